"""The cut: which equations are compiled together, and when calls are made.

An equation on the devices that needs the result of a call cannot be dispatched before the call has ended. So every
equation has a level, the number of calls the devices must have waited for before it. A level has up to two fragments:
what the awaited calls of this level need comes first; the rest is dispatched while they run, if it is worth a dispatch.
If not, it goes with the former, or with the next level if there is no such. Calls that the devices do not wait for cut
nothing: their arguments are results of whatever fragment computes them.
"""

import dataclasses
import heapq
from collections.abc import Container, Iterable, Sequence
from typing import Any

from jax.extend.core import DropVar, Var

from partjit.plan.ir.control_flow import is_call, is_host, is_pure, lanes_of
from partjit.plan.passes.cost import cost_of

__all__ = ["WORTH_A_DISPATCH", "Egress", "Step", "cut", "head_of", "taken_apart"]

WORTH_A_DISPATCH = 1e6
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
        items: the equations of a fragment; or one call, loop or branch.
        is_host: whether it is a call, loop or branch.
        is_inline: whether the calling thread runs the call.
        cost: of a fragment; see `Fragment`.
    """

    items: tuple[Item, ...]
    is_host: bool = False
    is_inline: bool = False
    cost: float = 0.0

    @property
    def is_async(self) -> bool:
        """Whether it is a call that may still run when the next step is taken."""
        return self.is_host and not self.is_inline


class _Graph:
    """The items with what each depends on, by position.

    Attributes:
        items: equations and egresses, in program order.
        data, order: for each the items whose results it needs, and those it must come after.
        is_host: for each whether the host makes or drives it: a call, loop or branch.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self._costs: dict[int, float] = {}
        self.is_host = [not isinstance(item, Egress) and is_host(item) for item in items]
        self.data: list[list[int]] = []
        self.order: list[list[int]] = []
        producer: dict[Any, int] = {}
        last: dict[Any, int] = {}
        for i, item in enumerate(items):
            atoms = [item.atom] if isinstance(item, Egress) else item.invars
            self.data.append([producer[a] for a in atoms if isinstance(a, Var) and a in producer])
            before = []
            for lane in self._lanes(i):
                if lane in last:
                    before.append(last[lane])
                last[lane] = i
            self.order.append(before)
            if not isinstance(item, Egress):
                producer.update((var, i) for var in item.outvars if not isinstance(var, DropVar))

    def _lanes(self, i: int) -> list[Any]:
        item = self.items[i]
        return [] if isinstance(item, Egress) else lanes_of(item)

    def cost(self, i: int) -> float:
        """The work of an item on the devices."""
        if i not in self._costs:
            item = self.items[i]
            self._costs[i] = 0.0 if isinstance(item, Egress) else cost_of(item)
        return self._costs[i]

    def levels(self) -> list[int]:
        """For each item the number of calls the devices must have waited for before."""
        levels: list[int] = []
        for i in range(len(self.items)):
            level = 0
            for before in self.data[i]:
                level = max(level, levels[before] + (self.is_host[before] and not self.is_host[i]))
            levels.append(max([level, *(levels[before] for before in self.order[i])]))
        return levels

    def awaited(self, afterwards: Container[Any] = ()) -> list[bool]:
        """For each call whether the devices wait for it, directly or through another call.

        Args:
            afterwards: variables that they wait for after the last item.
        """
        awaited = [
            flag and any(var in afterwards for var in item.outvars)
            for item, flag in zip(self.items, self.is_host, strict=True)
        ]
        for i in reversed(range(len(self.items))):
            if not self.is_host[i] or awaited[i]:
                for before in self.data[i]:
                    if self.is_host[before]:
                        awaited[before] = True
        return awaited


def cut(items: Sequence[Item], afterwards: Container[Any] = ()) -> list[Step]:
    """Cuts a program into fragments and calls, in the order in which they are taken up.

    Args:
        items: its equations, and the egresses of results that no equation computes, in program order.
        afterwards: variables that are waited for as soon as it has ended.
    """
    graph = _Graph(items)
    awaited = graph.awaited(afterwards)
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


