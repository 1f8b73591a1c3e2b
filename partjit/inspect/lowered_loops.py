"""Trip counts of the loops that jax lowers single primitives to, as the permutation of an LU factorization."""

from typing import Any

from jax.extend.mlir import ir

from partjit.inspect.moves.model import constant_index, definition

__all__ = ["trip_count_of_lowered"]


def trip_count_of_lowered(loop: ir.Operation) -> int | None:
    """The trip count of a lowered loop that counts by ones up to a constant; None if it is another one.

    Args:
        loop: a `stablehlo.while`.
    """
    (predicate,), (*carried,) = (_returned(region) for region in loop.regions)
    compared = definition(predicate, "stablehlo.compare")
    if compared is None or "LT" not in str(compared.attributes["comparison_direction"]):
        return None
    counter, stop = compared.operands[0], constant_index(compared.operands[1])
    if not isinstance(counter.owner, ir.Block) or counter.owner != loop.regions[0].blocks[0]:
        return None
    k = ir.BlockArgument(counter).arg_number
    step = definition(carried[k], "stablehlo.add")
    if step is None or loop.regions[1].blocks[0].arguments[k] not in step.operands:
        return None
    start = constant_index(loop.operands[k])
    if start is None or stop is None or all(constant_index(value) != 1 for value in step.operands):
        return None
    return max(0, stop - start)


def _returned(region: Any) -> list[ir.Value]:
    (block,) = region.blocks
    return [*block.operations[len(block.operations) - 1].operands]
