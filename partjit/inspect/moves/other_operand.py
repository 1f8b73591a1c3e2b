"""How the other operand of a product is sharded in groups that have parts of one operand's own dimensions.

Source: `GetNonContractingPartitionGroupedShardingForOtherOperand` of XLA's `dot_handler.cc`.
"""

import math

import numpy as np

from partjit.inspect.moves.device_grouping import Grouped, matching_dims, on_assigned_groups
from partjit.inspect.moves.partitioned import Array
from partjit.inspect.moves.product_dims import ProductDims
from partjit.inspect.moves.tiles import Tiles

__all__ = ["grouped_other"]


def grouped_other(
    other: Array, which: int, dims: ProductDims, parts: ProductDims.Parts, groups: Grouped, limit: int
) -> Grouped | None:
    """The sharding of the other operand in groups; None if it has to be replicated.

    Args:
        other: the operand.
        which: the number of the one by whose own dimensions the devices are grouped.
        dims: the dimensions of the product.
        parts: into how many parts they are sharded.
        groups: the groups of the result.
        limit: the bytes of the result on a device.
    """
    tiles, count, ndim, rest = other.tiles, math.prod(groups.sizes), len(other.shape), 1 - which
    if tiles.is_partial and tiles.copies % count == 0:
        for dim in reversed(range(ndim + 1)):
            if tiles.devices.shape[dim] % count == 0:
                swapped = Tiles.of(np.swapaxes(tiles.devices, dim, ndim))
                found = on_assigned_groups(swapped, swapped.copies // count, groups.groups)
                if found is not None:
                    return found
        made = Grouped.of(tiles, (ndim,), [tiles.copies // count])
        return made.aligned(groups, in_any_order=True)
    may_sum = parts.contracted[rest] == count and parts.own[rest] == parts.result_own[rest]
    may_own = parts.own[rest] == count and parts.contracted[which] == parts.contracted[rest]
    by = matching_dims(tiles, groups.groups)
    if by is None and may_sum and (not may_own or other.nbytes <= limit):
        by = tuple(pair[rest] for pair in dims.contracted)
    elif by is None and may_own:
        by = tuple(own for own, _ in dims.own[rest])
    if by is None or tiles.is_replicated:
        return None
    return Grouped.of(tiles, by).aligned(groups, in_any_order=True)
