"""The search: questions to a program, from the best starts to the best choice."""

import concurrent.futures
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from partjit.errors import MemoryLimitError
from partjit.inspect.asked_process import WhatIfError
from partjit.render.numbers import shown_bytes
from partjit.search.asked import Answer
from partjit.search.improve import METHODS, Score, Scored, simplified
from partjit.search.program import SearchedProgram
from partjit.search.space import Choice, Question, Space
from partjit.search.starts import kind_of, starts

__all__ = ["OWN", "Progress", "Ranking", "Tried", "find"]

Progress = Callable[[int, int, float], None]
"""Called with the questions so far, their limit, and the seconds of the best step so far."""

OWN = "its own specs"
"""The name of the specs that a function has."""

_KEPT = 3
_AHEAD = 8
"""How far ahead to look for a choice to be expected, for each process that answers."""

_OF_STARTS = 0.5
"""The share of the limits that starts may take."""


class Tried(NamedTuple):
    """A choice with the shardings that it means, and what they cost."""

    scored: Scored
    question: Question
    answer: Answer


@dataclasses.dataclass(frozen=True)
class Ranking:
    """What a search found.

    Attributes:
        best: the best choice.
        question: the shardings that it means, or those of the function's own specs if these are better.
        answer: what it costs.
        starts: the starts, the best first.
        runners_up: the next best choices that were seen, the best first.
        method: the method that improved the best choice last, or "start".
        questions: how many questions were asked.
        unanswered: how many of these ended the process that was asked.
        seconds: how long it took.
        candidates: what is worth to be measured, the most promising first: the best, the function's own specs, the best
            start of each kind, and then the next best that were seen, all of them within the memory. In these orders
            what is not predicted counts with what it takes as a rule.
        measured: the seconds of a step of those that were, by the keys of their questions.
        passed_over: what is said of those that could not be.
    """

    best: Scored
    question: Question
    answer: Answer
    starts: tuple[Scored, ...]
    runners_up: tuple[Scored, ...]
    method: str
    questions: int
    unanswered: int
    seconds: float
    candidates: tuple[Tried, ...] = ()
    measured: Mapping[object, float] = dataclasses.field(default_factory=dict)
    passed_over: tuple[str, ...] = ()


_UNANSWERED = Score(sys.maxsize, math.inf, sys.maxsize, 0)
"""Of a question that cannot be answered: the worst of all."""


class _Judge:
    """Gives scores to choices until as many questions were asked, or as much time has passed, as are allowed.

    What is asked does not depend on how many questions are answered at once: those expected in vain do not count.
    """

    def __init__(self, program: SearchedProgram, space: Space, memory: int, progress: Progress | None) -> None:
        self._program, self._space, self._memory, self._progress = program, space, memory, progress
        self._questions: dict[Choice, Question] = {}
        self._expected: dict[object, concurrent.futures.Future[Answer]] = {}
        self.known: dict[object, Answer | None] = {}
        self.seen: dict[object, Scored] = {}
        self.begun = time.monotonic()
        self.most, self.until, self.limit = 0, float("inf"), 0
        self.last_error: WhatIfError | None = None

    @property
    def asked(self) -> int:
        """The number of questions so far."""
        return len(self.known)

    @property
    def unanswered(self) -> int:
        """The number of questions that could not be answered."""
        return sum(answer is None for answer in self.known.values())

    def __call__(self, choice: Choice) -> Score | None:
        """The score of a choice."""
        return self.of(self._question(choice), choice)

    def expect(self, choices: Iterable[Choice]) -> None:
        """Asks about the first of these that are not known, as many as are answered at once."""
        if self._program.workers < 2:
            return
        left = min(self._program.workers + 1, self.most - self.asked)
        for choice in itertools.islice(choices, _AHEAD * self._program.workers):
            if left <= 0:
                return
            question = self._question(choice)
            if question.key not in self.known:
                left -= 1
                if question.key not in self._expected:
                    self._expected[question.key] = self._program.submit(question.change)

    def of(self, question: Question, choice: Choice, name: str = "") -> Score | None:
        """The score of a question, which a choice means, or which has a name."""
        if question.key not in self.known:
            if self.asked and (self.asked >= self.most or time.monotonic() - self.begun > self.until):
                return None
            expected = self._expected.pop(question.key, None)
            self.known[question.key] = self._answer(expected or self._program.submit(question.change))
        answer = self.known[question.key]
        if answer is None:
            return _UNANSWERED
        constraints = sum(choice.gathered) + sum(extra is not None for extra in choice.constraints)
        score = Score(max(0, answer.peak - self._memory), answer.seconds, answer.peak, constraints)
        before = self.seen.get(question.key)
        if before is None or score < before.score or name:
            self.seen[question.key] = Scored(score, choice, name)
        if self._progress is not None:
            self._progress(self.asked, self.limit, min(one.score for one in self.seen.values()).seconds)
        return score

    def _question(self, choice: Choice) -> Question:
        if choice not in self._questions:
            self._questions[choice] = self._space.question(choice)
        return self._questions[choice]

    def _answer(self, asked: "concurrent.futures.Future[Answer]") -> Answer | None:
        try:
            return asked.result()
        except WhatIfError as error:
            self.last_error = error
            return None


