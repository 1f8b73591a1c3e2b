"""Operations with windows: slices, padding, reversal, reductions over windows, convolutions.

Source: `HandleSlice`, `HandlePad`, `HandleReverse`, `HandleReduceWindow` of XLA's `spmd_partitioner.cc`, and its
`convolution_handler.cc`.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np
from jax.extend.mlir import ir

from partjit._jax import RELEASE
from partjit.inspect.device_groups import DeviceGroups
from partjit.inspect.moves.grouped import of_batch_groups, of_feature_groups
from partjit.inspect.moves.halo import Window, exchange, unread
from partjit.inspect.moves.model import (
    Model,
    Operation,
    Prepared,
    Tensor,
    Transfer,
    definition,
    elements,
    numbers,
    without,
)
from partjit.inspect.moves.products import product
from partjit.inspect.moves.tiles import Step, Unmodelled
from partjit.shardy import TensorSharding

__all__ = ["convolution", "is_near_slices", "pad", "readers_of", "reduce_window", "reverse", "slice_"]


def is_near_slices(op: ir.Operation) -> bool:
    """Whether slices are all that uses the only result of an operation, or one of them or the like computes it."""
    if all(use.owner.name == "stablehlo.slice" for use in op.results[0].uses):
        return True
    return definition(op.operands[0], "stablehlo.slice", "stablehlo.pad", "stablehlo.concatenate") is not None


def slice_(op: Operation) -> Model:
    """A slice of static bounds."""
    operand, result = op.operands[0], op.results[0]
    if op.primitive == "top_k":  # XLA has an operation of two results, of whose sharding before it knows nothing
        return dataclasses.replace(op.replicated(), forgets=True)
    windows = _of_slice(operand.shape, op.op)
    if math.prod(operand.shards) > math.prod(result.shards):
        chain, transfers = _windowed(op, operand, operand.sharding, windows)
        return op.model({0: chain}, [operand.sharding], transfers)
    if not result.is_sharded:
        return op.replicated()
    # XLA shards what is not sharded first, as the result is, and then exchanges halos.
    chain, transfers = _windowed(op, operand, result.sharding, windows, True, readers_of(op))
    if transfers and any(
        result.shards[dim] > 1 and not window.is_trivial and _is_exchanged_before(op, dim)
        for dim, window in enumerate(windows)
    ):
        return _at_most(op.model({0: chain}, None, transfers))  # XLA may make one exchange of two
    return op.model({0: chain}, None, transfers)


def _at_most(model: Model) -> Model:
    """A model of an operation for which XLA moves no more than this."""
    if any(model.operands):
        raise Unmodelled
    sent = (math.prod(step.operand) * tensor.itemsize for step, tensor in model.transfers or ())
    return dataclasses.replace(model, transfers=None, bound=sum(sent))


def _of_slice(shape: Sequence[int], op: ir.Operation) -> list[Window]:
    bounds = (numbers(op.attributes[name]) for name in ("start_indices", "limit_indices", "strides"))
    return [
        Window(stride=stride, low=-start, high=limit - n)
        for n, start, limit, stride in zip(shape, *bounds, strict=True)
    ]


def _of_padding(op: ir.Operation) -> list[Window]:
    amounts = (numbers(op.attributes[name]) for name in ("edge_padding_low", "edge_padding_high", "interior_padding"))
    return [
        Window(low=low, high=high, base_dilation=1 + interior) for low, high, interior in zip(*amounts, strict=True)
    ]


def _is_exchanged_before(op: Operation, dim: int) -> bool:
    """Whether halos are exchanged along a dimension for what is sliced, which is used by slices alone."""
    maker = definition(op.op.operands[0], "stablehlo.slice", "stablehlo.pad", "stablehlo.concatenate")
    if maker is None or any(use.owner.name != "stablehlo.slice" for use in maker.results[0].uses):
        return False
    if maker.name == "stablehlo.concatenate":
        return ir.IntegerAttr(maker.attributes["dimension"]).value == dim
    shape, sharding = maker.operands[0].type.shape, op.sharding_of(maker.results[0])
    windows = _of_slice(shape, maker) if maker.name == "stablehlo.slice" else _of_padding(maker)
    try:
        shifts = exchange(shape, [math.prod(sizes) for sizes in sharding.parts], windows)
    except NotImplementedError:
        return True
    return shifts is None or any(shift.dim == dim for shift in shifts)


def readers_of(op: Operation) -> list[list[Window]]:
    """The windows of the slices that alone use a result; none if something else does, or is sharded otherwise."""
    result, found = op.results[0], []
    for use in op.op.results[0].uses:
        user = use.owner.operation
        if user.name != "stablehlo.slice" or op.sharding_of(user.results[0]) != result.sharding:
            return []
        found.append(_of_slice(result.shape, user))
    return found


def pad(op: Operation) -> Model | None:
    """Padding on both sides and between the elements; that of nothing is a broadcast."""
    operand, result = op.operands[0], op.results[0]
    if 0 in operand.shape:
        return None
    if not result.is_sharded:
        return op.replicated()
    windows = _of_padding(op.op)
    try:
        chain, transfers = _windowed(op, operand, result.sharding, windows, False, readers_of(op))
    except Unmodelled:  # XLA may remove some of the exchange, of which slices read a part
        chain, transfers = _windowed(op, operand, result.sharding, windows)
        return _at_most(op.model({0: chain}, None, transfers))
    return op.model({0: chain}, None, transfers)


def reverse(op: Operation) -> Model:
    """The order of the shards is reversed, and that in each shard; uneven shards are shifted as well."""
    (operand,), result, dims = op.operands, op.results[0], op.numbers("dimensions")
    if not result.is_sharded:
        return op.replicated()
    sharded = [dim for dim in dims if result.shards[dim] > 1]
    if not sharded:
        return op.model({0: [] if operand.sharding == result.sharding else [result.sharding]})
    if operand.sharding != result.sharding or any(result.shape[dim] % result.shards[dim] for dim in sharded):
        raise Unmodelled
    factors = [count if dim in sharded else 1 for dim, count in enumerate(result.shards)]
    groups = op.tiles(result.sharding).groups(factors)
    step = Step("collective-permute", groups.paired_with(groups.positions[:, ::-1]), result.local, result.local)
    return op.model(None, None, [Transfer(step, operand)])


def reduce_window(op: Operation) -> Model:
    """A reduction over windows: pooling, or cumulative sums."""
    result = op.results[0]
    if not result.is_sharded:
        return op.replicated()
    if len(op.results) > 1:
        raise Unmodelled
    windows = _windows(op, len(result.shape), "window_dimensions")
    shards = op.operands[0].shards
    if any(shards[dim] > 1 == result.shards[dim] for dim, window in enumerate(windows) if not window.is_trivial):
        raise Unmodelled
    chain, transfers = _windowed(op, op.operands[0], result.sharding, windows)
    return op.model({0: chain}, None, transfers)


def convolution(op: Operation) -> Model | None:
    """A convolution: a product of features where no spatial dimension is sharded.

    Where the result is sharded along spatial dimensions like its input, and the kernel replicated, halos are exchanged.
    """
    image, kernel, result = op.operands[0], op.operands[1], op.results[0]
    inputs, kernels, results = _dimension_numbers(op)
    spatial = [*range(len(inputs) - 2)]
    at = [inputs[str(k)] for k in spatial]
    if (
        all(image.shards[dim] == 1 for dim in at)
        and all(kernel.shards[kernels[str(k)]] == 1 for k in spatial)
        and all(result.shards[results[str(k)]] == 1 for k in spatial)
    ):
        if op.number("batch_group_count") != 1:
            return of_batch_groups(op, (inputs, kernels, results))
        if op.number("feature_group_count") != 1:
            return of_feature_groups(op, (inputs, kernels, results))
        own = {inputs["b"]: results["b"]}, {kernels["o"]: results["f"]}
        return product(op, [(inputs["f"], kernels["i"])], [], own, bool(spatial))
    axes, parts = list(image.sharding.axes), list(image.sharding.parts)
    for here, there in (("b", "b"), ("f", "f"), *((str(k), str(k)) for k in spatial)):
        axes[inputs[here]] = result.sharding.axes[results[there]]
        parts[inputs[here]] = result.sharding.parts[results[there]]
    target = TensorSharding(tuple(axes), tuple(parts), image.sharding.mesh)
    groups = op.number("feature_group_count"), op.number("batch_group_count")
    of_features = result.shards[results["f"]] > 1 or image.shards[inputs["f"]] > 1
    if kernel.is_sharded or of_features or groups != (1, 1) or not image.is_sharded:
        raise Unmodelled
    sizes = [kernel.shape[kernels[str(k)]] for k in spatial]
    windows = [Window()] * len(image.shape)
    for k, window in enumerate(_windows(op, len(spatial), sizes)):
        windows[at[k]] = window
    chain, transfers = _windowed(op, image, target, windows)
    # Of two kernels over one image XLA computes the exchange once.
    halos = [Prepared(f"halos {windows}", tuple(transfers))] if transfers else []
    return op.model({0: [*chain, *halos]})


def _dimension_numbers(op: Operation) -> list[dict[str, int]]:
    """Where batch (b), features (f) and the spatial dimensions (0, 1, ...) are in input, kernel and result."""
    text = str(op.op.attributes["dimension_numbers"])
    layouts = re.findall(r"\[([^\]]*)\]", text)
    return [{name.strip(): k for k, name in enumerate(layout.split(","))} for layout in layouts]


def _windows(op: Operation, ndim: int, sizes: str | Sequence[int]) -> list[Window]:
    ones = (1,) * ndim
    size = op.numbers(sizes) if isinstance(sizes, str) else sizes
    names = ("base_dilations", "window_dilations") if isinstance(sizes, str) else ("lhs_dilation", "rhs_dilation")
    base, dilation = (op.numbers(name, ones) for name in names)
    padding = elements(op.op.attributes["padding"]) if "padding" in op.op.attributes else [[0, 0]] * ndim
    strides = op.numbers("window_strides", ones)
    return [
        Window(size=n, stride=stride, low=low, high=high, base_dilation=dilated, dilation=spread)
        for n, stride, (low, high), dilated, spread in zip(size, strides, padding, base, dilation, strict=True)
    ]


def _is_replicated_first(op: Operation, before: Tensor, after: Tensor) -> bool:
    """Whether copies of shards of one dimension become as many of another, for which XLA may replicate all of it.

    It did not in jax 0.10, and does not for slices and convolutions.
    """
    if RELEASE < (0, 11) or op.op.name not in ("stablehlo.pad", "stablehlo.reduce_window"):
        return False
    dims = [[dim for dim, count in enumerate(tensor.shards) if count > 1] for tensor in (before, after)]
    if [*map(len, dims)] != [1, 1] or dims[0] == dims[1] or op.tiles(before.sharding).copies == 1:
        return False
    (one,), (other,) = dims
    return before.shards[one] == after.shards[other]


def _windowed(
    op: Operation,
    operand: Tensor,
    target: TensorSharding,
    windows: Sequence[Window],
    is_sharded_first: bool = False,
    readers: Sequence[Sequence[Window]] = (),
) -> tuple[list[TensorSharding], list[Transfer]]:
    """The shardings that an operand gets, and its halo exchanges, for windows over shards of a sharding."""
    kept = without(target, [dim for dim, window in enumerate(windows) if not window.is_trivial])
    if not is_sharded_first and (not operand.is_sharded or operand.sharding == kept):
        return [], []
    chain = [] if operand.sharding == target else [target]
    there = operand.sharded(target)
    if _is_replicated_first(op, operand, there):
        chain = [without(target, range(len(operand.shape))), target]
    try:
        shifts = exchange(operand.shape, there.shards, windows)
        dead = unread(operand.shape, op.results[0].shape, there.shards, windows, readers) if shifts and readers else ()
    except NotImplementedError:
        raise Unmodelled from None
    if shifts is None:
        return [*chain, kept], []
    transfers = []
    for shift in (shift for shift in shifts if shift.dim not in dead):
        devices = op.tiles(target).devices
        for dim, shards in enumerate(shift.among):
            devices = devices if dim == shift.dim else devices.take(shards, dim)
        sources, targets = (
            np.moveaxis(devices.take(ends, shift.dim), shift.dim, 0) for ends in zip(*shift.pairs, strict=True)
        )
        pairs = DeviceGroups(np.stack([sources.ravel(), targets.ravel()], axis=1))
        transfers.append(Transfer(Step("collective-permute", pairs, shift.shape, shift.shape), operand))
    return chain, transfers
