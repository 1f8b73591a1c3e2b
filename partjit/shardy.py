"""Shardy's passes on a lowered program, and their results: shardings, and the reshards that these need.

Nothing is compiled here. The passes change the module, so it must not be used for anything else afterwards.

Source: `sdy-propagation-pipeline` and `sdy-insert-explicit-reshards` of https://openxla.org/shardy.
"""

import contextlib
import dataclasses
import functools
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy, stablehlo

__all__ = [
    "ReadShardings",
    "Shardings",
    "TensorSharding",
    "axis_name",
    "insert_reshards",
    "main_of",
    "nested",
    "propagate",
    "propagate_interface",
    "run_passes",
    "symbol_of",
]


stablehlo.register_stablehlo_passes()


_making = threading.RLock()  # a collection of garbage may come while it is held
_made: "weakref.WeakValueDictionary[tuple[object, ...], Any]" = weakref.WeakValueDictionary()


@dataclasses.dataclass(frozen=True, eq=False, init=False)
class TensorSharding:
    """How the partitioner shards a value. Equal ones are one object, as they are keys, thousands of times a report.

    Attributes:
        axes: for each dimension the mesh axes it is sharded over, major to minor. A sub-axis is named as Shardy names
            it: "data:(1)2" is the major sub-axis of size 2 of "data".
        parts: the size of each of these.
        mesh: the name of the mesh in the module; "mesh" is that of the program.
    """

    axes: tuple[tuple[str, ...], ...]
    parts: tuple[tuple[int, ...], ...]
    mesh: str = "mesh"

    def __new__(cls, axes: tuple[tuple[str, ...], ...], parts: tuple[tuple[int, ...], ...], mesh: str = "mesh") -> Self:
        """The one with these attributes."""
        key = axes, parts, mesh
        with _making:
            found = _made.get(key)
            if found is None:
                found = super().__new__(cls)
                for name, value in zip(("axes", "parts", "mesh"), key, strict=True):
                    object.__setattr__(found, name, value)
                _made[key] = found
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.axes, self.parts, self.mesh)

    @property
    def is_of_whole_axes(self) -> bool:
        """Whether a spec over the mesh of the program can express it."""
        return self.mesh == "mesh" and not any(":" in axis for dim in self.axes for axis in dim)

    @functools.cached_property
    def sizes(self) -> Mapping[str, int]:
        """The axes of all dimensions, with their sizes."""
        dims = zip(self.axes, self.parts, strict=True)
        return {axis: size for axes, parts in dims for axis, size in zip(axes, parts, strict=True)}

    @classmethod
    @functools.cache
    def replicated(cls, ndim: int) -> "TensorSharding":
        """The sharding of a value of which every device has a copy."""
        return cls(((),) * ndim, ((),) * ndim)


_PROPAGATION = "builtin.module(sdy-propagation-pipeline)"


def propagate(
    module: ir.Module, unobserved: Callable[[ir.Module], AbstractContextManager[object]] = contextlib.nullcontext
) -> None:
    """Runs Shardy's propagation, which decides the sharding of every value of a rewritten module.

    Operations keep their sharding rules, which the insertion of reshards reads then.

    Args:
        module: the module.
        unobserved: in which nothing uses its values that is not of the program; for passes that replace nothing.
    """
    functions = sum(op.operation.name == "func.func" for op in module.body.operations)
    with module.context:
        before, deciding, after = _expanded(str(passmanager.PassManager.parse(_PROPAGATION)), functions == 1)
    run_passes(module, before)
    with unobserved(module):
        run_passes(module, deciding)
    run_passes(module, after)


_DECIDING = r"(.*?),(sdy-apply-sharding-constraints\b.*?,sdy-user-priority-propagate\{[^}]*\}),(.*)"

_WITHOUT_CALLS = (
    "symbol-dce",
    "func.func(sdy-verify-unreduced-axes)",
    "sdy-propagate-sharding-from-func-to-call",
    "sdy-flatten-call-graph",
    "sdy-import-func-calls",
    "sdy-pre-order-funcs",
    "sdy-export-named-computations",
    "sdy-unflatten-call-graph",
    "sdy-insert-func-call-reshards",
)
"""The passes that leave a module of one function as it is: they are about calls and what nothing calls, and verify."""


@functools.cache
def _expanded(pipeline: str, is_one_function: bool) -> tuple[str, str, str]:
    """An expanded pipeline without the passes that are not needed; in all they take a tenth of the time.

    In three parts, of which the second decides, by what uses values.
    """
    kept = re.sub(r",sdy-save-module|,func\.func\(sdy-drop-sharding-rules\)", "", pipeline)
    for name in _WITHOUT_CALLS if is_one_function else ():
        kept = re.sub(rf"{re.escape(name)}(\{{[^}}]*\}})?,", "", kept)
    (parts,) = re.findall(_DECIDING, kept)
    before, deciding, after = parts
    return f"{before})", f"builtin.module({deciding})", f"builtin.module({after}"


