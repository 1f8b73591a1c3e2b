"""Convolutions of groups of features, as XLA partitions those of single features: depthwise ones and their gradients.

A depthwise convolution is computed by features: all of the image is gathered but for a slice of the features, over the
axes that shard these in the image, in the kernel or in the result. One of fewer groups is computed in full by every
device. The gradient of the kernel of a depthwise one is a convolution of as many batch groups. It is summed over all
devices if the examples are sharded in both operands, and otherwise computed by features as well.

Source: `PartitionConvolutionWithFeatureGroupCount` and `PartitionConvolutionWithBatchGroupCount` of XLA's
`convolution_handler.cc`, and what XLA compiles for all pairs of shardings over two axes.
"""

import math
from collections.abc import Mapping, Sequence

from partjit.inspect.moves.model import Model, Operation, Tensor, Transfer
from partjit.inspect.moves.tiles import Step, Unmodelled
from partjit.shardy import TensorSharding

__all__ = ["of_batch_groups", "of_feature_groups"]

_Dims = Sequence[Mapping[str, int]]


def of_feature_groups(op: Operation, dims: _Dims) -> Model | None:
    """A convolution with several feature groups, no spatial dimension of which is sharded.

    Args:
        op: the operation.
        dims: where batch, features and spatial dimensions are in image, kernel and result.
    """
    image, kernel, result = op.operands[0], op.operands[1], op.results[0]
    of_image, of_kernel, of_result = dims[0]["f"], dims[1]["o"], dims[2]["f"]
    own, of_weight, wanted = (
        tensor.sharding.axes[dim] for tensor, dim in ((image, of_image), (kernel, of_kernel), (result, of_result))
    )
    if kernel.shape[of_input := dims[1]["i"]] != 1:
        if kernel.local[of_input] == 1:
            raise Unmodelled
        return op.replicated()
    if not (own or of_weight or wanted):
        return None
    of_batch = image.sharding.axes[dims[0]["b"]], result.sharding.axes[dims[2]["b"]]
    if (own and own == wanted) or (not own and of_weight == wanted and of_batch[0] == of_batch[1]):
        return None  # each device has what it needs of the image
    if of_weight and wanted and of_weight != wanted and not own:
        raise Unmodelled
    axes = own or of_weight or wanted
    return op.model(
        {0: _chain(op, image, of_image, axes), 1: _chain(op, kernel, of_kernel, axes)},
        [_over(op, result, of_result, axes)],
        forgets=True,
    )


def of_batch_groups(op: Operation, dims: _Dims) -> Model | None:
    """A convolution with several batch groups, the gradient of a kernel: the features of its image are examples."""
    image, kernel, result = op.operands[0], op.operands[1], op.results[0]
    examples, of_image, of_kernel, of_result = dims[0]["f"], dims[0]["b"], dims[1]["o"], dims[2]["f"]
    summed, own, wanted = image.sharding.axes[examples], image.sharding.axes[of_image], result.sharding.axes[of_result]
    if not image.is_sharded and not kernel.is_sharded:
        return None
    if op.number("batch_group_count") != image.shape[of_image]:
        raise Unmodelled
    of_kernel_summed, of_kernel_own = (kernel.sharding.axes[dim] for dim in (dims[1]["i"], of_kernel))
    if summed and not own and kernel.is_sharded:
        chain = (
            []
            if kernel.sharding.axes == _named(kernel, {dims[1]["i"]: summed})
            else [_over(op, kernel, dims[1]["i"], summed)]
        )
        everything = tuple(op.sizes)
        along = TensorSharding((everything,), (tuple(op.sizes.values()),))
        groups = op.tiles(along).groups([math.prod(op.sizes.values())])
        step = Step("all-reduce", groups, result.shape, result.shape)
        chain = _chain(op, kernel, dims[1]["i"], summed)
        return op.model({1: chain}, [_over(op, result, of_result, ())], [Transfer(step, result)], forgets=True)
    if own == wanted and summed == of_kernel_summed and of_kernel_own in ((), own):
        return None
    chain = _chain(op, kernel, of_kernel, wanted)
    if own == wanted and not {*wanted} & {*of_kernel_summed} and not of_kernel_own:
        chain = [_sharded(op, kernel, {dims[1]["i"]: of_kernel_summed, of_kernel: wanted}), *chain]  # sliced at first
    return op.model({0: _chain(op, image, of_image, wanted), 1: chain})


def _chain(op: Operation, tensor: Tensor, dim: int, axes: tuple[str, ...]) -> list[TensorSharding]:
    """The reshard of an operand to a sharding of one dimension, if it has another one."""
    return [] if tensor.sharding.axes == _named(tensor, {dim: axes}) else [_over(op, tensor, dim, axes)]


def _named(tensor: Tensor, axes: Mapping[int, tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    return tuple(axes.get(k, ()) for k in range(len(tensor.shape)))


def _over(op: Operation, tensor: Tensor, dim: int, axes: tuple[str, ...]) -> TensorSharding:
    """The sharding of one dimension of a tensor over these axes."""
    return _sharded(op, tensor, {dim: axes})


def _sharded(op: Operation, tensor: Tensor, axes: Mapping[int, tuple[str, ...]]) -> TensorSharding:
    """The sharding of some dimensions of a tensor over these axes."""
    named = _named(tensor, axes)
    if any(":" in axis for dim in named for axis in dim):
        raise Unmodelled
    parts = tuple(tuple(op.sizes[axis] for axis in dim) for dim in named)
    if any(n % math.prod(sizes) for n, sizes in zip(tensor.shape, parts, strict=True)):
        raise Unmodelled
    return TensorSharding(named, parts, tensor.sharding.mesh)
