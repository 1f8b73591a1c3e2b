"""How a sum is sharded that groups of devices make of parts of its addends.

Source: `GetDotGroupPartitionContractingOutputShardings` of XLA's `dot_handler.cc`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from partjit.inspect.moves.device_grouping import (
    Grouped,
    is_subtiling,
    matching_dims,
    replicated,
    replicated_on,
    transposed,
)
from partjit.inspect.moves.product_dims import ProductDims
from partjit.inspect.moves.tiles import Tiles
from partjit.inspect.moves.ungrouped_products import Result

__all__ = ["Sums", "sums_of"]


class Sums(NamedTuple):
    """How a sum is sharded.

    Attributes:
        inner: within each group.
        outer: over all devices.
        dims: the dimensions of which the groups have parts.
    """

    inner: Tiles
    outer: Tiles
    dims: tuple[int, ...]


def sums_of(result: Result, lefts: Grouped, rights: Grouped, dims: ProductDims, count: int) -> Sums:
    """How the sum of so many groups is sharded, whose operands are, to the result that is wanted."""
    wanted, ndim = result.tiles, len(result.shape)
    parts = dims.parts((lefts.inner, rights.inner), wanted)
    if not wanted.is_replicated and (not wanted.is_partial or wanted.copies % count):
        for k, (own, other) in enumerate(((lefts, rights), (rights, lefts))):
            if other.inner.is_replicated and not own.inner.is_replicated:
                whole = replicated_on(own.ungrouped(), [pair[k] for pair in dims.contracted])
                made = transposed(whole, dims.to_result(k), ndim)
                if made is not None and is_subtiling(result.shape, wanted, made):
                    wanted = made
    if wanted.is_partial and wanted.copies % count == 0:
        grouped = Grouped.of(wanted, (ndim,), [wanted.copies // count]).aligned(lefts, in_any_order=True)
        return Sums(grouped.inner, grouped.ungrouped(), ())
    if (found := matching_dims(wanted, lefts.groups)) is not None:
        return Sums(Grouped.of(wanted, found).inner, wanted, found)
    pairs: Mapping[int, Sequence[int]] = {
        parts.result_batch: [o for _, _, o in dims.batch],
        parts.result_own[1]: [o for _, o in dims.own[1]],
        parts.result_own[0]: [o for _, o in dims.own[0]],
    }
    if not wanted.is_replicated and count in pairs:
        grouped = Grouped.of(wanted, pairs[count]).aligned(lefts)
        return Sums(grouped.inner, grouped.ungrouped(), tuple(pairs[count]))
    return Sums(replicated(ndim, lefts.groups.shape[1]), replicated(ndim, wanted.devices.size), ())
