"""Products of matrices: which of them XLA partitions as their shardings say.

A dimension that is contracted and sharded in one operand only is gathered, or the other operand is sliced. One that is
kept, but along which the result is not sharded because it is constrained, is gathered of the operand. A sum over an
axis along which the result is sharded, as of the gradient of a parameter that is sharded as the batch is, is made on
all devices, each of which takes its part. Where an axis is wanted for two dimensions, XLA weighs several ways, of which
some are modelled.

Source: `dot_handler.cc` of XLA.
"""

import math
import re
from collections.abc import Mapping, Sequence

from partjit.inspect.moves.model import Model, Operation, Tensor, Transfer, without
from partjit.inspect.moves.resharding import reshard
from partjit.inspect.moves.sums import sliced_in_groups
from partjit.inspect.moves.tiles import Step, Unmodelled
from partjit.shardy import TensorSharding

__all__ = ["dot", "product"]


def dot(op: Operation) -> Model | None:
    """A product of two arrays."""
    text = str(op.op.attributes["dot_dimension_numbers"])
    contracted, batches = (
        [*zip(*(_dimensions(text, f"{side}_{kind}_dimensions") for side in ("lhs", "rhs")), strict=True)]
        for kind in ("contracting", "batching")
    )
    own, place = [], len(batches)
    for k, tensor in enumerate(op.operands):
        used = {pair[k] for pair in (*contracted, *batches)}
        free = [dim for dim in range(len(tensor.shape)) if dim not in used]
        own.append(dict(zip(free, range(place, place + len(free)), strict=True)))
        place += len(free)
    return product(op, contracted, [(a, b, k) for k, (a, b) in enumerate(batches)], own)


def product(
    op: Operation,
    contracted: Sequence[tuple[int, int]],
    batches: Sequence[tuple[int, int, int]],
    own: Sequence[Mapping[int, int]],
) -> Model | None:
    """A product of the first two operands.

    Args:
        op: the operation.
        contracted: pairs of dimensions of the operands that are summed over.
        batches: dimensions of the operands and the result that are the same.
        own: for each operand, the other dimensions and where they are in the result.

    Raises:
        Unmodelled: XLA weighs several ways.
    """
    result = op.results[0].sharding.axes
    axes = [tensor.sharding.axes for tensor in op.operands[:2]]
    gathered: dict[int, list[int]] = {0: [], 1: []}
    for dims in contracted:
        one, other = (of[dim] for of, dim in zip(axes, dims, strict=True))
        if one and other and one != other:
            raise Unmodelled
        if one != other:
            side = int(not one)
            gathered[side].append(dims[side])
    if all(gathered.values()) or any(not axes[0][a] == axes[1][b] == result[k] for a, b, k in batches):
        raise Unmodelled
    kept = [(of[dim], result[there], there) for of, free in zip(axes, own, strict=True) for dim, there in free.items()]
    # The sum over what is sharded alike is replicated over those axes, and may be sliced along them.
    summed = {axis for dims in contracted for axis in axes[0][dims[0]] if axes[1][dims[1]]}
    is_all = summed and not batches and not any(gathered.values()) and not any(here for here, _, _ in kept)
    # Nothing else than what is contracted is sharded:
    if is_all and (found := _in_groups(op, [a for a, _ in contracted if axes[0][a]])) is not None:
        return found
    if any(there not in ((), here) and not (not here and {*there} <= summed) for here, there, _ in kept):
        raise Unmodelled
    batch = " ".join(sorted(axis for a, _, _ in batches for axis in axes[0][a]))
    used = [{axis for dim in free for axis in of[dim]} for of, free in zip(axes, own, strict=True)]
    shown = [{axis for there in free.values() for axis in result[there]} for free in own]
    # What the result is not sharded along, as it is constrained, is gathered of the operand, whatever the sizes.
    lost: list[list[int]] = [[], []]
    if not used[0] & used[1]:
        lost = [
            [dim for dim, there in free.items() if of[dim] and not result[there]]
            for of, free in zip(axes, own, strict=True)
        ]
        used = [used[k] - {axis for dim in lost[k] for axis in axes[k][dim]} for k in (0, 1)]
    first = _first(op, [axes if axes == there else set() for axes, there in zip(used, shown, strict=True)])
    chains, distinct = {}, dict[int, str]()
    if twice := used[0] & used[1]:
        # The operand whose dimensions the result keeps stays, and the other one is gathered.
        if (
            shown not in ([used[0], set()], [set(), used[1]])
            or _unused(op) % _count(op, twice) == 0
            or any(gathered.values())
        ):
            raise Unmodelled
        other = int(shown[0] == used[0])
        tensor = op.operands[other]
        chains[other] = [without(tensor.sharding, [dim for dim in own[other] if tensor.sharding.axes[dim]])]
    for k, dims in ((k, dims) for k, dims in gathered.items() if dims):
        tensor = op.operands[k]
        whole = tensor.sharded(without(tensor.sharding, dims))
        again = {axis for dim in dims for axis in tensor.sharding.axes[dim]} & used[1 - k]
        if again and _unused(op) % _count(op, again) == 0:
            raise Unmodelled
        ratio = _local_size(whole) / _local_size(op.results[0])
        if again or ratio <= 1 or _unused(op) > 1:
            chains[k] = [whole.sharding] if again or not lost[k] else []
            if first == k or (first is not None and not again):
                distinct[k] = "in groups"
        elif (k == 1 and ratio <= 2) or any(lost):
            raise Unmodelled
        # Otherwise the other operand is sliced, and the results are summed, which moves less.
    for k, dims in ((k, dims) for k, dims in enumerate(lost) if dims):
        more = gathered[k] if k in chains else []
        chains[k] = [*chains.get(k, []), without(op.operands[k].sharding, [*dims, *more])]
    if batch:
        distinct = dict.fromkeys(chains, f"in groups {batch}")
    if 1 in chains and op.op.operands[0] == op.op.operands[1]:
        distinct[1] = ""  # XLA copies it at first
    sliced = [dim for here, there, dim in kept if there and not here]
    if sliced:
        if any(lost) or any(dims and k not in chains for k, dims in gathered.items()):
            raise Unmodelled
        if _unused(op) % _count(op, {axis for dim in sliced for axis in op.results[0].sharding.axes[dim]}) == 0:
            raise Unmodelled  # within groups of devices, and as in `_in_groups`
        by_dim = [axes[0][a] for a, b in contracted if axes[0][a] and axes[1][b]]
        return op.model(chains, None, _sums(op, sliced, by_dim), distinct=distinct)
    return op.model(chains, keeps=True, distinct=distinct) if chains else None


