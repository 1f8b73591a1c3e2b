"""Hypothesis strategies for specs, shapes, shardings and arrays that fit together.

All arguments are keywords, so that more can be added. Everything shrinks towards few devices, short specs and small
shapes, and is printed as code that reproduces it.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from partjit._jax.shardings import HloSharding
from partjit.checks import require_flag, require_integer, require_mesh_type, shown, wrong_type
from partjit.opsharding import to_op_sharding
from partjit.spec import MAX_RANK
from partjit.testing.argument_checks import (
    axes_to_avoid,
    parsed_spec,
    require_numeric,
    shape_of,
)
from partjit.testing.mesh_strategies import meshes

__all__ = [
    "op_shardings",
    "partition_specs",
    "shapes",
    "sharded_arrays",
    "shardings",
    "spec_trees",
]

_DIMS = [1, 2, 4, 6, 8, 12]
_MOST_ELEMENTS = 2**31 - 1


@st.composite
def partition_specs(
    draw: st.DrawFn,
    *,
    mesh: Mesh,
    ndim: int | None = None,
    shape: Sequence[int] | None = None,
    avoid: Sequence[str] = (),
    divisible: bool = True,
    unconstrained: bool = False,
    partitioned: bool = False,
) -> P | None:
    """Specs for values of a rank or shape, in any spelling: None, short, with empty entries, axes in any order.

    Args:
        draw: given by hypothesis.
        mesh: the mesh of the specs.
        ndim: the rank of the value; not needed with `shape`.
        shape: the shape of the value.
        avoid: axes that are not used.
        divisible: whether axes must divide the dimensions of `shape`.
        unconstrained: whether dimensions may be UNCONSTRAINED, as in constraints.
        partitioned: whether every spec, the simplest included, names an axis of more than one device.

    Raises:
        TypeError: neither `ndim` nor `shape` is given, or an argument is of a wrong type.
        ValueError: `partitioned`, and no axis of more than one device fits any dimension.

    Example:
        >>> from hypothesis import given
        >>> mesh = Mesh(jax.devices(), "x")
        >>> @given(partition_specs(mesh=mesh, shape=(8, 3)))
        ... def test(spec):
        ...     NamedSharding(mesh, spec or P()).shard_shape((8, 3))
        >>> test()
    """
    where = "partition_specs"
    require_mesh_type(where, "mesh", mesh, or_abstract=True)
    avoid = axes_to_avoid(where, avoid)
    divisible = require_flag(where, "divisible", divisible)
    unconstrained = require_flag(where, "unconstrained", unconstrained)
    partitioned = require_flag(where, "partitioned", partitioned)
    rank = None if ndim is None else require_integer(where, "ndim", ndim, 0, MAX_RANK)
    if shape is None and rank is None:
        raise TypeError("partition_specs needs ndim or shape")
    sizes = [0] * (rank or 0) if shape is None else [*shape_of(where, shape)]
    names = [axis for axis in mesh.axis_names if axis not in avoid]
    dims: list[list[str]] = [[] for _ in sizes]
    if partitioned:
        dim, axis = draw(_partitions(mesh, names, sizes, divisible))
        dims[dim].append(axis)
        names.remove(axis)
    elif draw(st.integers(0, 7)) == 0:
        return None
    for axis in draw(st.permutations(names)):
        dim = draw(st.sampled_from([None, *range(len(sizes))]))
        if dim is None:
            continue
        if not divisible or sizes[dim] % math.prod(mesh.shape[name] for name in (*dims[dim], axis)) == 0:
            dims[dim].append(axis)
    # Every spec takes the same draws: hypothesis simplifies them one by one, and would have to guess a draw that only a
    # simpler spec needs.
    entries = []
    for axes in dims:  # False is simpler than True, and so is its spelling
        undecided, as_tuple = unconstrained and draw(st.booleans()), draw(st.booleans())
        if undecided and not axes:
            entries.append(P.UNCONSTRAINED)
        elif len(axes) > 1 or as_tuple:
            entries.append(tuple(axes))
        else:
            entries.append(axes[0] if axes else None)
    trailing = len(list(itertools.takewhile(lambda entry: entry in (None, ()), reversed(entries))))
    kept = min(draw(st.integers(0, len(entries))), trailing)
    return P(*entries[: len(entries) - trailing + kept])


def _partitions(
    mesh: Mesh, names: Sequence[str], sizes: Sequence[int], divisible: bool
) -> SearchStrategy[tuple[int, str]]:
    """Pairs of a dimension and an axis of more than one device that can partition it."""
    several = [axis for axis in names if mesh.shape[axis] > 1]
    found = [(d, axis) for d, n in enumerate(sizes) for axis in several if not divisible or n % mesh.shape[axis] == 0]
    if not found:
        axes = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in names)
        raise ValueError(
            f"partition_specs: none of the axes ({axes}) can partition a value of shape {tuple(sizes)}, so there is no "
            "spec with partitioned=True; give a shape that an axis of more than one device divides"
        )
    return st.sampled_from(found)


@st.composite
def shapes(
    draw: st.DrawFn,
    *,
    spec: P | None = None,
    mesh: Mesh | None = None,
    divisible: bool = True,
    min_ndim: int = 0,
    max_ndim: int = 3,
    max_size: int = 256,
) -> tuple[int, ...]:
    """Shapes of small arrays; with `spec`, those it divides, or on request those it does not.

    Args:
        draw: given by hypothesis.
        spec: the spec of the array.
        mesh: the mesh of the spec.
        divisible: whether the axes divide every dimension, or not some dimension. Where the spec names axes of size 1
            only, which divide any dimension, the example is rejected.
        min_ndim, max_ndim: of the rank; a spec may require more.
        max_size: the maximal number of elements; a spec may require more.

    Raises:
        TypeError: `spec` is given without `mesh`, or an argument is of a wrong type.
        ValueError: not `divisible`, and the spec names no axis.

    Example:
        >>> from hypothesis import given
        >>> mesh = Mesh(jax.devices()[:4], "x")
        >>> @given(shapes(spec=P("x"), mesh=mesh, divisible=False))
        ... def test(shape):
        ...     assert shape[0] % 4
        >>> test()
    """
    where = "shapes"
    divisible = require_flag(where, "divisible", divisible)
    min_ndim = require_integer(where, "min_ndim", min_ndim, 0, MAX_RANK)
    max_ndim = require_integer(where, "max_ndim", max_ndim, 0, MAX_RANK)
    if min_ndim > max_ndim:
        raise ValueError(f"shapes: min_ndim must be at most max_ndim, but they are {min_ndim} and {max_ndim}")
    max_size = require_integer(where, "max_size", max_size, 1)
    if spec is None:
        sizes = st.lists(st.sampled_from(_DIMS), min_size=min_ndim, max_size=max_ndim).map(tuple)
        return draw(sizes.filter(lambda shape: math.prod(shape) <= max_size))
    if mesh is None:
        raise TypeError("shapes of a spec needs its mesh")
    require_mesh_type(where, "mesh", mesh, or_abstract=True)
    parsed_spec(where, spec, mesh, unconstrained=True)  # for its errors only: shapes are drawn for the user's spec
    entries = [() if e in (None, P.UNCONSTRAINED) else tuple(e) if isinstance(e, tuple) else (e,) for e in spec]
    divisors = [math.prod(mesh.shape[axis] for axis in axes) for axes in entries]
    divisors += [1] * draw(st.integers(max(0, min_ndim - len(divisors)), max(0, max_ndim - len(divisors))))
    shape = [*divisors]
    for dim in range(len(shape)):
        times = draw(st.integers(1, 2))
        shape[dim] *= times if times * math.prod(shape) <= max_size else 1
    if not divisible:
        sharded = [dim for dim, divisor in enumerate(divisors) if divisor > 1]
        if not any(entries):
            raise ValueError(f"shapes: {spec} shards no dimension, so every shape is divisible")
        if not sharded:
            reject()
        dim = draw(st.sampled_from(sharded))
        remainder = draw(st.integers(1, divisors[dim] - 1))
        shape[dim] += remainder
        if math.prod(shape) > max_size:
            shape[dim] = remainder
    return tuple(shape)


@st.composite
def shardings(
    draw: st.DrawFn, *, mesh: Mesh | None = None, ndim: int = 2, shape: Sequence[int] | None = None
) -> NamedSharding:
    """`NamedSharding`s on `mesh` (or on any) for values of a rank or of a shape.

    Raises:
        TypeError, ValueError: when drawn from: an argument is of a wrong type, or no rank or shape.

    Example:
        >>> from hypothesis import given
        >>> @given(shardings(shape=(8, 8)))
        ... def test(sharding):
        ...     sharding.shard_shape((8, 8))
        >>> test()
    """
    chosen: Mesh = draw(meshes()) if mesh is None else require_mesh_type("shardings", "mesh", mesh)
    spec = draw(partition_specs(mesh=chosen, ndim=ndim, shape=shape))
    return NamedSharding(chosen, P() if spec is None else spec)


@st.composite
def op_shardings(draw: st.DrawFn, *, mesh: Mesh, ndim: int = 2, representable: bool | None = None) -> Any:
    """`OpSharding` protos for the devices of `mesh`.

    Args:
        draw: given by hypothesis.
        mesh: the mesh with the devices.
        ndim: the rank of the values.
        representable: True for those with an equivalent spec on the mesh, False for others, None for both. Those
            without are MAXIMAL, MANUAL or UNKNOWN, have a manual subgroup, or list the devices in an order that is no
            transposition of the mesh.

    Example:
        >>> from hypothesis import given
        >>> from partjit import parse_op_sharding
        >>> mesh = Mesh(jax.devices(), "x")
        >>> @given(op_shardings(mesh=mesh, representable=True))
        ... def test(op_sharding):
        ...     parse_op_sharding(op_sharding, mesh)
        >>> test()
    """
    require_mesh_type("op_shardings", "mesh", mesh, or_abstract=True)
    ndim = require_integer("op_shardings", "ndim", ndim, 0, MAX_RANK)
    if representable is None:
        representable = draw(st.booleans())
    representable = require_flag("op_shardings", "representable", representable)
    if representable:
        return to_op_sharding(draw(partition_specs(mesh=mesh, ndim=ndim)), mesh, ndim, as_list=draw(st.booleans()))
    texts = ["{maximal device=0}", "{manual}", "{unknown}"]
    texts.append(f"{{devices=[{'1,' * ndim}{mesh.size}]<=[{mesh.size}] last_tile_dims={{manual}}}}")
    if mesh.size > 1:
        order = draw(st.permutations(range(mesh.size)).filter(lambda order: order[0] != 0))
        texts.append(f"{{devices=[{mesh.size}{',1' * (ndim - 1)}]{','.join(map(str, order))}}}")
    return HloSharding.from_string(draw(st.sampled_from(texts))).to_proto()


@st.composite
def sharded_arrays(
    draw: st.DrawFn,
    *,
    mesh: Mesh | None = None,
    spec: P | None = None,
    shape: Sequence[int] | None = None,
    dtype: DTypeLike = np.float32,
) -> jax.Array:
    """Arrays committed to a mesh: floats between -1 and 1, small integers or flags.

    No two neighbours are equal, along any dimension.

    Args:
        draw: given by hypothesis.
        mesh: their mesh, or None for any mesh.
        spec: their spec, or None for any spec.
        shape: their shape, or None for any that the spec divides.
        dtype: their dtype.

    Raises:
        TypeError, ValueError: when drawn from: an argument is of a wrong type, or the spec does not fit.

    Example:
        >>> from hypothesis import given
        >>> mesh = Mesh(jax.devices(), "x")
        >>> @given(sharded_arrays(mesh=mesh, spec=P("x")))
        ... def test(array):
        ...     assert len(array.addressable_shards) == mesh.size
        >>> test()
    """
    where = "sharded_arrays"
    chosen: Mesh = draw(meshes()) if mesh is None else require_mesh_type(where, "mesh", mesh)
    require_numeric(where, dtype)
    sizes: tuple[int, ...] = draw(shapes(spec=spec, mesh=chosen)) if shape is None else shape_of(where, shape)
    if spec is None:
        spec = draw(partition_specs(mesh=chosen, shape=sizes))
    parsed = parsed_spec(where, spec, chosen)
    divisors = [math.prod(chosen.shape[axis] for axis in axes) for axes in parsed.partitions]
    if len(divisors) > len(sizes) or any(size % n for size, n in zip(sizes, divisors, strict=False)):
        raise ValueError(f"{where}: shape {sizes} must be one that the spec {parsed} divides, by {divisors}")
    count = math.prod(sizes)
    if count > _MOST_ELEMENTS:
        raise ValueError(f"{where}: shape {shown(sizes)} must have at most {_MOST_ELEMENTS} elements: make it smaller")
    return jax.device_put(_values(sizes, dtype), NamedSharding(chosen, P() if spec is None else spec))


def _values(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Numbers of which no two neighbours are equal."""
    is_float = jnp.issubdtype(dtype, jnp.inexact)
    if is_float:
        count = min(math.prod(shape), 1 << jnp.finfo(dtype).nmant)
    else:
        count = 2 if jnp.issubdtype(dtype, jnp.bool_) else min(17, int(jnp.iinfo(dtype).max) + 1)
    count = max(count, 2)
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    along = (np.arange(n) * (step if step % count else 1) for n, step in zip(shape, steps, strict=True))
    numbers = np.asarray(sum(np.ix_(*along))) % count
    return (np.linspace(-1, 1, count)[numbers] if is_float else numbers).astype(dtype)


