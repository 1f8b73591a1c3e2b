"""Shardings in groups of devices, each of which has a part of some dimensions and shards the others among its devices.

Source: `GroupedSharding` of XLA's `hlo_sharding_util.cc`, and `AlignGroupsWith` of its `spmd_partitioner_util.cc`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from partjit.inspect.moves.tiles import Tiles

__all__ = [
    "Grouped",
    "is_subtiling",
    "matching_dims",
    "on_assigned_groups",
    "replicated",
    "replicated_on",
    "reshaped",
    "transposed",
]

_Array = npt.NDArray[np.int64]


def replicated(ndim: int, size: int) -> Tiles:
    """The sharding of an array that all of so many devices have.

    Example:
        >>> replicated(2, 4).counts, replicated(2, 4).copies
        ((1, 1), 4)
    """
    return Tiles.of(np.arange(size).reshape([1] * ndim + [size]))


def reshaped(tiles: Tiles, counts: Mapping[int, int]) -> Tiles:
    """A sharding with other numbers of shards of some dimensions: the same devices in the same order.

    Args:
        tiles: the sharding.
        counts: the numbers of shards of these dimensions, together as many as before.
    """
    new = [counts.get(dim, n) for dim, n in enumerate(tiles.devices.shape)]
    return Tiles.of(tiles.devices.reshape(new))


def replicated_on(tiles: Tiles, dims: Sequence[int]) -> Tiles:
    """A sharding with some dimensions replicated."""
    kept = [dim for dim in range(len(tiles.counts)) if dim not in dims]
    devices = tiles.devices.transpose([*kept, *dims, len(tiles.counts)])
    counts = iter([tiles.counts[dim] for dim in kept])
    shape = [1 if dim in dims else next(counts) for dim in range(len(tiles.counts))]
    return Tiles.of(devices.reshape(*shape, -1))


def transposed(tiles: Tiles, dims: Mapping[int, int], ndim: int) -> Tiles | None:
    """The sharding of another array, of which some dimensions are those of this one; None if another one is sharded.

    Args:
        tiles: the sharding.
        dims: the dimensions, and which they are in the other array.
        ndim: the number of dimensions of that.
    """
    if any(n > 1 and dim not in dims for dim, n in enumerate(tiles.counts)):
        return None
    pairs = sorted((there, here) for here, there in dims.items())
    rest = [dim for dim in range(len(tiles.counts)) if dim not in dims]
    devices = tiles.devices.transpose([*(here for _, here in pairs), *rest, len(tiles.counts)])
    counts = {there: tiles.counts[here] for there, here in pairs}
    return Tiles.of(devices.reshape([*(counts.get(dim, 1) for dim in range(ndim)), tiles.copies]))


@dataclasses.dataclass(frozen=True, eq=False)
class Grouped:
    """A sharding in groups.

    Attributes:
        groups: the devices of each group, in rows.
        dims: the dimensions of which each group has a part; the number of dimensions stands for the copies.
        sizes: the number of parts of each.
        inner: how a group shards what it has, by positions in a row.
    """

    groups: _Array
    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    inner: Tiles

    @classmethod
    def of(cls, tiles: Tiles, dims: Sequence[int], shards: Sequence[int] = ()) -> "Grouped":
        """The groups of a sharding.

        Args:
            tiles: the sharding.
            dims: the dimensions of which each group has a part.
            shards: the number of shards of each that are in one group, by default 1.

        Example:
            >>> tiles = Tiles.of(np.arange(8).reshape(2, 2, 2))
            >>> Grouped.of(tiles, [1]).groups.tolist()
            [[0, 1, 4, 5], [2, 3, 6, 7]]
        """
        shape = tiles.devices.shape
        inside: dict[int, int] = dict(zip(dims, shards or [1] * len(dims), strict=True))
        sizes = tuple(shape[dim] // inside[dim] for dim in dims)
        each = [*{**dict(enumerate(shape)), **inside}.values()]
        split = [part for n, size in zip(shape, each, strict=True) for part in (n // size, size)]
        order = [*(2 * dim for dim in dims), *(2 * dim for dim in range(len(shape)) if dim not in dims)]
        order += [2 * dim + 1 for dim in range(len(shape))]
        groups = tiles.devices.reshape(split).transpose(order).reshape(math.prod(sizes), -1)
        return cls(groups, tuple(dims), sizes, Tiles.of(np.arange(groups.shape[1]).reshape(each)))

    @property
    def ndim(self) -> int:
        """The number of dimensions of the array."""
        return len(self.inner.counts)

    def ungrouped(self) -> Tiles:
        """The sharding over all devices."""
        inner = self.inner.devices
        devices = self.groups[:, inner.ravel()].reshape([*self.sizes, *inner.shape])
        count = len(self.dims)
        order = list[int]()
        for dim in range(inner.ndim):
            order += ([self.dims.index(dim)] if dim in self.dims else []) + [count + dim]
        sizes = dict(zip(self.dims, self.sizes, strict=True))
        shape = [n * sizes.get(dim, 1) for dim, n in enumerate(inner.shape)]
        return Tiles.of(devices.transpose(order).reshape(shape))

    def aligned(self, reference: "Grouped", *, in_any_order: bool = False) -> "Grouped":
        """The same in the groups of another sharding: the devices change their places only as far as they have to."""
        where = np.empty(reference.groups.size, np.int64)
        where[reference.groups] = np.arange(len(reference.groups))[:, None]
        own = where[self.groups]
        are_groups = bool((own == own[:, :1]).all())
        inner = self.inner
        if are_groups and (in_any_order or (own[:, 0] == np.arange(len(own))).all()):
            place = np.empty(reference.groups.size, np.int64)
            place[reference.groups] = np.arange(reference.groups.shape[1])
            inner = Tiles.of(place[self.groups[0]][self.inner.devices])
        return Grouped(reference.groups, self.dims, self.sizes, inner)

    def part(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what a group has of an array."""
        sizes = dict(zip(self.dims, self.sizes, strict=True))
        return tuple(-(-n // sizes.get(dim, 1)) for dim, n in enumerate(shape))


def matching_dims(tiles: Tiles, groups: _Array) -> tuple[int, ...] | None:
    """The dimensions of a sharding of which each of these groups of devices has one part; None if there are none."""
    if tiles.is_replicated or len(groups) < 2 or tiles.devices.size != groups.size:
        return None
    shape = tiles.devices.shape
    if groups.shape[1] < 2:
        return tuple(dim for dim, n in enumerate(shape) if n > 1)
    places = np.empty((len(shape), groups.size), np.int64)
    places[:, tiles.devices.ravel()] = np.indices(shape).reshape([len(shape), -1])
    of_groups = places[:, groups]
    # The copies are a dimension of XLA's only if there are several.
    tiled = range(len(shape) if tiles.copies > 1 else len(shape) - 1)
    dims = tuple(dim for dim in tiled if of_groups[dim, 0, 0] == of_groups[dim, 0, 1])
    if math.prod(shape[dim] for dim in dims) != len(groups):
        return None
    return dims if (of_groups[[*dims]] == of_groups[[*dims]][:, :, :1]).all() else None


def on_assigned_groups(tiles: Tiles, shards: int, groups: _Array) -> Grouped | None:
    """The sharding in these groups, so many copies of each shard in one group; None if they are others."""
    ndim = len(tiles.counts)
    if tiles.copies % len(groups):
        return None
    place = np.empty((ndim, groups.size), np.int64)
    place[:, tiles.devices.ravel()] = np.indices(tiles.devices.shape)[:-1].reshape([ndim, -1])
    found: _Array | None = None
    for group in groups:
        inner = np.empty([*tiles.counts, tiles.copies // len(groups)], np.int64)
        taken: dict[tuple[int, ...], int] = {}
        for position, device in enumerate(group):
            at = tuple(place[:, device].tolist())
            count = taken.get(at, 0)
            if count == shards or count >= inner.shape[-1]:
                return None
            inner[(*at, count)] = position
            taken[at] = count + 1
        if found is not None and not np.array_equal(found, inner):
            return None
        found = inner
    assert found is not None
    return Grouped(groups, (ndim,), (tiles.copies // shards,), Tiles.of(found))


def is_subtiling(shape: Sequence[int], fine: Tiles, coarse: Tiles) -> bool:
    """Whether each device has a part of what it has with another sharding."""
    if coarse.is_replicated or fine.is_replicated:
        return coarse.is_replicated
    if any(a < b for a, b in zip(fine.counts, coarse.counts, strict=True)):
        return False
    bounds = []
    for tiles in (fine, coarse):
        places = np.empty((len(shape), tiles.devices.size), np.int64)
        places[:, tiles.devices.ravel()] = np.indices(tiles.devices.shape)[:-1].reshape([len(shape), -1])
        size = np.array(tiles.local(shape))[:, None]
        start = np.minimum(places * size, np.array(shape)[:, None])
        bounds.append((start, np.minimum(start + size, np.array(shape)[:, None])))
    (start, limit), (first, last) = bounds
    return bool(((start >= limit) | ((first <= start) & (limit <= last))).all())
