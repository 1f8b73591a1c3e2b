"""Candidates of a search, compiled to take steps; where that is possible in another process, which an abort ends."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding

from partjit._jax.saved_computations import saved_computation
from partjit.api import pjit
from partjit.devices import platform_of
from partjit.inspect.changes import Axes
from partjit.search.constrained import with_constraints
from partjit.search.find import Tried
from partjit.search.found import spec_of
from partjit.search.made_arguments import MadeArguments, is_array
from partjit.search.program import SearchedProgram
from partjit.search.timing_process import SavedStep, TimingProcess

__all__ = ["Compiler", "TimedStep"]


@dataclasses.dataclass(frozen=True, eq=False)
class TimedStep:
    """A candidate that takes steps.

    Attributes:
        tried: the candidate.
        run: takes a step on new arguments, and returns its seconds.
        times: the seconds of the steps that it took in turns.
    """

    tried: Tried
    run: Callable[[], float]
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.times)


class Compiler:
    """What compiles candidates, here or in another process; `close` ends that.

    Another process is asked on CPUs: an accelerator's memory is this process's. A program that calls Python is run
    here.

    Args:
        program: the program.
        leaves: the arguments; those that are no arrays, or all by default, are made up: numbers between -0.02 and 0.02,
            and zeros where they are no floats.
        hidden: the axes of the arguments that are not the user's.
        where: what errors begin with.
        isolated: whether another process is asked.

    Raises:
        ValueError: the program has effects, which it would have each time.
    """

    def __init__(
        self,
        program: SearchedProgram,
        leaves: Sequence[object] | None = None,
        hidden: Sequence[Axes] = (),
        where: str = "search_specs",
        isolated: bool = True,
    ) -> None:
        closed = with_constraints(program.partitioned.inlined, {}, program.unit.mesh)
        if closed.effects:
            effects = ", ".join(sorted(map(str, closed.effects)))
            raise ValueError(
                f"{where}: {program.unit.name} cannot be measured: it has effects, {effects}, which it would have with "
                "each step that is timed. Leave out `measure`, or what has effects"
            )
        self._program, self._hidden, self._count = program, hidden, 0
        avals = [aval for aval in closed.in_avals if isinstance(aval, ShapedArray)]
        given = leaves if leaves is not None and len(leaves) == len(avals) - program.hidden else ()
        self._structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        values = [*[None] * (len(avals) - len(given)), *given]
        self._made = MadeArguments([(aval.shape, aval.dtype) for aval in avals], values)
        self._process: TimingProcess | None = None
        if isolated and platform_of(program.unit.mesh) == "cpu":
            pairs = zip(values, self._structs, strict=True)
            self._process = TimingProcess([value if is_array(value) else struct for value, struct in pairs])

    def __call__(self, tried: Tried) -> TimedStep:
        """The candidate; another process compiles it with its first step, this one at once."""
        shardings, lowered = self._lowered(tried)
        saved = None if self._process is None else saved_computation(lowered)
        if saved is not None:
            process, self._count = self._process, self._count + 1
            assert process is not None
            shape = tuple(self._program.unit.mesh.shape.items())
            step = SavedStep(saved, shape, tuple(sharding.spec for sharding in shardings))
            return TimedStep(tried, functools.partial(process.seconds, self._count, step))
        executable = lowered.compile()

        def run() -> float:
            arguments = jax.block_until_ready(self._made.on(shardings))
            start = time.perf_counter()
            jax.block_until_ready(executable(*arguments))
            return time.perf_counter() - start

        return TimedStep(tried, run)

    def close(self) -> None:
        """Ends the other process."""
        if self._process is not None:
            self._process.close()

    def _lowered(self, tried: Tried) -> tuple[tuple[NamedSharding, ...], jax.stages.Lowered]:
        """A candidate as a program, and the shardings of its arguments."""
        program, question, mesh = self._program, tried.question, self._program.unit.mesh

        def on_mesh(axes: Sequence[Axes]) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, spec_of(one)) for one in axes)

        own = (question.arguments.get(k) or axes for k, axes in enumerate(tried.answer.arguments))
        shardings = on_mesh([*self._hidden, *own])
        results = on_mesh([question.results.get(k) or axes for k, axes in enumerate(tried.answer.results)])
        specs = {number: spec_of(axes) for number, axes in question.values.items()}
        evaluate = jaxpr_as_fun(with_constraints(program.partitioned.inlined, specs, mesh))
        donated = tuple(k + program.hidden for k, donated in enumerate(program.donated) if donated)
        options: dict[str, Any] = {"in_shardings": shardings, "out_shardings": results, "donate_argnums": donated}
        partitioned = pjit(lambda *args: tuple(evaluate(*args)), **options)
        return shardings, partitioned.lower(*self._structs)
