"""Which equal operations of a propagated program XLA computes once: all but those whose results it sums over devices.

XLA merges equal instructions after it has partitioned them, and never merges two all-reduces; so an operation that ends
in one stays, with everything that is computed from it.

Source: `HloCSE` in the clean-up after XLA's `spmd_partitioner.cc`.
"""

from jax.extend.mlir import ir

from partjit.inspect.moves.model import numbers
from partjit.shardy import Shardings, merge_equal, nested

__all__ = ["merge"]

_NUMBER = "partjit.sum"
_PRODUCTS = ("stablehlo.dot_general", "stablehlo.convolution", "stablehlo.scatter")


def merge(module: ir.Module, shardings: Shardings) -> None:
    """Merges equal operations of a propagated module as XLA does."""
    for op in [op.operation for op in nested(module.operation) if op.operation.name == "stablehlo.reverse"]:
        if all(op.operands[0].type.shape[dim] == 1 for dim in numbers(op.attributes["dimensions"])):
            op.results[0].replace_all_uses_with(op.operands[0])  # the kernel of a 1 x 1 convolution
            op.erase()
    sums = [op.operation for op in nested(module.operation) if _may_be_summed(op.operation, shardings)]
    with module.context:
        number = ir.IntegerType.get_signless(64)
        for k, op in enumerate(sums):
            op.attributes[_NUMBER] = ir.IntegerAttr.get(number, k)
    merge_equal(module)


def _may_be_summed(op: ir.Operation, shardings: Shardings) -> bool:
    if op.name == "stablehlo.reduce":
        sharding = shardings.of(op.operands[0])
        return sharding is not None and any(sharding.axes[dim] for dim in numbers(op.attributes["dimensions"]))
    if op.name not in _PRODUCTS:
        return False
    kept = {axis for result in op.results for names in _axes(result, shardings) for axis in names}
    used = {axis for operand in op.operands for names in _axes(operand, shardings) for axis in names}
    return not used <= kept


def _axes(value: ir.Value, shardings: Shardings) -> tuple[tuple[str, ...], ...]:
    found = shardings.of(value)
    return () if found is None else found.axes
