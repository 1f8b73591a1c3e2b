"""Improving choices: descent from the best starts, and simulated annealing, on the same moves."""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from partjit.search.space import Choice, Names, Space

__all__ = ["METHODS", "Judge", "Score", "Scored", "annealing", "descent", "moves", "simplified"]

_SMALL = 0.01
"""The share of all parameters below which a group is not decided by itself."""

_FROM = 3
"""How many starts a descent goes down from."""


class Score(NamedTuple):
    """What a choice costs; the least is the best.

    Attributes:
        excess: the bytes by which the memory of a device is exceeded.
        seconds: the time of a step.
        peak: the bytes that a device needs.
        constraints: how many families and groups are constrained.
    """

    excess: int
    seconds: float
    peak: int
    constraints: int


class Scored(NamedTuple):
    """A choice with what it costs, and the start that it comes from."""

    score: Score
    choice: Choice
    origin: str


class Judge(Protocol):
    """Gives scores to choices."""

    def __call__(self, choice: Choice) -> Score | None:
        """The score of a choice; None when no more may be asked."""

    def expect(self, choices: Iterable[Choice]) -> None:
        """Says which choices are asked about next if nothing better is found, so that several can be at once."""


def subsets(axes: Sequence[str]) -> list[Names]:
    """All subsets of the axes, small ones first.

    Example:
        >>> subsets(("data", "model"))
        [(), ('data',), ('model',), ('data', 'model')]
    """
    return [subset for count in range(len(axes) + 1) for subset in itertools.combinations(axes, count)]


def moves(space: Space, choice: Choice) -> Iterator[Choice]:
    """The choices that differ from one in a single decision, those with much effect first."""
    axes = tuple(space.sizes)
    count = len(space.groups)
    for over in subsets(axes):
        yield dataclasses.replace(choice, storage=(over,) * count)
    for over in subsets(axes):
        yield dataclasses.replace(choice, states=(over,) * count)
    for is_gathered in (True, False):
        yield dataclasses.replace(choice, gathered=(is_gathered,) * count)
    plain = tuple(((),) * len(family.shape) for family in space.families)
    yield dataclasses.replace(choice, constraints=plain)
    yield dataclasses.replace(choice, constraints=(None,) * len(space.families))
    for is_last_first in (True, False):
        yield dataclasses.replace(choice, is_last_first=is_last_first)
    for a, b in itertools.combinations(axes, 2):
        yield _swapped(choice, {a: b, b: a})
    for c in range(len(space.classes)):
        if not space.is_given(c):
            yield from (_with_class(choice, c, over) for over in subsets(axes))
    for f, family in enumerate(space.families):
        yield _with_constraint(choice, f, None)
        yield _with_constraint(choice, f, plain[f])
        for axis in axes:
            for dim in range(len(family.shape)):
                if family.shape[dim] % space.sizes[axis] == 0:
                    extra = tuple((axis,) if k == dim else () for k in range(len(family.shape)))
                    yield _with_constraint(choice, f, extra)
    total = sum(group.nbytes for group in space.groups)
    large = [g for g, group in enumerate(space.groups) if group.nbytes >= _SMALL * total]
    small = [g for g in range(count) if g not in large]
    for chosen in (*([small] if small else []), *([g] for g in sorted(large, key=lambda g: -space.groups[g].nbytes))):
        for over in subsets(axes):
            yield dataclasses.replace(choice, storage=_put(choice.storage, chosen, over))
        for is_gathered in (True, False):
            own = tuple(is_gathered if g in chosen else other for g, other in enumerate(choice.gathered))
            yield dataclasses.replace(choice, gathered=own)


def _put(groups: tuple[Names, ...], chosen: Sequence[int], over: Names) -> tuple[Names, ...]:
    return tuple(over if g in chosen else own for g, own in enumerate(groups))


def _with_class(choice: Choice, c: int, over: Names) -> Choice:
    return dataclasses.replace(choice, classes=(*choice.classes[:c], over, *choice.classes[c + 1 :]))


def _with_constraint(choice: Choice, f: int, extra: tuple[Names, ...] | None) -> Choice:
    return dataclasses.replace(choice, constraints=(*choice.constraints[:f], extra, *choice.constraints[f + 1 :]))


def _swapped(choice: Choice, names: dict[str, str]) -> Choice:
    def renamed(over: Sequence[Names]) -> tuple[Names, ...]:
        return tuple(tuple(names.get(axis, axis) for axis in own) for own in over)

    constraints = tuple(None if one is None else renamed([dim or () for dim in one]) for one in choice.constraints)
    return dataclasses.replace(
        choice,
        classes=renamed(choice.classes),
        storage=renamed(choice.storage),
        states=renamed(choice.states),
        constraints=constraints,
    )


def descent(space: Space, begins: Sequence[Scored], judge: Judge) -> Scored:
    """Takes each move that makes a choice better, from the best starts, until none does."""
    best = begins[0]
    for begin in begins[:_FROM]:
        current, position, idle = begin, 0, 0
        possible = [*moves(space, current.choice)]
        while idle < len(possible):
            judge.expect(itertools.chain(possible[position:], possible[:position]))
            score = judge(possible[position])
            if score is None:
                return min(best, current, key=lambda one: one.score)
            idle += 1
            if score < current.score:
                current, idle = Scored(score, possible[position], begin.origin), 0
                possible = [*moves(space, current.choice)]  # as many, in the same order
            position = (position + 1) % len(possible)
        best = min(best, current, key=lambda one: one.score)
    return best


def annealing(space: Space, begins: Sequence[Scored], judge: Judge, steps: int = 300, seed: int = 0) -> Scored:
    """Makes random moves from the best start, at first also such as make a choice worse, and fewer of these later."""
    numbers = random.Random(seed)
    best = current = begins[0]
    for step in range(steps):
        temperature = 0.3 * (0.01 ** (step / steps))
        move = numbers.choice([*moves(space, current.choice)])
        score = judge(move)
        if score is None:
            break
        if score < current.score or numbers.random() < math.exp(
            (_energy(current.score) - _energy(score)) / temperature
        ):
            current = Scored(score, move, current.origin)
        best = min(best, current, key=lambda one: one.score)
    return best


def _energy(score: Score) -> float:
    excess = 10 * score.excess / max(score.peak - score.excess, 1)
    return math.log(max(score.seconds, 1e-12)) + excess


METHODS = {"descent": descent, "annealing": annealing}


def simplified(space: Space, found: Scored, judge: Judge) -> Scored:
    """The choice without what gains nothing: constraints, and axes of classes and groups, by which it gets no worse."""
    for f in range(len(space.families)):
        if found.choice.constraints[f] is not None:
            found = _if_no_worse(found, _with_constraint(found.choice, f, None), judge)
    for field, items in (("storage", found.choice.storage), ("states", found.choice.states)):
        for g in range(len(items)):
            own: tuple[Names, ...] = getattr(found.choice, field)
            if own[g]:
                found = _if_no_worse(found, dataclasses.replace(found.choice, **{field: _put(own, [g], ())}), judge)
    for g in range(len(space.groups)):
        if found.choice.gathered[g]:
            gathered = tuple(own and k != g for k, own in enumerate(found.choice.gathered))
            found = _if_no_worse(found, dataclasses.replace(found.choice, gathered=gathered), judge)
    return found


def _if_no_worse(found: Scored, choice: Choice, judge: Judge) -> Scored:
    score = judge(choice)
    if score is None or score[:2] > found.score[:2]:
        return found
    return Scored(score, choice, found.origin)
