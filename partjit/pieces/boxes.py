"""The piece of a global array that one process has: what its devices hold, as an array over its local mesh.

For that the devices of each process have to be a box of the mesh, and all boxes of one shape: then a piece is as large
as the array, divided in each dimension by the number of boxes along the mesh axes that shard it.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import ArrayLike

from partjit._jax.arrays import device_put
from partjit.devices import describe_devices
from partjit.errors import ShardingError
from partjit.mesh import describe_mesh, is_abstract_mesh
from partjit.spec import ParsedPartitionSpec

__all__ = [
    "global_array",
    "global_shape_of",
    "is_over_processes",
    "local_array",
    "local_mesh",
    "local_shape_of",
    "local_sharding_of",
    "part_of_process",
]


def is_over_processes(mesh: Mesh) -> bool:
    """Whether a mesh has devices of another process."""
    return not is_abstract_mesh(mesh) and not mesh.empty and _local_devices(mesh) != mesh.devices.size


@functools.lru_cache(maxsize=256)
def _local_devices(mesh: Mesh) -> int:
    """How many devices of a mesh are of this process."""
    return sum(device.process_index == jax.process_index() for device in mesh.devices.flat)


@functools.lru_cache(maxsize=256)
def local_mesh(mesh: Mesh) -> Mesh:
    """The part of a mesh whose devices are of this process, with the same axes.

    Raises:
        ShardingError: the devices of a process are no box, or boxes are of several shapes; or this process has none.
    """
    processes = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    boxes = {int(process): _box(processes == process) for process in np.unique(processes)}
    shapes = {box and tuple(part.stop - part.start for part in box) for box in boxes.values()}
    held = f"of the mesh ({describe_mesh(mesh)}) the devices are {describe_devices(mesh.devices.flat)}"
    if None in shapes or len(shapes) > 1:
        raise ShardingError(
            "a process can pass and receive its own piece of an array only where its devices are a box of the mesh, "
            f"and the boxes of all processes are of one shape; but {held}, in the grid {mesh.device_ids.tolist()}. "
            "Order the devices by process, as jax.devices() has them, or pass global arrays, made with "
            "jax.make_array_from_callback"
        )
    if jax.process_index() not in boxes:
        raise ShardingError(
            f"process {jax.process_index()} has no piece of an array over a mesh without its devices; {held}. Leave "
            "the call to the processes that have some"
        )
    return Mesh(mesh.devices[boxes[jax.process_index()]], mesh.axis_names, axis_types=mesh.axis_types)


def _box(mask: np.ndarray) -> tuple[slice, ...] | None:
    """The slices of a grid that contain what is set, or None if that is no box."""
    along = [np.flatnonzero(mask.any(axis=tuple(k for k in range(mask.ndim) if k != i))) for i in range(mask.ndim)]
    box = tuple(slice(int(found[0]), int(found[-1]) + 1) for found in along)
    return box if mask[box].all() else None


def local_sharding_of(sharding: NamedSharding) -> NamedSharding:
    """The sharding of the piece of an array."""
    return NamedSharding(local_mesh(sharding.mesh), sharding.spec, memory_kind=sharding.memory_kind)


def global_shape_of(shape: Sequence[int], sharding: NamedSharding) -> tuple[int, ...]:
    """The shape of an array whose piece has this shape."""
    return tuple(size * count for size, count in zip(shape, _counts(sharding, len(shape)), strict=True))


def local_shape_of(shape: Sequence[int], sharding: NamedSharding) -> tuple[int, ...]:
    """The shape of the piece of an array of this shape."""
    return tuple(size // count for size, count in zip(shape, _counts(sharding, len(shape)), strict=True))


def _counts(sharding: NamedSharding, rank: int) -> tuple[int, ...]:
    """Into how many pieces each dimension of an array is cut."""
    mesh, own = sharding.mesh, local_mesh(sharding.mesh)
    parsed = ParsedPartitionSpec.from_user_input(sharding.spec, "a sharding")
    counts = [math.prod(mesh.shape[axis] // own.shape[axis] for axis in axes) for axes in parsed]
    return (*counts, *[1] * (rank - len(counts)))


def global_array(piece: ArrayLike, sharding: NamedSharding) -> jax.Array:
    """The array of which this is the piece of this process; it shares the memory of a piece that is in place."""
    own = device_put(piece, local_sharding_of(sharding))
    shape = global_shape_of(own.shape, sharding)
    return jax.make_array_from_single_device_arrays(
        shape, sharding, [shard.data for shard in own.addressable_shards], dtype=own.dtype
    )


def local_array(array: jax.Array, path: str) -> jax.Array:
    """The piece of an array that this process has, which shares its memory.

    Raises:
        ShardingError: the array has none.
    """
    sharding = array.sharding
    if sharding.is_fully_addressable:
        return array
    if not isinstance(sharding, NamedSharding):
        raise ShardingError(
            f"{path} has the sharding {sharding}, of which it is not known what piece a process has: give it a "
            "NamedSharding with jax.device_put"
        )
    own = local_sharding_of(sharding)
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(
        local_shape_of(array.shape, sharding), own, shards, dtype=array.dtype
    )


def part_of_process(array: Any, dim: int, sharding: NamedSharding, shape: Sequence[int]) -> Any:
    """What the piece of this process has along a dimension of an array, from data that is complete along it.

    Args:
        array: the data.
        dim: the dimension.
        sharding, shape: those of the array.
    """
    indices: Any = sharding.addressable_devices_indices_map(tuple(shape)).values()
    held = {index[dim].indices(shape[dim]) for index in indices}
    positions = np.concatenate([np.arange(*part) for part in sorted(held)])
    return array[(*[slice(None)] * dim, positions)]
