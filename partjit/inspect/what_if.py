"""What a program would send and need if some of its shardings were others, without tracing or lowering it again.

The lowered module of a report is copied, the shardings in it are changed, and they are propagated as before.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.mlir import ir

from partjit.inspect.collectives import total_bytes
from partjit.inspect.inlining import TAG
from partjit.inspect.memory import estimate_memory
from partjit.inspect.predicted import predict
from partjit.inspect.propagation import Partitioned, is_mark, propagated
from partjit.shardy import main_of, nested

__all__ = ["Axes", "Change", "Effect", "what_if"]

Axes = tuple[tuple[str, ...], ...]
"""For each dimension the mesh axes that shard it."""

_CONSTRAINT = "sdy.sharding_constraint"
_TAG = re.compile(rf"{TAG}(\d+)")


@dataclasses.dataclass(frozen=True)
class Change:
    """Other shardings for a program.

    Attributes:
        arguments, results: the axes of arguments and results, by their positions.
        values: the axes that values are constrained to, by their numbers.
        dropped: the numbers of the equations whose constraints are left out.
    """

    arguments: Mapping[int, Axes] = dataclasses.field(default_factory=dict)
    results: Mapping[int, Axes] = dataclasses.field(default_factory=dict)
    values: Mapping[int, Axes] = dataclasses.field(default_factory=dict)
    dropped: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Effect:
    """What a program sends and needs.

    Attributes:
        sent: bytes that a device sends in a step, as far as they are predicted exactly.
        at_most: the same with the upper bounds of what is not.
        peak: bytes on a device at most, estimated.
    """

    sent: float
    at_most: float
    peak: int


def what_if(partitioned: Partitioned, donated: Sequence[bool], change: Change) -> Effect | None:
    """The effect of a change of a unit whose text was kept; None if it cannot be made."""
    if partitioned.module is None or partitioned.lowered is None:
        return None
    with partitioned.module.context:
        module: Any = partitioned.lowered.clone()
        names = [op.operation.attributes["sym_name"].value for op in module.body.operations if _is(op, "sdy.mesh")]
        if "mesh" not in names:  # no sharding names an axis
            return None
        _apply(module, partitioned, change)
        changed = propagated(module, partitioned.unit, partitioned.inlined)
        collectives, unknown = predict(changed)
    sent = total_bytes(collectives).bytes
    bounds = sum((1 if move.times is None else move.times) * move.bytes_at_most for move in unknown)
    return Effect(sent, sent + bounds, estimate_memory(changed, donated, collectives).peak)


def _is(op: ir.Operation | ir.OpView, name: str) -> bool:
    return op.operation.name == name


def _apply(module: ir.Module, partitioned: Partitioned, change: Change) -> None:
    main, unit = main_of(module), partitioned.unit
    hidden = {  # constants and tokens come first
        "arg_attrs": len(main.type.inputs) - len(unit.in_shardings),
        "res_attrs": len(main.type.results) - len(unit.out_shardings),
    }
    for which, specs in (("arg_attrs", change.arguments), ("res_attrs", change.results)):
        attributes = main.operation.attributes
        dicts = [*attributes[which]] if which in attributes else [ir.DictAttr.get({})] * _count(main, which)
        for position, axes in specs.items():
            k = position + hidden[which]
            known = {named.name: named.attr for named in dicts[k]}
            dicts[k] = ir.DictAttr.get({**known, "sdy.sharding": _written(axes)})
        if specs:
            attributes[which] = ir.ArrayAttr.get(dicts)
    operations = nested(module.operation)
    for op in operations if change.dropped else ():
        tags = _TAG.findall(str(op.location)) if op.name == _CONSTRAINT else ()
        if tags and int(tags[-1]) in change.dropped:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
    if change.values:
        for number, value in [*_marked(nested(module.operation))]:
            if number in change.values:
                _constrain(value, change.values[number])


def _count(main: Any, which: str) -> int:
    return len(main.type.inputs if which == "arg_attrs" else main.type.results)


def _marked(operations: Sequence[ir.Operation]) -> Iterator[tuple[int, ir.Value]]:
    for op in operations:
        if is_mark(op):
            numbers = map(int, re.findall(r"\d+", ir.StringAttr(op.attributes["backend_config"]).value))
            yield from zip(numbers, op.operands, strict=True)


def _constrain(value: ir.Value, axes: Axes) -> None:
    owner: Any = value.owner
    is_argument = isinstance(owner, ir.Block)
    where = ir.InsertionPoint.at_block_begin(owner) if is_argument else ir.InsertionPoint.after(owner)
    attributes = {"sharding": _written(axes)}
    made = ir.Operation.create(_CONSTRAINT, [value.type], [value], attributes, loc=ir.Location.unknown(), ip=where)
    value.replace_all_uses_except(made.results[0], made)


def _written(axes: Axes) -> ir.Attribute:
    dims = ", ".join("{" + ", ".join(f'"{axis}"' for axis in dim) + "}" for dim in axes)
    return ir.Attribute.parse(f"#sdy.sharding<@mesh, [{dims}]>")