def _in_groups(op: Operation, contracted: Sequence[int]) -> Model | None:
    """A sum of which each device makes a part of the result; None if it is made as a whole."""
    result = op.results[0]
    operand, wanted = op.tiles(op.operands[0].sharding), op.tiles(result.sharding)
    if wanted.is_replicated or (made := sliced_in_groups(operand, contracted, wanted)) is None:
        return None
    sums = []
    for dim in contracted:
        factors = [n if k == dim else 1 for k, n in enumerate(operand.counts)]
        sums.append(Step("all-reduce", operand.groups(factors), result.local, result.local))
    steps = [*sums, *reshard(made, wanted, result.shape)]
    return op.model(transfers=[Transfer(step, result) for step in steps])


def _sums(op: Operation, sliced: Sequence[int], by_dim: Sequence[tuple[str, ...]]) -> list[Transfer]:
    """All-reduces of a result that is sliced along axes that were contracted.

    All of it is summed over the axes of each sliced dimension, then a slice over those axes that are left.
    """
    result = op.results[0]
    full = result.sharded(without(result.sharding, sliced))
    first = [result.sharding.axes[dim] for dim in sliced]
    done = {axis for axes in first for axis in axes}
    rest = tuple(axis for axes in by_dim for axis in axes if axis not in done)

    def over(axes: tuple[str, ...], local: tuple[int, ...]) -> Transfer:
        along = TensorSharding((axes,), (tuple(op.sizes[axis] for axis in axes),))
        return Transfer(Step("all-reduce", op.tiles(along).groups([_count(op, {*axes})]), local, local), result)

    if any(":" in axis for axes in (*first, *by_dim) for axis in axes):
        raise Unmodelled
    return [*(over(axes, full.local) for axes in first), *([over(rest, result.local)] if rest else [])]


def _first(op: Operation, axes: Sequence[set[str]]) -> int | None:
    """The operand by whose own dimensions, sharded over these axes, XLA groups the devices first.

    What is gathered of that operand is gathered within the groups. Such a gather names its devices in another form, so
    XLA does not merge it with an equal one that is made among all devices.
    """
    if not all(axes):
        return next((k for k, names in enumerate(axes) if names), None)
    counts = [_count(op, names) for names in axes]
    return int(counts[0] * _local_size(op.operands[1]) >= counts[1] * _local_size(op.operands[0]))


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
