"""Sums of products of which the result is sharded further: XLA slices it over copies first, if there are enough.

Where both operands are sharded alike along what is contracted, each group of devices with the same part of it makes all
of a sum's addends. The result is sharded within each group, if it has as many copies as there are groups or a multiple,
and the shards are summed between the groups. The devices of a shard are then those next to each other in a group, which
are not the ones that should have it: it is sent to these.

Source: `PartitionDotGroupOnContractingImpl` of XLA's `dot_handler.cc`, and `AlignGroupsWith`.
"""

import math
from collections.abc import Sequence

import numpy as np

from partjit.inspect.moves.tiles import Tiles

__all__ = ["sliced_in_groups"]


def sliced_in_groups(operand: Tiles, contracted: Sequence[int], result: Tiles) -> Tiles | None:
    """How the result is sharded while it is summed; None if it is not sliced within groups.

    Args:
        operand: the first operand, which is sharded along nothing else than what is contracted.
        contracted: its dimensions that are.
        result: how the result is wanted.

    Example:
        >>> axis = Tiles.of(np.arange(8).reshape(4, 2).T[None])  # the second dimension, over the second of 4 x 2
        >>> sliced_in_groups(axis, [1], axis).devices.tolist()
        [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    """
    groups = operand.grouped(contracted)
    count, size = groups.shape
    if result.copies % count:
        return None
    parts = result.devices.reshape([math.prod(result.counts), count, -1]).swapaxes(0, 1).reshape([count, size])
    if np.array_equal(np.sort(parts), np.sort(groups)):
        return result
    shards = groups.reshape([count, math.prod(result.counts), -1]).swapaxes(0, 1)
    return Tiles.of(shards.reshape([*result.counts, -1]))
