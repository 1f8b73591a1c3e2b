"""The changes of single specs that help a program most, each tried out on the partitioner.

A change is about an argument, with those of equal layers, the states of an optimizer that are like it, and the results
that are these anew: to shard one of them alone would only move it. Its effect is that of the propagated program.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from jax.sharding import PartitionSpec as P

from partjit.inspect.annotated import shown_spec
from partjit.inspect.asked_pool import AskedPool
from partjit.inspect.asked_process import AskedOutcome, SavedProgram, saved_facts
from partjit.inspect.changes import Axes, Change, facts_of
from partjit.inspect.leaves import Leaf
from partjit.inspect.outcomes import Costs, Outcome, outcome_of
from partjit.inspect.places import known_of_copies
from partjit.inspect.propagation import Partitioned
from partjit.inspect.questions import Question
from partjit.inspect.spec_groups import Group, groups_of, leaf_of, shape_of
from partjit.inspect.suggestions import is_gain
from partjit.render.numbers import shown_bytes

__all__ = ["QUESTIONS", "SpecSuggestion", "helps", "suggested", "suggested_for"]

QUESTIONS = 32
"""How many changes are tried, if nothing else is said."""

_GAIN = 0.01  # as a share
_MORE_MEMORY = 1.5


@dataclasses.dataclass(frozen=True)
class SpecSuggestion:
    """Another spec of an argument, with which a program sends less or needs less memory.

    Attributes:
        spec: the spec.
        arguments: the names of the arguments that have it: one, those of equal layers, and states that are like them.
        results: the names of the results that are these arguments anew.
        before, after: what a device sends in a step, in bytes, and what it needs, without and with the change.
    """

    spec: P
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    before: Costs
    after: Costs

    @property
    def question(self) -> Question:
        """The change, as `WhatIf.ask` takes it."""
        return Question(dict.fromkeys(self.arguments, self.spec), dict.fromkeys(self.results, self.spec))

    @property
    def effect(self) -> str:
        """What changes, in words: "-3.1 MB per step, +0.5 MB of memory".

        Where what is sent has bounds it is the change of the upper one, and of the lower one if that rises while the
        upper one falls, or falls while it rises: then it is open which program sends less.
        """
        sent = self.after.sent - self.before.sent
        most = self.after.at_most - self.before.at_most
        known = _signed(sent, " per step") if sent == most else _signed(most, " per step at most")
        least = _signed(sent, " at least") if sent * most < 0 or (sent and not most) else ""
        parts = [known, least, _signed(self.after.peak - self.before.peak, " of memory")]
        return ", ".join(filter(None, parts))

    @property
    def title(self) -> str:
        """The spec, and what has it."""
        more = len(self.arguments) - 1
        whose = f"{self.arguments[0]}{f' and {more} like it' if more else ''}"
        anew = f", and {self.results[0]}{' ...' if self.results[1:] else ''}" if self.results else ""
        return f"{shown_spec(self.spec)} for {whose}{anew}"

    def __str__(self) -> str:
        return f"{self.title}: {self.effect}"


def suggested(
    inputs: Sequence[Leaf | None],
    outputs: Sequence[Leaf | None],
    sizes: Mapping[str, int],
    asked: Callable[[Sequence[Change]], Sequence[Outcome | None]],
    questions: int,
    most: int,
) -> tuple[SpecSuggestion, ...]:
    """The changes that help most, the best first.

    Args:
        inputs, outputs: the arguments and results of the program; None for what is no array.
        sizes: the axes of its mesh.
        asked: gives the outcomes of changes; None for one that ends the process that is asked.
        questions: how many changes are tried at most, those of most bytes first.
        most: how many suggestions there are at most.
    """
    (own,) = asked([Change()])
    if own is None:
        return ()
    groups = groups_of(inputs, outputs)
    candidates = itertools.islice(_candidates(groups, inputs, own, sizes), questions)
    changes = [
        (group, axes, Change(dict.fromkeys(group[0], axes), dict.fromkeys(group[1], axes)))
        for group, axes in candidates
    ]
    before, found = own.costs, []
    for (group, axes, _), outcome in zip(changes, asked([change for *_, change in changes]), strict=True):
        if outcome is not None and helps(before, outcome.costs):
            names = [
                [leaf.name for k in of if (leaf := leaves[k])]
                for of, leaves in zip(group, (inputs, outputs), strict=True)
            ]
            found.append(SpecSuggestion(_spec(axes), tuple(names[0]), tuple(names[1]), before, outcome.costs))
    best: dict[tuple[str, ...], SpecSuggestion] = {}
    for one in sorted(found, key=_rank):
        best.setdefault(one.arguments, one)  # one for each array: the others are instead of it
    return tuple(best.values())[:most]


def suggested_for(
    program: Partitioned, donated: Sequence[bool], questions: int, most: int, workers: int
) -> tuple[SpecSuggestion, ...]:
    """The same for a partitioned program of which the lowered module was kept.

    Args:
        program: the program.
        donated: which of its arguments are donated.
        questions, most: see `suggested`.
        workers: how many processes are asked; 0 for this one.
    """
    if program.lowered is None:  # it is on one device
        return ()
    unit, tree = program.unit, program.tree
    ins = [leaf_of(*of) for of in zip(unit.paths, tree.inputs, strict=True)]
    outs = [leaf_of(*of) for of in zip(unit.result_paths, tree.outputs, strict=True)]
    facts, lowered = facts_of(unit, program.inlined, donated), program.lowered.clone()
    known = known_of_copies(lowered)

    def here(changes: Sequence[Change]) -> Sequence[Outcome]:
        return [outcome_of(lowered, facts, change, known) for change in changes]

    if not workers:
        return suggested(ins, outs, dict(unit.mesh.shape), here, questions, most)
    saved = SavedProgram()
    pool = AskedPool(saved, workers)
    try:
        saved.write(lowered, AskedOutcome(saved_facts(facts)))
        return suggested(ins, outs, dict(unit.mesh.shape), pool.outcomes, questions, most)
    finally:
        pool.close()


def _candidates(
    groups: Sequence[Group], inputs: Sequence[Leaf | None], own: Outcome, sizes: Mapping[str, int]
) -> Iterator[tuple[Group, Axes]]:
    """Other axes of groups, by turns: each group has one before another has two."""
    each = [_others(own.arguments[group[0][0]].axes, shape_of(inputs, group[0]), sizes) for group in groups]
    for row in itertools.zip_longest(*each):
        yield from ((group, axes) for group, axes in zip(groups, row, strict=True) if axes is not None)


def _others(axes: Axes, shape: Sequence[int], sizes: Mapping[str, int]) -> Iterator[Axes]:
    """Axes for an array: one more of the mesh, another one instead, or none."""
    now = tuple(tuple(dim or ()) for dim in axes[: len(shape)])
    used, seen = {axis for dim in now for axis in dim}, {now}
    large = sorted(range(len(shape)), key=lambda dim: -shape[dim])
    none = ((),) * len(shape)
    over = sorted((axis for axis, size in sizes.items() if size > 1), key=lambda axis: -sizes[axis])
    for base in (now, none):
        for axis, dim in itertools.product(over, large):
            parts = sizes[axis]
            for other in base[dim]:
                parts *= sizes.get(other, 1)
            if (base is now and axis in used) or shape[dim] % parts or not shape[dim]:
                continue
            made = tuple((*own, axis) if k == dim else own for k, own in enumerate(base))
            if made not in seen:
                seen.add(made)
                yield made
    if none not in seen:
        yield none


def helps(before: Costs, after: Costs) -> bool:
    """Whether a change is a suggestion: as for findings, or it sends less for at most half as much memory again."""
    sends_less = after.sent + after.at_most < (1 - _GAIN) * (before.sent + before.at_most)
    return is_gain(before, after) or (sends_less and after.peak <= _MORE_MEMORY * before.peak)


def _rank(one: SpecSuggestion) -> float:
    """The share of what is sent that is left, and half of that of what is needed."""
    before, after = one.before, one.after
    sent = (after.sent + after.at_most) / max(before.sent + before.at_most, 1.0)
    return sent + after.peak / max(before.peak, 1) / 2


def _spec(axes: Axes) -> P:
    entries = [None if not dim else dim[0] if len(dim) == 1 else dim for dim in axes]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def _signed(nbytes: float, what: str) -> str:
    return f"{'-' if nbytes < 0 else '+'}{shown_bytes(abs(nbytes))}{what}" if nbytes else ""
