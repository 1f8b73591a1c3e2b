"""Specs that are AUTO: the program of a partitioned function with those that a search finds, or has found before."""

import dataclasses
import hashlib
import threading
import warnings
from collections.abc import Sequence
from importlib.metadata import version

import jax
from jax.extend.core import ClosedJaxpr, jaxprs_in_params

from partjit._jax.jaxprs import called_jaxpr
from partjit._jax.meshes import manual_axes
from partjit._jax.tracing import low_jaxpr, named_like
from partjit._jax.versions import COMPILER
from partjit.auto_specs import SearchOptions
from partjit.compile import Program, Traced
from partjit.devices import platform_of
from partjit.inspect.changes import Axes
from partjit.inspect.inlining import inline_program
from partjit.inspect.tracing import TracedFunction, trace_function
from partjit.primitive import pjit_p
from partjit.search.agreed import agreed, processes_of
from partjit.search.constrained import with_constraints
from partjit.search.find import find
from partjit.search.fingerprint import fingerprint
from partjit.search.found import spec_of
from partjit.search.given import axes_if_any
from partjit.search.machine import Machine
from partjit.search.options import bytes_of, machine_of, names_of, require_auto_axes, shown_progress, workers_of
from partjit.search.program import SearchedProgram
from partjit.search.settled import SettledSpecs, folder_of, keep, kept
from partjit.search.space import Space
from partjit.search.timed import fastest, require_measurable
from partjit.spec import ParsedPartitionSpec, Spec

__all__ = ["with_found_specs"]

_FORMAT = 3
"""Of what is kept; it changes with what a search does."""

_found: dict[str, SettledSpecs] = {}
_only = threading.Lock()


def with_found_specs(
    program: Program, arguments: Sequence[bool], results: Sequence[bool], options: SearchOptions, is_traced: bool
) -> Program:
    """A program with specs, and constraints of activations, that a search finds.

    Args:
        program: the program, in which specs that are AUTO are UNSPECIFIED.
        arguments, results: which specs of its arguments and results are AUTO.
        options: how to search.
        is_traced: whether it is part of another program, or transformed. What has derivatives or a checkpoint of its
            own then stays as it is, without constraints, which are set in the program with all calls inlined.

    Raises:
        MemoryLimitError: it does not fit into the memory with any specs that were tried.
        WhatIfError: none of the starts could be tried.
        ValueError: the mesh has axes of type Explicit, or the program is part of a `shard_map`.
    """
    if program.mesh.size == 1:
        replicated = ParsedPartitionSpec.from_user_input(jax.sharding.PartitionSpec(), "in_shardings")
        return dataclasses.replace(
            program,
            in_specs=tuple(replicated if auto else s for s, auto in zip(program.in_specs, arguments, strict=True)),
            out_specs=tuple(replicated if auto else s for s, auto in zip(program.out_specs, results, strict=True)),
        )
    if manual := manual_axes():
        raise ValueError(
            f"pjit: specs of {program.name} cannot be AUTO inside of a shard_map over {', '.join(manual)}, where a "
            "value is one device's own: leave specs out there, or search those of the function around it"
        )
    traced = trace_function(Traced(program, [None] * len(program.in_specs)), (), {}, None)
    require_auto_axes("pjit", traced, program.mesh)
    only_specs = is_traced and _has_rules_of_its_own(program.jaxpr)
    machine = machine_of(program.mesh) if options.machine is None else options.machine
    task = _Task(program, traced, tuple(arguments), tuple(results), options, machine, only_specs)
    found = task.found()
    return dataclasses.replace(
        program,
        jaxpr=_constrained(program, traced, found),
        in_specs=_specs(program.in_specs, arguments, found.arguments),
        out_specs=_specs(program.out_specs, results, found.results),
    )


