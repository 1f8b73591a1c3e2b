"""Shardings as XLA's partitioner has them: which devices have which shard."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from partjit.inspect.device_groups import DeviceGroups
from partjit.shardy import TensorSharding

__all__ = ["Step", "Tiles", "Unmodelled", "over_axes", "tiles_of"]


class Unmodelled(Exception):
    """XLA partitions something in a way that is not modelled."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A collective.

    Attributes:
        kind: its kind.
        groups: the positions in the mesh of each group, or of each source and target.
        operand, result: shapes on a device.
    """

    kind: str
    groups: DeviceGroups
    operand: tuple[int, ...]
    result: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Tiles:
    """The devices of each shard.

    Attributes:
        devices: their positions in the mesh: a dimension for each of the array, and one for the copies of a shard.
    """

    devices: npt.NDArray[np.int64]

    @classmethod
    def of(cls, devices: npt.NDArray[np.int64]) -> "Tiles":
        """With these devices; the order of copies does not matter."""
        return cls(np.sort(devices, axis=-1))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tiles) and np.array_equal(self.devices, other.devices)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of shards of each dimension."""
        return self.devices.shape[:-1]

    @property
    def copies(self) -> int:
        """The number of devices with the same shard."""
        return self.devices.shape[-1]

    @property
    def is_replicated(self) -> bool:
        """Whether all devices have all of it."""
        return math.prod(self.counts) == 1

    @property
    def is_partial(self) -> bool:
        """Whether there are several shards with several copies each."""
        return self.copies > 1 and not self.is_replicated

    def local(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the largest shard."""
        return tuple(-(-n // count) for n, count in zip(shape, self.counts, strict=True))

    def swapped(self, pairs: Sequence[tuple[int, int]]) -> "Tiles":
        """With the numbers of shards of pairs of dimensions swapped; the first of a pair has a multiple."""
        devices = self.devices
        for dim, to in pairs:
            shape = [*devices.shape]
            split = [[n] for n in shape]
            split[dim], split[to] = [shape[to], shape[dim] // shape[to]], [shape[to], 1]
            # Each of the two now has a minor part, at its own place and one for each split dimension up to it.
            minor, other = (k + 1 + (k > min(dim, to)) for k in (dim, to))
            shape[dim], shape[to] = shape[to], shape[dim]
            devices = devices.reshape([*itertools.chain(*split)]).swapaxes(minor, other).reshape(shape)
        return Tiles.of(devices)

    def split(self, dim: int, count: int) -> "Tiles":
        """With the shards of a dimension as those of two, of which the first has so many."""
        shape = self.devices.shape
        return Tiles(self.devices.reshape([*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]]))

    def merged(self, factors: Sequence[int]) -> "Tiles":
        """With so many neighbouring shards of each dimension as one."""
        split = self._split(factors)
        outer = [n for n, _ in zip(split.shape[::2], factors, strict=False)]
        return Tiles.of(split.transpose(_outer_first(len(factors))).reshape([*outer, -1]))

    def groups(self, factors: Sequence[int]) -> DeviceGroups:
        """The devices of so many neighbouring shards of each dimension; each copy has groups of its own."""
        ndim = len(factors)
        order = [*range(0, 2 * ndim, 2), 2 * ndim, *range(1, 2 * ndim, 2)]
        return DeviceGroups(self._split(factors).transpose(order).reshape([-1, math.prod(factors)]))

    def grouped(self, dims: Sequence[int]) -> npt.NDArray[np.int64]:
        """The devices with the same shard of some dimensions, one row for each."""
        others = [k for k in range(self.devices.ndim) if k not in dims]
        rows = math.prod(self.devices.shape[dim] for dim in dims)
        return self.devices.transpose([*dims, *others]).reshape([rows, -1])

    def regrouped(self, dims: Sequence[int], rows: npt.NDArray[np.int64]) -> "Tiles":
        """With other devices: those that `grouped` gives as these rows."""
        order = [*dims, *(k for k in range(self.devices.ndim) if k not in dims)]
        devices = rows.reshape([self.devices.shape[k] for k in order])
        return Tiles.of(devices.transpose(np.argsort(order)))

    def _split(self, factors: Sequence[int]) -> npt.NDArray[np.int64]:
        """Each dimension as two, the second so large; then the copies."""
        pairs = ((n // factor, factor) for n, factor in zip(self.counts, factors, strict=True))
        return self.devices.reshape([*itertools.chain.from_iterable(pairs), self.copies])


def _outer_first(ndim: int) -> list[int]:
    return [*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2), 2 * ndim]


def tiles_of(sharding: TensorSharding, sizes: Mapping[str, int]) -> Tiles:
    """The devices of the shards of a sharding over a mesh with axes of these sizes.

    Example:
        >>> tiles_of(TensorSharding((("y",), ()), ((2,), ())), {"x": 2, "y": 2}).devices.tolist()
        [[[0, 2]], [[1, 3]]]
    """
    parts = [[_part(axis, sizes) for axis in axes] for axes in sharding.axes]
    cuts = {name: {1, size} for name, size in sizes.items()}
    for name, major, size in itertools.chain.from_iterable(parts):
        cuts[name] |= {major, major * size}
    pieces = [
        (name, low, high // low) for name in sizes for low, high in itertools.pairwise(sorted(cuts[name])) if high > low
    ]

    def of(part: tuple[str, int, int]) -> list[int]:
        name, major, size = part
        return [k for k, (other, low, _) in enumerate(pieces) if other == name and major <= low < major * size]

    dims = [[k for part in dim for k in of(part)] for dim in parts]
    used = {k for dim in dims for k in dim}
    rest = [k for k in range(len(pieces)) if k not in used]
    devices = np.arange(math.prod(sizes.values())).reshape([size for _, _, size in pieces])
    counts = [math.prod(pieces[k][2] for k in dim) for dim in dims]
    return Tiles.of(devices.transpose([*itertools.chain(*dims), *rest]).reshape([*counts, -1]))


def _part(axis: str, sizes: Mapping[str, int]) -> tuple[str, int, int]:
    """Name, what is major to it, and size of an axis or a part of one."""
    name, _, part = axis.partition(":(")
    if not part:
        return name, 1, sizes[name]
    major, size = part.split(")")
    return name, int(major), int(size)


def over_axes(tiles: Tiles, sizes: Mapping[str, int]) -> TensorSharding | None:
    """The sharding over axes of a mesh that has these devices; None if there is none.

    Example:
        >>> sizes = {"x": 4, "y": 2}
        >>> over_axes(tiles_of(TensorSharding((("y",), ()), ((2,), ())), sizes), sizes).axes
        (('y',), ())
    """
    return _over_axes(tiles.devices.tobytes(), tiles.devices.shape, tuple(sizes.items()))


@functools.lru_cache(maxsize=4096)
def _over_axes(devices: bytes, shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...]) -> TensorSharding | None:
    known = dict(sizes)
    for axes in _assignments(shape[:-1], {name: size for name, size in sizes if size > 1}):
        found = TensorSharding(axes, tuple(tuple(known[name] for name in names) for names in axes))
        if tiles_of(found, known).devices.tobytes() == devices:
            return found
    return None


def _assignments(counts: tuple[int, ...], sizes: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """All ways to shard dimensions into so many parts over some of the axes."""
    if not counts:
        yield ()
        return
    for number in range(len(sizes) + 1):
        for names in itertools.permutations(sizes, number):
            if math.prod(sizes[name] for name in names) == counts[0]:
                rest = {name: size for name, size in sizes.items() if name not in names}
                yield from ((names, *others) for others in _assignments(counts[1:], rest))
