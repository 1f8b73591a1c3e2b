"""Products that all devices of a group partition in one way, and what is moved for these.

Source: `PartitionBaseCase` of XLA's `dot_handler.cc`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from partjit.inspect.moves.device_grouping import Grouped, transposed
from partjit.inspect.moves.partitioned import Array, Resharded, summed, within
from partjit.inspect.moves.product_dims import ProductDims
from partjit.inspect.moves.resharding import can_swap, reshard
from partjit.inspect.moves.tiles import Step, Tiles

__all__ = ["Create", "Created", "Partitioning", "Result", "created", "in_one"]

_Shape = tuple[int, ...]
Created = tuple[list[Step], _Shape]
Create = Callable[[Array, Array], Created]
"""What is moved for the product of two arrays on each device, and the shape of the product."""


class Partitioning(NamedTuple):
    """What is moved for a product.

    Attributes:
        operands: the reshards of each operand.
        result: the collectives of what is computed.
    """

    operands: tuple[tuple[Resharded, ...], tuple[Resharded, ...]]
    result: tuple[Step, ...]

    def then(self, steps: Sequence[Step]) -> "Partitioning":
        """The same with more collectives of the result."""
        return Partitioning(self.operands, (*self.result, *steps))


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """The result that is wanted: of this shape, sharded so within each row of devices."""

    shape: _Shape
    tiles: Tiles
    itemsize: int

    def from_(self, tiles: Tiles, array: Array) -> list[Step]:
        """The reshard from another sharding."""
        return within(reshard(tiles, self.tiles, self.shape), array.rows)

    def grouped(self, grouped: Grouped) -> "Result":
        """What each group has of it."""
        return Result(grouped.part(self.shape), grouped.inner, self.itemsize)


def created(lhs: Array, rhs: Array, create: Create) -> Partitioning:
    """What is moved for a product of two arrays on each device, once they are what they have to be."""
    return Partitioning((lhs.made, rhs.made), tuple(create(lhs, rhs)[0]))


def in_one(
    lhs: Array, rhs: Array, result: Result, dims: ProductDims, create: Create, *, may_reshard: bool
) -> Partitioning | None:
    """All devices shard the same dimensions, or one operand or both are resharded for that."""
    wanted, count, ndim = result.tiles, result.tiles.devices.size, len(result.shape)
    if wanted.is_partial:
        return None
    tiles = (lhs.tiles, rhs.tiles)
    parts = dims.parts(tiles, wanted)
    of_other = tuple(transposed(tiles[k], dims.between(k), len(tiles[1 - k].counts)) for k in (0, 1))
    of_result = tuple(transposed(tiles[k], dims.to_result(k), ndim) for k in (0, 1))
    if parts.batch[0] == parts.batch[1] == count and of_other[0] == rhs.tiles and of_result[0] is not None:
        return created(lhs, rhs, create).then(result.from_(of_result[0], lhs))
    for may_gather in (False, True):
        for k, operand in ((0, rhs), (1, lhs)):
            target = of_other[k]
            if parts.batch[k] == parts.result_batch == count and of_result[k] == wanted and target is not None:
                if not may_gather and not _moves_directly(operand.tiles, target):
                    break
                made = operand.resharded(target)
                return created(*((lhs, made) if k == 0 else (made, rhs)), create)
    if parts.contracted[0] == parts.contracted[1] == count and wanted.is_replicated and of_other[0] == rhs.tiles:
        return _summed_over(lhs, rhs, dims, create)
    for k, (operand, other) in enumerate(((lhs, rhs), (rhs, lhs))):
        if parts.own[k] == parts.result_own[k] == count and of_result[k] == wanted:
            made = other.replicated()
            return created(*((operand, made) if k == 0 else (made, operand)), create)
    if may_reshard:
        if parts.result_batch == count:
            both = [operand.resharded(dims.of_operand(k, wanted)) for k, operand in enumerate((lhs, rhs))]
            return created(both[0], both[1], create)
        for k, (operand, other) in enumerate(((lhs, rhs), (rhs, lhs))):
            if parts.result_own[k] == count:
                made, whole = operand.resharded(dims.of_operand(k, wanted)), other.replicated()
                return created(*((made, whole) if k == 0 else (whole, made)), create)
    if not wanted.is_replicated:
        return None
    size = math.prod(result.shape)
    if parts.contracted[1] == count and lhs.tiles.is_replicated and math.prod(rhs.shape) > size:
        return _summed_over(_to(lhs, of_other[1]), rhs, dims, create)
    if parts.contracted[0] == count and rhs.tiles.is_replicated and math.prod(lhs.shape) > size:
        return _summed_over(lhs, _to(rhs, of_other[0]), dims, create)
    return None


def _to(array: Array, target: Tiles | None) -> Array:
    assert target is not None
    return array.resharded(target)


def _moves_directly(source: Tiles, target: Tiles) -> bool:
    """Whether devices get shards of one kind for those of another: from one device each, or from all to all."""
    if source.is_replicated or target.is_replicated:
        return False
    permutes = source.devices.shape == target.devices.shape and source != target
    return permutes or can_swap(source, target)


def _summed_over(lhs: Array, rhs: Array, dims: ProductDims, create: Create) -> Partitioning:
    """A sum of what all devices compute."""
    steps, local = create(lhs, rhs)
    return Partitioning(
        (lhs.made, rhs.made), (*steps, *summed(lhs.tiles, [a for a, _ in dims.contracted], local, lhs.rows))
    )
