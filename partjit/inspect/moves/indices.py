"""Operations with computed indices: which of them XLA partitions as their shardings say.

XLA weighs several ways of partitioning a gather or a scatter, by which operand is sharded along which dimension. There
is only one if they are sharded over different axes; other cases are not modelled.

Source: `gather_scatter_handler.cc` of XLA.
"""

import math
import re
from collections.abc import Iterable

from jax.extend.mlir import ir

from partjit.inspect.moves.model import Model, Operation, Tensor, Transfer, without
from partjit.inspect.moves.tiles import Step, Unmodelled
from partjit.shardy import TensorSharding

__all__ = ["dimension_numbers", "gather", "scatter"]

_Axes = tuple[tuple[str, ...], ...]


def gather(op: Operation) -> Model | None:
    """A gather, such as `x[indices]`.

    What is indexed may be sharded: the devices leave out what others have, and their results are summed. Where the
    result is sharded over these axes as well, that is done afterwards.
    """
    operand, indices, result = *op.operands[:2], op.results[0]
    batches = _dimensions(op, "operand_batching_dims"), _dimensions(op, "start_indices_batching_dims")
    left, right = without(operand.sharding, batches[0]).axes, without(indices.sharding, batches[1]).axes
    if any(operand.sharding.axes[a] != indices.sharding.axes[b] for a, b in zip(*batches, strict=True)):
        raise Unmodelled
    windows = _dimensions(op, "offset_dims")
    along = [axes for dim, axes in enumerate(result.sharding.axes) if dim not in windows]
    if _used(left) & _used(right) or (_used(right) and not _used(along) <= _used(indices.sharding.axes)):
        raise Unmodelled
    indexed = [dim for dim in _dimensions(op, "start_index_map") if operand.shards[dim] > 1]
    summed = _used(operand.sharding.axes[dim] for dim in indexed)
    if not summed & _used(result.sharding.axes):
        return None
    hidden = {*_dimensions(op, "collapsed_slice_dims"), *batches[0]}
    shown = [dim for dim in range(len(operand.shape)) if dim not in hidden]
    has_copies = op.tiles(operand.sharding).copies > 1  # XLA may slice over these at first
    is_within = any(":" in axis for axis in summed)
    if has_copies or is_within or indices.is_sharded or not {*indexed} <= hidden or batches[0]:
        raise Unmodelled
    own = dict(zip(windows, shown, strict=True))
    if any(result.shape[there] != operand.shape[here] for there, here in own.items()):
        raise Unmodelled
    places = [own.get(dim) for dim in range(len(result.shape))]
    axes = tuple(() if dim is None else operand.sharding.axes[dim] for dim in places)
    parts = tuple(() if dim is None else operand.sharding.parts[dim] for dim in places)
    made = TensorSharding(axes, parts, result.sharding.mesh)
    sums = [_reduced(op, operand.sharding.axes[dim], result.sharded(made)) for dim in indexed]
    return op.model(None, [made], sums)


def scatter(op: Operation) -> Model | None:
    """A scatter, such as `x.at[indices].add(updates)`.

    A dimension of which each update has one element, as one of a cache with a position for each example, stays sharded:
    the devices leave out the updates of others.
    """
    count = (len(op.operands) - 1) // 2
    operand, indices, updates = op.operands[0], op.operands[count], op.operands[count + 1]
    if any(tensor.sharding != operand.sharding for tensor in op.operands[:count]):
        raise Unmodelled
    windows = _dimensions(op, "update_window_dims")
    hidden = {*_dimensions(op, "inserted_window_dims"), *_dimensions(op, "input_batching_dims")}
    shown = [dim for dim in range(len(operand.shape)) if dim not in hidden]
    indexed = {*_dimensions(op, "scatter_dims_to_operand_dims")}
    single = [dim for dim, window in zip(shown, windows, strict=True) if updates.shape[window] == 1 and dim in indexed]
    kept = without(operand.sharding, single)
    there = [updates.sharding.axes[dim] for dim in windows]
    here = [kept.axes[dim] for dim in shown]
    along = _used(without(updates.sharding, windows).axes)
    if any(tensor.sharding != updates.sharding for tensor in op.operands[count + 1 :]):
        raise Unmodelled
    if _used(there) and here != there:
        raise Unmodelled
    batches = _dimensions(op, "input_batching_dims"), _dimensions(op, "scatter_indices_batching_dims")
    if any(operand.sharding.axes[a] != indices.sharding.axes[b] for a, b in zip(*batches, strict=True)):
        raise Unmodelled
    others = _used(without(operand.sharding, batches[0]).axes)
    if along != _used(indices.sharding.axes) or along & others:
        raise Unmodelled
    over = along - _used(operand.sharding.axes[dim] for dim in batches[0])
    is_uneven = any(n % shards for n, shards in zip(indices.shape, indices.shards, strict=True))
    if kept == operand.sharding and over and _combines(op.op) == "stablehlo.multiply":
        # Shardy inserts no product over devices on jax 0.12.
        axes = tuple(axis for axis in op.sizes if axis in over)
        if is_uneven or over != {*axes} or [operand.sharding] != [result.sharding for result in op.results]:
            raise Unmodelled
        return op.model(transfers=[_reduced(op, axes, op.results[0])])
    if kept == operand.sharding:
        # XLA gathers the indices of uneven shards, to change those of the padding, and slices them again.
        whole = without(indices.sharding, range(len(indices.shape)))
        return op.model({count: [whole]}, keeps=True, forgets=True) if is_uneven else None
    if is_uneven or here != there or along != _used(operand.sharding.axes[dim] for dim in batches[0]):
        raise Unmodelled
    if any(result.sharding != operand.sharding for result in op.results):
        raise Unmodelled
    return op.model()


def _combines(op: ir.Operation) -> str:
    """The first operation by which a scatter combines updates with what is there."""
    (body,) = op.regions[0].blocks
    return next(iter(body.operations)).operation.name


def _reduced(op: Operation, axes: tuple[str, ...], result: Tensor) -> Transfer:
    """A result, combined over these axes."""
    sizes = tuple(op.sizes[axis] for axis in axes)
    groups = op.tiles(TensorSharding((axes,), (sizes,))).groups([math.prod(sizes)])
    return Transfer(Step("all-reduce", groups, result.local, result.local), result)


def _used(axes: Iterable[tuple[str, ...]]) -> set[str]:
    return {axis for names in axes for axis in names}


def _dimensions(op: Operation, name: str) -> list[int]:
    return dimension_numbers(op.op, name)


def dimension_numbers(op: ir.Operation, name: str) -> list[int]:
    """A list of dimensions in the dimension numbers of a gather or a scatter."""
    for attribute in ("dimension_numbers", "scatter_dimension_numbers"):
        if attribute in op.attributes:
            found = re.search(rf"{name} = \[([^\]]*)\]", str(op.attributes[attribute]))
            return [int(number) for number in found[1].split(",")] if found is not None and found[1] else []
    return []