def propagate_interface(module: ir.Module) -> None:
    """As `propagate`, but it stops when the shardings of arguments and results are settled."""
    with module.context:
        expanded = str(passmanager.PassManager.parse(_PROPAGATION))
    settling, later, _ = expanded.replace(",sdy-save-module", "").partition(",func.func(sdy-insert-explicit-reshards")
    run_passes(module, f"{settling})" if later else settling)


def insert_reshards(module: ir.Module) -> None:
    """Inserts reshards and all-reduces where the shardings of a propagated module need them."""
    run_passes(module, "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true}))")


def merge_equal(module: ir.Module) -> None:
    """Eliminates common subexpressions, as XLA does before it partitions."""
    run_passes(module, "builtin.module(cse)")


def run_passes(module: ir.Module, pipeline: str) -> None:
    """Runs a pipeline of passes on a module."""
    with module.context:
        manager = passmanager.PassManager.parse(pipeline)
        manager.enable_verifier(False)  # it takes twice as long as the passes
        manager.run(module.operation)


def main_of(module: ir.Module) -> Any:
    """The function of a module that is the program."""
    return next(op for op in module.body.operations if "sym_name" in op.attributes and symbol_of(op) == "main")


def nested(op: ir.OpView | ir.Operation, order: ir.WalkOrder = ir.WalkOrder.POST_ORDER) -> list[ir.Operation]:
    """The operations in the regions of an operation, at any depth, each after those in it or before them."""
    found: list[ir.Operation] = []
    append, advance = found.append, ir.WalkResult.ADVANCE

    def visit(inner: ir.Operation) -> ir.WalkResult:
        append(inner)
        return advance

    op.operation.walk(visit, order)  # a recursion over regions in Python takes three times as long
    found.pop(-1 if order == ir.WalkOrder.POST_ORDER else 0)  # the operation itself
    return found


@dataclasses.dataclass(frozen=True)
class ReadShardings:
    """What attributes say that were read already, in modules with the same meshes.

    Attributes:
        one: of attributes of one value.
        several: of those of all results of an operation.
        ends: of the dictionaries of arguments and results of a program; None for one without a sharding.
    """

    one: dict[ir.Attribute, TensorSharding] = dataclasses.field(default_factory=dict)
    several: dict[ir.Attribute, Sequence[TensorSharding]] = dataclasses.field(default_factory=dict)
    ends: dict[ir.Attribute, TensorSharding | None] = dataclasses.field(default_factory=dict)


