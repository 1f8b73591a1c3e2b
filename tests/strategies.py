"""Hypothesis strategies for meshes, specs, programs and the ways an argument can come.

A program is a chain of steps that are drawn for the shape they find. Each step knows two versions of itself: the plain
one, jax on one device, and the partitioned one, which adds what must not change the values (nested pjits with specs of
their own, constraints, control flow around them).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import partjit

AXES = ("i", "j", "k")
GRIDS = ((8,), (4,), (2,), (1,), (3,), (4, 2), (2, 4), (2, 2), (8, 1), (1, 3), (2, 3), (2, 2, 2), (2, 1, 4), (1, 2, 2))


@st.composite
def meshes(draw, *, min_axes=1):
    """Meshes of 1 to 3 axes over up to 8 devices in any order, all axes Auto or all Explicit."""
    grid = draw(st.sampled_from([grid for grid in GRIDS if len(grid) >= min_axes]))
    order = draw(st.permutations(range(8)) | st.just(list(range(8))))
    devices = np.array([jax.devices()[i] for i in order[: math.prod(grid)]]).reshape(grid)
    axis_type = draw(st.sampled_from([AxisType.Auto, AxisType.Auto, AxisType.Explicit]))
    return partjit.Mesh(devices, AXES[: len(grid)], (axis_type,) * len(grid))


def entering(mesh):
    """The ways to make a mesh ambient."""
    return st.sampled_from([lambda: mesh, lambda: partjit.set_mesh(mesh), lambda: jax.set_mesh(mesh._interned)])


@st.composite
def partitions(draw, mesh, shape, *, axes=None, even=True):
    """Per dimension a tuple of mesh axes, no axis twice; with `even`, what divides the dimension."""
    free = list(draw(st.permutations(mesh.axis_names if axes is None else axes)))
    found = []
    for size in shape:
        mine = []
        while free and draw(st.booleans()):
            if even and size % (math.prod(mesh.shape[axis] for axis in mine) * mesh.shape[free[0]]):
                break
            mine.append(free.pop(0))
        found.append(tuple(mine))
    return tuple(found)


@st.composite
def spelled(draw, parts):
    """One of the ways to write partitions as a PartitionSpec."""
    parts = list(parts)
    while parts and parts[-1] == () and draw(st.booleans()):
        parts.pop()
    if not parts and draw(st.booleans()):
        return None
    return P(*(_spell(draw, part) for part in parts))


def _spell(draw, part):
    if part == ():
        return draw(st.sampled_from([None, ()]))
    return part[0] if len(part) == 1 and draw(st.booleans()) else part


def specs(mesh, shape, *, axes=None):
    """Specs that fit a shape on a mesh."""
    return partitions(mesh, shape, axes=axes).flatmap(spelled)


@st.composite
def constraints(draw, mesh, shape, *, axes=None):
    """Specs for constraints: they need not divide, and may leave dimensions to the partitioner."""
    parts = draw(partitions(mesh, shape, axes=axes, even=draw(st.booleans())))
    return P(*(draw(st.sampled_from([P.UNCONSTRAINED, part or None, part or None])) for part in parts))


shapes = st.lists(st.sampled_from([8, 4, 2, 6, 16, 1, 12]), min_size=1, max_size=3).filter(
    lambda shape: math.prod(shape) <= 256
)


def arrays(shape, *, seed=0):
    """Values of which no two are equal and none is large."""
    return np.random.default_rng(seed).uniform(-1.5, 1.5, tuple(shape)).astype(np.float32)


ARRIVALS = ("numpy", "uncommitted", "placed", "misplaced", "permuted")


def arrive(x, how, mesh, parts):
    """The array as it comes to the call."""
    auto = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    if how == "numpy":
        return x
    if how == "uncommitted":
        return jnp.asarray(x)
    if how == "placed":
        return jax.device_put(x, NamedSharding(auto, P(*parts)))
    if how == "permuted":  # the same devices in another order
        reverse = jax.sharding.Mesh(mesh.devices.flatten()[::-1], "other")
        spec = next((P(*[None] * dim, "other") for dim, size in enumerate(x.shape) if size % mesh.size == 0), P())
        return jax.device_put(x, NamedSharding(reverse, spec))
    return jax.device_put(x, NamedSharding(auto, P()))


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One step of a program.

    Attributes:
        label: what it does, as hypothesis shows it.
        plain: the step on one device.
        partitioned: the same with everything that must not change its value.
        reverse: whether jax can differentiate it in reverse mode.
    """

    label: str
    plain: Callable[[Any], Any]
    partitioned: Callable[[Any], Any]
    reverse: bool = True

    def __repr__(self) -> str:
        return self.label


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A function of an array and a vector that weighs its last dimension, to a dictionary of arrays."""

    steps: tuple[Step, ...]

    @property
    def reverse(self) -> bool:
        return all(step.reverse for step in self.steps)

    def plain(self, x, w):
        return self._run(x, w, [step.plain for step in self.steps])

    def partitioned(self, x, w):
        return self._run(x, w, [step.partitioned for step in self.steps])

    def _run(self, x, w, steps):
        y = x * jnp.broadcast_to(w, x.shape)
        for step in steps:
            y = step(y)
        return {"y": y, "total": jnp.sum(y), "w": jnp.tanh(w)}

    def __repr__(self) -> str:
        return " > ".join(map(repr, self.steps)) or "weigh"


def _same(label, function):
    return Step(label, function, function)


def _elementwise(draw, shape):
    name = draw(st.sampled_from(["sin", "tanh", "square", "negative", "affine"]))
    return _same(name, (lambda x: x * np.float32(0.5) + np.float32(0.25)) if name == "affine" else getattr(jnp, name))


def _reduce(draw, shape):
    axis, keep = draw(st.integers(0, len(shape) - 1)), draw(st.booleans())
    name = draw(st.sampled_from(["sum", "mean", "max"]))
    return _same(f"{name}({axis}, keepdims={keep})", lambda x: jnp.tanh(getattr(jnp, name)(x, axis, keepdims=keep)))


def _matmul(draw, shape):
    matrix = arrays((shape[-1], draw(st.sampled_from([4, 8, 3]))), seed=1) / np.float32(shape[-1])
    return _same(f"@{matrix.shape}", lambda x: jnp.tensordot(x, matrix, 1))


def _gram(draw, shape):
    return _same("gram", lambda x: jnp.einsum("...i,...j->...ij", x, jnp.sin(x)))


def _transpose(draw, shape):
    order = draw(st.permutations(range(len(shape))))
    return _same(f"transpose{order}", lambda x: jnp.transpose(x, order))


def _gather(draw, shape):
    axis = draw(st.integers(0, len(shape) - 1))
    index = np.array(draw(st.lists(st.integers(0, shape[axis] - 1), min_size=1, max_size=6)))
    return _same(f"take({index.tolist()}, {axis})", lambda x: jnp.take(x, index, axis))


def _move(draw, shape):
    axis = draw(st.integers(0, len(shape) - 1))
    name = draw(st.sampled_from(["flip", "cumsum", "roll", "ravel", "twice", "halve", "sort"]))
    function = {
        "flip": lambda x: jnp.flip(x, axis),
        "cumsum": lambda x: jnp.tanh(jnp.cumsum(x, axis)),
        "roll": lambda x: jnp.roll(x, 1, axis),
        "ravel": jnp.ravel,
        "twice": lambda x: jnp.concatenate([x, jnp.sin(x)], axis),
        "halve": lambda x: lax.slice_in_dim(x, 0, (x.shape[axis] + 1) // 2, axis=axis),
        "sort": lambda x: jnp.sort(x, axis),
    }[name]
    return _same(f"{name}({axis})", function)


def _body(x):
    return jnp.tanh(x) * np.float32(0.9) + np.float32(0.1)


def _two(x):
    return {"a": jnp.sin(x), "b": (jnp.cos(x), jnp.sum(x))}


def _nested(draw, shape, mesh, axes):
    in_spec, out_spec = draw(specs(mesh, shape, axes=axes)), draw(specs(mesh, shape, axes=axes))
    inner = draw(st.sampled_from(["plain", "checkpoint", "jit", "twice", "unread", "unspecified"]))
    if inner == "twice":
        run = partjit.pjit(partjit.pjit(_body, out_spec, in_spec), in_spec, out_spec)
    elif inner == "unspecified":
        run = partjit.pjit(_body, out_axis_resources=out_spec)
    elif inner == "unread":
        two = partjit.pjit(_two, in_spec, {"a": out_spec, "b": (in_spec, None)})
        return Step(
            f"pjit(two, {in_spec}, {out_spec})", lambda x: _two(x)["b"][0] + x, lambda x: two(x)["b"][0] + x
        )
    else:
        run = partjit.pjit(_body, in_spec, out_spec)
        run = {"plain": run, "checkpoint": jax.checkpoint(run), "jit": jax.jit(run)}[inner]
    return Step(f"{inner}.pjit({in_spec}, {out_spec})", _body, run)


def _constraint(draw, shape, mesh, axes):
    spec = draw(constraints(mesh, shape, axes=axes))
    return Step(f"constraint({spec})", lambda x: x, lambda x: partjit.with_sharding_constraint(x, spec))


def _loop(draw, shape, mesh, axes):
    inner = draw(st.sampled_from([_nested, _constraint]))(draw, shape, mesh, axes)
    kind = draw(st.sampled_from(["scan", "fori", "while", "cond", "map", "switch"]))

    def looped(step):
        if kind == "scan":
            return lambda x: lax.scan(lambda c, t: (jnp.sin(step(c)) + t, jnp.sum(c)), x, arrays((3,)))[0]
        if kind == "fori":
            return lambda x: lax.fori_loop(0, 2, lambda _, c: jnp.sin(step(c)), x)
        if kind == "while":
            return lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(step(c[1]))), (0, x))[1]
        if kind == "cond":
            return lambda x: lax.cond(jnp.sum(x) > 0, step, jnp.sin, x)
        if kind == "switch":
            return lambda x: lax.switch(jnp.int32(1), [jnp.sin, step, jnp.cos], x)
        return lambda x: lax.map(step, jnp.stack([x, jnp.sin(x)]))[1]

    return Step(f"{kind}[{inner}]", looped(inner.plain), looped(inner.partitioned), reverse=kind != "while")


def _mapped(draw, shape, mesh, axes):
    if len(shape) < 2:
        return _nested(draw, shape, mesh, axes)
    axis = draw(st.integers(0, len(shape) - 1))
    rest = (*shape[:axis], *shape[axis + 1 :])
    inner = draw(st.sampled_from([_nested, _constraint, _loop]))(draw, rest, mesh, axes)
    return Step(
        f"vmap({inner}, {axis})",
        jax.vmap(inner.plain, axis, axis),
        jax.vmap(inner.partitioned, axis, axis),
        inner.reverse,
    )


@st.composite
def programs(draw, mesh, shape, *, axes=None, max_steps=4):
    """Programs of a few steps, at least one of which is about the mesh."""
    found = []
    for _ in range(draw(st.integers(1, max_steps))):
        if not shape or draw(st.booleans()):
            kind = draw(st.sampled_from([_nested, _constraint, _loop, _mapped]))
            step = kind(draw, shape, mesh, axes)
        else:
            kinds = [_elementwise, _reduce, _matmul, _transpose, _gather, _move]
            if len(shape) < 3 and shape[-1] <= 8:
                kinds.append(_gram)
            step = draw(st.sampled_from(kinds))(draw, shape)
        shape = jax.eval_shape(step.plain, jax.ShapeDtypeStruct(shape, np.float32)).shape
        if math.prod(shape) > 2048:
            break
        found.append(step)
    return Program(tuple(found))


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A program with all that a pjit of it needs.

    Attributes:
        enter: makes the mesh ambient, used with `with`.
        parts: the partitions of `x`, of `w` and of each result.
    """

    mesh: Any
    enter: Callable[[], Any]
    program: Program
    x: np.ndarray
    w: np.ndarray
    in_specs: tuple[Any, Any]
    out_specs: dict[str, Any]
    parts: dict[str, Any]
    spmd_axis_name: str | None

    def pjit(self):
        return partjit.pjit(self.program.partitioned, self.in_specs, self.out_specs)

    def __repr__(self) -> str:
        ids = [device.id for device in self.mesh.devices.flat]
        return (
            f"Case({dict(self.mesh.shape)} {ids} {self.mesh.axis_types[0]}, x {self.x.shape}, in {self.in_specs}, "
            f"out {self.out_specs}, spmd {self.spmd_axis_name}, {self.program})"
        )


@st.composite
def cases(draw, *, reserve_axis=False, max_steps=4):
    """A mesh, a program, specs that fit; with `reserve_axis` one mesh axis that no spec names."""
    mesh = draw(meshes(min_axes=2 if reserve_axis else 1))
    spare = draw(st.sampled_from(mesh.axis_names)) if reserve_axis else None
    axes = tuple(axis for axis in mesh.axis_names if axis != spare)
    shape = tuple(draw(shapes))
    program = draw(programs(mesh, shape, axes=axes, max_steps=max_steps))
    x, w = arrays(shape), arrays(shape[-1:], seed=2)
    result = jax.eval_shape(program.plain, x, w)
    avals = {"x": x, "in_w": w, **result}
    parts = {name: draw(partitions(mesh, aval.shape, axes=axes)) for name, aval in avals.items()}
    return Case(
        mesh,
        draw(entering(mesh)),
        program,
        x,
        w,
        (draw(spelled(parts["x"])), draw(spelled(parts["in_w"]))),
        {name: draw(spelled(parts[name])) for name in result},
        parts,
        spare,
    )
