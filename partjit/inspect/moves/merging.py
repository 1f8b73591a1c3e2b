"""Which equal operations of a propagated program XLA computes once.

XLA merges equal instructions after it has partitioned them. Those that contain a computation, such as sums over devices
and sorts, are never equal; nor are the updates that concatenations of shards and gathers from shards become. An
operation that becomes such instructions stays, with everything that is computed from it.

Source: `HloCSE` in the clean-up after XLA's `spmd_partitioner.cc`.
"""

from collections.abc import Iterable

from jax.extend.mlir import ir

from partjit.inspect.moves.indices import dimension_numbers
from partjit.inspect.moves.model import numbers
from partjit.shardy import Shardings, merge_equal, nested

__all__ = ["merge"]

_NUMBER = "partjit.number"


def merge(module: ir.Module, shardings: Shardings) -> None:
    """Merges equal operations of a propagated module as XLA does."""
    for op in [op.operation for op in nested(module.operation) if op.operation.name == "stablehlo.reverse"]:
        if all(op.operands[0].type.shape[dim] == 1 for dim in numbers(op.attributes["dimensions"])):
            op.results[0].replace_all_uses_with(op.operands[0])  # the kernel of a 1 x 1 convolution
            op.erase()
    staying = [op.operation for op in nested(module.operation) if _stays(op.operation, shardings)]
    with module.context:
        number = ir.IntegerType.get_signless(64)
        for k, op in enumerate(staying):
            op.attributes[_NUMBER] = ir.IntegerAttr.get(number, k)
    merge_equal(module)


def _stays(op: ir.Operation, shardings: Shardings) -> bool:
    match op.name:
        case "stablehlo.reduce":
            return _is_sharded(op.operands[0], numbers(op.attributes["dimensions"]), shardings)
        case "stablehlo.concatenate" | "stablehlo.sort":
            return _is_sharded(op.results[0], [ir.IntegerAttr(op.attributes["dimension"]).value], shardings)
        case "stablehlo.gather":
            return _is_sharded(op.operands[0], dimension_numbers(op, "start_index_map"), shardings)
        case "stablehlo.dot_general" | "stablehlo.convolution" | "stablehlo.scatter":
            kept = {axis for result in op.results for names in _axes(result, shardings) for axis in names}
            used = {axis for operand in op.operands for names in _axes(operand, shardings) for axis in names}
            return not used <= kept
    return False


def _is_sharded(value: ir.Value, dims: Iterable[int], shardings: Shardings) -> bool:
    axes = _axes(value, shardings)
    return bool(axes) and any(axes[dim] for dim in dims)


def _axes(value: ir.Value, shardings: Shardings) -> tuple[tuple[str, ...], ...]:
    found = shardings.of(value)
    return () if found is None else found.axes
