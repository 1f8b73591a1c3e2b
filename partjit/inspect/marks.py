"""Marks: operations that do nothing, by whose operands the values of a program are found in what it is lowered to.

What becomes of the program must not depend on them. Shardy propagates first through operations whose operands have no
other use, and a mark would be one: so marks use nothing meanwhile. And what only marks use is removed before, as jax
and XLA remove it: nothing is known of such values, which nobody computes.

Source: `op_priority_propagation.cc` of Shardy.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence

from jax.extend.core import Effect, JaxprEqn, Primitive, Var
from jax.extend.mlir import ir
from jax.interpreters import mlir

from partjit._jax.effects import register_effect
from partjit._jax.jaxprs import Atom
from partjit._jax.lowering import custom_call
from partjit.shardy import nested
from partjit.xla_effects import has_effect

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
    "without_unused",
]

MARK = "partjit.mark"
"""The call target of the operation that a mark is lowered to."""

_CALL = "stablehlo.custom_call"


class _MarkEffect(Effect):  # type: ignore[misc]  # jax gives the base class no types
    """Keeps marks from being eliminated."""

    def __str__(self) -> str:
        return "Mark"


register_effect(_MarkEffect)
mark_effect = _MarkEffect()
mark_p = Primitive("mark")
mark_p.multiple_results = True
mark_p.def_effectful_abstract_eval(lambda *_, **__: ([], {mark_effect}))


def mark(values: Sequence[ir.Value], numbers: Sequence[int]) -> ir.Operation:
    """Adds a mark of values with these numbers to a module."""
    return _mark(values, ",".join(map(str, numbers)))


def _mark(values: Sequence[ir.Value], config: str) -> ir.Operation:
    return custom_call(MARK, result_types=[], operands=values, backend_config=config, has_side_effect=True).operation


def _lower_mark(_: mlir.LoweringRuleContext, *values: ir.Value, numbers: tuple[int, ...]) -> Sequence[ir.Value]:
    mark(mlir.ir_tree_registry.flatten(values)[0], numbers)
    return []


mlir.register_lowering(mark_p, _lower_mark, cacheable=False)


def is_mark(op: ir.Operation) -> bool:
    """Whether an operation is a mark, whose operands are values with numbers."""
    return op.name == _CALL and ir.StringAttr(op.attributes["call_target_name"]).value == MARK


def numbers_of(mark: ir.Operation) -> list[int]:
    """The numbers of the values of a mark."""
    return [int(number) for number in _config_of(mark).split(",") if number]


def _config_of(mark: ir.Operation) -> str:
    return ir.StringAttr(mark.attributes["backend_config"]).value


def marked_values(operations: Sequence[ir.Operation]) -> Iterator[tuple[int, ir.Value]]:
    """The values that are marked, with their numbers.

    Those of some equations, such as `stop_gradient`, are the same: they are no operations.
    """
    for op in operations:
        if is_mark(op):
            yield from zip(numbers_of(op), op.operands, strict=True)


def without_unused(eqns: Sequence[JaxprEqn], outvars: Sequence[Atom]) -> tuple[list[JaxprEqn], set[Var]]:
    """The equations of a jaxpr whose results are used, or that have effects; and the results of the others.

    jax and XLA leave those out. What remains unused in what they are lowered to, `remove_unused_values` removes.
    """
    used, unused = {atom for atom in outvars if isinstance(atom, Var)}, set[Var]()
    kept: list[JaxprEqn] = []
    for eqn in reversed(eqns):
        if used.isdisjoint(eqn.outvars) and not {*eqn.effects} - {mark_effect}:
            unused.update(eqn.outvars)
        else:
            kept.append(eqn)
            used.update([atom for atom in eqn.invars if isinstance(atom, Var)])
    return kept[::-1], unused


def remove_unused_values(module: ir.Module) -> None:
    """Removes the operations of a lowered module whose results nothing uses but marks, and these from the marks."""
    ops = nested(module.operation)
    held = _hold(ops)
    gone: set[ir.Value] = set()
    k = len(ops)
    while k:  # users first, and before what is in them
        k -= 1
        results = ops[k].results
        if len(results) and not any(map(_has_user, results)):
            inside = nested(ops[k]) if len(ops[k].regions) else []
            if not any(map(has_effect, (ops[k], *inside))):
                gone.update(results)
                ops[k].erase()
                k -= len(inside)
    for one in held:
        one.release(gone)


@contextlib.contextmanager
def hidden_marks(module: ir.Module) -> Iterator[None]:
    """In which marks use nothing that the program uses, whose operations have to stay what they are."""
    held = _hold(nested(module.operation))
    for one in held:
        one.keep_unused()  # such as what Shardy has copied for a mark: it would be removed
    yield
    for one in held:
        one.release()


class _Held:
    """A mark that uses nothing: another one, without operands, has its place meanwhile."""

    def __init__(self, op: ir.Operation) -> None:
        self._values, self._config = [*op.operands], _config_of(op)
        self.place = _replaced(op, (), "")

    def keep_unused(self) -> None:
        """Uses the values that nothing else uses."""
        self.place = _replaced(self.place, [value for value in self._values if not _has_user(value)], "")

    def release(self, gone: Collection[ir.Value] = ()) -> None:
        """Uses all values again, but those that are gone."""
        values, config = self._values, self._config
        kept = [k for k, value in enumerate(values) if value not in gone] if gone else []
        if gone and len(kept) < len(values):
            numbers = config.split(",")
            values, config = [values[k] for k in kept], ",".join([numbers[k] for k in kept])
        _replaced(self.place, values, config)


def _replaced(op: ir.Operation, values: Sequence[ir.Value], config: str) -> ir.Operation:
    """A mark of these values in place of another one."""
    with ir.InsertionPoint(op), op.location:
        made = _mark(values, config)
    op.erase()
    return made


def _hold(ops: list[ir.Operation]) -> list[_Held]:
    """Holds the marks among operations, which are replaced in the list."""
    held = []
    for k, op in enumerate(ops):
        if is_mark(op):
            held.append(_Held(op))
            ops[k] = held[-1].place
    return held


def _has_user(value: ir.Value) -> bool:
    return next(iter(value.uses), None) is not None
