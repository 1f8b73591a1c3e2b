"""Which dimensions of a gather or a scatter are the same in what is indexed, the indices and the pieces.

A piece is what one index vector selects: a part of the result of a gather, an update of a scatter.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from jax.extend.mlir import ir

__all__ = ["IndexedDims", "dimension_numbers"]

_Pairs = tuple[tuple[int, int], ...]


class IndexedDims(NamedTuple):
    """The dimensions of a gather or a scatter.

    Attributes:
        shape: of what is indexed.
        indexed: the dimensions of it that an index vector has a number for.
        windows: its dimensions that pieces have as well, and where.
        batches: its dimensions that are batch dimensions, and where indices and pieces have them.
        rows: the dimensions of the indices, without that of the vectors, and where pieces have them.
        vector: the dimension of the indices that is an index vector; their number of dimensions if each is a number.
        ndims: the numbers of dimensions of all three.
    """

    shape: tuple[int, ...]
    indexed: tuple[int, ...]
    windows: _Pairs
    batches: tuple[tuple[int, int, int], ...]
    rows: _Pairs
    vector: int
    ndims: tuple[int, int, int]

    @classmethod
    def of(cls, op: ir.Operation, shape: tuple[int, ...], indices: int, pieces: int) -> "IndexedDims":
        """Those of an operation, by its operand's shape and the numbers of dimensions of indices and pieces."""
        is_gather = op.name == "stablehlo.gather"
        names = _OF_GATHER if is_gather else _OF_SCATTER
        indexed, windows, hidden, operand_batch, indices_batch = (dimension_numbers(op, name) for name in names)
        (vector,) = dimension_numbers(op, "index_vector_dim") or [0]
        shown = [dim for dim in range(len(shape)) if dim not in (*hidden, *operand_batch)]
        rows = [
            *zip(
                [dim for dim in range(indices) if dim != vector],
                [dim for dim in range(pieces) if dim not in windows],
                strict=True,
            )
        ]
        where = dict(rows)
        return cls(
            shape,
            tuple(indexed),
            tuple(zip(shown, windows, strict=True)),
            tuple((a, b, where[b]) for a, b in zip(operand_batch, indices_batch, strict=True)),
            tuple(rows),
            vector,
            (len(shape), indices, pieces),
        )

    @property
    def passing(self) -> _Pairs:
        """The rows that are not batch dimensions."""
        batches = {b for _, b, _ in self.batches}
        return tuple((here, there) for here, there in self.rows if here not in batches)

    def whole(self, slices: Sequence[int]) -> _Pairs:
        """The windows that have all of a dimension."""
        return tuple((here, there) for here, there in self.windows if slices[here] == self.shape[here])

    def single(self, slices: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
        """The indexed dimensions of which a piece has one element; none if none is sharded into these counts."""
        found = tuple(dim for dim in self.indexed if slices[dim] == 1)
        return found if math.prod(counts[dim] for dim in found) > 1 else ()

    def of_indices(self) -> tuple[int, ...]:
        """The dimensions of the indices in the order in which XLA gives up their shards."""
        batches = tuple(b for _, b, _ in self.batches)
        vector = (self.vector,) if self.vector < self.ndims[1] else ()
        return (*vector, *(here for here, _ in self.passing), *batches)

    def of_operand(self, slices: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
        """The dimensions of what is indexed in that order; others keep theirs."""
        return (*self.single(slices, counts), *(here for here, _ in self.whole(slices)))

    def of_pieces(self, slices: Sequence[int]) -> tuple[int, ...]:
        """The dimensions of the pieces in that order."""
        last = [there for _, there in self.whole(slices)]
        return (*(dim for dim in range(self.ndims[2]) if dim not in last), *last)


_OF_GATHER = (
    "start_index_map",
    "offset_dims",
    "collapsed_slice_dims",
    "operand_batching_dims",
    "start_indices_batching_dims",
)
_OF_SCATTER = (
    "scatter_dims_to_operand_dims",
    "update_window_dims",
    "inserted_window_dims",
    "input_batching_dims",
    "scatter_indices_batching_dims",
)


def dimension_numbers(op: ir.Operation, name: str) -> list[int]:
    """A list of dimensions in the dimension numbers of a gather or a scatter, or one dimension."""
    for attribute in ("dimension_numbers", "scatter_dimension_numbers"):
        if attribute in op.attributes:
            found = re.search(rf"{name} = \[?([\d, ]+)\]?", str(op.attributes[attribute]))
            return [int(number) for number in re.findall(r"\d+", found[1])] if found is not None else []
    return []
