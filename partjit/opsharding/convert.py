"""Exact conversion between OpSharding and PartitionSpec.

XLA numbers the devices of a program in the order of `mesh.devices.flat`, and an `OpSharding` assigns a device to each
tile of a grid. The axes of a mesh are mixed-radix digits of these numbers: the stride of an axis is the product of the
sizes of the axes after it. A `PartitionSpec` gives the axes, major to minor, that number the tiles along each
dimension. So both sides are lists of digits, (size, stride) from major to minor, and the spec is found by matching the
digits of the grid with axes of the mesh. The iota form is such a list already, so its cost does not depend on the
number of devices; a list of devices is one if it counts in mixed radix, which is checked for every device.

Shardings without an equivalent spec are refused: see `parse_op_sharding`.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from partjit._jax.shardings import OpSharding, to_proto
from partjit.checks import require_flag, require_integer, require_mesh_type
from partjit.errors import UnrepresentableShardingError
from partjit.mesh import describe_mesh
from partjit.opsharding.superdims import Digit, axes_by_top, axes_of_shape, digits_of, digits_of_array
from partjit.opsharding.text import from_text
from partjit.opsharding.tiling import Kind, Tiling
from partjit.opsharding.wire import from_bytes, from_proto
from partjit.spec import MAX_RANK, UNCONSTRAINED, ParsedPartitionSpec

__all__ = ["parse_op_sharding", "tiling_of", "to_op_sharding"]


def parse_op_sharding(sharding: object, mesh: Mesh | AbstractMesh) -> Any:
    """The spec on `mesh` that is equivalent to an XLA sharding.

    Args:
        sharding: an `OpSharding` proto, its serialized bytes, an `HloSharding`, a `GSPMDSharding`, or the text of one.
            Its device numbers are positions in `mesh.devices.flat`.
        mesh: the mesh of the spec. Axes of size 1 never appear: a sharding does not contain them.

    Returns:
        A `ParsedPartitionSpec` with one partition per dimension of the tile grid, none for a replicated value; a list
        of them for a tuple.

    Raises:
        UnrepresentableShardingError: no spec on this mesh is equivalent: it shards over part of an axis, the order of
            the devices is no transposition of the mesh, or their number is different; the sharding is MAXIMAL, MANUAL,
            UNKNOWN, UNREDUCED or has such subgroups, belongs to a shard group, or is malformed. The message says which,
            and suggests a remedy.
        TypeError: `sharding` is none of these kinds, or `mesh` no mesh.

    Example:
        >>> from jax.sharding import AbstractMesh
        >>> mesh = AbstractMesh((4, 2), ("x", "y"))
        >>> parse_op_sharding("{devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}", mesh).partitions
        (('y',), ())
        >>> parse_op_sharding("{devices=[8]<=[4,2]T(1,0)}", mesh).partitions
        (('y', 'x'),)

    Source: `parse_op_sharding` of `jax.experimental.pjit` as of jax 0.2.26, which supported lists of devices only.
    """
    require_mesh_type("parse_op_sharding", "mesh", mesh, or_abstract=True)
    tiling = tiling_of(sharding)
    if tiling is None:
        raise TypeError(
            "parse_op_sharding expects an OpSharding, its bytes or text, an HloSharding or a GSPMDSharding, but got "
            f"{type(sharding).__name__}: a NamedSharding has its spec in .spec"
        )
    return _spec_of(tiling, mesh)


def tiling_of(sharding: object) -> Tiling | None:
    """The content of an XLA sharding in any form, as `parse_op_sharding` takes it; None for anything else.

    Raises:
        UnrepresentableShardingError: it is malformed.
    """
    if isinstance(sharding, str):
        return from_text(sharding)
    if isinstance(sharding, bytes):
        return from_bytes(sharding)
    proto = to_proto(sharding)
    return None if proto is None else from_proto(proto)


def to_op_sharding(
    spec: ParsedPartitionSpec | P | None, mesh: Mesh | AbstractMesh, ndim: int, *, as_list: bool = False
) -> Any:
    """The `OpSharding` that is equivalent to a spec on a mesh.

    Args:
        spec: a spec, parsed or not; None is replicated.
        mesh: its mesh.
        ndim: the rank of the value, at least the length of the spec.
        as_list: list the devices instead of using the iota form.

    Returns:
        An `OpSharding` proto.

    Raises:
        UnrepresentableShardingError: the spec leaves a dimension unconstrained, or has unreduced or reduced axes.
        ValueError: the spec is longer than `ndim`, or names an axis twice or one that the mesh does not have.
        TypeError: an argument is of a wrong type.

    Example:
        >>> from jax.sharding import AbstractMesh
        >>> mesh = AbstractMesh((4, 2), ("x", "y"))
        >>> op_sharding = to_op_sharding(P("y"), mesh, 2)
        >>> op_sharding.tile_assignment_dimensions, op_sharding.iota_reshape_dims, op_sharding.iota_transpose_perm
        ([2, 1, 4], [4, 2], [1, 0])
        >>> parse_op_sharding(op_sharding, mesh).partitions
        (('y',), ())
    """
    require_mesh_type("to_op_sharding", "mesh", mesh, or_abstract=True)
    ndim = require_integer("to_op_sharding", "ndim", ndim, 0, MAX_RANK)
    as_list = require_flag("to_op_sharding", "as_list", as_list)
    parsed = spec if isinstance(spec, ParsedPartitionSpec) else ParsedPartitionSpec.from_user_input(spec, "spec")
    if len(parsed) > ndim:
        raise ValueError(f"the spec {parsed} needs a rank of at least {len(parsed)}, but ndim is {ndim}")
    if parsed.reductions:
        raise UnrepresentableShardingError(f"the spec {parsed} has unreduced or reduced axes, which a tiling has not")
    if UNCONSTRAINED in parsed.partitions:
        raise UnrepresentableShardingError(
            f"the spec {parsed} leaves a dimension to the partitioner, which no sharding expresses"
        )
    unknown = [axis for axis in parsed.mesh_axes if axis not in mesh.shape]
    if unknown:
        raise ValueError(
            f"the spec {parsed} names the axis {unknown[0]!r}, which is not found in the mesh ({describe_mesh(mesh)})"
        )
    axes = {name: (size, stride) for name, size, stride in axes_of_shape(mesh.shape_tuple)}
    tiled = [axes[axis] for axis in parsed.mesh_axes if axis in axes]
    copies = [digit for digit in axes.values() if digit not in tiled]
    proto = OpSharding()
    if not tiled:
        proto.type = OpSharding.Type.REPLICATED
        return proto
    proto.type = OpSharding.Type.OTHER
    grid = [math.prod(mesh.shape[axis] for axis in partition) for partition in parsed.partitions]
    grid += [1] * (ndim - len(parsed))
    if copies:
        grid.append(math.prod(size for size, _ in copies))
        proto.replicate_on_last_tile_dim = True
    proto.tile_assignment_dimensions = grid
    digits = _merged([*tiled, *copies])
    by_stride = sorted(digits, key=lambda digit: -digit[1])
    sizes, perm = [size for size, _ in by_stride], [by_stride.index(digit) for digit in digits]
    if as_list:
        proto.tile_assignment_devices = np.arange(mesh.size).reshape(sizes).transpose(perm).ravel().tolist()
    else:
        proto.iota_reshape_dims, proto.iota_transpose_perm = sizes, perm
    return proto


# From a tiling to a spec


def _spec_of(tiling: Tiling, mesh: Mesh | AbstractMesh) -> ParsedPartitionSpec | list:
    if tiling.kind is Kind.TUPLE:
        return [_spec_of(element, mesh) for element in tiling.elements]
    if tiling.shard_group:
        raise UnrepresentableShardingError(
            f"{tiling} belongs to a shard group: it ties other values to its sharding, which no PartitionSpec expresses"
        )
    if tiling.kind is Kind.REPLICATED:
        return ParsedPartitionSpec(P(), ())
    if tiling.kind is not Kind.TILED:
        raise UnrepresentableShardingError(f"no PartitionSpec expresses {tiling}: {_MEANINGS[tiling.kind]}")
    rank = len(tiling.grid) - len(tiling.subgroups)
    for kind, size in zip(tiling.subgroups, tiling.grid[rank:], strict=True):
        if kind is not Kind.REPLICATED and size > 1:  # one of a single device says nothing, to XLA as well
            raise UnrepresentableShardingError(
                f"{tiling} has a {kind.name} subgroup, which no PartitionSpec expresses: {_MEANINGS[kind]}. "
                f"{_remainder(tiling, mesh)}"
            )
    count = math.prod(tiling.grid)
    if count != mesh.size:
        raise UnrepresentableShardingError(
            f"{tiling} is for {count} devices, but the mesh ({describe_mesh(mesh)}) has {mesh.size}: use the mesh of "
            "its own program"
        )
    digits = None if tiling.devices is not None else _separate(_iota_digits(tiling), tiling.grid)
    if digits is None:
        digits = _separate(_listed_digits(tiling, rank, mesh), tiling.grid[:rank])
    if digits is None:
        raise _no_transposition(tiling, mesh)
    by_top = axes_by_top(mesh.shape_tuple)
    partitions = []
    for dim in range(rank):
        names = []
        for size, stride in digits[dim]:
            while size > 1:
                name, axis_size = by_top.get(size * stride, _NO_AXIS)
                if size % axis_size:
                    raise _part_of_axis(dim, (size, stride), tiling, mesh)
                names.append(name)
                size //= axis_size
        partitions.append(tuple(names))
    return ParsedPartitionSpec(P(*[names or None for names in partitions]), tuple(partitions))


_MANY = 64
"""From how many devices on NumPy is faster."""

_NO_AXIS = ("", sys.maxsize)  # of a size that divides nothing

_MEANINGS = {
    Kind.MAXIMAL: "the whole value is on one device of the mesh",
    Kind.MANUAL: "each device has a value of its own, as inside shard_map",
    Kind.UNKNOWN: "the partitioner has not decided",
    Kind.UNREDUCED: "each device holds a partial sum of the value",
}


def _remainder(tiling: Tiling, mesh: Mesh | AbstractMesh) -> str:
    """The spec of a tiling with its subgroups replaced by replicated ones, in words."""
    copies = tiling._replace(subgroups=(Kind.REPLICATED,) * len(tiling.subgroups))
    try:
        return f"The rest of it is {_spec_of(copies, mesh)}"
    except UnrepresentableShardingError as error:
        return f"Neither does one express the rest: {error}"


def _iota_digits(tiling: Tiling) -> list[Digit]:
    """The digits, major to minor, of the iota form."""
    strides = [1]
    for size in tiling.reshape_dims[:0:-1]:
        strides.append(strides[-1] * size)
    strides.reverse()
    return _merged([(tiling.reshape_dims[i], strides[i]) for i in tiling.transpose_perm])


def _listed_digits(tiling: Tiling, rank: int, mesh: Mesh | AbstractMesh) -> list[Digit]:
    """The digits of a list of devices. The order of those that share a tile does not matter, so they are sorted."""
    copies = math.prod(tiling.grid[rank:])
    if tiling.devices is not None and len(tiling.devices) < _MANY:
        devices = tiling.devices
        if copies > 1:
            devices = [device for k in range(0, len(devices), copies) for device in sorted(devices[k : k + copies])]
        digits = digits_of(devices)
    else:
        assignment = tiling.assignment
        digits = digits_of_array(np.sort(assignment.reshape(-1, copies)).ravel() if copies > 1 else assignment.ravel())
    if digits is None:
        raise _no_transposition(tiling, mesh)
    return digits[::-1]


def _merged(digits: Sequence[Digit]) -> list[Digit]:
    """Merges neighboring digits that are contiguous."""
    merged: list[Digit] = []
    for size, stride in digits:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def _separate(digits: Sequence[Digit], grid: Sequence[int]) -> list[list[Digit]] | None:
    """The digits of each dimension of the grid; None if a dimension ends inside of a digit that it does not divide."""
    remaining = [*reversed(digits)]
    separated = []
    for needed in grid:
        own: list[Digit] = []
        while needed > 1:
            size, stride = remaining.pop()
            if needed % size == 0:
                own.append((size, stride))
                needed //= size
            elif size % needed == 0:
                own.append((needed, stride * (size // needed)))
                remaining.append((size // needed, stride))
                needed = 1
            else:
                return None
        separated.append(own)
    return separated


def _part_of_axis(dim: int, digit: Digit, tiling: Tiling, mesh: Mesh | AbstractMesh) -> UnrepresentableShardingError:
    size, stride = digit
    for name, axis_size, step in axes_of_shape(mesh.shape_tuple):
        low, high = max(stride, step), min(size * stride, axis_size * step)
        # The axis can be split only if the digit begins and ends at factors of it.
        divides = low % step == low % stride == high % low == axis_size * step % high == 0
        if high > low and divides and high // low < axis_size:
            *majors, minor = [n for n in (axis_size * step // high, high // low, low // step) if n > 1]
            return UnrepresentableShardingError(
                f"{tiling} shards dimension {dim} over a factor of {high // low} of the axis {name!r}, which has "
                f"{axis_size} devices, but a PartitionSpec names whole axes of the mesh ({describe_mesh(mesh)}): split "
                f"{name!r} into axes of {', '.join(map(str, majors))} and {minor} devices, in this order"
            )
    return UnrepresentableShardingError(
        f"{tiling} shards dimension {dim} over {size} devices with a stride of {stride}, and no axes of the mesh "
        f"({describe_mesh(mesh)}) have these"
    )


def _no_transposition(tiling: Tiling, mesh: Mesh | AbstractMesh) -> UnrepresentableShardingError:
    return UnrepresentableShardingError(
        f"{tiling} has its devices in an order that is no transposition of the mesh ({describe_mesh(mesh)}), so no "
        "PartitionSpec expresses it"
    )
