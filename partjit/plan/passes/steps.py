"""What the steps of a program read from each other, and which of them can wait."""

from collections.abc import Collection, Sequence
from typing import Any

from partjit.plan.ir.flat import Flat, variables
from partjit.plan.passes.cut import Egress, Step

__all__ = ["postponed", "read_by"]


def read_by(step: Step, flat: Flat) -> list[Any]:
    """The variables a step needs from outside, once each, in the order of their first use."""
    own: set[Any] = set()
    found: dict[Any, None] = {}
    for item in step.items:
        for var in variables([item.atom] if isinstance(item, Egress) else item.invars):
            if var not in own and var not in flat.consts:
                found[var] = None
        if not isinstance(item, Egress):
            own.update(item.outvars)
    return [*found]


def postponed(steps: Sequence[Step], flat: Flat, donated: Collection[Any]) -> list[Step]:
    """The steps; calls that nobody waits for come after the fragment that takes what they read, if that is given away.

    That fragment can return copies of them. Otherwise each would have to be copied by itself.
    """
    moved = [*steps]
    reads = {id(step): read_by(step, flat) for step in steps}
    last_fragment = {var: step for step in steps if not step.is_host for var in reads[id(step)] if var in donated}
    position = {id(eqn): i for i, eqn in enumerate(flat.eqns)}
    produced_for_others = {var for read in reads.values() for var in read}
    for step in [s for s in steps if s.is_async]:
        (eqn,) = step.items
        targets = [last_fragment[var] for var in variables(eqn.invars) if var in last_fragment]
        if not targets or not produced_for_others.isdisjoint(eqn.outvars):
            continue
        here, there = moved.index(step), max(moved.index(target) for target in targets)
        # Never behind a call that comes after it in the program: should that fail, it would not be made at all.
        hopped = [other.items[0] for other in moved[here + 1 : there] if other.is_host]
        if here < there and all(position[id(other)] < position[id(eqn)] for other in hopped):
            moved.insert(there + 1, step)
            moved.pop(here)
    return moved
