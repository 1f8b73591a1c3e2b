"""What a lowered program computes and does not use, which XLA removes.

jax itself removes what no equation uses, but not what calls, loops and branches compute for results that are not used.

Source: `HloDCE`, `WhileLoopSimplifier` and `ConditionalSimplifier` of XLA.
"""

import math
from collections.abc import Iterator, Sequence, Set
from typing import Any

from jax.extend.mlir import ir

from partjit.inspect.walk import Walk
from partjit.shardy import nested
from partjit.xla_effects import has_effect

__all__ = ["remove_unused", "unused_in_copies"]


def remove_unused(walk: Walk, known: Set[ir.Attribute] | None = None) -> Walk:
    """Removes what is computed for nothing: carried values of loops that serve themselves alone, and operations.

    Args:
        walk: the operations of a module.
        known: what may be unused, if that is known; see `unused_in_copies`.

    Returns:
        The operations that are left.
    """
    if known is not None:
        return _without(walk, known)
    removal = _Removal(walk)
    left = walk.without(removal.run())
    for op in removal.found:  # at last: what refers to an operation that is erased cannot be used any more
        op.erase()
    return left


def unused_in_copies(module: Any) -> Set[ir.Attribute] | None:
    """The operations that may be unused in copies of a module without marks, whatever the shardings in these.

    These are the ones that nothing uses, and what Shardy copies for each use.

    Args:
        module: the module, of whose operations each has a location of its own. It is changed.

    Returns:
        The locations of the operations; None if they are not all that is to be removed.
    """
    ops = nested(module.operation)
    removal = _Removal(Walk(ops, [op.name for op in ops], {}))
    removal.run()
    copied = (op for op in _computed_anew(ops) if not removal.has_effect(op))
    return None if removal.replaces else {op.location.attr for op in (*removal.found, *copied)}


def _without(walk: Walk, known: Set[ir.Attribute]) -> Walk:
    """The operations that are left without those of these places, and reshards, that nothing uses."""
    ops, names, k = list[ir.Operation](), list[str](), len(walk.ops) - 1
    while k >= 0:  # users first
        op, name = walk.ops[k], walk.names[k]
        may_be = name in _RESHARDS or op.location.attr in known
        if may_be and (results := op.results) and not any(map(_has_user, results)):
            k -= len(_inside(op))
            op.erase()
        else:
            ops.append(op)
            names.append(name)
        k -= 1
    return Walk(ops[::-1], names[::-1], walk.shardings)


def _computed_anew(ops: Sequence[ir.Operation]) -> Iterator[ir.Operation]:
    """What Shardy may copy for each use: constants and scalars, and what is computed from these alone."""
    such: set[ir.Value] = set()
    for op in ops:
        if len(op.results) and all(value in such or _is_scalar(value) for value in op.operands):
            such.update(op.results)
            yield op


def _is_scalar(value: Any) -> bool:
    return isinstance(value.type, ir.RankedTensorType) and math.prod(value.type.shape) == 1