class Shardings:
    """The shardings in a propagated module.

    Args:
        module: the module; it may be changed afterwards, as long as its meshes stay.
        known: what attributes are known to say, of modules with the same meshes; it is added to.
    """

    def __init__(self, module: ir.Module, known: ReadShardings | None = None) -> None:
        self._main = main_of(module)
        self._meshes = {
            symbol_of(op): _sizes(op.attributes["mesh"])
            for op in module.body.operations
            if op.operation.name == "sdy.mesh"
        }
        known = ReadShardings() if known is None else known
        self._known, self._of_several, self._of_ends = known.one, known.several, known.ends

    def of_arguments(self) -> list[TensorSharding | None]:
        """The shardings of the arguments of the program; None for one without an annotation."""
        return self._of_main("arg_attrs", len(self._main.type.inputs))

    def of_results(self) -> list[TensorSharding | None]:
        """The shardings of the results of the program; None for one without an annotation."""
        return self._of_main("res_attrs", len(self._main.type.results))

    def of(self, value: ir.Value) -> TensorSharding | None:
        """The sharding of a value; None without an annotation, which means that it is replicated.

        In the body of a `shard_map`, it is how the value of one shard is sharded further.
        """
        owner = value.owner
        if not isinstance(owner, ir.Block):
            attribute = owner.attributes.get("sdy.sharding")
            if attribute is None:
                return self._nth(owner, ir.OpResult(value).result_number)
            several = self._of_several.get(attribute) or self._several(attribute)
            return several[0] if len(several) == 1 else several[ir.OpResult(value).result_number]
        op, k = owner.owner.operation, ir.BlockArgument(value).arg_number  # of a function, loop or manual computation
        if op.name == "func.func":
            attribute = _attribute(op, "arg_attrs", k)
            return None if attribute is None else self.read(attribute)
        if op.name == "sdy.manual_computation":
            shardings = sdy.TensorShardingPerValueAttr(op.attributes["in_shardings"]).shardings
            return _without(self.read(shardings[k]), {*sdy.ManualAxesAttr(op.attributes["manual_axes"])})
        return self._nth(op, k)

    def of_operations(self, ops: Sequence[ir.Operation], names: Sequence[str]) -> dict[ir.Value, TensorSharding]:
        """The shardings of the results of operations of these names, as far as they are quickly read.

        These are the ones with an annotation over the mesh of the program, and arrays that an operation of StableHLO
        with one result computes without an annotation, which are replicated.
        """
        found: dict[ir.Value, TensorSharding] = {}
        replicated: dict[ir.Type, TensorSharding | None] = {}
        several = self._of_several
        for op, name in zip(ops, names, strict=True):
            attribute = op.attributes.get("sdy.sharding")
            if attribute is not None:
                of_results = several.get(attribute) or self._several(attribute)
                if of_results and of_results[0].mesh == "mesh":
                    if len(of_results) == 1:
                        found[op.result] = of_results[0]
                    else:
                        found.update(zip(op.results, of_results, strict=False))
            elif name != "stablehlo.return" and name.startswith("stablehlo.") and len(op.results) == 1:
                value = op.result
                of_type = value.type
                if of_type not in replicated:
                    is_array = isinstance(of_type, ir.RankedTensorType)
                    replicated[of_type] = TensorSharding.replicated(of_type.rank) if is_array else None
                if (sharding := replicated[of_type]) is not None:
                    found[value] = sharding
        return found

    def read(self, attribute: ir.Attribute) -> TensorSharding:
        """The sharding that a `TensorShardingAttr` says."""
        if attribute not in self._known:
            self._known[attribute] = self._parse(attribute)
        return self._known[attribute]

    def _parse(self, attribute: ir.Attribute) -> TensorSharding:
        sharding = sdy.TensorShardingAttr(attribute)
        where = sharding.mesh_or_ref
        if isinstance(where, ir.FlatSymbolRefAttr):
            mesh = where.value
            sizes = self._meshes[mesh]
        else:
            mesh, sizes = "", _sizes(where)
        axes, parts = [], []
        for dim in sharding.dimension_shardings:
            refs = [sdy.AxisRefAttr(ref) for ref in sdy.DimensionShardingAttr(dim).axes]
            axes.append(tuple(map(axis_name, refs)))
            parts.append(tuple(sizes[r.name] if (part := _part(r)) is None else part.size for r in refs))
        if mesh == "mesh" and not any(axes):
            return TensorSharding.replicated(len(axes))
        return TensorSharding(tuple(axes), tuple(parts), mesh)

    def _of_main(self, which: str, count: int) -> list[TensorSharding | None]:
        attributes = self._main.attributes
        if which not in attributes:
            return [None] * count
        known = self._of_ends
        found = [*ir.ArrayAttr(attributes[which])]
        for named in found:
            if named not in known:
                sharding = ir.DictAttr(named)
                known[named] = self.read(sharding["sdy.sharding"]) if "sdy.sharding" in sharding else None
        return [known[named] for named in found]

    def _nth(self, op: ir.OpView | ir.Operation, k: int) -> TensorSharding | None:
        attributes = op.attributes
        for name in ("sdy.sharding", "out_shardings"):
            attribute = attributes.get(name)
            if attribute is not None:
                return self._several(attribute)[k]
        for name in ("sharding", "out_sharding") if op.name.startswith("sdy.") else ():
            if name in attributes:
                return self.read(attributes[name])
        return None

    def _several(self, attribute: ir.Attribute) -> Sequence[TensorSharding]:
        if attribute not in self._of_several:
            self._of_several[attribute] = [*map(self.read, sdy.TensorShardingPerValueAttr(attribute).shardings)]
        return self._of_several[attribute]


def _without(sharding: TensorSharding, manual: set[str]) -> TensorSharding:
    dims = [zip(axes, parts, strict=True) for axes, parts in zip(sharding.axes, sharding.parts, strict=True)]
    kept = [[(axis, part) for axis, part in dim if axis not in manual] for dim in dims]
    axes = tuple(tuple(axis for axis, _ in dim) for dim in kept)
    return TensorSharding(axes, tuple(tuple(part for _, part in dim) for dim in kept), sharding.mesh)


def axis_name(ref: sdy.AxisRefAttr) -> str:
    """The name of the axis or sub-axis of a reference."""
    part = _part(ref)
    return ref.name if part is None else f"{ref.name}:({part.pre_size}){part.size}"


def _part(ref: sdy.AxisRefAttr) -> sdy.SubAxisInfoAttr | None:
    """The sub-axis of a reference, None if it is to all of an axis."""
    part = ref.sub_axis_info
    return None if part is None else sdy.SubAxisInfoAttr(part)  # the bindings return a plain attribute


def _sizes(mesh: ir.Attribute) -> dict[str, int]:
    """The axes of a mesh, with their sizes."""
    axes = [sdy.MeshAxisAttr(axis) for axis in sdy.MeshAttr(mesh).axes]
    return {axis.name: axis.size for axis in axes}


def symbol_of(op: ir.OpView) -> str:
    """The name of a function or a mesh of a module."""
    return ir.StringAttr(op.attributes["sym_name"]).value


def _attribute(function: ir.Operation, which: str, i: int) -> ir.Attribute | None:
    """The sharding of an argument or a result of a function, if it has one."""
    if which not in function.attributes:
        return None
    attributes: Any = ir.DictAttr(ir.ArrayAttr(function.attributes[which])[i])
    if "sdy.sharding" not in attributes:
        return None
    return attributes["sdy.sharding"]
