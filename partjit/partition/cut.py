"""The cut: which equations are compiled together, and when calls are made.

An equation on the devices that needs the result of a call cannot be dispatched before the call has ended. So every
equation has a level, the number of calls the devices must have waited for before it. A level has up to two fragments:
what the awaited calls of this level need comes first; the rest is dispatched while they run, if it is worth a dispatch.
If not, it goes with the former, or with the next level if there is no such. Calls that the devices do not wait for cut
nothing: their arguments are results of whatever fragment computes them.
"""

import dataclasses
import heapq
from collections.abc import Iterable, Sequence
from typing import Any

from partjit._compat import core
from partjit.colocated.primitive import colocated_call_p
from partjit.partition.cost import cost_of

__all__ = ["Egress", "Step", "cut", "lanes_of"]

_WORTH_A_DISPATCH = 1e6
"""Elementary operations that take about as long as it takes to dispatch a fragment over a few devices."""


@dataclasses.dataclass(frozen=True, eq=False)
class Egress:
    """A result of the program that no equation computes: an argument, a constant, or a call's result under a spec.

    Attributes:
        atom: the variable or literal.
        index: which result it is.
    """

    atom: Any
    index: int


Item = Any  # an equation or an Egress


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One node of the plan to be.

    Attributes:
        items: the equations of a fragment, or one call.
        is_call: whether it is a call.
        is_inline: whether the calling thread runs the call.
        cost: of a fragment; see `Fragment`.
    """

    items: tuple[Item, ...]
    is_call: bool = False
    is_inline: bool = False
    cost: float = 0.0


def lanes_of(eqn: Any) -> list[Any]:
    """What calls are ordered by: their stream, and the object whose method they are."""
    origin = eqn.params["callee"].origin
    return [("stream", eqn.params["stream"]), *([("object", origin.lane)] if origin.lane is not None else [])]


class _Graph:
    """The items with what each depends on, by position.

    Attributes:
        items: equations and egresses, in program order.
        data, order: for each the items whose results it needs, and those it must come after.
        is_call: for each whether it is a call.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self._costs: dict[int, float] = {}
        self.is_call = [not isinstance(item, Egress) and item.primitive is colocated_call_p for item in items]
        self.data: list[list[int]] = []
        self.order: list[list[int]] = []
        producer: dict[Any, int] = {}
        last: dict[Any, int] = {}
        for i, item in enumerate(items):
            atoms = [item.atom] if isinstance(item, Egress) else item.invars
            self.data.append([producer[a] for a in atoms if isinstance(a, core.Var) and a in producer])
            before = []
            for lane in self._lanes(i):
                if lane in last:
                    before.append(last[lane])
                last[lane] = i
            self.order.append(before)
            if not isinstance(item, Egress):
                producer.update((var, i) for var in item.outvars if not isinstance(var, core.DropVar))

    def _lanes(self, i: int) -> list[Any]:
        item = self.items[i]
        if self.is_call[i]:
            return [] if item.params["callee"].is_pure else lanes_of(item)
        # Equations with effects of jax's own keep their order as well.
        return ["effects"] if not isinstance(item, Egress) and item.effects else []

    def cost(self, i: int) -> float:
        """The work of an item on the devices."""
        if i not in self._costs:
            item = self.items[i]
            self._costs[i] = 0.0 if isinstance(item, Egress) else cost_of(item)
        return self._costs[i]

    def levels(self) -> list[int]:
        """For each item the number of calls the devices must have waited for before."""
        levels: list[int] = []
        for i, is_call in enumerate(self.is_call):
            level = 0
            for before in self.data[i]:
                level = max(level, levels[before] + (self.is_call[before] and not is_call))
            levels.append(max([level, *(levels[before] for before in self.order[i])]))
        return levels

    def awaited(self) -> list[bool]:
        """For each call whether the devices wait for it, directly or through another call."""
        awaited = [False] * len(self.items)
        for i in reversed(range(len(self.items))):
            if not self.is_call[i] or awaited[i]:
                for before in self.data[i]:
                    if self.is_call[before]:
                        awaited[before] = True
        return awaited


def cut(items: Sequence[Item]) -> list[Step]:
    """Cuts a program into fragments and calls, in the order in which they are taken up.

    Args:
        items: its equations, and the egresses of results that no equation computes, in program order.
    """
    graph = _Graph(items)
    awaited = graph.awaited()
    of_level: dict[int, list[int]] = {}
    for i, level in enumerate(graph.levels()):
        of_level.setdefault(level, []).append(i)
    steps: list[Step] = []
    done: set[int] = set()
    left: list[int] = []
    for level in sorted(of_level):
        left = _cut_level(graph, left, of_level[level], awaited, done, steps)
    if left:  # nothing waits any more
        _cut_level(graph, left, [], [False] * len(awaited), done, steps)
    return steps


