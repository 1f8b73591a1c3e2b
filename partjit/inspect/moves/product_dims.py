"""Which dimensions of two operands and of their product are the same, and into how many parts these are sharded."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from partjit.inspect.moves.device_grouping import replicated_on, transposed
from partjit.inspect.moves.tiles import Tiles

__all__ = ["ProductDims"]


@dataclasses.dataclass(frozen=True)
class ProductDims:
    """The dimensions of a product.

    Attributes:
        batch: of both operands and the result.
        contracted: of both operands, which are summed over.
        own: for each operand, the others, and where they are in the result.
        ndims: the number of dimensions of each operand.
        is_spatial: whether there are spatial dimensions besides, as of a convolution.
    """

    batch: tuple[tuple[int, int, int], ...]
    contracted: tuple[tuple[int, int], ...]
    own: tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]
    ndims: tuple[int, int]
    is_spatial: bool = False

    class Parts(NamedTuple):
        """Numbers of parts.

        Attributes:
            batch, contracted, own: of the dimensions of each operand.
            result_batch: of those of the result that are in a batch.
            result_own: of those that are of each operand.
        """

        batch: tuple[int, int]
        contracted: tuple[int, int]
        own: tuple[int, int]
        result_batch: int
        result_own: tuple[int, int]

    def parts(self, operands: tuple[Tiles, Tiles], result: Tiles) -> Parts:
        """The numbers of parts with these shardings."""

        def count(tiles: Tiles, dims: Sequence[int]) -> int:
            return math.prod(tiles.counts[dim] for dim in dims)

        one, other = operands
        return self.Parts(
            (count(one, [a for a, _, _ in self.batch]), count(other, [b for _, b, _ in self.batch])),
            (count(one, [a for a, _ in self.contracted]), count(other, [b for _, b in self.contracted])),
            (count(one, [a for a, _ in self.own[0]]), count(other, [b for b, _ in self.own[1]])),
            count(result, [o for _, _, o in self.batch]),
            (count(result, [o for _, o in self.own[0]]), count(result, [o for _, o in self.own[1]])),
        )

    def between(self, k: int) -> Mapping[int, int]:
        """The dimensions of an operand, and which they are in the other one."""
        return {pair[k]: pair[1 - k] for pair in (*((a, b) for a, b, _ in self.batch), *self.contracted)}

    def to_result(self, k: int) -> Mapping[int, int]:
        """The dimensions of an operand, and which they are in the result."""
        return {**{pair[k]: pair[2] for pair in self.batch}, **dict(self.own[k])}

    def of_operand(self, k: int, result: Tiles) -> Tiles:
        """The sharding of an operand that fits to one of the result."""
        whole = replicated_on(result, [o for _, o in self.own[1 - k]])
        found = transposed(whole, {o: own for own, o in self.to_result(k).items()}, self.ndims[k])
        assert found is not None
        return found
