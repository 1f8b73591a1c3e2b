"""Random programs of several arrays, with constraints and nested pjits."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.typing import ArrayLike

from partjit.api import pjit
from partjit.checks import require_flag, require_integer, require_mesh_type, shown
from partjit.testing.argument_checks import axes_to_avoid
from partjit.testing.expected_shards import axes_of
from partjit.testing.program_bodies import bodies, run_body
from partjit.testing.strategies import partition_specs, shapes

__all__ = ["ShardedProgram", "sharded_programs"]

_MAX_ELEMENTS = 256

Step: TypeAlias = tuple[str, tuple[int, ...], tuple[Any, ...]]
"""(operation, positions of its operands, parameters)"""


@dataclasses.dataclass(frozen=True)
class ShardedProgram:
    """A small differentiable function of arrays with constraints and nested pjits, as data that is printed in full.

    Attributes:
        shapes: of the float32 arguments; if there are `num_indices`, an int32 vector of that length follows them.
        num_indices: the length of the vector, or None.
        steps: (operation, operands, parameters), each of which appends one value.
        results: the positions of the values that are returned.
    """

    shapes: tuple[tuple[int, ...], ...]
    num_indices: int | None
    steps: tuple[Step, ...]
    results: tuple[int, ...]

    def __call__(self, *args: ArrayLike) -> tuple[jax.Array, ...]:
        """Runs it with its constraints and nested pjits, under an ambient mesh."""
        return self._run(args, partitioned=True)

    def plain(self, *args: ArrayLike) -> tuple[jax.Array, ...]:
        """Runs it without them, for comparison."""
        return self._run(args, partitioned=False)

    def arguments(self, seed: int = 0) -> list[np.ndarray]:
        """Arguments: floats between -1 and 1, and indices, some of them out of bounds.

        Raises:
            TypeError, ValueError: `seed` is no number of at least 0.
        """
        seed = require_integer("ShardedProgram.arguments", "seed", seed, 0)
        generator = np.random.default_rng(seed)
        args: list[np.ndarray] = [generator.uniform(-1, 1, shape).astype(np.float32) for shape in self.shapes]
        if self.num_indices is not None:
            args.append(generator.integers(0, 6, self.num_indices, dtype=np.int32))
        return args

    @property
    def arg_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of all arguments."""
        return [*self.shapes, *([] if self.num_indices is None else [(self.num_indices,)])]

    @property
    def result_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the results."""
        return [out.shape for out in jax.eval_shape(self.plain, *self.arguments())]

    def _run(self, args: Sequence[Any], *, partitioned: bool) -> tuple[jax.Array, ...]:
        self._check(args)
        values = list(args)
        for kind, operands, parameters in self.steps:
            values.append(_step(kind, [values[i] for i in operands], parameters, partitioned))
        return tuple(values[i] for i in self.results)

    def _check(self, args: Sequence[object]) -> None:
        shapes = self.arg_shapes
        if len(args) != len(shapes):
            raise TypeError(f"ShardedProgram: it takes {len(shapes)} args, but got {len(args)}")
        for i, (arg, shape) in enumerate(zip(args, shapes, strict=True)):
            if not isinstance(arg, jax.Array | np.ndarray | np.generic) or arg.shape != shape:
                raise TypeError(f"ShardedProgram: args[{i}] must be an array of shape {shape}, but is {shown(arg)}")


def _step(kind: str, values: Sequence[jax.Array], parameters: tuple[Any, ...], partitioned: bool) -> jax.Array:
    match kind:
        case "body":
            return run_body(parameters[0], values[0], partitioned)
        case "add":
            return (values[0] + values[1]) / 2
        case "mul":
            return values[0] * values[1]
        case "tensordot":
            left, right = parameters
            return jnp.tensordot(values[0], values[1], axes=((left,), (right,))) / values[0].shape[left]
        case "mean" | "max":
            return getattr(jnp, kind)(values[0], axis=parameters[0])
        case "transpose":
            return values[0].transpose(parameters)
        case "reshape":
            return values[0].reshape(parameters)
        case "concatenate":
            return jnp.concatenate([values[0], jnp.sin(values[0])], parameters[0])
        case "gather":
            return jnp.take(values[0], values[1], axis=parameters[0], mode="clip")
        case "closure":  # a nested pjit that closes over a value of the outer trace
            in_spec, out_spec, body = parameters

            def closing(x: jax.Array) -> jax.Array:
                return run_body(body, x, partitioned) * values[1]

            return pjit(closing, in_spec, out_spec)(values[0]) if partitioned else closing(values[0])
        case "pair":  # a nested pjit of two arguments and two results, of which one is used
            in_specs, out_specs, used = parameters

            def both(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
                return jnp.sin(x) * jnp.mean(y), jnp.cos(y)

            return (pjit(both, in_specs, out_specs) if partitioned else both)(*values)[used]
    raise AssertionError(kind)


@st.composite
def sharded_programs(
    draw: st.DrawFn,
    *,
    mesh: Mesh,
    avoid: Sequence[str] = (),
    max_steps: int = 4,
    depth: int = 2,
    max_size: int = 2,
    partitioned: bool = False,
) -> ShardedProgram:
    """Small random programs with constraints, nested pjits, scan, cond, while, remat, custom rules, vmap.

    They take one or two float arrays and perhaps a vector of indices.

    Args:
        draw: given by hypothesis.
        mesh: the mesh of the specs.
        avoid: axes that they do not name.
        max_steps: the maximal number of operations at the top.
        depth: of nested bodies.
        max_size: the maximal number of operations of a body.
        partitioned: whether every program, the simplest included, partitions something: its first argument and its
            first result have a dimension that an axis of more than one device divides, the first argument has several
            dimensions longer than 1, and its first step gives it a spec that names such an axis.

    Raises:
        TypeError, ValueError: when drawn from: an argument is of a wrong type, a number too small, or, with
            `partitioned`, every axis of more than one device is to be avoided.

    Example:
        >>> from hypothesis import given, settings
        >>> from partjit import Mesh, pjit
        >>> mesh = Mesh(jax.devices()[:2], "x")
        >>> @settings(max_examples=1)
        ... @given(sharded_programs(mesh=mesh))
        ... def test(program):
        ...     with mesh:
        ...         pjit(program)(*program.arguments())
        >>> test()
    """
    where = "sharded_programs"
    require_mesh_type(where, "mesh", mesh)
    avoid = axes_to_avoid(where, avoid)
    max_steps = require_integer(where, "max_steps", max_steps, 1)
    depth, max_size = require_integer(where, "depth", depth, 0), require_integer(where, "max_size", max_size, 1)
    partitioned = require_flag(where, "partitioned", partitioned)
    inputs = tuple(draw(st.lists(shapes(), min_size=1, max_size=2)))
    if partitioned:
        inputs = (draw(_partitionable_shapes(mesh, avoid)), *inputs[1:])
    num_indices: int | None = draw(st.one_of(st.none(), st.sampled_from([2, 8])))
    known: list[tuple[int, tuple[int, ...]]] = list(enumerate(inputs))
    position = len(inputs) + (num_indices is not None)
    steps: list[Step] = []
    if partitioned:
        first = bodies(mesh, inputs[0], depth=depth, avoid=avoid, max_size=max_size, partitioned=True)
        steps.append(("body", (0,), (draw(first),)))
        known.append((position, inputs[0]))
        position += 1

    some_spec = functools.partial(partition_specs, mesh=mesh, avoid=avoid)

    for _ in range(draw(st.integers(1 - len(steps), max_steps - len(steps)))):
        i, shape = draw(st.sampled_from(known))
        same = [k for k, other in known if other == shape]
        kinds = ["body"] * 6 + ["add", "mul", "closure", "pair"]
        if shape:
            kinds += ["mean", "max", "transpose", "reshape", "concatenate", "tensordot"]
            kinds += ["gather"] * 2 if num_indices is not None else []
        kind = draw(st.sampled_from(kinds))
        operands: tuple[int, ...] = (i,)
        parameters: tuple[Any, ...] = ()
        result: tuple[int, ...] = shape
        if kind == "body":
            parameters = (draw(bodies(mesh, shape, depth=depth, avoid=avoid, max_size=max_size)),)
        elif kind in ("add", "mul"):
            operands = (i, draw(st.sampled_from(same)))
        elif kind == "closure":
            operands = (i, draw(st.sampled_from(same)))
            body = draw(bodies(mesh, shape, depth=depth - 1, avoid=avoid, max_size=max_size))
            parameters = (draw(some_spec(shape=shape)), draw(some_spec(shape=shape)), body)
        elif kind == "pair":
            k, other = draw(st.sampled_from(known))
            operands, used = (i, k), draw(st.integers(0, 1))
            in_specs, out_specs = (tuple(draw(some_spec(shape=s)) for s in (shape, other)) for _ in range(2))
            parameters = (in_specs, out_specs, used)
            result = (shape, other)[used]
        elif kind in ("mean", "max", "concatenate", "gather"):
            axis = draw(st.integers(0, len(shape) - 1))
            parameters = (axis,)
            sizes = {"concatenate": (2 * shape[axis],), "gather": (num_indices or 0,)}.get(kind, ())
            result = (*shape[:axis], *sizes, *shape[axis + 1 :])
            operands = (i, len(inputs)) if kind == "gather" else operands
        elif kind == "transpose":
            parameters = tuple(draw(st.permutations(range(len(shape)))))
            result = tuple(shape[p] for p in parameters)
        elif kind == "reshape":
            size = math.prod(shape)
            divisor = draw(st.sampled_from([d for d in (1, 2, 3, 4, 8) if size % d == 0]))
            reshaped = [(size,), (divisor, size // divisor), (size // divisor, divisor)]
            parameters = result = draw(st.sampled_from(reshaped))
        elif kind == "tensordot":
            matches = [
                (k, left, right)
                for k, other in known
                for left in range(len(shape))
                for right in range(len(other))
                if shape[left] == other[right] and len(shape) + len(other) <= 5
            ]
            if not matches:
                continue
            k, left, right = draw(st.sampled_from(matches))
            other = dict(known)[k]
            operands, parameters = (i, k), (left, right)
            result = shape[:left] + shape[left + 1 :] + other[:right] + other[right + 1 :]
        if math.prod(result) > 2 * _MAX_ELEMENTS:
            continue
        steps.append((kind, operands, parameters))
        known.append((position, result))
        position += 1
    last = [k for k, shape in known if not partitioned or _axes_that_divide(shape, mesh, avoid)][-1]
    others = draw(st.lists(st.sampled_from([k for k, _ in known]), max_size=1))
    return ShardedProgram(inputs, num_indices, tuple(steps), (last, *others))


@st.composite
def _partitionable_shapes(draw: st.DrawFn, mesh: Mesh, avoid: Sequence[str]) -> tuple[int, ...]:
    """Shapes of matrices and of values of rank 3 that a spec fits, each dimension longer than 1."""
    ndim = draw(st.integers(2, 3))
    spec = draw(partition_specs(mesh=mesh, ndim=ndim, avoid=avoid, partitioned=True))
    divisors = [math.prod(mesh.shape[axis] for axis in axes) for axes in axes_of(spec, ndim)]
    return tuple(d * draw(st.sampled_from([1, 2] if d > 1 else [2, 3, 4])) for d in divisors)


def _axes_that_divide(shape: Sequence[int], mesh: Mesh, avoid: Sequence[str]) -> list[str]:
    """The axes of more than one device that divide some dimension."""
    axes = [axis for axis in mesh.axis_names if axis not in avoid and mesh.shape[axis] > 1]
    return [axis for axis in axes if any(size % mesh.shape[axis] == 0 for size in shape)]
