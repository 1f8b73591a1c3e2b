"""Products of matrices: which of them XLA partitions as their shardings say.

A dimension that is contracted and sharded in one operand only is gathered, or the other operand is sliced. A sum over
an axis along which the result is sharded, as of the gradient of a parameter that is sharded as the batch is, is made
on all devices, each of which takes its part. Where an
axis is wanted for two dimensions, XLA weighs several ways, which are not modelled.

Source: `dot_handler.cc` of XLA.
"""

import math
import re

from partjit.inspect.moves.model import Model, Operation, Tensor, without
from partjit.inspect.moves.tiles import Unmodelled

__all__ = ["dot"]


def dot(op: Operation) -> Model | None:
    """A product of two arrays."""
    text, result = str(op.op.attributes["dot_dimension_numbers"]), op.results[0].sharding.axes
    contracted = [_dimensions(text, f"{side}_contracting_dimensions") for side in ("lhs", "rhs")]
    batches = [_dimensions(text, f"{side}_batching_dimensions") for side in ("lhs", "rhs")]
    axes = [tensor.sharding.axes for tensor in op.operands]
    gathered: dict[int, list[int]] = {0: [], 1: []}
    for dims in zip(*contracted, strict=True):
        one, other = (of[dim] for of, dim in zip(axes, dims, strict=True))
        if one and other and one != other:
            raise Unmodelled
        if one != other:
            side = int(not one)
            gathered[side].append(dims[side])
    own = [
        [of[dim] for dim in range(len(of)) if dim not in {*dims, *batch}]
        for of, dims, batch in zip(axes, contracted, batches, strict=True)
    ]
    count = len(batches[0])
    for k, (a, b) in enumerate(zip(*batches, strict=True)):
        if not axes[0][a] == axes[1][b] == result[k]:
            raise Unmodelled
    sides = result[count : count + len(own[0])], result[count + len(own[0]) :]
    kept = [*zip((*own[0], *own[1]), (*sides[0], *sides[1]), strict=True)]
    # The sum over what is sharded alike is replicated over those axes, and may be sliced along them.
    summed = {axis for dims in zip(*contracted, strict=True) for axis in axes[0][dims[0]] if axes[1][dims[1]]}
    if any(there not in ((), here) and not (not here and {*there} <= summed) for here, there in kept):
        raise Unmodelled
    used = [{axis for names in side for axis in names} for side in own]
    if twice := used[0] & used[1]:
        # The operand whose dimensions the result keeps stays, and the other one is gathered.
        shown = [{axis for names in side for axis in names} for side in sides]
        if (
            shown not in ([used[0], set()], [set(), used[1]])
            or _unused(op) % _count(op, twice) == 0
            or any(gathered.values())
        ):
            raise Unmodelled
    chains = {}
    for k, dims in ((k, dims) for k, dims in gathered.items() if dims):
        tensor = op.operands[k]
        whole = tensor.sharded(without(tensor.sharding, dims))
        again = {axis for dim in dims for axis in tensor.sharding.axes[dim]} & used[1 - k]
        if again and _unused(op) % _count(op, again) == 0:
            raise Unmodelled
        ratio = _local_size(whole) / _local_size(op.results[0])
        if again or ratio <= 1 or (not any(used) and _unused(op) > 1):
            chains[k] = [whole.sharding]
        elif k == 1 and ratio <= 2:
            raise Unmodelled
        # Otherwise the other operand is sliced, and the results are summed, which moves less.
    sliced = [count + k for k, (here, there) in enumerate(kept) if there and not here]
    if sliced:  # of the whole sum
        return op.model(chains, [without(op.results[0].sharding, sliced)], keeps=True)
    return op.model(chains, keeps=True) if chains else None


def _unused(op: Operation) -> int:
    """The number of devices along unused axes: if it suffices, XLA may gather over these instead."""
    shardings = (tensor.sharding for tensor in (*op.operands, *op.results))
    used = {axis.partition(":")[0] for sharding in shardings for names in sharding.axes for axis in names}
    return math.prod(size for name, size in op.sizes.items() if name not in used)


def _count(op: Operation, axes: set[str]) -> int:
    return math.prod(op.sizes[axis.partition(":")[0]] for axis in axes)


def _local_size(tensor: Tensor) -> int:
    return math.prod(tensor.local) * tensor.itemsize


def _dimensions(text: str, name: str) -> list[int]:
    found = re.search(rf"{name} = \[([^\]]*)\]", text)
    return [int(number) for number in found[1].split(",")] if found is not None and found[1] else []
