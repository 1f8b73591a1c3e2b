"""What a loop of a lowered program computes anew in each iteration; XLA moves the rest out of the loop.

Source: `WhileLoopInvariantCodeMotion` of XLA.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.mlir import ir

from partjit.inspect.moves.moved import moved_by
from partjit.shardy import nested

__all__ = ["varying"]


def varying(
    loop: ir.Operation, functions: Mapping[str, ir.Operation], calls: Mapping[str, Sequence[tuple[str, ir.Operation]]]
) -> set[ir.Operation]:
    """The operations in a loop, and in functions called there, that may compute something else in each iteration."""
    found: set[ir.Operation] = set()
    values, seen = [*_arguments(loop)], set()
    for op in _with_callees(loop, functions):
        if op.name in _KEPT and moved_by(op) is None:
            found.add(op)
            values += [*op.results, *_arguments(op)]
    while values:
        value = values.pop()
        if value in seen:
            continue
        seen.add(value)
        for use in value.uses:
            op: Any = use.owner.operation
            found.add(op)
            if op.name == "func.call":
                values.append(
                    functions[op.attributes["callee"].value].regions[0].blocks[0].arguments[use.operand_number]
                )
            elif op.name == "func.return":
                name = ir.StringAttr(op.parent.attributes["sym_name"]).value
                values += [call.results[use.operand_number] for _, call in calls.get(name, ())]
            else:
                values += op.results
    return found


_KEPT = tuple(f"stablehlo.{name}" for name in ("custom_call", "rng", "while", "case", "if"))
"""Of these XLA moves none out of a loop."""


def _arguments(op: ir.Operation) -> Iterator[ir.Value]:
    for region in op.regions:
        for block in region.blocks:
            yield from block.arguments


def _with_callees(op: ir.Operation, functions: Mapping[str, ir.Operation]) -> Iterator[ir.Operation]:
    for inner in nested(op):
        yield inner
        if inner.name == "func.call":
            yield from _with_callees(functions[ir.FlatSymbolRefAttr(inner.attributes["callee"]).value], functions)
