"""The collectives that the shardings of a program require, before it is compiled.

Shardy inserts all-reduces and reshards into the propagated module; `partjit.inspect.moves` models how XLA reshards, and
what else it moves; collectives in the body of a `shard_map` are there already. XLA may do better afterwards: it
combines several of one kind, turns an all-reduce of which each device needs a shard into a reduce-scatter, and moves
loop-invariant ones out of loops.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax.extend.mlir import ir
from jax.sharding import Mesh

from partjit.inspect.collectives import KINDS, Collective, UnknownMove, in_branch
from partjit.inspect.device_groups import DeviceGroups
from partjit.inspect.hlo.device_groups import groups_over
from partjit.inspect.loop_invariance import varying
from partjit.inspect.lowered_loops import trip_count_of_lowered
from partjit.inspect.moves.callbacks import reshard_callbacks
from partjit.inspect.moves.merging import merge, remove_reversals
from partjit.inspect.moves.model import Tensor, element_type, elements
from partjit.inspect.moves.moved import Moved, moved_by
from partjit.inspect.moves.resharding import reshard
from partjit.inspect.moves.rewriting import Writing
from partjit.inspect.moves.tiles import Step, tiles_of
from partjit.inspect.moves.unused import remove_unused
from partjit.inspect.places import Known, Origin
from partjit.inspect.propagation import Partitioned, PropagatedModule
from partjit.inspect.times import ONCE, Branches, Times
from partjit.inspect.walk import Walk
from partjit.inspect.why.dataflow import reachable
from partjit.inspect.wider_types import widened, widening
from partjit.shardy import Shardings, TensorSharding, insert_reshards, nested

__all__ = ["Prediction", "predict", "predict_of"]

_SDY = {
    "sdy.all_reduce": ("all-reduce", "reduction_axes"),
    "sdy.reduce_scatter": ("reduce-scatter", "reduce_scatter_axes"),
}
_STABLEHLO = {f"stablehlo.{kind.replace('-', '_')}": kind for kind in KINDS}
_CALL = "stablehlo.custom_call"
_AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')
# Name, pre-size and size of the part of an axis: the last two are empty for a whole axis.
_AxisRef = tuple[str, str, str]
_Operation: TypeAlias = ir.Operation | ir.OpView


class Prediction(NamedTuple):
    """The collectives of a unit, and the operations for which XLA's partitioner moves data in a way not predicted."""

    collectives: tuple[Collective, ...]
    unknown: tuple[UnknownMove, ...]


def predict(partitioned: Partitioned) -> Prediction:
    """The collectives that the shardings of a unit require, in the order of the program. Changes its module."""
    if partitioned.propagated is None:
        return Prediction((), ())
    unit = partitioned.unit
    return predict_of(partitioned.propagated, Origin(unit.name, unit.mesh, partitioned.inlined.equations), Known())


def predict_of(propagated: PropagatedModule, origin: Origin, known: Known) -> Prediction:
    """The same for a module of this origin, of which this is known."""
    module, shardings, walk = propagated
    walk = remove_reversals(remove_unused(walk, known.unused))
    reshard_callbacks(walk)

    def primitive_of(op: ir.Operation) -> str:
        return origin.equations[tags[-1]].primitive if (tags := known.tags(op)) else ""

    writing = Writing(shardings, origin.mesh, primitive_of, known)
    writing.operations(walk)
    insert_reshards(module)
    ops = nested(module.operation)
    written = Walk(ops, [op.name for op in ops], {})
    writing.reshards(written)
    merge(module, written, shardings, {*_SDY, *_STABLEHLO}, known)
    reading = _Reading(module, shardings, origin, known, writing.moved)
    branches = Branches()
    found = [
        in_branch(one, branches.around(op))
        for function, op in reading.communicating
        for number, times in reading.instances(function, op)
        for one in reading.read(op, number, times)
    ]
    collectives = tuple(one for one in found if isinstance(one, Collective))
    moves = (one for one in found if isinstance(one, UnknownMove))
    return Prediction(collectives, (*moves, *widened(collectives, origin.mesh)))


def _functions(module: ir.Module) -> Iterator[tuple[str, ir.Operation]]:
    """The functions of a module, with their names."""
    functions = (op.operation for op in module.body.operations if op.operation.name == "func.func")
    return ((ir.StringAttr(function.attributes["sym_name"]).value, function) for function in functions)


