"""What a lowered program computes and does not use, which XLA removes.

jax itself removes what no equation uses, but not what calls, loops and branches compute for results that are not used.

Before jax 0.11 the body of a loop is a function of its own, all of whose results count as used here.

Source: `HloDCE` and `WhileLoopSimplifier` of XLA.
"""

from collections.abc import Iterator
from typing import Any

from jax.extend.mlir import ir

from partjit.shardy import nested

__all__ = ["remove_unused"]


def remove_unused(module: ir.Module) -> None:
    """Removes what is computed for nothing: carried values of loops that serve themselves alone, and operations."""
    _Removal(module).run()


class _Removal:
    def __init__(self, module: ir.Module) -> None:
        self._functions: dict[str, ir.Operation] = {}
        self._loops: list[ir.Operation] = []  # inner ones first
        roots = []
        for op in nested(module.operation):
            operation = op.operation
            results = operation.results
            if len(results) and not any(next(iter(result.uses), None) for result in results):
                roots.append(operation)
            elif (name := operation.name) == "stablehlo.while":
                self._loops.append(operation)
            elif name == "func.func":
                self._functions[ir.StringAttr(operation.attributes["sym_name"]).value] = operation
        self._roots = roots[::-1]  # users first
        self._effects: dict[str, bool] = {}
        self._unused: set[ir.Operation] = set()
        self._found: list[ir.Operation] = []

    def run(self) -> None:
        for op in self._roots:
            self._find(op)
        for loop in reversed(self._loops):
            if loop in self._unused or all(map(self._is_used, loop.results)):
                continue
            end, body = _end(loop.regions[1]), loop.regions[1].blocks[0]
            for k in self._unused_carries(loop):
                maker = end.operands[k].owner
                end.operands[k] = body.arguments[k]
                if not isinstance(maker, ir.Block):
                    self._find(maker.operation)
        for op in self._found:  # at last: what refers to an operation that is erased cannot be used any more
            op.erase()

    def _is_used(self, value: ir.Value) -> bool:
        return any(use.owner.operation not in self._unused for use in value.uses)

    def _find(self, op: ir.Operation) -> None:
        """Notes an operation if it is not used, and then those that only it has used."""
        candidates = [op]
        while candidates:
            op = candidates.pop()
            if op in self._unused or any(map(self._is_used, op.results)) or self._has_effect(op):
                continue
            self._found.append(op)
            self._unused |= {op, *(inner.operation for inner in nested(op))}
            candidates += [value.owner.operation for value in _needed(op) if not isinstance(value.owner, ir.Block)]

    def _has_effect(self, op: ir.Operation) -> bool:
        """Whether an operation, or one in its regions, does more than to compute its results."""
        return self._is_effect(op) or any(self._is_effect(inner.operation) for inner in nested(op))

    def _is_effect(self, op: ir.Operation) -> bool:
        if op.name != "func.call":
            return op.name in _EFFECTS
        name = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
        if name not in self._effects:
            self._effects[name] = self._has_effect(self._functions[name])
        return self._effects[name]

    def _unused_carries(self, loop: ir.Operation) -> list[int]:
        """The values that a loop carries for their own next values alone."""
        cond, body = (region.blocks[0] for region in loop.regions)
        end = _end(loop.regions[1])
        used = {k for k, result in enumerate(loop.results) if self._is_used(result) or self._is_used(cond.arguments[k])}
        values = [end.operands[k] for k in used]
        for op in body.operations:
            if (not op.results and op.operation != end) or self._has_effect(op.operation):
                values += _needed(op.operation)
        seen = set()
        while values:
            value = values.pop()
            if value in seen:
                continue
            seen.add(value)
            owner: Any = value.owner
            if not isinstance(owner, ir.Block):
                values += self._needed_for(owner.operation, ir.OpResult(value).result_number)
            elif owner == body:
                k = ir.BlockArgument(value).arg_number
                used.add(k)
                values.append(end.operands[k])
            elif owner.owner.operation.name == "stablehlo.while":
                values += _of_iteration(owner.owner.operation, ir.BlockArgument(value).arg_number)
        return [k for k in range(len(loop.results)) if k not in used]

    def _needed_for(self, op: ir.Operation, number: int) -> Iterator[ir.Value]:
        """The values that a result of an operation is computed from."""
        if op.name != "stablehlo.while" or self._has_effect(op):
            yield from _needed(op)
            return
        yield from _of_iteration(op, number)
        yield from _end(op.regions[0]).operands


def _end(region: ir.Region) -> Any:
    operations = region.blocks[0].operations
    return operations[len(operations) - 1].operation


def _of_iteration(loop: ir.Operation, number: int) -> Iterator[ir.Value]:
    """What a carried value is before the loop, and after an iteration."""
    yield loop.operands[number]
    yield _end(loop.regions[1]).operands[number]


def _needed(op: ir.Operation) -> Iterator[ir.Value]:
    """The values that an operation uses, those in its regions included."""
    yield from op.operands
    for inner in nested(op):
        yield from inner.operation.operands


_EFFECTS = tuple(f"stablehlo.{name}" for name in ("custom_call", "infeed", "outfeed", "send", "recv", "rng"))
