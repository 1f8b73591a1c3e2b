"""What a search found: specs as trees and as Python, what they cost, and the partitioned function."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from partjit._jax.shardings import UNSPECIFIED
from partjit._jax.types import PyTree
from partjit.api import pjit
from partjit.inspect.annotated import shown_spec
from partjit.inspect.changes import Axes
from partjit.inspect.explain import explain
from partjit.inspect.report import Report
from partjit.inspect.user_lines import Site, shown_lines
from partjit.mesh import describe_mesh
from partjit.render.numbers import counted, shown_bytes, shown_duration
from partjit.render.text import table
from partjit.search.constrained import with_constraints
from partjit.search.given import given_axes
from partjit.search.machine import Machine
from partjit.search.program import SearchedProgram
from partjit.search.python_text import shown_tree
from partjit.search.step_time import StepTime, estimate_time

__all__ = ["Candidate", "Constraint", "FoundSpecs", "SpecChange"]


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A spec for activations that the program computes on some lines, or for a parameter where the loss reads it.

    A constraint of a value in `jax.grad` is one of its gradient as well.

    Attributes:
        spec: the spec.
        argument: the path of the argument; empty for activations.
        array: dtype and shape of the activations.
        sites: the lines that compute them in the forward pass; innermost ones outside of installed packages.
        numbers: their numbers in the program, those of their cotangents included.
    """

    spec: P
    argument: str
    array: str
    sites: tuple[Site, ...]
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        if self.argument:
            return f"{self.argument}, where the loss reads it -> {shown_spec(self.spec)}"
        where = ", ".join(shown_lines(site, None) for site in self.sites) or "lines that are not known"
        return f"{self.array} -> {shown_spec(self.spec)} at {where}"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Specs that were tried.

    Attributes:
        name: the start that they come from.
        seconds: of a step.
        peak: the bytes that a device needs.
        fits: whether that is within the limit.
        measured: the seconds of a step on the devices, if it was measured.
    """

    name: str
    seconds: float
    peak: int
    fits: bool
    measured: float | None = None


@dataclasses.dataclass(frozen=True)
class SpecChange:
    """An array whose spec is another one.

    Attributes:
        path: its path.
        before, after: the specs; None where the partitioner chose.
    """

    path: str
    before: P | None
    after: P | None

    def __str__(self) -> str:
        before, after = ("chosen by XLA" if one is None else shown_spec(one) for one in (self.before, self.after))
        return f"{self.path}: {before} -> {after}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FoundSpecs:
    """Specs that were found for a function; see `search_specs`.

    Attributes:
        name: the name of the function.
        mesh: the mesh.
        machine, memory: the machine, and the bytes of a device that were allowed.
        in_specs: a tree like the tuple of positional arguments, with a spec for each array.
        out_specs: a tree like the result.
        constraints: the specs of activations.
        seconds: the estimated time of a step, in which what is not predicted counts with its upper bound; `time` counts
            what it takes as a rule.
        peak: the estimated bytes that a device needs.
        starts: the named starts, the best first.
        runners_up: the next best that were found, the best first.
        origin: the name of the start that the specs come from.
        method: the method that found them: "start", "descent" or "annealing".
        questions: how many questions were asked.
        unanswered: how many of these ended the process that was asked, by a failed check of the partitioner.
        search_seconds: how long the search took, before anything was measured.
        measured: the seconds of a step on the devices, if it was measured.
        not_measured: what was to be measured and could not be, a line each: it ended the process that ran it, or XLA
            refused it.
    """

    name: str
    mesh: Mesh
    machine: Machine
    memory: int
    in_specs: tuple[PyTree, ...]
    out_specs: PyTree
    constraints: tuple[Constraint, ...]
    seconds: float
    peak: int
    starts: tuple[Candidate, ...]
    runners_up: tuple[Candidate, ...]
    origin: str
    method: str
    questions: int
    unanswered: int
    search_seconds: float
    measured: float | None
    not_measured: tuple[str, ...]
    _program: SearchedProgram
    _fun: Any
    _overlap: float

    def pjit(self, **options: Any) -> Any:
        """The function, partitioned by these specs and with these constraints; `options` are those of `partjit.pjit`.

        With constraints it evaluates the traced program: nothing of Python is in it any more, custom derivatives
        included, and static arguments have the values they had in the search and are left out.
        """
        return pjit(self._constrained, in_shardings=self.in_specs, out_shardings=self.out_specs, **options)

    @functools.cached_property
    def report(self) -> Report:
        """The report on the function with these specs and constraints."""
        donated = self._program.donated_positions
        return explain(self.pjit(donate_argnums=donated), *self._program.structs, mesh=self.mesh)

    @functools.cached_property
    def time(self) -> StepTime:
        """The time of a step by causes."""
        return estimate_time(self.report, self.machine, overlap=self._overlap)

    @property
    def _constrained(self) -> Callable[..., Any]:
        program, fun = self._program, self._fun
        if not self.constraints and not hasattr(fun, "trace") and callable(fun):
            return fun
        specs = {number: one.spec for one in self.constraints for number in one.numbers}
        evaluate = jaxpr_as_fun(with_constraints(program.partitioned.inlined, specs, self.mesh))

        def constrained(*args: Any) -> Any:
            return jax.tree.unflatten(program.out_tree, evaluate(*jax.tree.leaves(args)))

        constrained.__name__ = constrained.__qualname__ = self.name
        constrained.__signature__ = _signature(program.argument_names)  # type: ignore[attr-defined]  # as `inspect` has it
        return constrained

    def diff(self, in_specs: PyTree = UNSPECIFIED, out_specs: PyTree = UNSPECIFIED) -> tuple[SpecChange, ...]:
        """The arrays whose specs are others than these, or than those of the function that was searched.

        Args:
            in_specs, out_specs: tree prefixes of specs; by default those that the function had.

        Raises:
            TypeError, ValueError: they are no tree prefixes of specs.
        """
        program = self._program
        positional, result = program.leaf_trees
        given: tuple[Mapping[int, Axes | None], ...] = (
            given_axes(in_specs, "in_specs", positional, self.mesh, "diff"),
            given_axes(out_specs, "out_specs", result, self.mesh, "diff"),
        )
        if all(axes is None for of in given for axes in of.values()):
            given = dict(enumerate(program.own_arguments)), dict(enumerate(program.own_results))
        found = []
        for of, leaves, specs in zip(
            given, (program.arguments, program.results), (self.in_specs, self.out_specs), strict=True
        ):
            for k, (leaf, after) in enumerate(zip(leaves, jax.tree.leaves(specs), strict=True)):
                axes = of.get(k)
                before = None if axes is None else spec_of(axes)
                if before != after:
                    found.append(SpecChange(leaf.path, before, after))
        return tuple(found)

    def to_python(self) -> str:
        """Python that makes `in_specs` and `out_specs`, with the constraints as comments.

        Arguments have the names that they have in the function; the result is `result`, as `jax.eval_shape` gives it.
        """
        names = self._program.argument_names
        shown = [shown_tree(specs, name) for name, specs in zip(names, self.in_specs, strict=True)]
        lines = ["from partjit import P, specs_like", "", "in_specs = ("]
        lines += [f"    {line}" for text in shown for line in f"{text},".split("\n")]
        lines += [")"]
        known = {f"in_specs[{k}]": specs for k, specs in enumerate(self.in_specs)}
        if isinstance(self.out_specs, tuple) and type(self.out_specs) is tuple:
            parts = [shown_tree(specs, f"result[{k}]", known) for k, specs in enumerate(self.out_specs)]
            lines += ["out_specs = (", *(f"    {line}" for text in parts for line in f"{text},".split("\n")), ")"]
        else:
            lines += [f"out_specs = {shown_tree(self.out_specs, 'result', known)}"]
        if self.constraints:
            lines += ["", "# in the function, x = partjit.with_sharding_constraint(x, spec) for"]
            lines += [f"# {constraint}" for constraint in self.constraints]
        return "\n".join(lines)

    def to_text(self, most: int | None = 10) -> str:
        """What was found, what it costs, and beside which starts."""
        title = (
            f"{self.name} on {describe_mesh(self.mesh)}, {self.machine.name}: {shown_duration(self.seconds)} per step, "
            f"{shown_bytes(self.peak)} of {shown_bytes(self.memory)} per device"
        )
        how = (
            f"found by {self.method} from {self.origin}, with {counted(self.questions, 'question')} in "
            f"{shown_duration(self.search_seconds)}"
        )
        if self.unanswered:
            how += f"; {self.unanswered} could not be answered, as they ended the process that was asked"
        if self.measured is not None:
            how += f"; the fastest of what was measured, {shown_duration(self.measured)} per step"
        how += "".join(f"\nnot measured: {line}" for line in self.not_measured)
        rows = [_row(Candidate("found", self.seconds, self.peak, True, self.measured)), *map(_row, self.starts)]
        columns = ("specs", "step", "memory", "fits", "measured")
        if self.measured is None:
            columns, rows = columns[:-1], [row[:-1] for row in rows]
        return "\n\n".join([title, how, table(columns, rows, most), self.to_python()])

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__


def _signature(names: Sequence[str]) -> inspect.Signature:
    """A signature that names arguments in messages; several that are `data[0]` and so on are `*data`."""
    kinds = {
        name.partition("[")[0]: inspect.Parameter.VAR_POSITIONAL if "[" in name else inspect.Parameter.POSITIONAL_ONLY
        for name in names
    }
    return inspect.Signature([inspect.Parameter(name, kind) for name, kind in kinds.items()])


def _row(one: Candidate) -> tuple[str, ...]:
    measured = "" if one.measured is None else shown_duration(one.measured)
    return one.name, shown_duration(one.seconds), shown_bytes(one.peak), "yes" if one.fits else "no", measured


def spec_of(axes: tuple[tuple[str, ...] | None, ...]) -> P:
    """Axes as a spec, without trailing None.

    Example:
        >>> [*spec_of(((), ("data", "model"), ()))]
        [None, ('data', 'model')]
    """
    entries = [None if not dim else dim[0] if len(dim) == 1 else dim for dim in axes]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def paths_by_number(sites: Mapping[int, Site | None]) -> tuple[Site, ...]:
    """The distinct lines of values, in the order of their numbers."""
    return tuple(dict.fromkeys(site for _, site in sorted(sites.items()) if site is not None))
