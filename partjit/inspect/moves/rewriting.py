"""The lowered program, with what XLA's partitioner does for an operation written out.

Each operation that has a model becomes an opaque call between reshards; Shardy makes collectives of the reshards, as it
does of all others, and leaves the call alone. What XLA moves besides is found by the number of the call.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from partjit.inspect.moves.model import Model, Operation, Tensor, Unmodelled, element_type
from partjit.inspect.moves.table import MODELS
from partjit.shardy import Shardings, TensorSharding, nested

__all__ = ["Moved", "moved_by", "write_out"]

_CALL = "partjit.moves"


@dataclasses.dataclass(frozen=True, eq=False)
class Moved:
    """An operation that XLA's partitioner moves data for.

    Attributes:
        name: of the operation: `stablehlo.slice`.
        model: how; None if that is not modelled.
        bound: bytes that a device sends at most if there is no model.
    """

    name: str
    model: Model | None
    bound: int


def write_out(module: ir.Module, shardings: Shardings, primitive_of: Callable[[ir.Operation], str]) -> list[Moved]:
    """Replaces the operations of a propagated module that have a model.

    Args:
        module: the module.
        shardings: its shardings.
        primitive_of: the primitive that an operation was lowered from, or the empty string.

    Returns:
        What was replaced; `moved_by` gives the number of each call in it.
    """
    candidates = [op.operation for op in nested(module.operation) if op.operation.name in MODELS]
    # All models first: some look at the operations that compute their operands.
    modelled = [(op, found) for op in candidates if (found := _modelled(op, shardings, primitive_of)) is not None]
    reshards: list[sdy.ReshardOp] = []
    for number, (op, (operation, moved)) in reversed([*enumerate(modelled)]):
        if _is_used(op):
            _replace(op, operation, moved, number, reshards)
        else:
            op.erase()
    _fold(reshards, shardings)
    return [moved for _, (_, moved) in modelled]


def _is_used(op: ir.Operation) -> bool:
    return any(next(iter(result.uses), None) for result in op.results)


def _fold(reshards: Sequence[sdy.ReshardOp], shardings: Shardings) -> None:
    """XLA remembers what it has resharded: there and back is nothing."""
    made: dict[ir.Value, sdy.ReshardOp] = {reshard.result: reshard for reshard in reshards}
    for reshard in reshards:
        before = made.get(reshard.input)
        if before is not None and shardings.of(before.input) == shardings.of(reshard.result):
            reshard.result.replace_all_uses_with(before.input)
    for reshard in reshards:
        if not _is_used(reshard.operation):
            reshard.operation.erase()


def moved_by(op: ir.Operation) -> int | None:
    """The number of what an operation stands for, if it is a call that `write_out` made."""
    if op.name != "stablehlo.custom_call" or ir.StringAttr(op.attributes["call_target_name"]).value != _CALL:
        return None
    return int(ir.StringAttr(op.attributes["backend_config"]).value)


def _modelled(
    op: ir.Operation, shardings: Shardings, primitive_of: Callable[[ir.Operation], str]
) -> tuple[Operation, Moved] | None:
    operands, results = (tuple(_tensors(values, shardings)) for values in (op.operands, op.results))
    if not any(tensor.is_sharded for tensor in (*operands, *results)) or not all(r.nbytes for r in results):
        return None
    if any(tensor.sharding.mesh != "mesh" for tensor in (*operands, *results) if tensor.is_sharded):
        return None
    operation = Operation(op, operands, results, primitive_of(op))
    try:
        model = MODELS[op.name](operation)
    except Unmodelled:
        return operation, Moved(op.name, None, _bound(operation))
    return None if model is None else (operation, Moved(op.name, model, 0))


def _bound(op: Operation) -> int:
    """Every operand gathered on all devices, and every result reduced over them."""
    return sum(tensor.nbytes for tensor in op.operands if tensor.is_sharded) + 2 * sum(t.nbytes for t in op.results)


def _tensors(values: ir.OpOperandList | ir.OpResultList, shardings: Shardings) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value.type, ir.RankedTensorType):
            shape, itemsize, dtype = element_type(value)
            yield Tensor(shape, dtype, itemsize, shardings.of(value) or TensorSharding.replicated(len(shape)))


def _replace(op: ir.Operation, operation: Operation, moved: Moved, number: int, reshards: list[sdy.ReshardOp]) -> None:
    """Replaces an operation, and adds the reshards that this takes."""
    model = moved.model or operation.model()
    with op.context, op.location, ir.InsertionPoint(op):

        def reshard(value: ir.Value, sharding: TensorSharding) -> ir.Value:
            reshards.append(sdy.ReshardOp(value, _attribute(sharding)))
            return reshards[-1].result

        absorbed: list[Any] = [value.owner for value in op.operands] if model.absorbs else []
        operands = [owner.operands[0] for owner in absorbed] or [*op.operands]
        operands = [
            functools.reduce(reshard, chain, value) for value, chain in zip(operands, model.operands, strict=True)
        ]
        local = [
            tensor.sharding if sharding is None else sharding
            for tensor, sharding in zip(operation.results, model.results, strict=True)
        ]
        call = ir.Operation.create(
            "stablehlo.custom_call",
            results=[result.type for result in op.results],
            operands=operands,
            attributes={
                "call_target_name": ir.StringAttr.get(_CALL),
                "backend_config": ir.StringAttr.get(str(number)),
                "sdy.sharding": sdy.TensorShardingPerValueAttr.get([*map(_attribute, local)]),
            },
        )
        for old, new, tensor, sharding in zip(op.results, call.results, operation.results, local, strict=True):
            old.replace_all_uses_with(new if sharding == tensor.sharding else reshard(new, tensor.sharding))
    op.erase()


def _attribute(sharding: TensorSharding) -> ir.Attribute:
    dims = ["{" + ", ".join(map(_reference, axes)) + "}" for axes in sharding.axes]
    return ir.Attribute.parse(f"#sdy.sharding<@mesh, [{', '.join(dims)}]>")


def _reference(axis: str) -> str:
    name, _, part = axis.partition(":")
    return f'"{name}"' + (f":{part}" if part else "")
