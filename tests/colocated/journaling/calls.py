"""Programs with calls of every kind, which say what they do: for tests of the journal."""

import jax
import jax.numpy as jnp
import numpy as np

from partjit import colocated, pjit
from partjit.colocated import colocated_python, colocated_python_class

__all__ = ["KINDS", "Program", "seen"]

seen: list[tuple[str, str]] = []
"""The calls that ran: of which function, and with what."""

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def _same(x):
    return x


def _nothing(*_):
    return None


def _saw(name, *values):
    seen.append((name, " ".join(f"{float(np.sum(value)):g}" for value in values)))


def inline(x):
    _saw("inline", x)
    return 2 * x + 1


def on_thread(x):
    _saw("on_thread", x)
    return x + 3


def log(x):
    _saw("log", x)


def emitted(x):
    _saw("emitted", x)


def answered(x):
    _saw("answered", x)
    return np.float32(x + 1)


def on_stream(x):
    _saw("on_stream", x)
    return x * 2


def each_shard(x):
    _saw("each_shard", x.data)
    return x.data + 1


call_inside = colocated_python(inline, out_specs_fn=_same, mode="inline")


def in_worker(x):
    return x * 2


def nesting(x):
    _saw("nesting", x)
    return call_inside(call_inside(x))


class Loader:
    """Counts; its methods run ahead, or see what the program has consumed."""

    def __init__(self):
        self.count = 0

    def following(self):
        self.count += 1
        _saw("following", self.count)
        return np.float32(self.count)

    def shown(self, x):
        _saw("shown", x)
        return np.float32(self.count)

    def save(self):
        return self.count

    def restore(self, count):
        self.count = count


class Program:
    """What is called, made anew as after a restart; its executables are made once."""

    def __init__(self):
        loader = colocated_python_class(Loader, state=("save", "restore"))()
        following = loader.following.specialize(out_specs=SCALAR, run_ahead=2, devices=jax.devices())
        self.loader, self.following = loader, following
        self.shown = loader.shown.specialize(out_specs=SCALAR, mode="inline")

    def call(self, kind, x):
        """A number from a number, with calls of a kind."""
        if kind == "loader":
            return _step_of_loader(self.following() + x)
        if kind == "shown":
            return jnp.asarray(self.shown(x))
        return EAGER[kind](x) if kind in EAGER else _programs[kind](x)


def _in_loop(x):
    def body(carry, _):
        CALLS["emitted"](carry)
        carry = CALLS["answered"](carry)
        return carry + 1, carry

    carry, all_of_them = jax.lax.scan(body, x, None, length=3)
    return carry + all_of_them.sum()


def _on_two_streams(x):
    with colocated.stream("a"):
        y = CALLS["on_stream"](x)
    with colocated.stream("b"):
        z = CALLS["on_stream"](x + 1)
    return y + z


def _per_shard(x):
    return CALLS["each_shard"](jnp.full(8, x, jnp.float32)).sum()


CALLS = {
    "inline": colocated_python(inline, out_specs_fn=_same, mode="inline"),
    "on_thread": colocated_python(on_thread, out_specs_fn=_same, mode="stream"),
    "log": colocated_python(log, out_specs_fn=_nothing),
    "emitted": colocated_python(emitted, out_specs_fn=_nothing),
    "answered": colocated_python(answered, out_specs_fn=_same, arrays="numpy", mode="inline"),
    "on_stream": colocated_python(on_stream, out_specs_fn=_same),
    "each_shard": colocated_python(each_shard, out_specs_fn=_same, layout="per_shard", mode="inline"),
    "nesting": colocated_python(nesting, out_specs_fn=_same, mode="stream"),
    "worker": colocated_python(in_worker, out_specs_fn=_same, isolate="process"),
    "unspecified": colocated_python(inline, mode="inline"),
}
EAGER = {f"eager {kind}": CALLS[kind] for kind in ("inline", "on_thread", "nesting", "unspecified")}


def _program(body, **options):
    def program(x):
        return body(x) * 0.5

    return pjit(program, **options)


def _and_emit(x):
    CALLS["emitted"](x)
    return x + 1


def _and_log(x):
    CALLS["log"](x)
    return CALLS["on_thread"](x)


_programs = {
    "inline": _program(CALLS["inline"]),
    "threads": _program(_and_log),
    "loop": _program(_in_loop),
    "streams": _program(_on_two_streams),
    "shards": _program(_per_shard),
    "nesting": _program(CALLS["nesting"]),
    "under jit": jax.jit(_and_emit),
    "worker": _program(CALLS["worker"]),
}
_step_of_loader = pjit(lambda x: CALLS["inline"](x) * 0.5)
KINDS = ["loader", "shown", *EAGER, *_programs]
