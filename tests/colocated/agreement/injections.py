"""A process of several that run the same programs; in one of them something fails, time and again.

    python injections.py NUMBER COUNT ADDRESS SEED TRIALS KINDS

After each failure all processes compare what they saw, and a sum over all devices has to be right.
"""

import collections
import contextlib
import faulthandler
import os
import random
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

number, count, address, seed, trials = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:6])
faulthandler.dump_traceback_later(60 + 2 * trials, exit=True)
jax.config.update("jax_num_cpu_devices", 8 // count)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, count, number)

import partjit  # noqa: E402
from partjit import OtherProcessError, P, colocated, pjit  # noqa: E402
from partjit._jax.processes import distributed_client  # noqa: E402
from partjit.colocated import colocated_python  # noqa: E402
from partjit.colocated.agreement.program import executions_begun  # noqa: E402

client = distributed_client()
mesh = partjit.Mesh(np.array(jax.devices()), "x")
PACKAGE = os.path.dirname(partjit.__file__)
LIMIT = 20.0
"""Seconds after which an error has to be everywhere."""


class Alarm(BaseException):
    """What the handler of a signal raises."""


class Hook:
    """What the host functions call: it fails at one of its calls.

    Attributes:
        calls: how often it was called.
        at: the call that fails; None if none does.
        kind: how.
    """

    calls = 0
    at: int | None = None
    kind = ""

    def __call__(self, x: jax.Array) -> object:
        self.calls += 1
        if self.calls - 1 != self.at:
            return x
        if self.kind == "raise":
            raise LookupError("no space left")
        if self.kind == "interrupt":
            raise KeyboardInterrupt
        if self.kind == "exit":
            raise SystemExit(3)
        return "no array" if self.kind == "result" else x

    def __reduce__(self) -> tuple[object, ...]:  # the function of a call is copied, this is not
        return _the_hook, ()


def _the_hook() -> Hook:
    return sys.modules["__main__"].hook


hook = Hook()
inline = colocated_python(lambda x, hook=hook: hook(x), out_specs_fn=lambda x: x, mode="inline")
auto = colocated_python(lambda x, hook=hook: hook(x), out_specs_fn=lambda x: x)
stream = colocated_python(lambda x, hook=hook: hook(x), out_specs_fn=lambda x: x, stream="s", mode="stream")
everywhere = jax.NamedSharding(mesh, P())
shards = colocated_python(
    lambda shard, hook=hook: hook(shard.data),
    layout="per_shard",
    out_specs_fn=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
)
elsewhere = colocated_python(
    lambda x, hook=hook: hook(x),
    out_specs_fn=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
    mode="inline",
)
log = colocated_python(lambda x, hook=hook: hook(x) and None, out_specs_fn=lambda x: None, mode="inline")


def straight(x):
    y = inline(x + jnp.sum(x))
    return auto(y * jnp.sum(y))


def with_a_number(x):
    return inline(x + 1) * jnp.sum(x)


def until_large_on_devices(x):
    start = jnp.sum(x), inline(x + 1)
    return jax.lax.while_loop(lambda v: v[0] < 1e3, lambda v: (2 * v[0], v[1] + jnp.sum(v[1]) * 0.01), start)[1]


def in_a_loop(x):
    return jax.lax.fori_loop(0, 3, lambda _, v: inline(v + jnp.sum(v) * 0.01), x)


def in_a_branch(x):
    return jax.lax.cond(jnp.sum(x) > 0, lambda v: auto(v + jnp.sum(v)), lambda v: v, x)


def on_a_stream(x):
    first, y = stream(x + 1), jnp.sum(x * x)
    return first + y + stream(x + 2)


def until_large(x):
    return jax.lax.while_loop(lambda v: jnp.sum(v) < 1e5, lambda v: inline(v * 2 + jnp.sum(v)), x)


def at_the_end(x):
    log(jnp.sum(x))
    return x + jnp.sum(x)


def resharded(x):
    y = shards(x + jnp.sum(x))
    return jax.lax.with_sharding_constraint(y, P()) + shards(x + 1)


def moved_in_a_loop(x):
    return jax.lax.fori_loop(0, 3, lambda _, v: elsewhere(v + jnp.sum(v) * 0.01) + x, x)


inner = pjit(straight, in_shardings=P("x"), out_shardings=P("x"))


def nested(x):
    y = inner(x)
    return inline(y + jnp.sum(y))


def eagerly(x):
    return inline(x + 1)


def of(function: Callable, **options: str) -> Callable:
    return pjit(function, in_shardings=P("x"), out_shardings=P("x"), **options)


plain = [straight, with_a_number, until_large_on_devices, in_a_loop, in_a_branch, on_a_stream, until_large, at_the_end]
plain += [nested, resharded, moved_in_a_loop]
programs = {**{function.__name__: of(function) for function in plain}, "eagerly": eagerly}
programs |= {f"{function.__name__} ahead": of(function, agree="ahead") for function in plain}
total = pjit(jnp.sum, in_shardings=P("x"), out_shardings=P())
kinds = sys.argv[6].split(",")
x = jax.make_array_from_callback(
    (16,), jax.NamedSharding(mesh, P("x")), lambda index: np.arange(16, dtype=np.float32)[index]
)


def on_alarm(*_):
    raise Alarm


signal.signal(signal.SIGALRM, on_alarm)


def own_part(array: jax.Array) -> str:
    return repr([np.asarray(shard.data).tolist() for shard in array.addressable_shards])


def exchanged(step: object, text: str) -> list[str]:
    """What all processes say."""
    assert client is not None
    client.key_value_set(f"said/{step}/{number}", text)
    return [client.blocking_key_value_get(f"said/{step}/{k}", 60_000) for k in range(count)]


def has_begun(tb: types.TracebackType | None, begun: int) -> bool:
    """Whether an alarm came in a call of a program, or after it; a first line is one before anything is done."""
    lines = [(frame.f_code, line) for frame, line in traceback.walk_tb(tb) if PACKAGE in frame.f_code.co_filename]
    return any(line != code.co_firstlineno for code, line in lines) or executions_begun() != begun


def outcome(run: Callable, argument: object, seconds: float) -> tuple[str, float]:
    """What a program does: this process's part of its result or the type of what it raises, and how long that takes."""
    started, begun = time.monotonic(), executions_begun()
    try:
        try:
            try:
                if seconds:
                    signal.setitimer(signal.ITIMER_REAL, seconds)
                result = run(argument)
            except Alarm as error:
                if not has_begun(error.__traceback__, begun):  # others wait for a program that was never called
                    result = run(argument)
                else:
                    raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        said = own_part(result)
    except BaseException as error:
        said = type(error).__name__
        if isinstance(error, OtherProcessError) and "process " not in str(error):
            said = f"an error that names no process: {error}"
    return said, time.monotonic() - started


def main() -> None:
    draw = random.Random(seed)
    seen: collections.Counter[tuple[str, bool]] = collections.Counter()
    with mesh:
        right, calls, durations = {}, {}, {}
        for name, run in programs.items():
            hook.calls = 0
            right[name], _ = outcome(run, x, 0)
            calls[name] = hook.calls
            _, durations[name] = outcome(run, x, 0)
        exchanged("begin", "")
        for trial in range(trials):
            name, kind, victim = draw.choice([*programs]), draw.choice(kinds), draw.randrange(count)
            if name == "eagerly" and kind in ("alarm", "argument"):  # what fails before it begins is known as late
                continue
            at, share, other = draw.randrange(calls[name]), draw.random(), draw.choice([*programs])
            run, argument, seconds = programs[name], x, 0.0
            hook.calls, hook.at, hook.kind = 0, None, kind
            if victim == number:
                if kind in ("raise", "result", "interrupt", "exit"):
                    hook.at = at
                elif kind == "alarm":
                    seconds = max(share * durations[name], 1e-4)
                elif kind == "argument":
                    argument = "no array"
                else:
                    run = programs[other]
            said, took = outcome(run, argument, seconds)
            hook.at = None
            with contextlib.suppress(BaseException):
                colocated.wait(timeout=LIMIT)
            said = "right" if said == right[name] else "wrong" if said.startswith("[") else said
            all_said = exchanged(trial, said)
            what = f"trial {trial}: {kind} in process {victim}, call {at} of {name} ({other}): {all_said}"
            assert took < LIMIT, f"{what}, after {took:.1f} s"
            ok = [text == "right" for text in all_said]
            is_late = kind == "alarm" and all_said[victim] == "Alarm"  # everything was done already
            assert all(ok) or not any(ok) or (is_late and ok.count(False) == 1), what
            assert "wrong" not in all_said, what
            seen[kind, all(ok)] += 1
            assert float(total(x).addressable_data(0)) == 120.0, what
    exchanged("end", "")  # the devices of others may still need this process
    if number:
        client.key_value_set(f"left/{number}", "")
    else:  # which has what they have just read
        for k in range(1, count):
            client.blocking_key_value_get(f"left/{k}", 60_000)
        time.sleep(1.0)  # without their service they would be ended as failed
    for kind in {*kinds} if trials >= 100 else ():
        assert seen[kind, False] > trials // 50, f"{kind} never failed: {seen}"
    print(f"process {number}: {sum(n for (_, ok), n in seen.items() if not ok)} of {trials} failed everywhere")


try:
    main()
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # the others may be waiting for this process
