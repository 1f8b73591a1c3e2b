"""Which tile of an array each device holds, from any form of sharding: jax's, specs, XLA's protos and texts.

A spec may be that of a value inside of a program, which XLA pads where the axes do not divide a dimension. jax refuses
such shardings, so the tiles are computed here.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from partjit._jax.shardings import to_proto
from partjit.checks import wrong_type
from partjit.mesh import ambient_mesh, describe_mesh
from partjit.opsharding.convert import parse_op_sharding, tiling_of
from partjit.opsharding.tiling import Kind, Tiling
from partjit.spec import UNCONSTRAINED, ParsedPartitionSpec

__all__ = ["Cut", "Tiles", "tiles_of"]

Cut = tuple[int, int]


@dataclass(frozen=True)
class Tiles:
    """The tiles of an array and the devices that hold them.

    Attributes:
        sharding: the sharding, in words: "as P('x') on (x=8)".
        cuts: per dimension, the start and stop of each of its parts.
        ids: of the devices.
        parts: for each dimension which part each of these devices holds.
        over: per dimension, the mesh axes that shard it, in words: "data=4"; empty if none does or no mesh is known.
        copies: the mesh axes along which it is replicated, in words.
        remote: the ids of the devices of other processes.
        notes: remarks, a sentence each.
    """

    sharding: str
    cuts: tuple[tuple[Cut, ...], ...]
    ids: npt.NDArray[np.int64]
    parts: npt.NDArray[np.int64]
    over: tuple[str, ...]
    copies: str = ""
    remote: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()


def tiles_of(shape: Sequence[int], sharding: object, mesh: Mesh | AbstractMesh | None = None) -> Tiles:
    """The tiles of an array of a shape.

    Args:
        shape: of the array.
        sharding: a `Sharding` of jax, a spec (parsed or not), or a sharding that `partjit.parse_op_sharding` takes.
        mesh: the mesh of a spec, by default the ambient one; or that of XLA's sharding, whose devices are positions
            in a mesh without it.

    Raises:
        TypeError: `sharding` is none of these.
        ValueError: it does not fit `shape` or `mesh`, or there is no mesh.
    """
    if isinstance(sharding, NamedSharding):
        tiles = _of_spec(shape, sharding.spec, sharding.mesh)
        return _in_memory(tiles, sharding.memory_kind)
    if isinstance(sharding, P | ParsedPartitionSpec) or sharding is None:
        own = sharding.mesh if isinstance(sharding, ParsedPartitionSpec) else None
        found = own or (ambient_mesh() if mesh is None else mesh)
        if found.empty:
            raise ValueError(
                f"draw_array: the spec {_show(sharding)} names axes of a mesh, and there is none: give it as `mesh`, "
                "or set it with partjit.set_mesh"
            )
        return _of_spec(shape, sharding, found)
    if isinstance(sharding, Sharding) and (mesh is None or to_proto(sharding) is None):
        return _in_memory(_of_sharding(shape, sharding), sharding.memory_kind)
    tiling = tiling_of(sharding)
    if tiling is None:
        raise wrong_type("draw_array", "spec", sharding, "a Sharding, a PartitionSpec, or an OpSharding or its text")
    if mesh is None:
        return _of_tiling(shape, tiling)
    parsed = parse_op_sharding(sharding, mesh)
    if isinstance(parsed, list):
        raise ValueError("draw_array draws one array, but `spec` is the sharding of a tuple: give it one by one")
    return _of_spec(shape, parsed, mesh)


def _of_spec(shape: Sequence[int], spec: P | ParsedPartitionSpec | None, mesh: Mesh | AbstractMesh) -> Tiles:
    unreduced: tuple[str, ...] = ()
    if isinstance(spec, P) and (spec.unreduced or spec.reduced):  # which a parsed spec cannot express
        unreduced = tuple(axis for axis in mesh.axis_names if axis in spec.unreduced)
        spec = P(*spec.partitions)
    if isinstance(spec, ParsedPartitionSpec):
        parsed = spec
    else:
        parsed = ParsedPartitionSpec.from_user_input(spec, "spec", allow_unconstrained_dims=True)
    unknown = [axis for axis in parsed.mesh_axes if axis not in mesh.shape]
    if unknown:
        raise ValueError(
            f"draw_array: the spec {_show(parsed)} names the axis {unknown[0]!r}, which the mesh "
            f"({describe_mesh(mesh)}) does not have"
        )
    if len(parsed) > len(shape):
        raise ValueError(
            f"draw_array: the spec {_show(parsed)} is for a rank of at least {len(parsed)}, but the shape is "
            f"{_show_shape(shape)}"
        )
    dims = [() if axes is UNCONSTRAINED else axes for axes in parsed.partitions]
    dims += [()] * (len(shape) - len(dims))
    sizes = dict(mesh.shape_tuple)
    counts = [math.prod(sizes[axis] for axis in axes) for axes in dims]
    places = dict(zip(mesh.axis_names, np.indices([*sizes.values()]).reshape(len(sizes), -1), strict=True))
    tile = np.zeros((len(shape), math.prod(sizes.values())), np.int64)
    for dim, axes in enumerate(dims):
        for axis in axes:  # the first one is major
            tile[dim] = tile[dim] * sizes[axis] + places[axis]
    used = {axis for axes in dims for axis in axes}
    ids, remote, notes = _devices(mesh)
    free = ", ".join(str(dim) for dim in sorted(parsed.unconstrained_dims))
    if free:
        notes += (f"the sharding of dimension {free} is left to the partitioner",)
    if unreduced:
        notes += (f"unreduced: along {_axes(unreduced, sizes)} each device holds a partial sum",)
    return Tiles(
        f"as {_show(parsed)} on ({describe_mesh(mesh)})",
        tuple(_cuts(size, count) for size, count in zip(shape, counts, strict=True)),
        ids,
        tile,
        tuple(_axes(axes, sizes) for axes in dims),
        _axes([axis for axis in sizes if axis not in used and axis not in unreduced and sizes[axis] > 1], sizes),
        remote,
        (*_padding(shape, counts), *notes),
    )


def _of_sharding(shape: Sequence[int], sharding: Sharding) -> Tiles:
    """The tiles of a sharding without a mesh, which only knows what each device holds."""
    devices = sorted(sharding.device_set, key=lambda device: device.id)
    remote = frozenset(device.id for device in sharding.device_set - sharding.addressable_devices)
    ids = np.array([device.id for device in devices])
    tiling = tiling_of(sharding)
    if tiling is not None and tiling.kind is Kind.TILED:
        counts = tiling.grid[: len(tiling.grid) - len(tiling.subgroups)]
        _check_rank(shape, counts, str(tiling))
        tiles = sharding.devices_indices_map(tuple(counts))  # of an array with one element per tile
        held = [[part.start or 0 for part in tiles[device]] for device in devices]
        cuts = tuple(_cuts(size, count) for size, count in zip(shape, counts, strict=True))
        at = np.array(held, np.int64).reshape([len(devices), len(shape)]).T
        return Tiles(f"as {tiling}", cuts, ids, at, ("",) * len(shape), "", remote, tuple(_padding(shape, counts)))
    indices = sharding.devices_indices_map(tuple(shape))
    parts = {d.id: tuple(s.indices(n)[:2] for s, n in zip(indices[d], shape, strict=True)) for d in devices}
    cuts = tuple(tuple(sorted({part[dim] for part in parts.values()})) for dim in range(len(shape)))
    held = [[cuts[dim].index(cut) for dim, cut in enumerate(parts[device.id])] for device in devices]
    at = np.array(held, np.int64).reshape([len(devices), len(shape)]).T
    shown = f"on device {devices[0].id}" if len(devices) == 1 else f"as {tiling or type(sharding).__name__}"
    return Tiles(shown, cuts, ids, at, ("",) * len(shape), "", remote)


def _of_tiling(shape: Sequence[int], tiling: Tiling) -> Tiles:
    """The tiles of an XLA sharding, whose devices are positions in the mesh of some program."""
    if tiling.kind is not Kind.TILED or any(kind is not Kind.REPLICATED for kind in tiling.subgroups):
        raise ValueError(f"draw_array: {tiling} does not determine which devices hold what: give the `mesh` it is for")
    counts = tiling.grid[: len(tiling.grid) - len(tiling.subgroups)]
    _check_rank(shape, counts, str(tiling))
    positions = np.indices(tiling.grid).reshape(len(tiling.grid), -1)[: len(counts)]
    return Tiles(
        f"as {tiling}",
        tuple(_cuts(size, count) for size, count in zip(shape, counts, strict=True)),
        np.asarray(tiling.assignment.ravel(), np.int64),
        positions,
        ("",) * len(shape),
        notes=(*_padding(shape, counts), _NUMBERS),
    )


_NUMBERS = "devices are positions in the mesh"


def _devices(mesh: Mesh | AbstractMesh) -> tuple[npt.NDArray[np.int64], frozenset[int], tuple[str, ...]]:
    """The ids of the devices in their order, those of other processes, and remarks."""
    if isinstance(mesh, AbstractMesh):
        return np.arange(mesh.size), frozenset(), (_NUMBERS,)
    ids = np.array([device.id for device in mesh.devices.flat])
    remote = frozenset(d.id for d in mesh.devices.flat if d.process_index != d.client.process_index())
    return ids, remote, ()


def _cuts(size: int, count: int) -> tuple[Cut, ...]:
    """The parts of a dimension: XLA gives all tiles one size, so the last ones may be short or empty."""
    length = -(-size // count)
    ends = np.minimum(np.arange(count + 1) * length, size).tolist()
    return tuple(itertools.pairwise(ends))


def _padding(shape: Sequence[int], counts: Sequence[int]) -> Iterable[str]:
    for dim, (size, count) in enumerate(zip(shape, counts, strict=True)):
        if size % count:
            padded = -(-size // count) * count
            yield f"{count} parts do not divide dimension {dim} of {size} elements: XLA pads it to {padded}"


def _check_rank(shape: Sequence[int], counts: Sequence[int], sharding: str) -> None:
    if len(counts) != len(shape):
        raise ValueError(
            f"draw_array: {sharding} is for a rank of {len(counts)}, but the shape is {_show_shape(shape)}"
        )


def _axes(axes: Iterable[str], sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={sizes[axis]}" for axis in axes)


def _in_memory(tiles: Tiles, kind: str | None) -> Tiles:
    if kind in (None, "device"):
        return tiles
    return replace(tiles, notes=(*tiles.notes, f"in the memory {kind!r}"))


def _show(spec: P | ParsedPartitionSpec | None) -> str:
    entries = spec.partition_spec if isinstance(spec, ParsedPartitionSpec) else spec
    return "None" if entries is None else f"P({', '.join(map(repr, entries))})"


def _show_shape(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