@dataclasses.dataclass(frozen=True)
class _Task:
    """What is searched, in which way; `only_specs` says that nothing in the program may be constrained."""

    program: Program
    traced: TracedFunction
    arguments: tuple[bool, ...]
    results: tuple[bool, ...]
    options: SearchOptions
    machine: Machine
    only_specs: bool

    def found(self) -> SettledSpecs:
        """What was found before, by this process or another, or what is found now."""
        key = self._key()
        with _only:
            settled = _found.get(key)
        if settled is None:
            text = agreed(lambda: self._text(key), key, self.program.mesh, self.program.name)
            settled = SettledSpecs.from_json(text, *self._ranks)
            with _only:
                _found[key] = settled
        return settled

    def _text(self, key: str) -> str:
        folder = folder_of(self.options.cache)
        before = None if folder is None else kept(folder, key, *self._ranks)
        if before is not None:
            return before.to_json(self.program.name)
        text = self._searched().to_json(self.program.name)
        if folder is not None:
            keep(folder, key, text)
        return text

    @property
    def _ranks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        jaxpr = self.traced.whole.jaxpr
        ranks = [[getattr(aval, "ndim", 0) for aval in avals] for avals in (jaxpr.in_avals, jaxpr.out_avals)]
        return tuple(ranks[0]), tuple(ranks[1])

    def _fixed(self) -> tuple[list[Axes | None], list[Axes | None]]:
        """The axes that specs say; None for what is AUTO or left to the partitioner."""
        program = self.program
        both = zip((program.in_specs, program.out_specs), self._ranks, strict=True)
        found = [[axes_if_any(one, program.mesh, n) for one, n in zip(*of, strict=True)] for of in both]
        return found[0], found[1]

    def _key(self) -> str:
        """What identifies the search: the program, the mesh, the machine, the options, and the versions."""
        mesh, options, unit = self.program.mesh, self.options, self.traced.whole
        known = (
            _FORMAT,
            [version(name) for name in ("partjit", "jax", COMPILER)],
            fingerprint(self.program.jaxpr),
            [*mesh.shape.items()],
            platform_of(mesh),
            len(processes_of(mesh)),
            [(field.name, getattr(self.machine, field.name)) for field in dataclasses.fields(self.machine)],
            [
                options.memory,
                options.questions,
                options.time_limit,
                options.constrain,
                options.overlap,
                options.methods,
                options.measure,
            ],
            [unit.name, unit.paths, unit.result_paths, self.traced.donated],
            [self.arguments, self.results, self._fixed(), self.only_specs],
        )
        return hashlib.sha256(repr(known).encode()).hexdigest()

    def _searched(self) -> SettledSpecs:
        options, memory = self.options, self.machine.memory if self.options.memory is None else self.options.memory
        workers = workers_of(options.workers) if options.isolated else 0
        timed = require_measurable("SearchOptions", options.measure, self.program.mesh)
        program = SearchedProgram(self.traced, self.machine, options.overlap, workers)
        hidden = program.hidden
        ins, outs = self._fixed()
        try:
            space = Space(
                program,
                {k: axes for k, axes in enumerate(ins[hidden:]) if not self.arguments[k + hidden]},
                {k: axes for k, axes in enumerate(outs) if not self.results[k]},
                names_of("SearchOptions", options.constrain),
                self.only_specs,
            )
            with shown_progress("SearchOptions", options.progress) as report:
                ranking = find(
                    program,
                    space,
                    bytes_of(memory),
                    options.questions,
                    options.time_limit,
                    tuple(options.methods),
                    report,
                    "pjit",
                )
        finally:
            program.close()
        hidden_axes = [_closed(axes or ((),) * rank) for axes, rank in zip(ins[:hidden], self._ranks[0], strict=False)]
        if timed:
            ranking = fastest(
                program, ranking, timed, hidden=hidden_axes, where="SearchOptions", isolated=options.isolated
            )
            for line in ranking.passed_over:
                warnings.warn(f"pjit: of the specs that were to be measured, {line}", stacklevel=2)
        question, answer = ranking.question, ranking.answer
        arguments = [question.arguments.get(k) or axes for k, axes in enumerate(answer.arguments)]
        return SettledSpecs(
            (*hidden_axes, *map(_closed, arguments)),
            tuple(_closed(question.results.get(k) or axes) for k, axes in enumerate(answer.results)),
            {number: _closed(axes) for number, axes in question.values.items()},
            ranking.best.score.seconds,
            ranking.best.score.peak,
            ranking.questions,
        )


def _closed(axes: Axes) -> Axes:
    return tuple(dim or () for dim in axes)


def _specs(specs: Sequence[Spec], auto: Sequence[bool], found: Sequence[Axes]) -> tuple[Spec, ...]:
    """These specs, and those that were found in place of those that are AUTO."""
    return tuple(
        ParsedPartitionSpec.from_user_input(spec_of(axes), "in_shardings") if is_auto else spec
        for spec, is_auto, axes in zip(specs, auto, found, strict=True)
    )


def _constrained(program: Program, traced: TracedFunction, found: SettledSpecs) -> ClosedJaxpr:
    """The jaxpr of the program with the constraints that were found."""
    if not found.constraints:
        return program.jaxpr
    unit = traced.whole
    inlined = inline_program(unit.jaxpr, unit.mesh, unit.paths, unit.result_paths, {})
    specs = {number: spec_of(axes) for number, axes in found.constraints.items()}
    return named_like(with_constraints(inlined, specs, unit.mesh), program.jaxpr)


def _has_rules_of_its_own(jaxpr: object) -> bool:
    """Whether a jaxpr has derivatives, a checkpoint or other rules that inlining its calls would lose."""
    if isinstance(jaxpr, ClosedJaxpr) and low_jaxpr(jaxpr) is not jaxpr:
        return True
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:  # type: ignore[attr-defined]
        is_plain_call = eqn.primitive is pjit_p or eqn.primitive.name in ("jit", "pjit", "closed_call")
        if called_jaxpr(eqn) is not None and not is_plain_call:
            return True
        if any(_has_rules_of_its_own(inner) for inner in jaxprs_in_params(eqn.params)):
            return True
    return False
