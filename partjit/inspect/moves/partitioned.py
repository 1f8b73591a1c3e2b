"""Arrays as XLA partitions a product of them: sharded within groups of devices, and resharded there."""

import dataclasses
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from partjit.inspect.device_groups import DeviceGroups
from partjit.inspect.moves.device_grouping import Grouped, replicated
from partjit.inspect.moves.resharding import can_swap, hops
from partjit.inspect.moves.tiles import Step, Tiles, Unmodelled

__all__ = ["Array", "Resharded", "summed", "within"]


class Resharded(NamedTuple):
    """A reshard of an array.

    Attributes:
        rows: the groups of devices in which it is made.
        target: the sharding that a group gets it to.
        steps: the collectives.
    """

    rows: npt.NDArray[np.int64]
    target: Tiles
    steps: tuple[Step, ...]

    @property
    def name(self) -> str:
        """The name under which XLA remembers it."""
        return f"in groups {self.rows.tolist()} {self.target.devices.tolist()}"


@dataclasses.dataclass(frozen=True, eq=False)
class Array:
    """An array.

    Attributes:
        shape: of what a group of devices has.
        itemsize: bytes of an element.
        tiles: how a group shards it.
        rows: the devices of the groups.
        made: how it was resharded.
        swaps: whether it is known that dimensions may swap axes when it is resharded next.
    """

    shape: tuple[int, ...]
    itemsize: int
    tiles: Tiles
    rows: npt.NDArray[np.int64]
    made: tuple[Resharded, ...] = ()
    swaps: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes on a device."""
        return math.prod(self.tiles.local(self.shape)) * self.itemsize

    def resharded(self, target: Tiles) -> "Array":
        """The same in another sharding, over tiles.

        Raises:
            Unmodelled: dimensions would swap axes, and it is not known whether they may.
        """
        if target == self.tiles:
            return self
        if not self.swaps and can_swap(self.tiles, target):
            raise Unmodelled
        made = [
            Resharded(self.rows, hop.target, tuple(within(hop.steps, self.rows)))
            for hop in hops(self.tiles, target, self.shape)
        ]
        return dataclasses.replace(self, tiles=target, made=(*self.made, *made), swaps=True)

    def replicated(self) -> "Array":
        """The same, replicated."""
        return self.resharded(replicated(len(self.shape), self.tiles.devices.size))

    def grouped(self, grouped: Grouped, shape: tuple[int, ...]) -> "Array":
        """What each group of a sharding has of it, of this shape."""
        rows = self.rows[:, grouped.groups].reshape([-1, grouped.groups.shape[1]])
        return dataclasses.replace(self, shape=shape, tiles=grouped.inner, rows=rows, swaps=True)


def within(steps: list[Step], rows: npt.NDArray[np.int64]) -> list[Step]:
    """Steps among the devices of each row, by their positions in it."""
    return [dataclasses.replace(step, groups=step.groups.within(rows)) for step in steps]


def summed(tiles: Tiles, dims: list[int], local: tuple[int, ...], rows: npt.NDArray[np.int64]) -> list[Step]:
    """Sums of an array of this shape over the devices along dimensions of a sharding, one after the other."""
    shape = tiles.devices.shape
    steps = []
    for dim in dims:
        if shape[dim] > 1:
            order = [*(k for k in range(len(shape)) if k != dim), dim]
            rows_of = tiles.devices.transpose(order).reshape([-1, shape[dim]])
            steps.append(Step("all-reduce", DeviceGroups(rows_of), local, local))
    return within(steps, rows)
