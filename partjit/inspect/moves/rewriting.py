"""The lowered program, with what XLA's partitioner does for its operations written out.

Each operation that has a model becomes an opaque call between reshards, which Shardy leaves alone; it adds the reshards
that the other operations need. Then each reshard becomes a call as well. The number of a call says what XLA moves.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.sharding import Mesh

from partjit.inspect.moves.merging import stays
from partjit.inspect.moves.model import Model, Operation, Tensor, Transfer, definition, element_type
from partjit.inspect.moves.replicated import elementwise
from partjit.inspect.moves.resharding import reshard
from partjit.inspect.moves.table import MODELS
from partjit.inspect.moves.tiles import Step, Unmodelled, tiles_of
from partjit.shardy import Shardings, TensorSharding, nested

__all__ = ["Moved", "Writing", "moved_by"]

_CALL = "partjit.moves"
_DISTINCT = "partjit.distinct"  # an attribute of reshards


@dataclasses.dataclass(frozen=True, eq=False)
class Moved:
    """An operation that XLA's partitioner moves data for, or a reshard.

    Attributes:
        name: of the operation: `stablehlo.slice`.
        transfers: what is moved, besides the reshards of operands and results; None if that is not modelled.
        bound: bytes that a device sends at most if it is not.
    """

    name: str
    transfers: tuple[Transfer, ...] | None
    bound: int = 0


def moved_by(op: ir.Operation) -> int | None:
    """The number of what an operation stands for, if it is a call that a `Writing` made."""
    if op.name != "stablehlo.custom_call" or ir.StringAttr(op.attributes["call_target_name"]).value != _CALL:
        return None
    return int(ir.StringAttr(op.attributes["backend_config"]).value)


class Writing:
    """The writing out of a propagated module.

    Args:
        module: the module, which is changed.
        shardings: the shardings in it.
        mesh: the mesh of the program.
        primitive_of: the primitive that an operation was lowered from, or the empty string.

    Attributes:
        moved: what is moved, by the numbers of the calls.
    """

    def __init__(
        self, module: ir.Module, shardings: Shardings, mesh: Mesh, primitive_of: Callable[[ir.Operation], str]
    ) -> None:
        self.moved: list[Moved] = []
        self._numbers: dict[Hashable, int] = {}
        self._module, self._shardings, self._mesh, self._primitive_of = module, shardings, mesh, primitive_of
        self._attributes: dict[TensorSharding, ir.Attribute] = {}
        self._sizes = dict(mesh.shape)

    def operations(self) -> None:
        """Replaces the operations that have models, and adds the reshards that XLA makes for them."""
        candidates = [op for op in nested(self._module.operation) if op.name in MODELS]
        # All models first: some look at the operations that compute their operands.
        tensors = _Tensors(self._of)
        modelled = [(op, found) for op in candidates if (found := self._modelled(op, tensors)) is not None]
        for op, (operation, model) in reversed(modelled):
            if _is_used(op):
                self._replace(op, operation, model)
            else:
                op.erase()

    def reshards(self) -> None:
        """Replaces all reshards by calls."""
        made: dict[Any, ir.Value] = {}
        reshards = [op for op in nested(self._module.operation) if op.name == "sdy.reshard"]
        for op in reshards:
            value, result = op.operands[0], op.results[0]
            before = definition(value, "sdy.reshard")
            # XLA remembers what it has resharded: there and back is nothing, and twice is once.
            if before is not None and self._of(before.operands[0]) == self._of(result):
                result.replace_all_uses_with(before.operands[0])
                continue
            key = value, op.attributes["sharding"], op.block, _DISTINCT in op.attributes
            if key in made:
                result.replace_all_uses_with(made[key])
            made.setdefault(key, result)
        for op in reversed(reshards):
            if _is_used(op):
                self._reshard(op)
            else:
                op.erase()

    def _of(self, value: ir.Value) -> TensorSharding:
        ndim = len(value.type.shape)
        found = self._shardings.of(value) or TensorSharding.replicated(ndim)
        # That of a callback's result names one device, and has no dimensions.
        return (
            found if len(found.axes) >= ndim else dataclasses.replace(TensorSharding.replicated(ndim), mesh=found.mesh)
        )

    def _modelled(self, op: ir.Operation, tensors: "_Tensors") -> tuple[Operation, Model | None] | None:
        operands, results = tensors.of(op.operands), tensors.of(op.results)
        find = MODELS[op.name]
        if find is elementwise and len({id(one.sharding) for one in (*operands, *results) if one.shape}) < 2:
            return None  # most operations: all that they read and compute is sharded alike
        sharded = [tensor for tensor in (*operands, *results) if tensor.is_sharded]
        if not sharded or any(0 in tensor.shape for tensor in results):
            return None
        if any(tensor.sharding.mesh != "mesh" for tensor in sharded):
            return None
        operation = Operation(op, operands, results, self._automatic(op), self._of, self._primitive_of)
        try:
            model = find(operation)
        except Unmodelled:
            return operation, None
        return None if model is None else (operation, model)

    def _automatic(self, op: ir.Operation) -> dict[str, int]:
        """The sizes of the axes that are not manual around an operation."""
        manual: set[str] = set()
        outer = op.parent
        while outer is not None and outer.name != "func.func":
            if outer.name == "sdy.manual_computation":
                manual |= {*sdy.ManualAxesAttr(outer.attributes["manual_axes"])}
            outer = outer.parent
        return {name: size for name, size in self._sizes.items() if name not in manual}

    def _replace(self, op: ir.Operation, operation: Operation, model: Model | None) -> None:
        """Replaces an operation by a call between reshards."""
        arrays = (*operation.operands, *operation.results)
        bound = sum(tensor.nbytes for tensor in arrays) + sum(tensor.nbytes for tensor in operation.results)
        written = model or operation.model()
        with op.context, op.location, ir.InsertionPoint(op):

            def resharded(value: ir.Value, sharding: TensorSharding, distinct: bool = False) -> ir.Value:
                made = sdy.ReshardOp(value, self._attribute(sharding))
                if distinct:
                    made.operation.attributes[_DISTINCT] = ir.UnitAttr.get()
                return made.result

            absorbed: list[Any] = [value.owner for value in op.operands] if written.absorbs else []
            operands = [owner.operands[0] for owner in absorbed] or [*op.operands]
            chains = (*written.operands, *[()] * (len(operands) - len(written.operands)))
            operands = [
                functools.reduce(functools.partial(resharded, distinct=k in written.distinct), chain, value)
                for k, (chain, value) in enumerate(zip(chains, operands, strict=True))
            ]
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
            results = self._call(op, operands, local, Moved(op.name, model and model.transfers, bound))
            for old, new, tensor, sharding in zip(op.results, results, operation.results, local, strict=True):
                old.replace_all_uses_with(new if sharding == tensor.sharding else resharded(new, tensor.sharding))
        op.erase()

    def _compute_as(self, op: ir.Operation, result: ir.Value, sharding: TensorSharding, wanted: TensorSharding) -> None:
        """Gives the only result of an operation that stays a sharding, and reshards it."""
        uses = [(use.owner, use.operand_number) for use in result.uses]
        op.attributes["sdy.sharding"] = sdy.TensorShardingPerValueAttr.get([self._attribute(sharding)])
        with ir.InsertionPoint.after(op):
            resharded = sdy.ReshardOp(result, self._attribute(wanted)).result
        for owner, number in uses:
            owner.operands[number] = resharded

    def _reshard(self, op: ir.Operation) -> None:
        tensors = _Tensors(self._of)
        (before,), (after,) = tensors.of(op.operands), tensors.of(op.results)
        try:
            transfers = self._steps_between(op, before, after)
        except Unmodelled:
            transfers = None
        # At worst it is replicated, or sent as it is a few times.
        moved = Moved(op.name, transfers, 3 * max(before.nbytes, after.nbytes))
        with op.context, op.location, ir.InsertionPoint(op):
            (result,) = self._call(op, [*op.operands], [after.sharding], moved)
            op.results[0].replace_all_uses_with(result)
        op.erase()

    def _steps_between(self, op: ir.Operation, before: Tensor, after: Tensor) -> tuple[Transfer, ...]:
        of_scalar = definition(op.operands[0], "stablehlo.broadcast_in_dim", "stablehlo.reshape")
        if of_scalar is not None and not of_scalar.operands[0].type.shape:
            return ()
        sizes = self._automatic(op)
        if before.sharding.mesh.startswith("maximal_mesh"):
            raise Unmodelled  # one device has the result of a callback, and sends it if it is used
        steps = _steps(before.sharding, after.sharding, before.shape, tuple(sizes.items()))
        return tuple(Transfer(step, before) for step in steps)

    def _call(
        self, op: ir.Operation, operands: list[ir.Value], shardings: list[TensorSharding], moved: Moved
    ) -> list[ir.Value]:
        sizes = self._automatic(op)
        if moved.transfers and len(sizes) < len(self._mesh.shape):
            expanded = (Transfer(self._expanded(step, sizes), tensor) for step, tensor in moved.transfers)
            moved = dataclasses.replace(moved, transfers=tuple(expanded))
        attributes = {
            "call_target_name": ir.StringAttr.get(_CALL),
            "backend_config": ir.StringAttr.get(str(self._number(op, moved))),
            "has_side_effect": ir.BoolAttr.get(False),
            "sdy.sharding": sdy.TensorShardingPerValueAttr.get([*map(self._attribute, shardings)]),
        }
        types = [result.type for result in op.results]
        call = ir.Operation.create("stablehlo.custom_call", results=types, operands=operands, attributes=attributes)
        return [*call.results]

    def _number(self, op: ir.Operation, moved: Moved) -> int:
        """A number for what is moved; XLA merges operations of one number if their operands are equal."""
        self.moved.append(moved)
        steps = moved.transfers
        if steps is None or any(one.step.kind != "collective-permute" for one in steps) or stays(op, self._shardings):
            return len(self.moved) - 1
        named = (op.attributes[k] for k in range(len(op.attributes)))
        attributes = frozenset((one.name, one.attr) for one in named if one.name != "sdy.sharding")
        return self._numbers.setdefault((moved.name, steps, attributes), len(self.moved) - 1)

    def _expanded(self, step: Step, sizes: Mapping[str, int]) -> Step:
        """A step among the devices of each coordinate of the manual axes, in positions of the whole mesh."""
        names = [*self._mesh.shape]
        manual = [names.index(name) for name in names if name not in sizes]
        others = [names.index(name) for name in sizes]
        positions = np.arange(self._mesh.size).reshape([*self._mesh.shape.values()])
        rows = positions.transpose([*manual, *others]).reshape([-1, math.prod(sizes.values())])
        return dataclasses.replace(step, groups=step.groups.within(rows))

    def _attribute(self, sharding: TensorSharding) -> ir.Attribute:
        if sharding not in self._attributes:
            dims = ["{" + ", ".join(map(_reference, axes)) + "}" for axes in sharding.axes]
            self._attributes[sharding] = ir.Attribute.parse(f"#sdy.sharding<@mesh, [{', '.join(dims)}]>")
        return self._attributes[sharding]


class _Tensors:
    """The arrays among the operands and results of operations, of a module that is not changed meanwhile.

    Values of one type and sharding are one tensor, and each value is read once: a program has few of the former.
    """

    def __init__(self, sharding_of: Callable[[ir.Value], TensorSharding]) -> None:
        self._sharding_of = sharding_of
        self._of_values: dict[ir.Value, Tensor | None] = {}
        self._alike: dict[tuple[ir.Type, TensorSharding], Tensor] = {}

    def of(self, values: Iterable[ir.Value]) -> tuple[Tensor, ...]:
        """The tensors of those that are arrays."""
        found = []
        for value in values:
            if value not in self._of_values:
                self._of_values[value] = self._read(value)
            if (tensor := self._of_values[value]) is not None:
                found.append(tensor)
        return tuple(found)

    def _read(self, value: Any) -> Tensor | None:
        type_ = value.type
        if not isinstance(type_, ir.RankedTensorType):
            return None
        # Scalars are not sharded, and those in the body of a reduction have no sharding to be read.
        sharding = self._sharding_of(value) if type_.rank else _SCALAR
        key = type_, sharding
        if key not in self._alike:
            shape, itemsize, dtype = element_type(value)
            self._alike[key] = Tensor(shape, dtype, itemsize, sharding)
        return self._alike[key]


_SCALAR = TensorSharding.replicated(0)


@functools.lru_cache(maxsize=4096)
def _steps(
    before: TensorSharding, after: TensorSharding, shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...]
) -> tuple[Step, ...]:
    return tuple(reshard(tiles_of(before, dict(sizes)), tiles_of(after, dict(sizes)), shape))


def _is_used(op: ir.Operation) -> bool:
    return any(next(iter(result.uses), None) for result in op.results)


def _reference(axis: str) -> str:
    name, _, part = axis.partition(":")
    return f'"{name}"' + (f":{part}" if part else "")
