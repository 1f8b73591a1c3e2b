"""Random bodies of `shard_map` with colocated calls, on one device after the other by hand, and with jax.

Values are small whole numbers, so that both are equal to the last bit. `PARTJIT_PROFILE=soak` draws a thousand.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from partjit import colocated, pjit
from partjit.colocated import colocated_python
from tests.colocated import rendezvous

EXAMPLES = 1000 if os.environ.get("PARTJIT_PROFILE") == "soak" else 7
SIZES = {"x": 4, "y": 2}
PLACES = [*np.ndindex(*SIZES.values())]
LOCAL = (2, 2)
TURNS = 3
STREAMS = (None, "left", "right")
MODES = (None, "inline", "stream")
WRAPPERS = {
    None: lambda fun: fun,
    "jit": jax.jit,
    "pjit": pjit,
    "checkpoint": jax.checkpoint,
}


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of a body, which makes one value.

    Attributes:
        op: what it does.
        args: which values it reads.
        number: which step it is.
        axis: the mesh axis that it is about.
        stream, mode: of a call.
        wrapper: what it is nested in.
    """

    op: str
    args: tuple[int, ...]
    number: int
    axis: str
    stream: str | None
    mode: str | None
    wrapper: str | None


CALLS = ("call", "total", "where", "log", "pure", "scan", "stack")
OPS = ("mix", "psum", "permute", "gather", "index", *CALLS)


@st.composite
def bodies(draw: Any) -> list[Step]:
    """Steps, of which each reads two values that there are before."""
    steps: list[Step] = []
    for number in range(draw(st.integers(2, 6))):
        before = st.integers(0, 1 + number)
        steps.append(
            Step(
                draw(st.sampled_from(OPS)),
                (draw(before), draw(before)),
                number,
                draw(st.sampled_from([*SIZES])),
                draw(st.sampled_from(STREAMS)),
                draw(st.sampled_from(MODES)),
                draw(st.sampled_from([*WRAPPERS])),
            )
        )
    return steps


# By hand: the values of all shards


def by_hand(steps: list[Step], first: list[Any], second: list[Any]) -> tuple[list[list[Any]], dict[Any, list[Any]]]:
    """The values for each shard, and what is called on each stream: (step, place, sums of arguments)."""
    values = [first, second]
    called: dict[Any, list[Any]] = {stream: [] for stream in STREAMS}

    def call(step: Step, args: list[list[Any]]) -> list[Any]:
        results = []
        for k, place in enumerate(PLACES):
            own = [arg[k] for arg in args]
            if step.op != "pure":
                called[step.stream].append((step.number, place, [float(arg.sum()) for arg in own]))
            results.append(np.float32(_result(own, place)))
        return results

    for step in steps:
        a, b = (values[i] for i in step.args)
        if step.op == "scan":
            carry, total = a, [np.float32(0)] * len(a)
            for turn in range(TURNS):
                carry = call(step, [carry, [x + turn for x in b]])
                total = [t + c.sum() for t, c in zip(total, carry, strict=True)]
            made = [(c + t) % 8 for c, t in zip(carry, total, strict=True)]
        elif step.op == "stack":
            rows = [call(step, [[x[row] for x in a], [x[row] for x in b]]) for row in reversed(range(LOCAL[0]))]
            made = [np.stack(own[::-1]) for own in zip(*rows, strict=True)]
        elif step.op in ("call", "pure"):
            made = call(step, [a, b])
        elif step.op == "total":
            made = [(x + y) % 8 for x, y in zip(b, call(step, [[x.sum() for x in a]]), strict=True)]
        elif step.op == "where":
            made = [(x + y) % 8 for x, y in zip(a, call(step, []), strict=True)]
        elif step.op == "log":
            call(step, [a, b])
            made = a
        else:
            made = _on_devices_by_hand(step, a, b)
        values.append(made)
    return values, called


def _result(own: list[Any], place: tuple[int, int]) -> Any:
    if not own:
        return place[0] + 4 * place[1]
    return (own[0] + (3 * own[-1] if len(own) > 1 else 0) + place[0]) % 8


