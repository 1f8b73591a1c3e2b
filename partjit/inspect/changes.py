"""Other shardings for a partitioned program, without tracing or lowering it again.

The lowered module of a report is copied, the shardings in it are changed, and they are propagated as before.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from partjit.inspect.collectives import total_bytes
from partjit.inspect.inlining import ADDED, TAG, mark
from partjit.inspect.memory import estimate_memory
from partjit.inspect.predicted import predict
from partjit.inspect.propagation import Partitioned, is_mark, propagated
from partjit.shardy import TensorSharding, main_of, nested
from partjit.xla_rewrites import open_captured

__all__ = ["Axes", "Change", "Changed", "Effect", "changed", "distinct_values", "effect_of"]

Axes: TypeAlias = tuple[tuple[str, ...] | None, ...]
"""For each dimension the mesh axes that shard it; None for one that is left to the partitioner."""

_CONSTRAINT = "sdy.sharding_constraint"
_TAG = re.compile(rf"{TAG}(\d+)")


@dataclasses.dataclass(frozen=True)
class Change:
    """Other shardings for a program.

    Attributes:
        arguments, results: the axes of arguments and results, by their positions; None leaves one to the partitioner.
        values: the axes that values are constrained to, by their numbers.
        dropped: the numbers of the equations whose constraints are left out.
    """

    arguments: Mapping[int, Axes | None] = dataclasses.field(default_factory=dict)
    results: Mapping[int, Axes | None] = dataclasses.field(default_factory=dict)
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


def effect_of(partitioned: Partitioned, donated: Sequence[bool], change: Change) -> Effect | None:
    """The effect of a change of a unit whose text was kept; None if it cannot be made."""
    if partitioned.module is None or partitioned.lowered is None:
        return None
    after = changed(partitioned, change).partitioned
    collectives, unknown = predict(after)
    sent = total_bytes(collectives).bytes
    bounds = sum((1 if move.times is None else move.times) * move.bytes_at_most for move in unknown)
    return Effect(sent, sent + bounds, estimate_memory(after, donated, collectives).peak)


@dataclasses.dataclass(frozen=True)
class Changed:
    """A unit that was propagated with other shardings.

    Attributes:
        partitioned: the unit; a value that is constrained has the sharding in which it is computed.
        constrained: the shardings in which such values are used, by their numbers.
    """

    partitioned: Partitioned
    constrained: Mapping[int, TensorSharding]


def changed(partitioned: Partitioned, change: Change) -> Changed:
    """A unit of several devices whose lowered module was kept, propagated again with other shardings."""
    assert partitioned.lowered is not None  # it was kept
    count = len(partitioned.inlined.numbers)
    with partitioned.lowered.context:
        module: Any = partitioned.lowered.clone()
        _require_mesh(module, partitioned.unit.mesh.shape)
        _apply(module, partitioned, change)
        open_captured(module)
        after = propagated(module, partitioned.unit, partitioned.inlined)
    shardings = after.inlined.shardings
    return Changed(after, {number - count: own for number, own in shardings.items() if number >= count})


def _require_mesh(module: ir.Module, shape: Mapping[str, int]) -> None:
    """Adds the mesh, which a module lacks that names none of its axes."""
    meshes = [op.operation for op in module.body.operations if op.operation.name == "sdy.mesh"]
    if not any(ir.StringAttr(mesh.attributes["sym_name"]).value == "mesh" for mesh in meshes):
        axes = [sdy.MeshAxisAttr.get(name, size) for name, size in shape.items()]
        attributes = {"sym_name": ir.StringAttr.get("mesh"), "mesh": sdy.MeshAttr.get(axes)}
        where = ir.InsertionPoint.at_block_begin(module.body)
        ir.Operation.create("sdy.mesh", attributes=attributes, loc=ir.Location.unknown(), ip=where)


def _apply(module: ir.Module, partitioned: Partitioned, change: Change) -> None:
    main, unit = main_of(module), partitioned.unit
    types = {"arg_attrs": [*main.type.inputs], "res_attrs": [*main.type.results]}
    hidden = {  # constants and tokens come first
        "arg_attrs": len(types["arg_attrs"]) - len(unit.in_shardings),
        "res_attrs": len(types["res_attrs"]) - len(unit.out_shardings),
    }
    for which, specs in (("arg_attrs", change.arguments), ("res_attrs", change.results)):
        attributes = main.operation.attributes
        dicts = [*attributes[which]] if which in attributes else [ir.DictAttr.get({})] * len(types[which])
        for position, axes in specs.items():
            k = position + hidden[which]
            known = {named.name: named.attr for named in dicts[k] if named.name != "sdy.sharding"}
            if axes is not None:
                known["sdy.sharding"] = _written(axes, types[which][k].rank)
            dicts[k] = ir.DictAttr.get(known)
        if specs:
            attributes[which] = ir.ArrayAttr.get(dicts)
    for op in nested(module.operation) if change.dropped else ():
        tags = _TAG.findall(str(op.location)) if op.name == _CONSTRAINT else ()
        if tags and int(tags[-1]) in change.dropped:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
    if change.values:
        _constrain(partitioned, [*_marked(nested(module.operation))], change.values)


def distinct_values(partitioned: Partitioned) -> frozenset[int]:
    """The numbers of the values of a unit that a change may constrain: one for each in its lowered module.

    Some equations, such as `stop_gradient`, are no operations: their results are their operands there.
    """
    if partitioned.lowered is None:
        return frozenset(partitioned.inlined.numbers.values())
    first: dict[ir.Value, int] = {}
    for number, value in _marked(nested(partitioned.lowered)):
        first.setdefault(value, number)
    return frozenset(first.values())


def _marked(operations: Sequence[ir.Operation]) -> Iterator[tuple[int, ir.Value]]:
    for op in operations:
        if is_mark(op):
            numbers = map(int, re.findall(r"\d+", ir.StringAttr(op.attributes["backend_config"]).value))
            yield from zip(numbers, op.operands, strict=True)


def _constrain(partitioned: Partitioned, marked: Sequence[tuple[int, ir.Value]], wanted: Mapping[int, Axes]) -> None:
    """Constrains values for those that use them; what these use gets numbers of its own."""
    count, equations = len(partitioned.inlined.numbers), partitioned.inlined.computing
    constrained: dict[ir.Value, ir.Value] = {}
    for number, value in marked:
        if number in wanted:
            tag = f"{ADDED}/{TAG}{equations[number]}" if number in equations else ADDED
            constrained[value] = _constrained(value, wanted[number], tag)
        if value in constrained:
            with _after(constrained[value]), ir.Location.unknown():
                mark([constrained[value]], [count + number])


def _constrained(value: ir.Value, axes: Axes, tag: str) -> ir.Value:
    """What those that use a value use instead."""
    uses = [(use.owner, use.operand_number) for use in value.uses]
    with _after(value), ir.Location.name(tag):
        made = sdy.ShardingConstraintOp(value, _written(axes, ir.RankedTensorType(value.type).rank)).result
    for user, k in uses:
        if not is_mark(user.operation):
            user.operands[k] = made
    return made


def _after(value: ir.Value) -> ir.InsertionPoint:
    owner: Any = value.owner
    is_argument = isinstance(owner, ir.Block)
    return ir.InsertionPoint.at_block_begin(owner) if is_argument else ir.InsertionPoint.after(owner)


def _written(axes: Axes, rank: int) -> ir.Attribute:
    """A sharding; a key has one dimension more in the module than in the program."""
    dims = [
        sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(axis) for axis in dim or ()], is_closed=dim is not None)
        for dim in (*axes, *[()] * (rank - len(axes)))
    ]
    return sdy.TensorShardingAttr.get("mesh", dims)
