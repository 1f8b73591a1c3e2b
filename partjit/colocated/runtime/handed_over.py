"""Which devices hand over which shards of the arguments of a call that their executable makes, and what they get."""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from partjit._jax.types import PyTree
from partjit.spec import ParsedPartitionSpec

__all__ = ["HandedOver", "Returned", "owned"]

_Shard: TypeAlias = tuple[int, tuple[slice, ...]]
"""The position of the device that hands it over, and the part of the array that it is."""


@dataclasses.dataclass(frozen=True)
class HandedOver:
    """Which devices hand over what: of each shard one that has it, the first one in the order of the mesh.

    Attributes:
        mesh: the mesh; None for a program on one device.
        avals: the arguments.
        shardings: theirs, on the mesh.
        shards: for each argument where its shards come from.
    """

    mesh: Mesh | None
    avals: tuple[ShapedArray, ...]
    shardings: tuple[NamedSharding, ...]
    shards: tuple[tuple[_Shard, ...], ...]

    @staticmethod
    def of(avals: Sequence[ShapedArray], shardings: Sequence[Sharding | None], mesh: Mesh) -> "HandedOver":
        """For arguments with these shardings, on one device or on a mesh; None is replicated."""
        if mesh.size <= 1:
            here = tuple(((0, (slice(None),) * len(aval.shape)),) for aval in avals)
            return HandedOver(None, tuple(avals), (), here)
        named = tuple(map(functools.partial(_on_mesh, mesh), shardings))
        return HandedOver(mesh, tuple(avals), named, tuple(map(_shards, avals, named)))

    @functools.cached_property
    def positions(self) -> frozenset[int]:
        """The positions, in the order of the mesh, of the devices that hand something over."""
        return frozenset({0, *(position for shards in self.shards for position, _ in shards)})

    @functools.cached_property
    def is_replicated(self) -> bool:
        """Whether each device has all of them."""
        return all(sharding.is_fully_replicated for sharding in self.shardings)

    def arrays(self, handed_over: Mapping[int, Sequence[np.ndarray]]) -> list[np.ndarray]:
        """The arguments, put together of what each device has handed over; read-only."""
        if self.mesh is None:
            return [*handed_over[0]]
        return [
            _assembled(aval, [(index, handed_over[position][k]) for position, index in shards])
            for k, (aval, shards) in enumerate(zip(self.avals, self.shards, strict=True))
        ]

    def owned(self, handed_over: Mapping[int, Sequence[np.ndarray]]) -> list[np.ndarray]:
        """As `arrays`, in memory of their own."""
        arrays = self.arrays(handed_over) if self.mesh is not None else handed_over[0]
        return [*map(owned, arrays)]


@dataclasses.dataclass(frozen=True)
class Returned:
    """Which devices get which parts of the results of a call.

    Attributes:
        avals: the results.
        shardings: theirs, on the mesh; none for a program on one device.
        mesh: the mesh, which may have no device or one.
    """

    avals: tuple[ShapedArray, ...]
    shardings: tuple[NamedSharding, ...]
    mesh: Mesh

    @staticmethod
    def of(avals: Sequence[ShapedArray], shardings: Sequence[Sharding | None], mesh: Mesh) -> "Returned":
        """For results with these shardings, on one device or on a mesh; None is replicated."""
        if mesh.size <= 1:
            return Returned(tuple(avals), (), mesh)
        return Returned(tuple(avals), tuple(map(functools.partial(_on_mesh, mesh), shardings)), mesh)

    @functools.cached_property
    def parts(self) -> tuple[tuple[tuple[slice, ...], ...], ...]:
        """For each device, in the order of the mesh, its part of each result."""
        if self.mesh.size <= 1:
            return (tuple((slice(None),) * len(aval.shape) for aval in self.avals),)
        maps = [s.devices_indices_map(aval.shape) for aval, s in zip(self.avals, self.shardings, strict=True)]
        return tuple(tuple(found[device] for found in maps) for device in self.mesh.devices.flat)

    def answers(self, results: Sequence[np.ndarray], *others: PyTree) -> Sequence[Sequence[PyTree]]:
        """For each device, in the order of the mesh, others and its parts of the results."""
        if self.mesh.size <= 1:
            return [(*others, *results)] * len(self.parts)
        # A device takes its part when it goes on, maybe after the function has been called again.
        own = [*map(np.array, results)]
        return [(*others, *(result[part] for result, part in zip(own, parts, strict=True))) for parts in self.parts]


def owned(array: np.ndarray) -> np.ndarray:
    """An array in memory of its own, which nobody changes: itself, or a copy if it is a view, as XLA:CPU gives it."""
    if array.flags.owndata:
        return array
    copy = array.copy()
    copy.setflags(write=False)
    return copy


def _on_mesh(mesh: Mesh, sharding: Sharding | None) -> NamedSharding:
    return sharding if isinstance(sharding, NamedSharding) else NamedSharding(mesh, PartitionSpec())


def _shards(aval: ShapedArray, sharding: NamedSharding) -> tuple[_Shard, ...]:
    """The shards, each from the first device in the order of the mesh; the mesh may be abstract."""
    sizes = sharding.mesh.shape
    strides = dict(zip(sizes, np.cumprod([1, *[*sizes.values()][:0:-1]])[::-1].tolist(), strict=True))
    spec = ParsedPartitionSpec.from_user_input(sharding, "sharding")
    dims: list[list[tuple[int, slice]]] = []
    partitions = (*spec.partitions, *[()] * (len(aval.shape) - len(spec.partitions)))
    for n, axes in zip(aval.shape, partitions, strict=True):
        parts = math.prod(sizes[axis] for axis in axes)
        each = [sum(at) for at in itertools.product(*(range(0, strides[a] * sizes[a], strides[a]) for a in axes))]
        size = n // parts
        dims.append([(at, slice(k * size, k * size + size) if parts > 1 else slice(None)) for k, at in enumerate(each)])
    found = ((sum(at for at, _ in shard), tuple(part for _, part in shard)) for shard in itertools.product(*dims))
    return tuple(sorted(found, key=operator.itemgetter(0)))


def _assembled(aval: ShapedArray, parts: Sequence[tuple[tuple[slice, ...], np.ndarray]]) -> np.ndarray:
    if len(parts) == 1:
        return parts[0][1]
    array = np.empty(aval.shape, aval.dtype)
    for index, part in parts:
        array[index] = part
    array.flags.writeable = False
    return array