def _on_devices_by_hand(step: Step, a: list[Any], b: list[Any]) -> list[Any]:
    axis = [*SIZES].index(step.axis)

    def along(place: tuple[int, ...]) -> list[int]:
        """The shards at the same place but along the axis."""
        return [k for k, other in enumerate(PLACES) if other[1 - axis] == place[1 - axis]]

    if step.op == "mix":
        return [(x + 2 * y) % 8 for x, y in zip(a, b, strict=True)]
    if step.op == "psum":
        return [sum(a[k] for k in along(place)) % 8 for place in PLACES]
    if step.op == "permute":
        return [a[along(place)[place[axis] - 1]] for place in PLACES]
    if step.op == "gather":
        return [(b[n] + sum((k + 1) * a[other] for k, other in enumerate(along(p)))) % 8 for n, p in enumerate(PLACES)]
    return [(x + place[axis]) % 8 for x, place in zip(a, PLACES, strict=True)]  # "index"


# In jax: the values of one shard


def traced(steps: list[Step]) -> Any:
    """A function of the values of one shard, with colocated calls."""
    calls = {step.number: _colocated(step) for step in steps if step.op in CALLS}

    def body(first: jax.Array, second: jax.Array) -> list[jax.Array]:
        values = [first, second]
        for step in steps:
            fun = WRAPPERS[step.wrapper](lambda a, b, step=step: _evaluated(step, calls.get(step.number), a, b))
            values.append(fun(*(values[i] for i in step.args)))
        return values

    return body


def _colocated(step: Step) -> Any:
    number, stream, op = step.number, step.stream, step.op

    def run(*own: Any) -> Any:
        # In NumPy, for XLA would compile each operation anew for each device.
        place, values = tuple(colocated.mesh_coordinates().values()), [*map(np.asarray, own)]
        if op != "pure":
            rendezvous.logs[stream].append((number, place, [float(value.sum()) for value in values]))
        return None if op == "log" else jnp.asarray(np.float32(_result(values, place)))

    def specs(*own: Any) -> Any:
        if op == "log":
            return None
        return jax.ShapeDtypeStruct(own[0].shape if own else (), np.float32)

    return colocated_python(run, out_specs_fn=specs, stream=stream, mode=step.mode, pure=op == "pure" or None)


def _evaluated(step: Step, call: Any, a: jax.Array, b: jax.Array) -> jax.Array:
    size = SIZES[step.axis]
    if step.op in ("call", "pure"):
        return call(a, b)
    if step.op == "total":
        return (b + call(jnp.sum(a))) % 8
    if step.op == "where":
        return (a + call()) % 8
    if step.op == "log":
        call(a, b)
        return a
    if step.op == "scan":

        def turn(carry: Any, k: Any) -> Any:
            c = call(carry, b + k)
            return c, jnp.sum(c)

        carry, sums = jax.lax.scan(turn, a + varying_zero(), jnp.arange(TURNS, dtype=jnp.float32))
        return (carry + jnp.sum(sums)) % 8
    if step.op == "stack":
        return jax.lax.scan(lambda _, rows: (None, call(*rows)), None, (a, b), reverse=True)[1]
    if step.op == "mix":
        return (a + 2 * b) % 8
    if step.op == "psum":
        return jax.lax.psum(a, step.axis) % 8
    if step.op == "permute":
        return jax.lax.ppermute(a, step.axis, [(k, (k + 1) % size) for k in range(size)])
    if step.op == "gather":
        return (b + jnp.tensordot(jnp.arange(1.0, size + 1), jax.lax.all_gather(a, step.axis), 1)) % 8
    return (a + jax.lax.axis_index(step.axis).astype(a.dtype)) % 8  # "index"


def varying_zero() -> jax.Array:
    """Zero, of a type that varies over the mesh as that of what a call returns: added to it, a scan may carry that."""
    return 0.0 * jax.lax.axis_index((*SIZES,)).astype(np.float32)
