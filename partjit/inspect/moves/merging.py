"""Which equal operations of a partitioned program XLA computes once.

XLA merges equal instructions after it has partitioned them: what is computed locally, and what neighbours exchange. It
never merges equal gathers, sums over devices and the like; so each reshard of another value is one more, even if the
values are equal. Nor does it merge what contains a computation, such as sorts, and the updates that concatenations of
shards and gathers from shards become. An operation that becomes such instructions stays, with everything that is
computed from it.

Source: `HloCSE` in the clean-up after XLA's `spmd_partitioner.cc`.
"""

from collections.abc import Container, Iterable

from jax.extend.mlir import ir

from partjit.inspect.moves.indexed_dims import dimension_numbers
from partjit.inspect.moves.model import numbers
from partjit.inspect.places import Known
from partjit.inspect.walk import Walk
from partjit.shardy import Shardings, merge_equal

__all__ = ["merge", "remove_reversals", "stays"]

_NUMBER = "partjit.number"
_KINDS_THAT_STAY = ("reduce", "concatenate", "sort", "gather", "dot_general", "convolution", "scatter")
_MAY_STAY = {f"stablehlo.{name}" for name in _KINDS_THAT_STAY}


def remove_reversals(walk: Walk) -> Walk:
    """Removes the reversals of dimensions of size 1, such as those of the kernel of a 1 x 1 convolution.

    Returns:
        The operations that are left.
    """
    removed = set()
    for op in walk.named("stablehlo.reverse"):
        if all(op.operands[0].type.shape[dim] == 1 for dim in numbers(op.attributes["dimensions"])):
            op.results[0].replace_all_uses_with(op.operands[0])
            removed.add(op)
    left = walk.without(removed)
    for op in removed:
        op.erase()
    return left


def merge(
    module: ir.Module, walk: Walk, shardings: Shardings, communicating: Container[str], known: Known | None = None
) -> None:
    """Merges equal operations of a module in which all that communicates is written out.

    Args:
        module: the module, which is changed.
        walk: its operations; reshards among them are not there any more.
        shardings: the shardings in it.
        communicating: the names of the operations that communicate, of which none is merged.
        known: what is known of operations, which is added to.
    """
    staying = [
        op
        for op, name in zip(walk.ops, walk.names, strict=True)
        if name in communicating or (name in _MAY_STAY and stays(op, shardings, known))
    ]
    with module.context:
        number = ir.IntegerType.get_signless(64)
        for k, op in enumerate(staying):
            op.attributes[_NUMBER] = ir.IntegerAttr.get(number, k)
    merge_equal(module)


def stays(op: ir.Operation, shardings: Shardings, known: Known | None = None) -> bool:
    """Whether XLA never merges an operation with an equal one, besides those that communicate."""
    if op.name not in _MAY_STAY:
        return False
    place = None if known is None else known.own_location(op)
    if known is None or place is None:
        return _stays(op, shardings)
    key = (place, *map(shardings.of, (*op.operands, *op.results)))
    if key not in known.staying:
        known.staying[key] = _stays(op, shardings)
    return known.staying[key]


def _stays(op: ir.Operation, shardings: Shardings) -> bool:
    match op.name:
        case "stablehlo.reduce":
            axes = _axes(op.operands[0], shardings)
            return any(axes) and any(axes[dim] for dim in ir.DenseI64ArrayAttr(op.attributes["dimensions"]))
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
