"""Products of matrices, and what is one to XLA: convolutions of which no spatial dimension is sharded."""

import re
from collections.abc import Mapping, Sequence

from partjit._jax import RELEASE
from partjit.inspect.moves.model import Model, Operation, Prepared, Transfer
from partjit.inspect.moves.partitioned import Resharded
from partjit.inspect.moves.product_dims import ProductDims
from partjit.inspect.moves.recursion import partition
from partjit.inspect.moves.tiles import over_axes
from partjit.shardy import TensorSharding

__all__ = ["dot", "link", "product"]


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
    is_spatial: bool = False,
) -> Model | None:
    """A product of the first two operands.

    Args:
        op: the operation.
        contracted: pairs of dimensions of the operands that are summed over.
        batches: dimensions of the operands and the result that are the same.
        own: for each operand, the other dimensions and where they are in the result.
        is_spatial: whether there are spatial dimensions besides.

    Returns:
        The model; None where nothing is moved but for a sum that Shardy inserts.

    Raises:
        Unmodelled: XLA reshards in a way that is not modelled.
    """
    one, other, result = *op.operands[:2], op.results[0]
    dims = ProductDims(
        tuple(batches),
        tuple(contracted),
        (tuple(own[0].items()), tuple(own[1].items())),
        (len(one.shape), len(other.shape)),
        is_spatial,
    )
    tiles = [op.tiles(tensor.sharding) for tensor in (one, other, result)]
    itemsizes = one.itemsize, other.itemsize, result.itemsize
    found = partition((tiles[0], tiles[1]), (one.shape, other.shape), itemsizes, dims, result.shape, tiles[2])
    is_sum = all(step.kind == "all-reduce" and step.operand == result.local for step in found.result)
    if not any(found.operands) and is_sum and len(found.result) < 2:
        return None
    chains = {k: [link(op, k, each) for each in made] for k, made in enumerate(found.operands)}
    is_one = op.op.operands[0] == op.op.operands[1]  # XLA copies it at first
    return op.model(chains, None, [Transfer(step, result) for step in found.result], distinct={1: ""} if is_one else {})


def link(op: Operation, k: int, made: Resharded) -> TensorSharding | Prepared:
    """A reshard of an operand: to a sharding over named axes, or what is moved for another one."""
    tensor = op.operands[k]
    # Where dimensions swap axes, others cannot do so from jax 0.12 on; see `reshards.py`.
    is_own = len(made.rows) > 1 or (RELEASE >= (0, 12) and any(step.kind == "all-to-all" for step in made.steps))
    if not is_own and (named := over_axes(made.target, op.sizes)) is not None:
        return TensorSharding(named.axes, named.parts, tensor.sharding.mesh)
    return Prepared(made.name, tuple(Transfer(step, tensor) for step in made.steps))


def _dimensions(text: str, name: str) -> list[int]:
    found = re.search(rf"{name} = \[([^\]]*)\]", text)
    return [int(number) for number in found[1].split(",")] if found is not None and found[1] else []
