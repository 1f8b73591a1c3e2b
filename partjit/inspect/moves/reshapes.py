"""How XLA's partitioner reshapes a sharded array.

Where the sharding of the result is one of the operand too, reshaped, the operand is resharded to it; otherwise, where
that of the operand is one of the result, the result is resharded; and where neither is, all is replicated.

Source: `HandleReshape` of XLA's `spmd_partitioner.cc`, `ReshapeSharding` of its `hlo_sharding_util.cc`.
"""

import dataclasses
import math
from collections.abc import Sequence

from partjit.inspect.moves.model import Model, Operation, Tensor, without
from partjit.inspect.moves.tiles import Unmodelled
from partjit.shardy import TensorSharding

__all__ = ["reshape"]

_WITHIN_AXES = TensorSharding.replicated(0)
"""Stands for a sharding over parts of axes."""


def reshape(op: Operation) -> Model | None:
    """Another shape."""
    (operand,), (result,) = op.operands, op.results
    several = any(len(axes) > 1 for axes in operand.sharding.axes)
    if several and result.is_sharded and math.prod(operand.shards) != math.prod(result.shards):
        raise Unmodelled
    if ones := [dim for dim, n in enumerate(result.shape) if n == 1 and result.shards[dim] > 1]:
        # In jax 0.10 they may be sharded. XLA slices them afterwards.
        whole = result.sharded(without(result.sharding, ones))
        found = reshape(dataclasses.replace(op, results=(whole,))) or op.model(keeps=True)
        return dataclasses.replace(found, results=(found.results[0] or whole.sharding,))
    if operand.is_sharded and not result.is_sharded:
        return op.replicated()
    if result.is_sharded and not operand.is_sharded:
        return op.model(None, [without(result.sharding, range(len(result.shape)))], keeps=True)
    to_operand, to_result = _reshaped(result, operand.shape), _reshaped(operand, result.shape)
    if operand.is_sharded and not (to_operand or to_result):
        if op.tiles(operand.sharding).copies == op.tiles(result.sharding).copies:
            raise Unmodelled  # XLA may exchange halos
        return op.replicated()
    # Where both are, what Shardy inserts is what XLA does.
    if _WITHIN_AXES in (to_operand, to_result) or (to_operand and to_result):
        pass
    elif to_operand:
        return None if to_operand == operand.sharding else op.model({0: [to_operand]}, keeps=True)
    elif to_result and operand.is_sharded:
        return None if to_result == result.sharding else op.model(None, [to_result])
    # In jax 0.10, Shardy's rule of reshapes leaves out dimensions of size 1, which the result may be without.
    ones = [dim for dim, n in enumerate(operand.shape) if n == 1 and operand.shards[dim] > 1]
    return op.model({0: [without(operand.sharding, ones)]}, keeps=True) if ones else None


def _reshaped(source: Tensor, target: Sequence[int]) -> TensorSharding | None:
    """The sharding of another shape whose shards are those of an array, reshaped; None if there is none.

    Dimensions are merged of which only the first is sharded, or split where shards end.
    """
    dims = zip(source.shape, source.shards, source.sharding.axes, source.sharding.parts, strict=True)
    left = [dim for dim in dims if dim[0] != 1]
    targets = [(n, k) for k, n in enumerate(target) if n != 1]
    axes: list[tuple[str, ...]] = [() for _ in target]
    parts: list[tuple[int, ...]] = [() for _ in target]
    while any(count > 1 for _, count, _, _ in left):
        (n, count, names, sizes), *left = left
        (size, k), *targets = targets
        if n < size:
            (more, inner, inner_names, inner_sizes), *left = left
            if n % count or (inner > 1 and n != count):
                return None
            left = [(n * more, count * inner, (*names, *inner_names), (*sizes, *inner_sizes)), *left]
            targets = [(size, k), *targets]
        elif n == size:
            axes[k], parts[k] = names, sizes
        else:
            if n % size or (size % count and count % size):
                return None
            taken = _taken(sizes, min(size, count))
            if taken is None:
                return _WITHIN_AXES
            axes[k], parts[k] = names[:taken], sizes[:taken]
            left = [(n // size, max(count // size, 1), names[taken:], sizes[taken:]), *left]
    return dataclasses.replace(source.sharding, axes=tuple(axes), parts=tuple(parts))


def _taken(sizes: Sequence[int], count: int) -> int | None:
    """How many of the first axes have so many shards together; None if none have."""
    return next((k for k in range(len(sizes) + 1) if math.prod(sizes[:k]) == count), None)