class _Removal:
    """The removal of what is not used.

    Attributes:
        found: the operations to be erased, those in them left out.
        replaces: whether loops and functions return something else now.
    """

    def __init__(self, walk: Walk) -> None:
        self._functions: dict[str, ir.Operation] = {}
        self._passing: list[ir.Operation] = []  # loops and conditionals, inner ones first
        self._calls: dict[str, list[ir.Operation]] = {}
        self._effects: dict[str, bool] = {}
        self._inside: dict[ir.Operation, Sequence[ir.Operation]] = {}  # of what has regions, which is asked for often
        self._have_effects: dict[ir.Operation, bool] = {}
        roots = [op for op in walk.ops if (results := op.results) and not any(map(_has_user, results))]
        self._roots = roots[::-1]  # users first
        unused = {*roots}
        for op in walk.named("stablehlo.while", _CASE, "func.call", "func.func"):
            match op.name:
                case "stablehlo.while" | "stablehlo.case" if op.name == _CASE or op not in unused:
                    self._passing.append(op)
                case "func.call" if op not in unused:
                    self._calls.setdefault(_callee(op), []).append(op)
                case "func.func":
                    self._functions[ir.StringAttr(op.attributes["sym_name"]).value] = op
        self._unused: set[ir.Operation] = set()
        self.found: list[ir.Operation] = []
        self.replaces = False

    def run(self) -> Set[ir.Operation]:
        """Finds what is to be erased; returns that with all that is in it."""
        for op in self._roots:
            self._find(op)
        for op in reversed(self._passing):
            self._drop_passed(op)
        # Before jax 0.11 the bodies of loops are functions, and the loops in them come in any order.
        while any([*map(self._drop_results, self._calls)]):
            for op in self._passing:
                self._drop_passed(op)
        return self._unused

    def _drop_passed(self, op: ir.Operation) -> None:
        if op.name == _CASE:
            self._drop_branch_results(op)
        else:
            self._drop_carries(op)

    def _drop_branch_results(self, conditional: ir.Operation) -> None:
        """Lets the branches of a conditional return zeros for results that are not used."""
        if conditional in self._unused:
            return
        for k, result in enumerate(conditional.results):
            if self._is_used(result) or not isinstance(result.type, ir.RankedTensorType):
                continue
            zero = _ZEROS.get(str(result.type.element_type)[0])
            for end in map(_end, conditional.regions):
                if zero is None or _is_constant(end.operands[k]):
                    continue
                with conditional.context, conditional.location, ir.InsertionPoint(end):
                    value = ir.Attribute.parse(f"dense<{zero}> : {result.type}")
                    made = ir.Operation.create("stablehlo.constant", [result.type], [], {"value": value})
                self._replace(end, k, made.results[0])

    def _drop_carries(self, loop: ir.Operation) -> None:
        """Lets a loop pass on what it carries for nothing."""
        if loop in self._unused or all(map(self._is_used, loop.results)):
            return
        end, body = _end(loop.regions[1]), loop.regions[1].blocks[0]
        for k in self._unused_carries(loop):
            self._replace(end, k, body.arguments[k])

    def _drop_results(self, name: str) -> bool:
        """Lets a function return an argument where no caller uses the result; whether there was such a result."""
        body, calls = self._functions[name].regions[0].blocks[0], self._calls[name]
        end, dropped = _end(self._functions[name].regions[0]), False
        for k, value in enumerate(end.operands):
            if isinstance(value.owner, ir.Block) or any(self._is_used(call.results[k]) for call in calls):
                continue
            same = [argument for argument in body.arguments if argument.type == value.type]
            if same:
                self._replace(end, k, same[0])
                dropped = True
        return dropped

    def _replace(self, end: ir.Operation, k: int, value: ir.Value) -> None:
        maker = end.operands[k].owner
        end.operands[k] = value
        self.replaces = True
        if not isinstance(maker, ir.Block):
            self._find(maker.operation)

    def _is_used(self, value: ir.Value) -> bool:
        return any(use.owner.operation not in self._unused for use in value.uses)

    def _find(self, op: ir.Operation) -> None:
        """Notes an operation if it is not used, and then those that only it has used."""
        candidates = [op]
        while candidates:
            op = candidates.pop()
            if op in self._unused or any(map(self._is_used, op.results)):
                continue
            if self.has_effect(op):
                continue
            both = (op, *self._nested(op))
            self.found.append(op)
            self._unused.update(both)
            makers = [value.owner for one in both for value in one.operands]
            candidates += [maker.operation for maker in makers if not isinstance(maker, ir.Block)]

    def has_effect(self, op: ir.Operation) -> bool:
        """Whether an operation, or one in its regions, does more than to compute its results."""
        if not len(op.regions):
            return self._is_effect(op)
        if op not in self._have_effects:
            self._have_effects[op] = any(map(self._is_effect, (op, *self._nested(op))))
        return self._have_effects[op]

    def _nested(self, op: ir.Operation) -> Sequence[ir.Operation]:
        """The operations in the regions of an operation."""
        if not len(op.regions):
            return ()
        if op not in self._inside:
            self._inside[op] = nested(op)
        return self._inside[op]

    def _is_effect(self, op: ir.Operation) -> bool:
        if op.name != "func.call":
            return has_effect(op)
        name = _callee(op)
        if name not in self._effects:
            self._effects[name] = self.has_effect(self._functions[name])
        return self._effects[name]

    def _unused_carries(self, loop: ir.Operation) -> list[int]:
        """The values that a loop carries for their own next values alone."""
        cond, body = (region.blocks[0] for region in loop.regions)
        end = _end(loop.regions[1])
        used = {k for k, result in enumerate(loop.results) if self._is_used(result) or self._is_used(cond.arguments[k])}
        values = [end.operands[k] for k in used]
        for op in body.operations:
            if (not op.results and op.operation != end) or self.has_effect(op.operation):
                values += self._needed(op.operation)
        seen, whole = set[ir.Value](), set[ir.Operation]()  # the operations of which all results need the same
        # What comes from outside is computed there, from no results of the loop but those that are used.
        inside = {*self._nested(loop)} if len(self._functions) == 1 else None
        while values:
            value = values.pop()
            if value in seen:
                continue
            seen.add(value)
            owner: Any = value.owner
            if not isinstance(owner, ir.Block):
                op = owner.operation
                if inside is not None and op not in inside:
                    continue
                if op.name in _PER_RESULT and not self.has_effect(op):
                    values += self._needed_for(op, ir.OpResult(value).result_number)
                elif len(op.results) == 1 or op not in whole:
                    whole.add(op)
                    values += self._needed(op)
            elif owner == body:
                k = ir.BlockArgument(value).arg_number
                used.add(k)
                values.append(end.operands[k])
            elif (outer := owner.owner.operation).name == "stablehlo.while" and (inside is None or outer in inside):
                values += _of_iteration(outer, ir.BlockArgument(value).arg_number)
            elif outer.name == "func.func":
                calls = self._calls.get(ir.StringAttr(outer.attributes["sym_name"]).value, ())
                values += [call.operands[ir.BlockArgument(value).arg_number] for call in calls]
        return [k for k in range(len(loop.results)) if k not in used]

    def _needed_for(self, op: ir.Operation, number: int) -> Sequence[ir.Value]:
        """The values that a result of a loop or call without effects is computed from."""
        if op.name == "func.call":
            return [_end(self._functions[_callee(op)].regions[0]).operands[number]]
        return [*_of_iteration(op, number), *_end(op.regions[0]).operands]

    def _needed(self, op: ir.Operation) -> list[ir.Value]:
        """The values that an operation uses, those in its regions included."""
        values = [*op.operands]
        for inner in self._nested(op):
            values += inner.operands
        return values


_CASE = "stablehlo.case"
_ZEROS = {"f": "0.0", "b": "0.0", "i": "0", "u": "0"}
"""By the first letter of the name of a type."""
_PER_RESULT = ("func.call", "stablehlo.while")
"""The operations whose results need different values."""


def _has_user(value: ir.Value) -> bool:
    return next(iter(value.uses), None) is not None


def _is_constant(value: ir.Value) -> bool:
    return not isinstance(value.owner, ir.Block) and value.owner.name == "stablehlo.constant"


def _callee(call: ir.Operation) -> str:
    return ir.FlatSymbolRefAttr(call.attributes["callee"]).value


def _end(region: ir.Region) -> Any:
    operations = region.blocks[0].operations
    return operations[len(operations) - 1].operation


def _of_iteration(loop: ir.Operation, number: int) -> Iterator[ir.Value]:
    """What a carried value is before the loop, and after an iteration."""
    yield loop.operands[number]
    yield _end(loop.regions[1]).operands[number]


def _inside(op: ir.Operation) -> Sequence[ir.Operation]:
    """The operations in the regions of an operation; most have none."""
    return nested(op) if len(op.regions) else ()


_RESHARDS = ("sdy.reshard", "sdy.sharding_constraint")