def find(
    program: SearchedProgram,
    space: Space,
    memory: int,
    questions: int,
    time_limit: float | None,
    methods: Sequence[str] = tuple(METHODS),
    progress: Progress | None = None,
    where: str = "search_specs",
) -> Ranking:
    """The best choice that is found with so many questions in so many seconds.

    The starts are asked first, then each method goes on from the best choices so far, with an equal share of what is
    left of both limits. At least the first start is asked. Errors begin with `where`.

    Raises:
        MemoryLimitError: no choice that was seen needs as little memory as `memory` bytes on a device.
        WhatIfError: none of the starts could be answered.
    """
    judge = _Judge(program, space, memory, progress)
    judge.limit, judge.most = questions, max(1, int(_OF_STARTS * questions))
    limit = float("inf") if time_limit is None else time_limit
    judge.until = _OF_STARTS * limit
    begins, named = list[Scored](), [*starts(space)]
    for k, (name, choice) in enumerate(named):
        judge.expect(choice for _, choice in named[k:])
        if (score := judge(choice)) is not None and score is not _UNANSWERED:
            begins.append(Scored(score, choice, name))
    if not begins:
        raise WhatIfError(f"{where}: none of {judge.asked} specs to start from could be tried: {judge.last_error}")
    own, judge.most, judge.until = space.own, questions, limit
    of_own = None if own is None else judge.of(own, space.nothing, OWN)
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
    if own is not None and of_own is not None and of_own is not _UNANSWERED:
        given = Scored(of_own, space.nothing, OWN)
        kept = sorted([given, *begins], key=lambda one: one.score)
        if of_own < best.score:
            best, question, last = given, own, "start"
    if best.score.excess:
        raise _too_large(program, question, memory, best, where)
    others = sorted((one for one in judge.seen.values() if one.score > best.score), key=lambda one: one.score)
    fitting = tuple(one for one in others if not one.score.excess)
    seconds = time.monotonic() - judge.begun
    answer = judge.known[question.key]
    assert answer is not None
    candidates = dict[object, Tried]()
    for one in (Tried(best, question, answer), *_candidates(kept, fitting, space, judge)):
        candidates.setdefault(one.question.key, one)
    return Ranking(
        best, question, answer, tuple(kept), fitting[:_KEPT], last, judge.asked, judge.unanswered, seconds,
        tuple(candidates.values()),
    )  # fmt: skip


def _candidates(begins: Sequence[Scored], seen: Sequence[Scored], space: Space, judge: _Judge) -> Iterator[Tried]:
    """What may be as fast as the best: the own specs, the best start of each kind, and what was seen besides."""
    kinds: dict[str, Tried] = {}

    def tried(one: Scored) -> Tried:
        question = space.own if one.origin == OWN else space.question(one.choice)
        assert question is not None  # of specs that were tried
        answer = judge.known[question.key]
        assert answer is not None
        return Tried(one, question, answer)

    def by_expectation(several: Sequence[Scored]) -> list[Tried]:
        return sorted(map(tried, several), key=lambda one: one.answer.expected)

    for start in by_expectation([one for one in begins if not one.score.excess]):
        kinds.setdefault(kind_of(start.scored.origin), start)
    yield from sorted(kinds.values(), key=lambda one: one.scored.origin != OWN)
    yield from by_expectation(seen)


def _too_large(program: SearchedProgram, question: Question, memory: int, best: Scored, where: str) -> MemoryLimitError:
    """The error that says by how much the memory is exceeded, and what takes it."""
    lines = program.largest(question.change)
    return MemoryLimitError(
        f"{where}: {program.unit.name} does not fit into {shown_bytes(memory)} per device on "
        f"{', '.join(f'{axis}={size}' for axis, size in program.sizes.items())}: the least that was found is "
        f"{shown_bytes(best.score.peak)}, {shown_bytes(best.score.excess)} too much. In the way are\n"
        + "\n".join(f"  {line}" for line in lines)
        + "\nUse more devices, a smaller batch, jax.checkpoint for what is saved for the backward pass, or donate what "
        "is returned anew"
    )
