"""Operations on whole dimensions: where these are sharded, XLA moves their axes to another dimension, or gathers them.

Source: `HandleElementwiseWithDimsToReplicate`, `HandleSort`, `HandleDynamicSlice`, `HandleDynamicUpdateSlice`,
`HandleReduce` and `DefaultAction` of XLA's `spmd_partitioner.cc`.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.mlir import ir

from partjit._jax import RELEASE
from partjit.inspect.moves.halo import part_read
from partjit.inspect.moves.model import (
    Model,
    Operation,
    Tensor,
    Transfer,
    constant_index,
    definition,
    merged,
    numbers,
    without,
)
from partjit.inspect.moves.tiles import Step, Unmodelled
from partjit.inspect.moves.windows import readers_of
from partjit.shardy import TensorSharding

__all__ = [
    "concatenate",
    "custom_call",
    "dynamic_slice",
    "dynamic_update_slice",
    "elementwise",
    "factorization",
    "fft",
    "reduce",
    "sort",
    "transpose",
]


def concatenate(op: Operation) -> Model:
    """Arrays one after the other; what `jnp.roll` and `jnp.pad` make of an array and slices of it is recognized."""
    dim = op.number("dimension")
    if op.results[0].shards[dim] > 1 and _is_continued(op):
        # XLA pads and rotates it instead, which is not modelled.
        return dataclasses.replace(op.model(), absorbs=(op.op.operands[1],) * 3, transfers=None)
    amount = _rotated(op, dim)
    if amount is None or op.results[0].shards[dim] == 1:
        return _along(op, [dim])
    (part, *_), result = (definition(value, "stablehlo.slice") for value in op.op.operands), op.results[0]
    source = result.sharding if part is None else op.sharding_of(part.operands[0])
    if not any(source.axes):
        return _along(op, [dim])
    if source != result.sharding:
        raise Unmodelled
    return _rotation(op, dim, amount)


def _rotated(op: Operation, dim: int) -> int | None:
    """By how much the concatenation of two slices of an array rotates it; None if it does not."""
    parts = [part for value in op.op.operands if (part := definition(value, "stablehlo.slice")) is not None]
    if len(parts) != 2 or len(op.operands) != 2:
        return None
    (last, first), result, n = map(_Bounds.of, parts), op.results[0], op.results[0].shape[dim]
    sources = [part.operands[0] for part in parts]
    if sources[0] != sources[1] or tuple(sources[0].type.shape) != result.shape:
        return None
    if {*last.strides, *first.strides} != {1} or first.starts[dim] != 0 or last.limits[dim] != n:
        return None
    return n - last.starts[dim] if last.starts[dim] == first.limits[dim] else None


class _Bounds(NamedTuple):
    starts: list[int]
    limits: list[int]
    strides: list[int]

    @classmethod
    def of(cls, op: ir.Operation) -> "_Bounds":
        return cls(*(numbers(op.attributes[name]) for name in ("start_indices", "limit_indices", "strides")))


def _rotation(op: Operation, dim: int, amount: int) -> Model:
    """Each shard is put together of parts of the two that are so far away."""
    result = op.results[0]
    if result.shape[dim] % result.shards[dim]:
        raise Unmodelled
    count, own = result.shards[dim], result.local[dim]
    far, rest = divmod(amount, own)
    groups = op.tiles(result.sharding).groups([n if k == dim else 1 for k, n in enumerate(result.shards)])
    transfers = []
    readers = readers_of(op)
    try:  # a part that is sent for nobody is not sent
        read = [part_read(result.shape[dim], count, reader[dim]) for reader in readers]
    except NotImplementedError:
        return dataclasses.replace(op.model(), absorbs=_sources(op), transfers=None)
    for distance, size, others in ((far + 1, rest, (rest, own)), (far, own - rest, (0, rest))):
        is_read = not readers or any(start < others[0] or others[1] < limit for start, limit in read)
        if size and distance % count and is_read:
            shape = (*result.local[:dim], size, *result.local[dim + 1 :])
            pairs = groups.paired_with(np.roll(groups.positions, -distance, axis=1))
            transfers.append(Transfer(Step("collective-permute", pairs, shape, shape), result))
    return dataclasses.replace(op.model(None, None, transfers), absorbs=_sources(op))


def _sources(op: Operation) -> tuple[ir.Value, ...]:
    makers: list[Any] = [value.owner for value in op.op.operands]
    return tuple(maker.operands[0] for maker in makers)


def _is_continued(op: Operation) -> bool:
    """Whether it is an array between parts of its own, possibly changed, as `jnp.pad` makes it of a periodic one."""
    if len(op.operands) != 3:
        return False
    before, array, after = op.op.operands
    return all(_is_made_of(value, array) for value in (before, after))


def _is_made_of(value: ir.Value, array: ir.Value) -> bool:
    while (maker := definition(value, *_PARTS)) is not None:
        value = maker.operands[0]
        if value == array:
            return True
    return False


_PARTS = tuple(f"stablehlo.{name}" for name in ("slice", "reverse", "broadcast_in_dim", "reshape", "convert", "negate"))


def factorization(op: Operation) -> Model:
    """Operations on the matrices of a batch."""
    ndim = len(op.results[0].shape)
    return _along(op, [ndim - 2, ndim - 1])


def _along(op: Operation, dims: Sequence[int]) -> Model:
    result = op.results[0]
    if not result.is_sharded:
        return op.replicated()
    target = result.sharding
    for dim in dims:
        target = merged(result.shape, target, dim, dims)
    return op.model(_to(op, target), [target])


def _to(op: Operation, target: TensorSharding) -> dict[int, list[TensorSharding]]:
    """All operands of the rank of a sharding get it."""
    ndim = len(target.axes)
    return {
        k: [target]
        for k, tensor in enumerate(op.operands)
        if len(tensor.shape) == ndim and tensor.sharding != target and tensor.shape
    }


def sort(op: Operation) -> Model:
    """A sort of one array or several along a dimension."""
    first, dim = op.results[0], op.number("dimension")
    # `top_k` is an operation of its own in XLA, which it does not partition; here it is a sort and slices.
    if op.primitive == "top_k":
        return dataclasses.replace(op.replicated([0]), forgets=False)
    if any(result.sharding != first.sharding for result in op.results):
        return op.replicated()
    if not first.is_sharded:
        return op.replicated()
    if first.shards[dim] == 1:
        return op.model(_to(op, first.sharding))
    if len(first.shape) == 1:
        return op.replicated()
    target = merged(first.shape, first.sharding, dim, ())
    return op.model(_to(op, target), [target] * len(op.results))


def fft(op: Operation) -> Model | None:
    """A Fourier transform of the last dimensions."""
    operand, last = op.operands[0], len(op.numbers("fft_length"))
    dims, result = range(len(operand.shape) - last, len(operand.shape)), op.results[0]
    if any(result.shards[dim] > 1 for dim in dims) and len(operand.shape) >= 3:
        raise Unmodelled
    # Before that release XLA partitioned no transform.
    if RELEASE < (0, 11) or not result.is_sharded or any(result.shards[dim] > 1 for dim in dims):
        return op.replicated()
    return op.model({0: [result.sharding]} if operand.sharding != result.sharding else {})


def elementwise(op: Operation) -> Model | None:
    """An operation on elements: operands are resharded, or the result if these are all sharded alike."""
    result = op.results[0]
    arrays = {k: tensor for k, tensor in enumerate(op.operands) if tensor.shape}
    shardings = {tensor.sharding for tensor in arrays.values()}
    if shardings == {result.sharding}:
        return None
    if len(shardings) == 1 < len(op.operands):
        return op.model(None, [*shardings])
    return op.model({k: [result.sharding] for k, tensor in arrays.items() if tensor.sharding != result.sharding})


def transpose(op: Operation) -> Model | None:
    """A permutation of dimensions: the operand is resharded."""
    (operand,), result, order = op.operands, op.results[0], op.numbers("permutation")
    places = [order.index(dim) for dim in range(len(order))]
    axes, parts = ([of[k] for k in places] for of in (result.sharding.axes, result.sharding.parts))
    wanted = dataclasses.replace(operand.sharding, axes=tuple(axes), parts=tuple(parts))
    return None if wanted == operand.sharding else op.model({0: [wanted]})


def dynamic_slice(op: Operation) -> Model:
    """A slice whose start is computed."""
    operand, result = op.operands[0], op.results[0]
    sliced = [dim for dim, (n, size) in enumerate(zip(operand.shape, result.shape, strict=True)) if n != size]
    if not result.is_sharded or any(result.shards[dim] > 1 for dim in sliced):
        return op.replicated()
    return op.model({0: [result.sharding]} if operand.sharding != result.sharding else {})


def dynamic_update_slice(op: Operation) -> Model:
    """An update of a part whose start is computed: of a cache, for instance."""
    (operand, update), result = op.operands[:2], op.results[0]
    sliced = [dim for dim, (n, size) in enumerate(zip(result.shape, update.shape, strict=True)) if n != size]
    if sliced and not result.is_sharded:
        return op.replicated()
    sharded = [dim for dim in sliced if result.shards[dim] > 1]

    def in_one_shard(dim: int) -> bool:
        size, own = update.shape[dim], result.local[dim]
        start = constant_index(op.op.operands[2 + dim])
        return size == 1 or (start is not None and start // own == (start + size - 1) // own)

    if not sliced:
        return op.model({1: [result.sharding]} if update.sharding != result.sharding else {})
    kept, base = without(result.sharding, sliced), result.sharding
    if not sharded or not all(map(in_one_shard, sharded)):
        more = math.prod(operand.shards) > math.prod(result.shards)
        base = kept = without(operand.sharding if more else result.sharding, sliced)
    chains = {0: [base]} if operand.sharding != base else {}
    return op.model(chains | ({1: [kept]} if update.sharding != kept else {}), [base])


def reduce(op: Operation) -> Model | None:
    """A reduction of several arrays at once, such as `argmax`: partial results are gathered and reduced again."""
    if len(op.results) == 1:
        return None
    dims, operands = op.numbers("dimensions"), op.operands[: len(op.results)]
    first = operands[0]
    sharding = without(first.sharding, dims)
    kept = [dim for dim in range(len(first.shape)) if dim not in dims]
    names, parts = tuple(sharding.axes[dim] for dim in kept), tuple(sharding.parts[dim] for dim in kept)
    result = TensorSharding(names, parts, first.sharding.mesh)
    transfers = []
    for tensor in operands:
        shape = tuple(1 if dim in dims else n for dim, n in enumerate(first.local))
        for dim in reversed(dims):
            if (count := first.shards[dim]) > 1:
                groups = op.tiles(first.sharding).groups([count if k == dim else 1 for k in range(len(shape))])
                before, shape = shape, (*shape[:dim], count, *shape[dim + 1 :])
                transfers.append(Transfer(Step("all-gather", groups, before, shape), tensor))
    chains = {k: [first.sharding] for k, tensor in enumerate(operands) if tensor.sharding != first.sharding}
    return op.model(chains, [result] * len(op.results), transfers)


def custom_call(op: Operation) -> Model | None:
    """A call of a library such as LAPACK. Those that say how many dimensions are a batch can be partitioned."""
    name, attributes = ir.StringAttr(op.op.attributes["call_target_name"]).value, "mhlo.frontend_attributes"
    batch = (
        re.search(r'num_batch_dims = "(\d+)"', str(op.op.attributes[attributes]))
        if attributes in op.op.attributes
        else None
    )
    if not name.startswith(_LIBRARIES):
        return None
    count = 0 if batch is None else int(batch[1])
    found = (tensor.sharding for tensor in op.operands if any(tensor.sharding.axes[:count]))
    first = next(found, None)
    if first is None:
        return op.replicated()
    axes, parts = first.axes[:count], first.parts[:count]

    def batched(tensor: Tensor) -> TensorSharding:
        rest = ((),) * (len(tensor.shape) - count)
        return dataclasses.replace(first, axes=(*axes, *rest), parts=(*parts, *rest))

    chains = {k: [batched(tensor)] for k, tensor in enumerate(op.operands) if tensor.sharding != batched(tensor)}
    return op.model(chains, [*map(batched, op.results)])


_LIBRARIES = ("blas_", "lapack_", "cusolver_", "hipsolver_", "magma_")
