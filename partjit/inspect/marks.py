"""Marks: operations that do nothing, by whose operands the values of a program are found in what it is lowered to.

What becomes of the program must not depend on them. Shardy propagates first through operations whose operands have no
other use, and a mark would be one: so marks use nothing meanwhile. And what only marks use is removed before, as jax
and XLA remove it: nothing is known of such values, which nobody computes.

Source: `op_priority_propagation.cc` of Shardy.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jax.extend.core import Effect, Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir

from partjit._jax.effects import register_effect
from partjit._jax.lowering import custom_call
from partjit.shardy import nested

__all__ = [
    "MARK",
    "hidden_marks",
    "is_mark",
    "mark",
    "mark_effect",
    "mark_p",
    "marked_values",
    "numbers_of",
    "remove_unused_values",
]

MARK = "partjit.mark"
"""The call target of the operation that a mark is lowered to."""

_CALL = "stablehlo.custom_call"
_EFFECTS = tuple(f"stablehlo.{name}" for name in ("custom_call", "infeed", "outfeed", "send", "recv", "rng"))


class _MarkEffect(Effect):  # type: ignore[misc]  # jax gives the base class no types
    """Keeps marks from being eliminated."""

    def __str__(self) -> str:
        return "Mark"


register_effect(_MarkEffect)
mark_effect = _MarkEffect()
mark_p = Primitive("mark")
mark_p.multiple_results = True
mark_p.def_effectful_abstract_eval(lambda *_, **__: ([], {mark_effect}))


def mark(values: Sequence[ir.Value], numbers: Sequence[int]) -> None:
    """Adds a mark of values with these numbers to a module."""
    config = ",".join(map(str, numbers))
    custom_call(MARK, result_types=[], operands=values, backend_config=config, has_side_effect=True)


def _lower_mark(_: mlir.LoweringRuleContext, *values: ir.Value, numbers: tuple[int, ...]) -> Sequence[ir.Value]:
    mark(mlir.ir_tree_registry.flatten(values)[0], numbers)
    return []


mlir.register_lowering(mark_p, _lower_mark, cacheable=False)


def is_mark(op: ir.Operation) -> bool:
    """Whether an operation is a mark, whose operands are values with numbers."""
    return op.name == _CALL and ir.StringAttr(op.attributes["call_target_name"]).value == MARK


def numbers_of(mark: ir.Operation) -> list[int]:
    """The numbers of the values of a mark."""
    return [int(number) for number in ir.StringAttr(mark.attributes["backend_config"]).value.split(",") if number]


def marked_values(operations: Sequence[ir.Operation]) -> Iterator[tuple[int, ir.Value]]:
    """The values that are marked, with their numbers.

    Those of some equations, such as `stop_gradient`, are the same: they are no operations.
    """
    for op in operations:
        if is_mark(op):
            yield from zip(numbers_of(op), op.operands, strict=True)


def remove_unused_values(module: ir.Module) -> None:
    """Removes the operations of a lowered module whose results nothing uses but marks, and the marks of these."""
    ops = nested(module.operation)
    marks = [op for op in ops if is_mark(op)]
    unused = [*_unused(ops, marks)]
    if not unused:
        return
    gone = {*unused}
    for one in marks:
        values, numbers = [*one.operands], numbers_of(one)
        kept = [k for k, value in enumerate(values) if _owner(value) not in gone]
        if len(kept) < len(values):
            with ir.InsertionPoint(one), one.location:
                mark([values[k] for k in kept], [numbers[k] for k in kept])
            one.erase()
    for op in unused:
        op.erase()


@contextlib.contextmanager
def hidden_marks(module: ir.Module) -> Iterator[None]:
    """In which marks use nothing that the program uses, whose operations have to stay what they are."""
    ops = nested(module.operation)
    hidden: list[tuple[ir.Operation, int, ir.Value]] = []
    scalars: list[ir.Operation] = []  # what marks use instead, of which Shardy ignores the uses
    for op in filter(is_mark, ops):
        values = [*op.operands]
        if values:
            scalars.append(_scalar_before(op))
        for k, value in enumerate(values):
            hidden.append((op, k, value))
            op.operands[k] = scalars[-1].results[0]
    unused = {*_unused(ops)}  # such as what Shardy has copied for a mark: it would be removed
    for op, k, value in hidden:
        if _owner(value) in unused:
            op.operands[k] = value
    kept = [scalar for scalar in scalars if next(iter(scalar.results[0].uses), None) is not None]
    for scalar in {*scalars} - {*kept}:
        scalar.erase()
    yield
    for op, k, value in hidden:
        if _owner(value) not in unused:
            op.operands[k] = value
    for scalar in kept:
        scalar.erase()


def _scalar_before(op: ir.Operation) -> ir.Operation:
    with ir.InsertionPoint(op), ir.Location.unknown(op.context):
        number = ir.FloatAttr.get_f32(0.0)
        value = ir.DenseElementsAttr.get_splat(ir.RankedTensorType.get((), number.type), number)
        return ir.Operation.create("stablehlo.constant", [value.type], attributes={"value": value})


def _unused(ops: Sequence[ir.Operation], ignored: Collection[ir.Operation] = ()) -> Iterator[ir.Operation]:
    """The operations that nothing uses but those that are ignored, the last ones first, without what is in them.

    Args:
        ops: the operations of a module, each after those in it.
        ignored: users that do not count.
    """
    used: set[ir.Value] = set()
    passed_over = {*ignored}
    for op in reversed(ops):  # users first, and before what is in them
        if op in passed_over:
            continue
        results = op.results
        if len(results) and used.isdisjoint(results):
            both = (op, *nested(op)) if len(op.regions) else (op,)
            if not any(one.name in _EFFECTS for one in both):
                passed_over.update(both)
                yield op
                continue
        used.update(op.operands)


def _owner(value: ir.Value) -> ir.Operation | None:
    owner: Any = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation
