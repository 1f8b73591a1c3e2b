"""The best of what a search found, timed on the devices of the mesh."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from partjit._jax.processes import own_process
from partjit.checks import require_integer, wrong_value
from partjit.inspect.asked_process import WhatIfError
from partjit.inspect.changes import Axes
from partjit.inspect.kept_process import ProcessEndedError
from partjit.mesh import is_abstract_mesh
from partjit.render.numbers import counted
from partjit.search.agreed import processes_of
from partjit.search.compiled import Compiler, TimedStep
from partjit.search.find import Ranking, Tried
from partjit.search.program import SearchedProgram

__all__ = ["fastest", "require_measurable"]

_ROUNDS = 15
_CUTS = {3: 1.5, 6: 1.25, 10: 1.15}
"""After so many rounds, by how much the median of one may exceed the best for it to be timed further."""

_WINS = 2 / 3
"""The share of the turns in which another candidate has to be faster than the one with the least estimate."""


def require_measurable(where: str, measure: object, mesh: Mesh) -> int:
    """How many programs are timed.

    Raises:
        TypeError, ValueError: it is no number of at least 0, or this process has not all devices of the mesh.
    """
    count = require_integer(where, "measure", measure, 0)
    if count and is_abstract_mesh(mesh):
        raise wrong_value(where, "measure", count, "0 on an abstract mesh, whose devices are not there to be timed")
    if count and processes_of(mesh) != (own_process(),):
        raise wrong_value(where, "measure", count, "0 on a mesh with devices of other processes")
    return count


def fastest(
    program: SearchedProgram,
    ranking: Ranking,
    count: int,
    leaves: Sequence[object] | None = None,
    hidden: Sequence[Axes] = (),
    where: str = "search_specs",
    isolated: bool = True,
    compiled: "Callable[[Tried], TimedStep] | None" = None,
) -> Ranking:
    """The ranking, with the fastest of its first `count` candidates as the best.

    Each is compiled. Then they take steps in turn, so that what else the machine does slows all of them alike; those
    that are clearly slower drop out, and the best by estimate stays the best if the fastest is hard to tell from it. A
    candidate that cannot be compiled, does not fit in the memory of a device, or ends the process that takes its steps
    is not the fastest: `Ranking.passed_over` says so.

    Args:
        program: the program.
        ranking: what was found, of which the candidates are compiled.
        count: how many are compiled.
        leaves, hidden, where, isolated: see `Compiler`.
        compiled: what compiles candidates, if it is not to be made.

    Raises:
        ValueError: the program has effects, which it would have each time.
        jax.errors.JaxRuntimeError, WhatIfError: none of the candidates could be run.
    """
    if compiled is None:
        with contextlib.closing(Compiler(program, leaves, hidden, where, isolated)) as made:
            return fastest(program, ranking, count, compiled=made, where=where)
    turns = _Turns()
    begun = [step for tried in ranking.candidates[:count] if (step := turns.begun(tried, compiled)) is not None]
    finished = turns.finished(begun)
    if not finished:
        raise turns.error(where)
    chosen = _winner(finished, begun[0]).tried
    runners_up = ranking.runners_up
    if chosen.question.key != ranking.question.key:
        runners_up = (ranking.best, *(one for one in runners_up if one.choice != chosen.scored.choice))
    return dataclasses.replace(
        ranking,
        best=chosen.scored,
        question=chosen.question,
        answer=chosen.answer,
        runners_up=runners_up,
        measured={step.tried.question.key: step.seconds for step in begun if step.times and step not in turns.failed},
        passed_over=tuple(map(str, turns.passed_over)),
    )


@dataclasses.dataclass(frozen=True)
class _PassedOver:
    """A candidate that could not be run, and the error."""

    tried: Tried
    error: Exception

    def __str__(self) -> str:
        name = self.tried.scored.origin or "near"
        if isinstance(self.error, ProcessEndedError):
            return f"{name} ended the process that ran it: {self.error}"
        first, *_ = str(self.error).splitlines() or [""]
        return f"{name} could not be run: {first}"


class _Turns:
    """Steps taken in turns.

    Attributes:
        passed_over: the candidates that could not be run.
        failed: those of them that took steps before.
    """

    def __init__(self) -> None:
        """Nothing was taken yet."""
        self.passed_over: list[_PassedOver] = []
        self.failed: list[TimedStep] = []

    def begun(self, tried: Tried, compiled: "Callable[[Tried], TimedStep]") -> TimedStep | None:
        """A candidate that has taken a step, which does not count; None if it cannot."""
        try:
            step = compiled(tried)
            step.run()
        except (jax.errors.JaxRuntimeError, ProcessEndedError) as error:
            self.passed_over.append(_PassedOver(tried, error))
            return None
        return step

    def finished(self, steps: Sequence[TimedStep]) -> Sequence[TimedStep]:
        """Those of the steps that were timed to the end."""
        for turn in range(_ROUNDS):
            if turn in _CUTS and steps:
                most = _CUTS[turn] * min(step.seconds for step in steps)
                steps = [step for step in steps if step.seconds <= most]
            steps = [step for step in steps if self._took(step)]
        return steps

    def _took(self, step: TimedStep) -> bool:
        try:
            step.times.append(step.run())
        except (jax.errors.JaxRuntimeError, ProcessEndedError) as error:
            self.passed_over.append(_PassedOver(step.tried, error))
            self.failed.append(step)
            return False
        return True

    def error(self, where: str) -> Exception:
        """What to raise if none could be run: the last error of XLA, or how processes ended."""
        of_xla = [one.error for one in self.passed_over if not isinstance(one.error, ProcessEndedError)]
        if of_xla:
            return of_xla[-1]
        count, last = len(self.passed_over), self.passed_over[-1]
        return WhatIfError(f"{where}: none of {counted(count, 'program')} could be measured; {last}")


def _winner(steps: Sequence[TimedStep], first: TimedStep) -> TimedStep:
    """The fastest, unless it is hard to tell from the first."""
    best = min(steps, key=lambda step: step.seconds)
    if first not in steps:
        return best
    wins = sum(own < other for own, other in zip(best.times, first.times, strict=True))
    return best if wins >= _WINS * len(first.times) else first