def spec_trees(tree: object, *, mesh: Mesh, prefix: bool = True) -> SearchStrategy:
    """Trees of specs for a tree of arrays, or of anything with a `shape`; each fits all arrays it applies to.

    Args:
        tree: the values.
        mesh: the mesh of the specs.
        prefix: whether a spec may apply to a subtree.

    Raises:
        TypeError: an argument is of a wrong type.

    Example:
        >>> from hypothesis import given
        >>> from partjit import Mesh, pjit
        >>> params, mesh = {"w": np.ones((4, 8)), "b": np.ones(8)}, Mesh(jax.devices()[:4], "x")
        >>> @given(spec_trees(params, mesh=mesh))
        ... def test(specs):
        ...     with mesh:
        ...         pjit(lambda p: p, in_axis_resources=(specs,)).eval_shape(params)
        >>> test()
    """
    require_mesh_type("spec_trees", "mesh", mesh, or_abstract=True)
    prefix = require_flag("spec_trees", "prefix", prefix)
    leaves = jax.tree.leaves(tree)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        has_shape = isinstance(getattr(leaf, "shape", None), tuple) and not isinstance(leaf, np.dtype)
        if not has_shape and not isinstance(leaf, bool | int | float | complex):
            raise wrong_type("spec_trees", f"tree{jax.tree_util.keystr(path)}", leaf, "an array, or have a shape")
    one = st.nothing()
    if prefix or jax.tree.structure(tree) == jax.tree.structure(0):
        sizes = [math.gcd(*column) for column in zip(*(np.shape(leaf) for leaf in leaves), strict=False)]
        one = partition_specs(mesh=mesh, shape=sizes)  # for all of them
    children = jax.tree.structure(tree).children()
    if not children:
        return one if leaves else st.just(tree)
    parts, _ = jax.tree.flatten(tree, is_leaf=lambda node: node is not tree)
    build = functools.partial(jax.tree.unflatten, jax.tree.structure(tree, is_leaf=lambda node: node is not tree))
    each = st.tuples(*(spec_trees(part, mesh=mesh, prefix=prefix) for part in parts)).map(build)
    return st.one_of(one, each) if prefix else each