def taken_apart(eqns: Sequence[Item], afterwards: Container[Any]) -> list[Step]:
    """The equations in groups such that `cut` can do with the groups, in a larger program, what it could do with them.

    Args:
        eqns: equations in program order.
        afterwards: the variables that are used after the last one.
    """
    graph = _Graph(eqns)
    awaited = graph.awaited(afterwards)
    of_level: dict[int, list[int]] = {}
    for i, level in enumerate(graph.levels()):
        of_level.setdefault(level, []).append(i)
    steps = []
    for _, here in sorted(of_level.items()):
        ancestors = _ancestors(graph, [i for i in here if graph.is_host[i] and awaited[i]], set())
        device = [i for i in here if not graph.is_host[i]]
        for group in ([i for i in device if i in ancestors], [i for i in device if i not in ancestors]):
            if group:
                steps.append(Step(tuple(eqns[i] for i in group)))
        steps += [Step((eqns[i],), is_host=True) for i in here if graph.is_host[i]]
    return steps


def head_of(eqns: Sequence[Item]) -> tuple[set[int], float]:
    """What a turn of a loop does on the devices before the first calls that they wait for, and what it costs.

    Nothing, if it would be the only fragment of the turn anyhow, or has effects of jax's own.
    """
    graph = _Graph(eqns)
    awaited = graph.awaited()
    first = [i for i, level in enumerate(graph.levels()) if level == 0 and awaited[i]]
    head = {i for i in _ancestors(graph, first, set()) if not graph.is_host[i]}
    is_only = all(graph.is_host[i] or i in head for i in range(len(eqns)))
    if is_only or any(eqns[i].effects for i in head):
        return set(), 0.0
    return head, sum(map(graph.cost, head))


def _cut_level(
    graph: _Graph, left: Sequence[int], own: Sequence[int], awaited: Sequence[bool], done: set[int], steps: list[Step]
) -> list[int]:
    """Adds the steps of one level, and of what was left of the one before; gives what is left for the next."""
    here = sorted([*left, *own])
    device = [i for i in here if not graph.is_host[i]]
    calls = [i for i in here if graph.is_host[i]]
    waited_for = [i for i in calls if awaited[i]]
    if not waited_for:
        _add_fragment(graph, device, done, steps)
        _add_calls(graph, calls, set(), done, steps)
        return []
    ancestors = _ancestors(graph, waited_for, done)
    rest = [i for i in device if i not in ancestors]
    # What was called ahead is there, as a rule.
    may_overlap = not all(_is_ahead(graph.items[i]) for i in waited_for)
    overlaps = may_overlap and sum(graph.cost(i) for i in rest) >= WORTH_A_DISPATCH
    # A little work delays a call less than a dispatch would; and what stands before it must not be lost if it fails.
    if not overlaps and (len(rest) < len(device) or _stands_before(graph, calls, waited_for, done | {*rest})):
        ancestors.update(rest)
    _add_fragment(graph, [i for i in device if i in ancestors], done, steps)
    if overlaps and not all(is_call(graph.items[i]) for i in waited_for):
        # The calling thread drives a loop or branch, so what is to overlap with it is dispatched before.
        _add_fragment(graph, rest, done, steps)
        rest = []
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
        and not is_pure(graph.items[i])
        and graph.data[i]
        and done.issuperset(graph.data[i])
        for i in calls
        if i not in done
    )


def _inline(graph: _Graph, waited_for: Sequence[int]) -> set[int]:
    """The calls that the calling thread runs: those of one stream, while others run theirs."""
    eqns = {i: graph.items[i] for i in waited_for if is_call(graph.items[i]) and not _is_ahead(graph.items[i])}
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
        steps.append(Step((graph.items[i],), is_host=True, is_inline=is_inline))
        done.add(i)
        del missing[i]
        for later in waiting.get(i, ()):
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, (_is_inline(graph, later, inline), later))
    return [*missing]


def _is_ahead(item: Item) -> bool:
    return is_call(item) and bool(item.params["callee"].options.run_ahead)


def _is_inline(graph: _Graph, i: int, inline: set[int]) -> bool:
    if not is_call(graph.items[i]):
        return True
    mode = graph.items[i].params["callee"].options.mode
    return mode == "inline" or (mode != "stream" and i in inline)