def _cut_level(
    graph: _Graph, left: Sequence[int], own: Sequence[int], awaited: Sequence[bool], done: set[int], steps: list[Step]
) -> list[int]:
    """Adds the steps of one level, and of what was left of the one before; gives what is left for the next."""
    here = sorted([*left, *own])
    device = [i for i in here if not graph.is_call[i]]
    calls = [i for i in here if graph.is_call[i]]
    waited_for = [i for i in calls if awaited[i]]
    if not waited_for:
        _add_fragment(graph, device, done, steps)
        _add_calls(graph, calls, set(), done, steps)
        return []
    ancestors = _ancestors(graph, waited_for, done)
    rest = [i for i in device if i not in ancestors]
    # What was called ahead is there, as a rule.
    may_overlap = not all(graph.items[i].params["callee"].specialization.run_ahead for i in waited_for)
    overlaps = may_overlap and sum(graph.cost(i) for i in rest) >= _WORTH_A_DISPATCH
    # A little work delays a call less than a dispatch would; and what stands before it must not be lost if it fails.
    if not overlaps and (len(rest) < len(device) or _stands_before(graph, calls, waited_for, done | {*rest})):
        ancestors.update(rest)
    _add_fragment(graph, [i for i in device if i in ancestors], done, steps)
    inline = set() if overlaps else _inline(graph, waited_for)
    later = _add_calls(graph, calls, inline, done, steps)
    rest = [i for i in rest if i not in ancestors]
    if overlaps:
        _add_fragment(graph, rest, done, steps)
        return _add_calls(graph, later, inline, done, steps)
    return sorted([*rest, *later])


def _stands_before(graph: _Graph, calls: Sequence[int], waited_for: Sequence[int], done: set[int]) -> bool:
    """Whether a call with effects stands before one that is waited for, and could be made by then."""
    return any(
        i < max(waited_for)
        and i not in waited_for
        and not graph.items[i].params["callee"].is_pure
        and graph.data[i]
        and done.issuperset(graph.data[i])
        for i in calls
        if i not in done
    )


def _inline(graph: _Graph, waited_for: Sequence[int]) -> set[int]:
    """The calls that the calling thread runs: those of one stream, while others run theirs."""
    eqns = {i: graph.items[i] for i in waited_for if not graph.items[i].params["callee"].specialization.run_ahead}
    if not eqns:
        return set()
    stream = eqns[max(eqns)].params["stream"]
    return {i for i, eqn in eqns.items() if eqn.params["stream"] is stream}


def _ancestors(graph: _Graph, targets: Iterable[int], done: set[int]) -> set[int]:
    found: set[int] = set()
    stack = [*targets]
    while stack:
        i = stack.pop()
        for before in (*graph.data[i], *graph.order[i]):
            if before not in found and before not in done:
                found.add(before)
                stack.append(before)
    return found


def _add_fragment(graph: _Graph, device: Sequence[int], done: set[int], steps: list[Step]) -> None:
    if device:
        items = tuple(graph.items[i] for i in device)
        steps.append(Step(items, cost=sum(map(graph.cost, device))))
        done.update(device)


def _add_calls(graph: _Graph, calls: Sequence[int], inline: set[int], done: set[int], steps: list[Step]) -> list[int]:
    """Adds the calls whose arguments are there: first those that others run, then what the calling thread runs."""
    missing: dict[int, int] = {}
    waiting: dict[int, list[int]] = {}
    for i in calls:
        if i not in done:
            before = {*graph.data[i], *graph.order[i]} - done
            missing[i] = len(before)
            for earlier in before:
                waiting.setdefault(earlier, []).append(i)
    ready = [(_is_inline(graph, i, inline), i) for i, count in missing.items() if not count]
    heapq.heapify(ready)
    while ready:
        is_inline, i = heapq.heappop(ready)
        steps.append(Step((graph.items[i],), is_call=True, is_inline=is_inline))
        done.add(i)
        del missing[i]
        for later in waiting.get(i, ()):
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, (_is_inline(graph, later, inline), later))
    return [*missing]


def _is_inline(graph: _Graph, i: int, inline: set[int]) -> bool:
    mode = graph.items[i].params["callee"].specialization.mode
    return mode == "inline" or (mode != "stream" and i in inline)
