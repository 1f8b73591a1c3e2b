"""What a search asks about a program: the time of a step, the memory and the shardings; in this process or another."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from partjit.inspect.asked_process import saved_facts
from partjit.inspect.changes import Axes, Change, Facts
from partjit.inspect.memory import needs_of
from partjit.inspect.outcomes import after_change
from partjit.inspect.places import Known
from partjit.search.machine import Machine
from partjit.search.step_time import seconds_of_step
from partjit.search.work import Work
from partjit.shardy import TensorSharding

__all__ = ["Answer", "AskedStep"]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a program would cost with some shardings.

    Attributes:
        seconds: the time of a step, in which what is not predicted counts with its upper bound.
        expected: the same, in which it counts with what XLA sends as a rule.
        peak: the bytes that a device needs at most.
        arguments, results: the axes of arguments and results, by dimensions; those of an argument or result that was
            left to the partitioner are what it chose.
    """

    seconds: float
    expected: float
    peak: int
    arguments: tuple[Axes, ...]
    results: tuple[Axes, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class AskedStep:
    """Asks what a step costs.

    Attributes:
        facts: what is known of the program.
        hidden: how many of its first arguments are left out of answers.
        work: what it computes and moves.
        machine: the machine.
        sizes: the axes of the mesh, with their sizes.
        overlap: which part of the communication is assumed to be hidden.
        is_cpu: whether the mesh is of CPUs.
    """

    facts: Facts
    hidden: int
    work: Work
    machine: Machine
    sizes: Mapping[str, int]
    overlap: float
    is_cpu: bool

    def answer(self, lowered: Any, wanted: Change, known: Known) -> Answer:
        """What a step costs after a change."""
        after = after_change(lowered, self.facts, wanted, known)
        parts = self.work.parts(after.values, after.used(self.facts))
        seconds, expected = seconds_of_step(parts, *after.prediction, self.sizes, self.machine, self.overlap)
        needs = needs_of(
            self.facts.skeleton, after.values, after.results, self.facts.donated, *after.prediction, self.is_cpu
        )
        none, inputs = TensorSharding.replicated(0), self.facts.skeleton.body.invars
        arguments = zip(self.facts.arguments, inputs, strict=True)
        # A key has more dimensions in the module than in the program.
        of_arguments = [after.values.get(number, none).axes[: variable.ndim] for number, variable in arguments]
        of_results = zip(after.results, self.facts.ranks, strict=True)
        return Answer(
            seconds,
            expected,
            needs.peak,
            tuple(of_arguments[self.hidden :]),
            tuple(sharding.axes[:rank] for sharding, rank in of_results),
        )

    def saved(self) -> "AskedStep":
        """The same as data that can be pickled."""
        return dataclasses.replace(self, facts=saved_facts(self.facts), work=self.work.saved())
