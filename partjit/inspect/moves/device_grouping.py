"""Shardings in groups of devices, each of which has a part of some dimensions and shards the others among its devices.

Source: `GroupedSharding` of XLA's `hlo_sharding_util.cc`, and `AlignGroupsWith` of its `spmd_partitioner_util.cc`.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from partjit.inspect.moves.tiles import Tiles, Unmodelled, over_axes, tiles_of
from partjit.shardy import TensorSharding

__all__ = [
    "Grouped",
    "combined",
    "combined_in_names",
    "grouped_by_copies",
    "is_subtiling",
    "matched",
    "matching_dims",
    "on_assigned_groups",
    "propagated",
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


def propagated(tiles: Tiles, dims: Sequence[tuple[int, int]], ndim: int) -> Tiles:
    """The sharding of another array in the dimensions that it has in common with this one.

    Args:
        tiles: the sharding.
        dims: pairs of dimensions of this and of the other array that are the same.
        ndim: the number of dimensions of that.
    """
    here = {dim for dim, _ in dims}
    whole = replicated_on(tiles, [dim for dim in range(len(tiles.counts)) if dim not in here])
    found = transposed(whole, dict(dims), ndim)
    assert found is not None
    return found


def combined(more: Tiles, tiles: Tiles) -> Tiles | None:
    """A sharding with that of other dimensions as well; None if there is none, or if it has no more shards."""
    if more.is_replicated:
        return None
    if tiles.is_replicated:
        return more
    if not tiles.is_partial:
        return None
    pairs = [*zip(more.counts, tiles.counts, strict=True)]
    counts = [max(pair) for pair in pairs]
    number, size = math.prod(counts), tiles.devices.size
    if any(a != b and 1 not in (a, b) for a, b in pairs) or size % number or number <= math.prod(tiles.counts):
        return None
    members: dict[tuple[int, ...], list[int]] = {}
    for device, (a, b) in enumerate(zip(_places(more).T.tolist(), _places(tiles).T.tolist(), strict=True)):
        place = tuple(x if n > 1 else y for (n, _), x, y in zip(pairs, a, b, strict=True))
        if all(x == y for (n, m), x, y in zip(pairs, a, b, strict=True) if n == m):
            members.setdefault(place, []).append(device)
    if len(members) < number or any(len(devices) != size // number for devices in members.values()):
        return None
    return Tiles.of(np.array([members[place] for place in sorted(members)]).reshape([*counts, size // number]))


def combined_in_names(more: Tiles, tiles: Tiles, sizes: Mapping[str, int]) -> Tiles | None:
    """The same for shardings over named axes: each dimension gets more of these until one is used already.

    Args:
        more, tiles: the shardings.
        sizes: of the axes of the mesh.

    Raises:
        Unmodelled: a sharding is not over axes.
    """
    both = [over_axes(each, sizes) for each in (more, tiles)]
    if both[0] is None or both[1] is None:
        raise Unmodelled
    used = {axis for names in both[1].axes for axis in names}
    axes = list[tuple[str, ...]]()
    for extended, names in zip(both[0].axes, both[1].axes, strict=True):
        rest = extended[len(names) :] if extended[: len(names)] == names else ()
        axes.append((*names, *itertools.takewhile(lambda axis: axis not in used, rest)))
    found = TensorSharding(tuple(axes), tuple(tuple(sizes[axis] for axis in names) for names in axes))
    return None if tuple(axes) == both[1].axes else tiles_of(found, sizes)


def _places(tiles: Tiles) -> _Array:
    """Which shard each device has, a row for each dimension."""
    places = np.empty((len(tiles.counts), tiles.devices.size), np.int64)
    places[:, tiles.devices.ravel()] = np.indices(tiles.devices.shape)[:-1].reshape([len(tiles.counts), -1])
    return places


def grouped_by_copies(tiles: Tiles, count: int, order: Sequence[int]) -> Grouped:
    """So many groups, each of which has all of an array: its copies, or those that it has once dimensions are gathered.

    Args:
        tiles: the sharding of the array.
        count: the number of groups.
        order: the dimensions that are gathered, the first ones first.
    """
    ndim, size = len(tiles.counts), tiles.devices.size
    if tiles.is_partial and tiles.copies % count == 0:
        return Grouped.of(tiles, (ndim,), [tiles.copies // count])
    most = tiles.copies * math.prod(tiles.counts[dim] for dim in order)
    if not tiles.is_replicated and most % count == 0 and count % tiles.copies == 0:
        shape, left = [*tiles.devices.shape], count // tiles.copies
        for dim in order:
            for factor in _factors(tiles.counts[dim]):
                if left > 1 and left % factor == 0:
                    shape[dim], shape[-1], left = shape[dim] // factor, shape[-1] * factor, left // factor
        if left == 1 and math.prod(shape[:-1]) > 1:
            # XLA forgets which devices had what.
            return Grouped.of(Tiles.of(np.arange(size).reshape(shape)), (ndim,))
    groups = np.arange(size).reshape(count, -1)
    return Grouped(groups, (ndim,), (count,), replicated(ndim, size // count))


def _factors(number: int) -> list[int]:
    """The prime factors of a number, the smallest first."""
    factor = next((k for k in range(2, number + 1) if number % k == 0), None)
    return [] if factor is None else [factor, *_factors(number // factor)]


def matched(
    left: Tiles, right: Tiles, left_dims: Sequence[int], right_dims: Sequence[int]
) -> tuple[Tiles, Tiles] | None:
    """The shardings of two arrays, with equal ones of the dimensions that both have; None if these stay unsharded.

    Source: `GatherScatterOperandsShardedAcrossParallelDims` of XLA's `spmd_partitioner_util.cc`.
    """
    numbers = [math.prod(t.counts[dim] for dim in dims) for t, dims in ((left, left_dims), (right, right_dims))]
    if max(numbers) == 1:
        return None
    if right.is_replicated:
        return left, _as(left, left_dims, right_dims, len(right.counts))
    if left.is_replicated:
        return _as(right, right_dims, left_dims, len(left.counts)), right
    if numbers[0] < numbers[1]:
        made = _more_alike(left, left_dims, right, right_dims)
    elif numbers[0] > numbers[1]:
        made = _more_alike(right, right_dims, left, left_dims)
    else:
        made = None
    if numbers[0] != numbers[1]:
        if made is None:
            return None
        left, right = (made, right) if numbers[0] < numbers[1] else (left, made)
    counts = {a: right.counts[b] for a, b in zip(left_dims, right_dims, strict=True)}
    return _aligned(reshaped(left, counts), left_dims, right, right_dims), right


def _as(tiles: Tiles, dims: Sequence[int], others: Sequence[int], ndim: int) -> Tiles:
    """The sharding of an array in some dimensions only, as these are sharded in another one."""
    counts = dict(zip(others, (tiles.counts[dim] for dim in dims), strict=True))
    made = Tiles.of(tiles.devices.reshape([*(counts.get(dim, 1) for dim in range(ndim)), -1]))
    return _aligned(made, others, tiles, dims)


def _aligned(tiles: Tiles, dims: Sequence[int], reference: Tiles, others: Sequence[int]) -> Tiles:
    return Grouped.of(tiles, dims).aligned(Grouped.of(reference, others)).ungrouped()


def _more_alike(tiles: Tiles, dims: Sequence[int], wanted: Tiles, others: Sequence[int]) -> Tiles | None:
    """A sharding with as many shards of some dimensions as another one has; its copies become these."""
    if not tiles.is_partial:
        return None
    shape = [*tiles.devices.shape]
    for dim, other in zip(dims, others, strict=True):
        ratio, rest = divmod(wanted.counts[other], tiles.counts[dim])
        if rest or shape[-1] % ratio:
            return None
        shape[dim], shape[-1] = shape[dim] * ratio, shape[-1] // ratio
    return _aligned(Tiles.of(tiles.devices.reshape(shape)), dims, wanted, others)
