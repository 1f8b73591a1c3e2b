"""The sharding that the partitioner chooses for every value of a program, without compiling it."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr
from jax.extend.mlir import ir
from jax.sharding import Mesh

from partjit._jax.shardings import MaybeSharding
from partjit.colocated.ir.lowering import opaque_calls
from partjit.compile import lower_to_module
from partjit.inspect.annotated import AnnotatedJaxpr, AnnotatedValue
from partjit.inspect.inlining import InlinedProgram, inline_program
from partjit.inspect.marks import hidden_marks, is_mark, numbers_of, remove_unused_values
from partjit.inspect.walk import Walk, walk_of
from partjit.shardy import ReadShardings, Shardings, TensorSharding, propagate
from partjit.xla_folds import Lowered
from partjit.xla_rewrites import open_captured, rewrite_operations

__all__ = [
    "Partitioned",
    "PropagatedModule",
    "Unit",
    "lower_unit",
    "partition",
    "propagated",
    "ranks_of",
    "results_of",
]

_CALL = "stablehlo.custom_call"


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """What is partitioned as one program: a whole function, or a fragment of its plan.

    Attributes:
        name: its name.
        jaxpr: its jaxpr.
        in_shardings, out_shardings: of its arguments and results; UNSPECIFIED where the partitioner chooses.
        mesh: its mesh; empty if it has none.
        paths, result_paths: the key paths of arguments and results, or their names.
        times: how often it runs in one execution of the function; None if that is not known.
        iterations: the trip counts of loops that the caller gave, by their lines; see `given_trip_count`.
        keep_unused: whether arguments that it does not use are passed to it all the same.
    """

    name: str
    jaxpr: ClosedJaxpr
    in_shardings: tuple[MaybeSharding, ...]
    out_shardings: tuple[MaybeSharding, ...]
    mesh: Mesh
    paths: tuple[str, ...]
    result_paths: tuple[str, ...]
    times: int | None = 1
    iterations: Mapping[str, int] = dataclasses.field(default_factory=dict)
    keep_unused: bool = False


class PropagatedModule(NamedTuple):
    """A module after the partitioner's propagation, without marks.

    Attributes:
        module: the module.
        shardings: the shardings in it.
        walk: its operations.
    """

    module: ir.Module
    shardings: Shardings
    walk: Walk


@dataclasses.dataclass(frozen=True, eq=False)
class Partitioned:
    """A unit after the partitioner's propagation.

    Attributes:
        unit: the unit.
        inlined: its inlined program, with the sharding of every value.
        result_shardings: the shardings in which the results are returned; a value with another one is resharded.
        propagated: its module after the propagation; None without a mesh of several devices.
        lowered: the module before the propagation, if it was kept; its shardings may still be changed, and what loops
            capture is not opened yet.
    """

    unit: Unit
    inlined: InlinedProgram
    result_shardings: tuple[TensorSharding, ...]
    propagated: "PropagatedModule | None"
    lowered: ir.Operation | ir.OpView | None

    @functools.cached_property
    def text(self) -> str:
        """The module before the propagation, with locations, if it was kept."""
        if self.lowered is None:
            return ""
        module: Any = self.lowered.clone()
        open_captured(module)
        return str(module.operation.get_asm(enable_debug_info=True))

    @property
    def tree(self) -> AnnotatedJaxpr:
        """The annotated program."""
        return self.inlined.tree

    @functools.cached_property
    def results(self) -> tuple[AnnotatedValue, ...]:
        """The results, with their paths and the shardings in which they are returned."""
        return tuple(
            dataclasses.replace(value, path=path, shardings={value.number: sharding}, literal=False)
            for value, path, sharding in zip(
                self.tree.outputs, self.unit.result_paths, self.result_shardings, strict=True
            )
        )


def partition(unit: Unit, keep_text: bool = False) -> Partitioned:
    """Annotates a unit; `keep_text` keeps the lowered module, whose text `origins` needs."""
    inlined, module = lower_unit(unit)
    if module is None:
        return Partitioned(unit, inlined, tuple(map(TensorSharding.replicated, ranks_of(unit))), None, None)
    lowered = module.operation.clone() if keep_text else None  # its text takes longer than a copy
    open_captured(module)
    after, of_values = propagated(module)
    inlined.shardings.update(of_values)
    return Partitioned(unit, inlined, results_of(after.shardings, ranks_of(unit)), after, lowered)


def lower_unit(unit: Unit) -> tuple[InlinedProgram, ir.Module | None]:
    """The inlined program of a unit, and what it is lowered to on several devices, whose shardings may be changed.

    On one device its values have shardings already.
    """
    inlined = inline_program(unit.jaxpr, unit.mesh, unit.paths, unit.result_paths, unit.iterations, unit.keep_unused)
    if unit.mesh.size <= 1:
        arrays = (value for value in inlined.tree.values if value.is_array)
        inlined.shardings.update((v.number, TensorSharding.replicated(len(v.aval.shape))) for v in arrays)
        return inlined, None
    with opaque_calls():
        module = lower_to_module(inlined.jaxpr, unit.in_shardings, unit.out_shardings, unit.mesh, unit.name)
    remove_unused_values(module)
    rewrite_operations(module, Lowered(is_mark, inlined.functions(), remove_unused_values))
    return inlined, module


def propagated(
    module: ir.Module, known: ReadShardings | None = None
) -> tuple[PropagatedModule, dict[int, TensorSharding]]:
    """Propagates shardings in a rewritten module, and removes its marks.

    Args:
        module: the module.
        known: what attributes are known to say; see `Shardings`.

    Returns:
        The module, with what is left in it, and the shardings of the marked values by their numbers.
    """
    propagate(module, hidden_marks)
    shardings = Shardings(module, known)
    of_values: dict[int, TensorSharding] = {}
    ops, names, known_already = walk_of(module, shardings)
    marks = [k for k, name in enumerate(names) if name == _CALL and is_mark(ops[k])]
    for op in map(ops.__getitem__, marks):
        for number, value in zip(numbers_of(op), op.operands, strict=True):
            sharding = known_already.get(value) or shardings.of(value)
            of_values[number] = sharding or TensorSharding.replicated(len(value.type.shape))
    for k in reversed(marks):
        ops.pop(k).erase()
        names.pop(k)
    return PropagatedModule(module, shardings, Walk(ops, names, known_already)), of_values


def results_of(shardings: Shardings, ranks: Sequence[int]) -> tuple[TensorSharding, ...]:
    """The shardings of the results of a propagated program, which have these ranks."""
    found = shardings.of_results()[-len(ranks) :] if ranks else []  # after those of tokens
    return tuple(own or TensorSharding.replicated(rank) for own, rank in zip(found, ranks, strict=True))


def ranks_of(unit: Unit) -> tuple[int, ...]:
    """The ranks of the results of a unit."""
    return tuple(getattr(aval, "ndim", 0) for aval in unit.jaxpr.out_avals)
