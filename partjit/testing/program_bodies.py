"""Bodies of random programs: shape-preserving functions of one value, as data.

A body is a tuple of operations, `(kind, *parameters)`, so that a failing example is printed in full. `run_body`
interprets it, with its partitioned functions or, for comparison, without. All values stay bounded, so that float32 is
precise enough to compare derivatives of any order.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh

from partjit._jax.shardings import UNSPECIFIED
from partjit.api import pjit
from partjit.constraint import with_sharding_constraint
from partjit.testing.strategies import partition_specs

__all__ = ["Body", "Operation", "bodies", "run_body"]

Operation: TypeAlias = tuple[Any, ...]
"""(kind, *parameters)"""
Body: TypeAlias = tuple[Operation, ...]

ELEMENTWISE = {
    "sin": jnp.sin,
    "tanh": jnp.tanh,
    "leaky": lambda x: jnp.where(x > 0.25, x, 0.1 * x + jnp.cos(x)),
    "constant": lambda x: x * jnp.linspace(0.5, 1.0, x.size, dtype=x.dtype).reshape(x.shape),
    "stop": lambda x: x * jax.lax.stop_gradient(jnp.cos(x)),
}
NESTED = ["pjit", "jit", "remat", "scan", "map", "fori", "while", "cond", "vmap", "custom_jvp", "grad", "jvp", "swap"]


@st.composite
def bodies(
    draw: st.DrawFn,
    mesh: Mesh,
    shape: tuple[int, ...],
    *,
    depth: int = 2,
    avoid: Sequence[str] = (),
    max_size: int = 2,
    partitioned: bool = False,
) -> Body:
    """A body for values of `shape`, with constraints and nested pjits with specs of their own at every depth.

    With `partitioned` the first operation is a constraint or a nested pjit that partitions the value.
    """
    smaller = functools.partial(bodies, mesh, depth=depth - 1, avoid=avoid, max_size=max_size)
    requested = partition_specs(mesh=mesh, shape=shape, avoid=avoid)
    body: list[Operation] = []
    if partitioned:
        specs = partition_specs(mesh=mesh, shape=shape, avoid=avoid, partitioned=True)
        if draw(st.sampled_from(["pjit", "constraint"] if depth else ["constraint"])) == "pjit":
            body.append(("pjit", draw(specs), draw(specs), draw(smaller(shape))))
        else:
            body.append(("constraint", draw(specs)))
    for _ in range(draw(st.integers(1, max_size))):
        kinds = [*ELEMENTWISE, "constraint", "constraint"]
        if shape:
            kinds += ["softmax", "center", "flip", "roll", "cumsum", "take", "scatter", "ravel"]
        if len(shape) == 2:
            kinds += ["gram"]
        if depth:
            kinds += ["pjit"] * 6 + NESTED * 2
        kind = draw(st.sampled_from(kinds))
        if kind in ("map", "vmap", "swap") and not shape:
            kind = "pjit"
        axis = draw(st.integers(0, len(shape) - 1)) if shape else 0
        if kind in ELEMENTWISE or kind in ("ravel", "gram"):
            body.append((kind,))
        elif kind == "constraint":
            spec = draw(partition_specs(mesh=mesh, shape=shape, avoid=avoid, divisible=False, unconstrained=True))
            body.append((kind, spec))
        elif kind in ("softmax", "center", "flip", "roll", "cumsum"):
            body.append((kind, axis))
        elif kind in ("take", "scatter"):
            size = shape[axis]
            index = draw(st.lists(st.integers(0, size - 1), min_size=size, max_size=size))
            body.append((kind, axis, tuple(index)))
        elif kind == "pjit":
            specs = st.just(UNSPECIFIED) if draw(st.integers(0, 5)) == 0 else requested
            body.append((kind, draw(specs), draw(specs), draw(smaller(shape))))
        elif kind == "cond":
            body.append((kind, draw(smaller(shape)), draw(smaller(shape))))
        elif kind in ("map", "vmap"):
            spmd = None
            if kind == "vmap":
                free = [a for a in mesh.axis_names if a not in avoid and shape[axis] % mesh.shape[a] == 0]
                spmd = draw(st.sampled_from([None, *free]))
            axis = axis if kind == "vmap" else 0
            rest = shape[:axis] + shape[axis + 1 :]
            inner_avoid = (*avoid, spmd) if spmd else avoid
            body.append((kind, axis, spmd, draw(bodies(mesh, rest, depth=depth - 1, avoid=inner_avoid, max_size=2))))
        elif kind == "swap":
            perm = tuple(draw(st.permutations(range(len(shape)))))
            body.append((kind, perm, draw(smaller(tuple(shape[i] for i in perm)))))
        else:
            body.append((kind, draw(smaller(shape))))
    return tuple(body)


def run_body(body: Body, x: jax.Array, partitioned: bool) -> jax.Array:
    """The result of a body for `x`, with its partitioned functions or without."""
    for kind, *parameters in body:
        x = _apply(kind, parameters, x, partitioned)
    return x


def _apply(kind: str, parameters: Sequence[Any], x: jax.Array, partitioned: bool) -> jax.Array:
    if kind in ELEMENTWISE:
        return ELEMENTWISE[kind](x)
    match kind, parameters:
        case "constraint", (spec,):
            return with_sharding_constraint(x, spec) if partitioned else x
        case "softmax", (axis,):
            return jax.nn.softmax(x, axis=axis)
        case "center", (axis,):
            return x - x.mean(axis, keepdims=True)
        case "flip", (axis,):
            return jnp.flip(x, axis)
        case "roll", (axis,):
            return jnp.roll(x, 1, axis)
        case "cumsum", (axis,):
            return jnp.cumsum(x, axis) / x.shape[axis]
        case "take", (axis, index):
            return jnp.take(x, np.array(index, np.int32), axis=axis)
        case "scatter", (axis, index):
            rows = jnp.moveaxis(x, axis, 0)
            return jnp.moveaxis(rows.at[np.array(index, np.int32)].add(jnp.sin(rows)) / len(index), 0, axis)
        case "ravel", ():
            return jnp.cos(jnp.ravel(x)).reshape(x.shape)
        case "gram", ():
            return x @ (x.T @ x) / x.size
    *own, last = parameters
    inner = functools.partial(run_body, last, partitioned=partitioned)
    match kind, own:
        case "pjit", (in_spec, out_spec):
            return pjit(inner, in_spec, out_spec)(x) if partitioned else inner(x)
        case "jit", ():
            return jax.jit(inner)(x)
        case "remat", ():
            return jax.checkpoint(inner)(x)
        case "scan", ():
            return jax.lax.scan(lambda c, s: (inner(c) * s, c.sum()), x, np.array([0.5, 0.9], x.dtype))[0]
        case "map", (_, _):
            return jax.lax.map(inner, x)
        case "fori", ():
            return jax.lax.fori_loop(0, 2, lambda _, c: inner(c), x)
        case "while", ():  # it has no reverse mode
            state = (0, jax.lax.stop_gradient(x))
            return x * jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, inner(s[1])), state)[1]
        case "cond", (other,):
            # XLA refuses branches whose first or last operations are constrained differently.
            others = functools.partial(run_body, other, partitioned=partitioned)
            branches = [lambda x, branch=branch: jnp.sin(branch(0.9 * x)) for branch in (inner, others)]
            return jax.lax.cond(jnp.ravel(x)[0] > 0.25, *branches, x)
        case "vmap", (axis, spmd):
            return jax.vmap(inner, axis, axis, spmd_axis_name=spmd if partitioned else None)(x)
        case "custom_jvp", ():
            custom = jax.custom_jvp(inner)
            custom.defjvp(lambda primals, tangents: jax.jvp(inner, primals, tangents))
            return custom(x)
        case "grad", ():
            return jnp.tanh(jax.grad(lambda v: inner(v).sum())(x))
        case "jvp", ():
            return jnp.tanh(jax.jvp(inner, (x,), (jnp.cos(x),))[1])
        case "swap", (perm,):
            return inner(x.transpose(perm)).transpose(np.argsort(perm))
    raise AssertionError(kind)
