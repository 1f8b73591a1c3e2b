"""The lowered program, with what XLA's partitioner does for its operations written out.

Each operation that has a model becomes an opaque call between reshards, which Shardy leaves alone; it adds the reshards
that the other operations need. Then each reshard becomes a call as well. The number of a call says what XLA moves.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.sharding import Mesh

from partjit.inspect.moves.kinds import NONE, UNMODELLED, Kind, model_of
from partjit.inspect.moves.merging import stays
from partjit.inspect.moves.model import Model, Operation, Prepared, Tensor, Transfer, definition, element_type
from partjit.inspect.moves.moved import CALL, Moved, most_sent, moved_by
from partjit.inspect.moves.replicated import elementwise
from partjit.inspect.moves.reshards import (
    DISTINCT,
    FORGOTTEN,
    PREPARED,
    REMEMBERED,
    Reshard,
    Reshards,
    is_of_scalar,
    transfers_of,
)
from partjit.inspect.moves.table import LOOKING_AROUND, LOOKING_AT_PRIMITIVES, LOOKING_AT_SLICES, MODELS
from partjit.inspect.moves.tiles import Step, Unmodelled
from partjit.inspect.moves.values import Values, are_alike
from partjit.inspect.moves.windows import is_near_slices
from partjit.inspect.places import Known
from partjit.inspect.walk import Walk
from partjit.shardy import Shardings, TensorSharding

__all__ = ["Writing"]

_OF_PARTS = tuple(f"stablehlo.{name}" for name in ("broadcast_in_dim", "convert", "reshape", "reverse", "slice"))


_COPIED = Moved("copy", ())


class Writing:
    """The writing out of a propagated module.

    Args:
        shardings: the shardings in the module, which is changed.
        mesh: the mesh of the program.
        primitive_of: the primitive that an operation was lowered from, or the empty string.
        known: what is known of operations, which is added to.

    Attributes:
        moved: what is moved, by the numbers of the calls.
    """

    def __init__(
        self,
        shardings: Shardings,
        mesh: Mesh,
        primitive_of: Callable[[ir.Operation], str],
        known: Known,
    ) -> None:
        self.moved: list[Moved] = []
        self._numbers: dict[Hashable, int] = {}
        self._shardings, self._mesh, self._primitive_of = shardings, mesh, primitive_of
        self._sizes = dict(mesh.shape)
        self._known = known
        self._own = itertools.count()
        self._with_models: set[ir.Operation] = set()
        self._prepared: list[tuple[Transfer, ...]] = []  # of reshards

    def operations(self, walk: Walk) -> None:
        """Replaces the operations that have models, and adds the reshards that XLA makes for them."""
        # All models first: some look at the operations that compute their operands.
        values = Values(self._of, walk.shardings)
        modelled = []
        for op, name in zip(walk.ops, walk.names, strict=True):
            find = MODELS.get(name)
            if find is None or (find is elementwise and values.are_like_result(op)):
                continue  # most operations: all that they read and compute is sharded alike
            if (found := self._modelled(op, find, values)) is not None:
                modelled.append((op, found))
        self._with_models = {op for op, _ in modelled}
        constraints = list[ir.Operation]()
        for op in walk.named("sdy.reshard", "sdy.sharding_constraint"):
            if op.operands[0].type.shape:
                constraints.append(op)
            else:  # perhaps in the body of an operation that is erased
                op.results[0].replace_all_uses_with(op.operands[0])
                op.erase()
        for op, (operation, model, key) in reversed(modelled):
            if _is_used(op):
                self._replace(op, operation, model, key)
            else:
                self._erase(op)
        for op in constraints:
            self._copy(op)

    def _copy(self, op: ir.Operation) -> None:
        """Replaces a constraint by a reshard and a copy: XLA remembers nothing of what is copied."""
        value, wanted = op.operands[0], self._of(op.results[0])
        with op.context, op.location, ir.InsertionPoint(op):
            if self._of(value) != wanted:
                value = sdy.ReshardOp(value, self._attribute(wanted)).result
            (copied,) = self._call(op, [value], [wanted], _COPIED, (_COPIED, wanted))
            op.results[0].replace_all_uses_with(copied)
        op.erase()

    def _erase(self, op: ir.Operation) -> None:
        """Erases an operation, and those without models that computed its operands for it alone."""
        makers = {value.owner.operation for value in op.operands if not isinstance(value.owner, ir.Block)}
        op.erase()
        for maker in makers:
            if maker not in self._with_models and maker.name in _OF_PARTS and not _is_used(maker):
                self._erase(maker)

    def reshards(self, walk: Walk) -> None:
        """Replaces all reshards among these operations by calls."""
        made = Reshards(self._of, self._automatic, self._attribute, self._is_product)
        for one in reversed(made.left(walk.named("sdy.reshard"))):
            self._reshard(one)

    def _is_product(self, op: ir.Operation) -> bool:
        number = moved_by(op)
        return (op.name if number is None else self.moved[number].name) == "stablehlo.dot_general"

    def _of(self, value: ir.Value) -> TensorSharding:
        ndim = len(value.type.shape)
        found = self._shardings.of(value) or TensorSharding.replicated(ndim)
        # That of a callback's result names one device, and has no dimensions.
        return (
            found if len(found.axes) >= ndim else dataclasses.replace(TensorSharding.replicated(ndim), mesh=found.mesh)
        )

    def _modelled(
        self, op: ir.Operation, find: Callable[[Operation], Model | None], values: "Values"
    ) -> "tuple[Operation, Model | None, tuple[object, ...] | None] | None":
        """An operation with its model, and what says all about them if it is not looked at others; None if it stays."""
        of_operands, of_results = [*op.operands], [*op.results]
        shardings, models = values.shardings((*of_operands, *of_results)), self._known.models
        known = self._known.kind(op)
        if known is not None and models.get((known.number, *shardings)) is NONE:
            return None
        stays = (find is elementwise and are_alike(shardings)) or not any(any(one.axes) for one in shardings)
        if stays and not self._known.has_own_locations:
            return None
        kind = known or self._kind(op, find, of_operands, of_results)
        key = kind.number, *shardings
        if stays:
            models[key] = NONE
            return None
        if kind.is_modelled_alone and models.get(key) is NONE:
            return None
        operands, results = values.tensors(of_operands), values.tensors(of_results)
        operation = Operation(op, operands, results, kind.sizes, self._of, self._primitive_of)
        if not kind.is_modelled_alone:
            model = model_of(find, operation)
        elif key in models:
            model = models[key]
        else:
            model = models[key] = model_of(find, operation)
        if model is NONE:
            return None
        return operation, None if model is UNMODELLED else model, key if kind.is_modelled_alone else None

    def _kind(
        self,
        op: ir.Operation,
        find: Callable[[Operation], Model | None],
        operands: Sequence[ir.Value],
        results: Sequence[ir.Value],
    ) -> "Kind":
        """The kind of an operation with this model, these operands and results."""
        kinds, place, sizes = self._known.kinds, self._known.own_location(op), self._automatic(op)
        same = (
            find,
            *[own for name, own in op.attributes.items() if name != "sdy.sharding"],
            self._primitive_of(op) if find in LOOKING_AT_PRIMITIVES else "",
            len(operands) > 1 and operands[0] == operands[1],
            *[value.type for value in operands],
            *[value.type for value in results],
            *sizes,
            looks_around := find in LOOKING_AROUND or (find in LOOKING_AT_SLICES and is_near_slices(op)),
        )
        kind = kinds.get(same)
        if kind is None:
            kind = kinds[same] = Kind(len(kinds), sizes, not looks_around)
        if place is not None:
            kinds[place] = kind
        return kind

    def _automatic(self, op: ir.Operation) -> dict[str, int]:
        """The sizes of the axes that are not manual around an operation."""
        outer = op.parent
        if outer is None or outer.name == "func.func":
            return self._sizes
        manual: set[str] = set()
        while outer is not None and outer.name != "func.func":
            if outer.name == "sdy.manual_computation":
                manual |= {*sdy.ManualAxesAttr(outer.attributes["manual_axes"])}
            outer = outer.parent
        return {name: size for name, size in self._sizes.items() if name not in manual}

    def _replace(
        self, op: ir.Operation, operation: Operation, model: Model | None, key: tuple[object, ...] | None
    ) -> None:
        """Replaces an operation by a call between reshards."""
        written = model or operation.model()
        with op.context, op.location, ir.InsertionPoint(op):

            def resharded(value: ir.Value, sharding: TensorSharding, **marks: str) -> ir.Value:
                made = sdy.ReshardOp(value, self._attribute(sharding))
                for name, text in marks.items():
                    made.operation.attributes[f"partjit.{name}"] = ir.StringAttr.get(text)
                return made.result

            operands = [*(written.absorbs or op.operands)]
            chains = (*written.operands, *[()] * (len(operands) - len(written.operands)))
            for k, chain in enumerate(chains):
                name = {"distinct": written.distinct[k] or str(next(self._own))} if k in written.distinct else {}
                name |= {"forgotten": ""} if written.keeps and written.forgets else {}
                for link in chain:
                    if isinstance(link, Prepared):
                        marks = {"distinct": link.name, **name, "prepared": str(len(self._prepared))}
                        self._prepared.append(link.transfers)
                        operands[k] = resharded(operands[k], self._of(operands[k]), **marks)
                    else:
                        operands[k] = resharded(operands[k], link, **name)
            if written.keeps:
                for k, value in enumerate(operands):
                    op.operands[k] = value
                for old, tensor, sharding in zip(op.results, operation.results, written.results, strict=True):
                    if sharding is not None:
                        self._compute_as(op, old, sharding, tensor.sharding)
                return
            local = [
                tensor.sharding if sharding is None else sharding
                for tensor, sharding in zip(operation.results, written.results, strict=True)
            ]
            if key is None or (moved := self._known.moved.get(key)) is None:
                moved = self._moved(op, model and model.transfers, operation.bound, operation.sizes)
                if written.bound is not None:
                    moved = dataclasses.replace(moved, bound=written.bound, needed=operation.bound)
                if key is not None:
                    self._known.moved[key] = moved
            # Of different primitives they may be equal all the same.
            is_own = key is not None and MODELS[op.name] not in LOOKING_AT_PRIMITIVES
            results = self._call(op, operands, local, moved, (moved,) if is_own else None)
            if written.remembered:
                ir.OpResult(results[0]).owner.attributes[REMEMBERED] = ir.StringAttr.get(written.remembered)
            for old, new, tensor, sharding in zip(op.results, results, operation.results, local, strict=True):
                if sharding != tensor.sharding:
                    new = resharded(new, tensor.sharding, **({"forgotten": ""} if written.forgets else {}))
                old.replace_all_uses_with(new)
        self._erase(op)

    def _compute_as(self, op: ir.Operation, result: ir.Value, sharding: TensorSharding, wanted: TensorSharding) -> None:
        """Gives the only result of an operation that stays a sharding, and reshards it."""
        uses = [(use.owner, use.operand_number) for use in result.uses]
        op.attributes["sdy.sharding"] = sdy.TensorShardingPerValueAttr.get([self._attribute(sharding)])
        with ir.InsertionPoint.after(op):
            resharded = sdy.ReshardOp(result, self._attribute(wanted)).result
        for owner, number in uses:
            owner.operands[number] = resharded

    def _reshard(self, one: Reshard) -> None:
        op, value, sizes = one.op, one.op.operands[0], self._automatic(one.op)
        if PREPARED in op.attributes:
            self._reshard_as_prepared(op, sizes)
            return
        before, after = Values(self._of, {}).shardings([value, op.results[0]])
        is_scalar = is_of_scalar(value)
        key = value.type, before, after, is_scalar, one.swaps, *sizes
        moved = self._known.moved.get(key)
        if moved is None:
            shape, itemsize, dtype = element_type(value)
            tensor, wanted = (Tensor(shape, dtype, itemsize, sharding) for sharding in (before, after))
            try:
                transfers = () if is_scalar else transfers_of(tensor, after, sizes, one.swaps)
            except Unmodelled:
                transfers = None
            # At worst it is replicated, or sent as it is a few times.
            moved = self._moved(op, transfers, 3 * max(tensor.nbytes, wanted.nbytes), sizes)
            self._known.moved[key] = moved
        if moved.transfers and self._may_be_resharded(value):
            moved = self._moved(op, None, most_sent(moved.transfers), sizes)
        own = moved, op.attributes["sharding"], op.attributes.get(DISTINCT), FORGOTTEN in op.attributes
        with op.context, op.location, ir.InsertionPoint(op):
            (result,) = self._call(op, [value], [after], moved, own)
            op.results[0].replace_all_uses_with(result)
        op.erase()

    def _may_be_resharded(self, value: ir.Value) -> bool:
        """Whether a value, or what it is a reshard of, is computed by indices in a sharding that is not known."""
        while (reshard := definition(value, "sdy.reshard")) is not None:
            value = reshard.operands[0]
        maker = definition(value, "stablehlo.custom_call")
        number = None if maker is None else moved_by(maker)
        if number is None or self.moved[number].transfers is not None:
            return False
        return self.moved[number].name in ("stablehlo.gather", "stablehlo.scatter")

    def _reshard_as_prepared(self, op: ir.Operation, sizes: Mapping[str, int]) -> None:
        """Replaces a reshard of which it is known what is moved."""
        prepared = self._prepared[int(ir.StringAttr(op.attributes[PREPARED]).value)]
        transfers = () if is_of_scalar(op.operands[0]) else prepared
        moved = self._moved(op, transfers, 0, sizes)
        with op.context, op.location, ir.InsertionPoint(op):
            (result,) = self._call(op, [op.operands[0]], [self._of(op.results[0])], moved, moved)
            op.results[0].replace_all_uses_with(result)
        op.erase()

    def _moved(
        self, op: ir.Operation, transfers: tuple[Transfer, ...] | None, bound: int, sizes: Mapping[str, int]
    ) -> Moved:
        if transfers and len(sizes) < len(self._mesh.shape):
            transfers = tuple(Transfer(self._expanded(step, sizes), tensor) for step, tensor in transfers)
        if transfers is not None:
            return Moved(op.name, transfers, bound)
        arrays = (value for value in (*op.operands, *op.results) if isinstance(value.type, ir.RankedTensorType))
        return Moved(op.name, transfers, bound, None, frozenset(element_type(value)[2] for value in arrays))

    def _call(
        self,
        op: ir.Operation,
        operands: list[ir.Value],
        shardings: list[TensorSharding],
        moved: Moved,
        own: Hashable,
    ) -> list[ir.Value]:
        """A call in place of an operation.

        Args:
            op: the operation.
            operands: the operands of the call.
            shardings: of its results.
            moved: what it stands for.
            own: what XLA compares of operations that it merges, their operands aside; None for their attributes.
        """
        attributes = {
            "call_target_name": ir.StringAttr.get(CALL),
            "backend_config": ir.StringAttr.get(str(self._number(op, moved, own))),
            "has_side_effect": ir.BoolAttr.get(False),
            "sdy.sharding": sdy.TensorShardingPerValueAttr.get([*map(self._attribute, shardings)]),
        }
        types = [result.type for result in op.results]
        call = ir.Operation.create("stablehlo.custom_call", results=types, operands=operands, attributes=attributes)
        return [*call.results]

    def _number(self, op: ir.Operation, moved: Moved, own: Hashable) -> int:
        """A number for what is moved; XLA merges operations of one number if their operands are equal."""
        self.moved.append(moved)
        steps = moved.transfers
        if (
            steps is None
            or any(one.step.kind != "collective-permute" for one in steps)
            or stays(op, self._shardings, self._known)
        ):
            return len(self.moved) - 1
        if own is None:
            named = (op.attributes[k] for k in range(len(op.attributes)))
            own = moved.name, steps, frozenset((one.name, one.attr) for one in named if one.name != "sdy.sharding")
        return self._numbers.setdefault(own, len(self.moved) - 1)

    def _expanded(self, step: Step, sizes: Mapping[str, int]) -> Step:
        """A step among the devices of each coordinate of the manual axes, in positions of the whole mesh."""
        names = [*self._mesh.shape]
        manual = [names.index(name) for name in names if name not in sizes]
        others = [names.index(name) for name in sizes]
        positions = np.arange(self._mesh.size).reshape([*self._mesh.shape.values()])
        rows = positions.transpose([*manual, *others]).reshape([-1, math.prod(sizes.values())])
        return dataclasses.replace(step, groups=step.groups.within(rows))

    def _attribute(self, sharding: TensorSharding) -> ir.Attribute:
        known = self._known.written
        if sharding not in known:
            dims = ["{" + ", ".join(map(_reference, axes)) + "}" for axes in sharding.axes]
            known[sharding] = ir.Attribute.parse(f"#sdy.sharding<@mesh, [{', '.join(dims)}]>")
        return known[sharding]


def _is_used(op: ir.Operation) -> bool:
    return any(next(iter(result.uses), None) for result in op.results)


def _reference(axis: str) -> str:
    name, _, part = axis.partition(":")
    return f'"{name}"' + (f":{part}" if part else "")