class _Reading:
    """Reads a module that was written out.

    Attributes:
        communicating: the operations that communicate, with the names of the functions they are in. Equal ones of
            several users of a value count once, as in XLA.
    """

    def __init__(
        self, module: ir.Module, shardings: Shardings, origin: Origin, known: Known, moved: Sequence[Moved]
    ) -> None:
        self._moved, self._origin, self._mesh = moved, origin, origin.mesh
        self._shardings, self._known = shardings, known
        self._varying: dict[ir.Operation, set[ir.Operation]] = {}
        self._functions = dict(_functions(module))
        self._calls: dict[str, list[tuple[str, ir.Operation]]] = {}
        self.communicating: list[tuple[str, ir.Operation]] = []
        for caller, function in self._functions.items():
            seen = set()
            for op in nested(function):
                name = op.name
                if name == "func.call":
                    callee = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
                    self._calls.setdefault(callee, []).append((caller, op))
                elif name in _STABLEHLO or (name == _CALL and self._moves(op)):
                    self.communicating.append((caller, op))
                elif name in _SDY:
                    same = name, op.operands[0], op.attributes["out_sharding"], op.block
                    if same not in seen:
                        self.communicating.append((caller, op))
                    seen.add(same)

    def _moves(self, op: ir.Operation) -> bool:
        """Whether an operation is a call for which anything is moved."""
        k = moved_by(op)
        return k is not None and self._moved[k].transfers != ()

    def instances(self, function: str, op: ir.Operation) -> list[tuple[int | None, Times]]:
        """The equations that an operation belongs to, and how often it runs for each.

        There are several if its function is called by several. XLA moves an operation out of loops in which it computes
        the same in every iteration.
        """
        return self._instances(function, op, op, True)

    def _instances(
        self, function: str, op: ir.Operation, of: ir.Operation, may_move: bool
    ) -> list[tuple[int | None, Times]]:
        """Those of an operation, or of a call on the way to the operation that they are `of`."""
        trips, outer, own = ONCE, op.parent, self._known.tags(op)
        while outer is not None and outer.name != "func.func":
            if outer.name == "stablehlo.while":
                may_move = may_move and self._is_invariant(of, outer)
                if not may_move:
                    trips = self._trips_of(outer) * trips
            elif outer.name != "sdy.manual_computation":
                may_move = False
            outer = outer.parent
        calls = self._calls.get(function, ())
        of_callers = [instance for caller, call in calls for instance in self._instances(caller, call, of, may_move)]
        if len(calls) > 1 or (of_callers and not own):
            return [(number, times * trips) for number, times in of_callers]
        number = own[-1] if own else self._nearest_tag(op)
        return [(number, of_callers[0][1] * trips if of_callers else trips)]

    def _trips_of(self, loop: ir.Operation) -> Times:
        tags = self._known.tags(loop)
        equation = self._origin.equations[tags[-1]] if tags else None
        count = equation.trip_count if equation is not None and equation.bodies else trip_count_of_lowered(loop)
        return Times(1, (None if equation is None else equation.site,)) if count is None else Times(count)

    def _is_invariant(self, op: ir.Operation, loop: ir.Operation) -> bool:
        if loop not in self._varying:
            self._varying[loop] = varying(loop, self._functions, self._calls)
        return op not in self._varying[loop]

    def read(self, op: ir.Operation, number: int | None, times: Times) -> Sequence[Collective | UnknownMove]:
        """The collectives, one in most cases, that an operation stands for in one of its equations."""
        name = op.name
        if name in _STABLEHLO:
            return self._placed(self._of_shard_map(op), op, number, times)
        moved = None if (k := moved_by(op)) is None else self._moved[k]
        of_maker: tuple[TensorSharding | None, ...] = ()
        what: tuple[object, ...] = ()
        known: dict[Any, Any] = self._known.collectives if moved is None else moved.collectives
        if moved is None:
            maker, attribute = op.operands[0].owner, op.attributes[_SDY[name][1]]
            read = () if name != "sdy.all_reduce" or isinstance(maker, ir.Block) else maker.operands
            of_maker = tuple(map(self._shardings.of, read))
            what = name, attribute, op.results[0].type, *self._shardings_of(op), of_maker
        key = *what, number, times, self._known.is_added(op)
        if key not in known:
            if what not in known:  # equal layers have equal ones
                found = self._of_inserted(op, of_maker) if moved is None else self._of_operation(moved)
                known[what] = [*found]
            known[key] = self._placed(known[what], op, number, times)
        return known[key]

    def _placed(
        self, found: Iterable[Collective | UnknownMove], op: ir.Operation, number: int | None, times: Times
    ) -> Sequence[Collective | UnknownMove]:
        """What an operation stands for as that of an equation, and so often."""
        equation = None if number is None else self._origin.equations[number]
        common: dict[str, Any] = {
            "times": times.exact,
            "per": times if times.loops else None,
            "is_exact": not times.loops,
            "site": None if equation is None else equation.site,
            "library": None if equation is None else equation.library,
            "module": "" if equation is None else equation.module,
            "tags": () if equation is None or self._known.is_added(op) else (equation.number,),
            "op_name": "" if equation is None else equation.scope,
            "program": self._origin.name,
        }
        return [dataclasses.replace(one, **common) for one in found]

    def _of_inserted(self, op: ir.Operation, of_maker: Sequence[TensorSharding | None]) -> Iterator[Collective]:
        """What Shardy has inserted, for an operation whose operands have these shardings if that counts."""
        name = op.name
        refs = [*dict.fromkeys(_AXIS.findall(str(op.attributes[_SDY[name][1]])))]
        for together in _by_dimension(of_maker, refs):
            yield from self._of_axes(op, together)

    def _of_operation(self, moved: Moved) -> Iterator[Collective | UnknownMove]:
        """What XLA moves for an operation, or a reshard."""
        if moved.transfers is None:
            sent = moved.bound * widening(moved.dtypes, self._mesh)
            yield UnknownMove(operation=moved.name, bytes_at_most=sent, needed_at_most=moved.needed)
            return
        for step, tensor in moved.transfers:
            yield self._of_step(step, tensor, moved.name)

    def _of_step(self, step: Step, tensor: Tensor, name: str) -> Collective:
        mesh, groups, sent = self._mesh, step.groups, 1.0
        if step.kind == "collective-permute":
            axes, sent = groups.axes_of_pairs(mesh), groups.moving / mesh.size
            size = math.prod(mesh.shape[axis] for axis in axes)
        else:
            axes, size = groups.axes(mesh), groups.group_size
        return Collective(
            kind=step.kind,
            axes=axes,
            group_size=size,
            operand=_shown(tensor.dtype, step.operand),
            result=_shown(tensor.dtype, step.result),
            operand_bytes=math.prod(step.operand) * tensor.itemsize,
            result_bytes=math.prod(step.result) * tensor.itemsize,
            groups=groups.on(mesh),
            sent=sent,
            name=name,
        )

    def _of_axes(self, op: ir.Operation, refs: list[_AxisRef]) -> Iterator[Collective]:
        """The collective over these axes."""
        mesh = self._mesh
        if (size := math.prod(int(part) if part else mesh.shape[name] for name, _, part in refs)) > 1:
            axes, groups = _axes_and_groups(tuple(refs), mesh)
            yield self._of_shards(op, size, axes, groups)

    def _of_shards(self, op: ir.Operation, size: int, axes: tuple[str, ...], groups: DeviceGroups) -> Collective:
        """A collective on shards of the operand of an operation, which gives shards of its result."""
        kind, (before, after) = _SDY[op.name][0], self._shardings_of(op)
        shape, itemsize, dtype = element_type(op.results[0])
        result_bytes = math.prod(_local(shape, after)) * itemsize
        return Collective(
            kind=kind,
            axes=axes,
            group_size=size,
            operand=_shown(dtype, _local(shape, after if kind == "all-reduce" else before)),
            result=_shown(dtype, _local(shape, after)),
            operand_bytes=result_bytes * size if kind == "reduce-scatter" else result_bytes,
            result_bytes=result_bytes,
            groups=groups,
            name=op.name,
        )

    def _nearest_tag(self, op: _Operation) -> int | None:
        """The equation of the nearest operation among the users of results and the definitions of operands."""
        found = (tags[-1] for near in reachable([op], _adjacent) if (tags := self._known.tags(near)))
        return next(found, None)

    def _shardings_of(self, op: ir.Operation) -> tuple[TensorSharding, TensorSharding]:
        """The shardings of the operand and the result of an operation."""
        ndim = len(op.results[0].type.shape)
        found = (self._shardings.of(value) for value in (op.operands[0], op.results[0]))
        before, after = (sharding or TensorSharding.replicated(ndim) for sharding in found)
        return before, after

    def _tensor(self, value: ir.Value) -> Tensor:
        shape, itemsize, dtype = element_type(value)
        return Tensor(shape, dtype, itemsize, self._shardings.of(value) or TensorSharding.replicated(len(shape)))

    def _of_shard_map(self, op: ir.Operation) -> Iterator[Collective]:
        """A collective that the user wrote in the body of a `shard_map`.

        Over axes that are not manual its operands may be sharded further. XLA leaves them so where it combines elements
        of equal positions, and gathers them before other collectives.
        """
        mesh = self._mesh
        kind = _STABLEHLO[op.name]
        tensors = [[self._tensor(value) for value in values] for values in (op.operands, op.results)]
        if kind in ("all-reduce", "collective-permute"):
            operands, results = ([(t, t.local) for t in each] for each in tensors)
        else:
            for tensor in tensors[0]:
                sizes, whole = dict(mesh.shape), TensorSharding.replicated(len(tensor.shape))
                steps = reshard(tiles_of(tensor.sharding, sizes), tiles_of(whole, sizes), tensor.shape)
                yield from (self._of_step(step, tensor, op.name) for step in steps)
            operands, results = ([(t, t.shape) for t in each] for each in tensors)
        in_bytes, out_bytes = (sum(math.prod(shape) * t.itemsize for t, shape in each) for each in (operands, results))
        sent = 1.0
        if kind == "collective-permute":
            pairs = np.array(elements(op.attributes["source_target_pairs"]), np.int64).reshape([-1, 2])
            groups = DeviceGroups(pairs[pairs[:, 0] != pairs[:, 1]])
            axes, sent = groups.axes_of_pairs(mesh), len(groups) / mesh.size
            size = math.prod(mesh.shape[axis] for axis in axes)
        else:
            groups = _replica_groups(op.attributes["replica_groups"], mesh)
            axes, size = groups.axes(mesh), groups.group_size
        yield Collective(
            kind=kind,
            axes=axes,
            group_size=size,
            operand=", ".join(_shown(t.dtype, shape) for t, shape in operands),
            result=", ".join(_shown(t.dtype, shape) for t, shape in results),
            operand_bytes=in_bytes,
            result_bytes=out_bytes,
            groups=groups.on(mesh),
            sent=sent,
            name=op.name,
        )


