"""The search: questions to a program, from the best starts to the best choice."""

import dataclasses
import time
from collections.abc import Callable, Sequence

from partjit.errors import MemoryLimitError
from partjit.render.numbers import shown_bytes
from partjit.search.improve import METHODS, Score, Scored, simplified
from partjit.search.program import Answer, SearchedProgram
from partjit.search.space import Choice, Question, Space
from partjit.search.starts import starts

__all__ = ["Progress", "Ranking", "find"]

Progress = Callable[[int, int, float], None]
"""Called with the questions so far, their limit, and the seconds of the best step so far."""

_KEPT = 3
_OF_STARTS = 0.5
"""The share of the limits that starts may take."""


@dataclasses.dataclass(frozen=True)
class Ranking:
    """What a search found.

    Attributes:
        best: the best choice.
        question: the shardings that it means, or those of the function's own specs if these are better.
        starts: the starts, the best first.
        runners_up: the next best choices that were seen, the best first.
        method: the method that improved the best choice last, or "start".
        questions: how many questions were asked.
        seconds: how long it took.
    """

    best: Scored
    question: Question
    starts: tuple[Scored, ...]
    runners_up: tuple[Scored, ...]
    method: str
    questions: int
    seconds: float


class _Judge:
    """Gives scores to choices until as many questions were asked, or as much time has passed, as are allowed."""

    def __init__(self, program: SearchedProgram, space: Space, memory: int, progress: Progress | None) -> None:
        self._program, self._space, self._memory, self._progress = program, space, memory, progress
        self._known: dict[object, Answer] = {}
        self.seen: dict[object, Scored] = {}
        self.begun = time.monotonic()
        self.most, self.until, self.limit = 0, float("inf"), 0

    @property
    def asked(self) -> int:
        """The number of questions so far."""
        return len(self._known)

    def __call__(self, choice: Choice) -> Score | None:
        """The score of a choice."""
        return self.of(self._space.question(choice), choice)

    def of(self, question: Question, choice: Choice) -> Score | None:
        """The score of a question, which a choice means."""
        answer = self._known.get(question.key)
        if answer is None:
            if self.asked and (self.asked >= self.most or time.monotonic() - self.begun > self.until):
                return None
            answer = self._program.ask(question.arguments, question.results, question.values)
            self._known[question.key] = answer
        constraints = sum(choice.gathered) + sum(extra is not None for extra in choice.constraints)
        score = Score(max(0, answer.peak - self._memory), answer.seconds, answer.peak, constraints)
        before = self.seen.get(question.key)
        if before is None or score < before.score:
            self.seen[question.key] = Scored(score, choice, "")
        if self._progress is not None:
            self._progress(self.asked, self.limit, min(one.score for one in self.seen.values()).seconds)
        return score


def find(
    program: SearchedProgram,
    space: Space,
    memory: int,
    questions: int,
    time_limit: float | None,
    methods: Sequence[str] = tuple(METHODS),
    progress: Progress | None = None,
) -> Ranking:
    """The best choice that is found with so many questions in so many seconds.

    The starts are asked first, then each method goes on from the best choices so far, with an equal share of what is
    left of both limits. At least the first start is asked.

    Raises:
        MemoryLimitError: no choice that was seen needs as little memory as `memory` bytes on a device.
    """
    judge = _Judge(program, space, memory, progress)
    judge.limit, judge.most = questions, max(1, int(_OF_STARTS * questions))
    limit = float("inf") if time_limit is None else time_limit
    judge.until = _OF_STARTS * limit
    begins = list[Scored]()
    for name, choice in starts(space):
        if (score := judge(choice)) is not None:
            begins.append(Scored(score, choice, name))
    own, judge.most, judge.until = space.own, questions, limit
    of_own = None if own is None else judge.of(own, space.nothing)
    begins.sort(key=lambda one: one.score)
    best, last = begins[0], "start"
    for number, method in enumerate(methods):
        left = len(methods) - number
        judge.most = judge.asked + (questions - judge.asked) // left
        now = time.monotonic() - judge.begun
        judge.until = now + max(0.0, limit - now) / left
        found = METHODS[method](space, sorted([best, *begins], key=lambda one: one.score), judge)
        if found.score < best.score:
            best, last = found, method
    judge.most, judge.until = questions, limit
    best = simplified(space, best, judge)
    question, kept = space.question(best.choice), begins
    if own is not None and of_own is not None:
        given = Scored(of_own, space.nothing, "its own specs")
        kept = sorted([given, *begins], key=lambda one: one.score)
        if of_own < best.score:
            best, question, last = given, own, "start"
    if best.score.excess:
        raise _too_large(program, question, memory, best)
    others = sorted((one for one in judge.seen.values() if one.score > best.score), key=lambda one: one.score)
    fitting = tuple(one for one in others if not one.score.excess)
    seconds = time.monotonic() - judge.begun
    return Ranking(best, question, tuple(kept), fitting[:_KEPT], last, judge.asked, seconds)


def _too_large(program: SearchedProgram, question: Question, memory: int, best: Scored) -> MemoryLimitError:
    """The error that says by how much the memory is exceeded, and what takes it."""
    lines = program.largest(question.arguments, question.results, question.values)
    return MemoryLimitError(
        f"search_specs: {program.unit.name} does not fit into {shown_bytes(memory)} per device on "
        f"{', '.join(f'{axis}={size}' for axis, size in program.sizes.items())}: the least that was found is "
        f"{shown_bytes(best.score.peak)}, {shown_bytes(best.score.excess)} too much. In the way are\n"
        + "\n".join(f"  {line}" for line in lines)
        + "\nUse more devices, a smaller batch, jax.checkpoint for what is saved for the backward pass, or donate what "
        "is returned anew"
    )