def _by_dimension(of_maker: Sequence[TensorSharding | None], refs: list[_AxisRef]) -> list[list[_AxisRef]]:
    """The axes of an all-reduce in the groups that XLA reduces over: one for each dimension that was contracted.

    Args:
        of_maker: the shardings of the operands of what computes the addends.
        refs: all of the axes.
    """
    dims = [dim for sharding in of_maker if sharding is not None for dim in sharding.axes]
    groups = [[ref for ref in refs if ref[0] in dim] for dim in dims]
    distinct = [group for k, group in enumerate(groups) if group and group not in groups[:k]]
    return distinct if sorted(itertools.chain.from_iterable(distinct)) == sorted(refs) else [refs]


def _adjacent(op: _Operation) -> Iterator[_Operation]:
    users = [use.owner for result in op.results for use in result.uses]
    makers = [value.owner for value in op.operands if not isinstance(value.owner, ir.Block)]
    return (getattr(other, "operation", other) for other in (*users, *makers))


def _local(shape: Sequence[int], sharding: TensorSharding) -> tuple[int, ...]:
    return tuple(-(-n // math.prod(parts)) for n, parts in zip(shape, sharding.parts, strict=True))


def _shown(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


@functools.lru_cache(maxsize=256)
def _axes_and_groups(refs: tuple[_AxisRef, ...], mesh: Mesh) -> tuple[tuple[str, ...], DeviceGroups]:
    """The axes of several devices among these, and the devices that differ along them, in groups."""
    groups, names = _groups(refs, mesh), {name for name, _, _ in refs}
    axes = tuple(name for name in mesh.axis_names if name in names and mesh.shape[name] > 1)
    if any(part for _, _, part in refs):
        axes = groups.axes(mesh)
    return axes, groups.on(mesh)


def _groups(refs: Sequence[_AxisRef], mesh: Mesh) -> DeviceGroups:
    """Groups of positions in the mesh that differ along these axes, or parts of axes, only."""
    return groups_over([(name, int(pre or 1), int(part or mesh.shape[name])) for name, pre, part in refs], mesh.shape)


def _replica_groups(attribute: ir.Attribute, mesh: Mesh) -> DeviceGroups:
    text = str(attribute)
    if "replica_group_mesh_axes" in text:
        return _groups([(name, "", "") for name in re.findall(r'axis_ref<name = "([^"]+)"', text)], mesh)
    return DeviceGroups(np.array(elements(attribute), np.int64))
