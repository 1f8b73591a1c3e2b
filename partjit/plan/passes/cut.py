"""The cut: which equations are compiled together, and when calls are made.

An equation on the devices that needs the result of a call cannot be dispatched before the call has ended. So every
equation has a level, the number of calls the devices must have waited for before it. A level has up to two fragments:
what the awaited calls of this level need comes first; the rest is dispatched while they run, if it amortizes that. If
not, it goes with the former, or with the next level if there is no such. Calls that the devices do not wait for cut
nothing: their arguments are results of whatever fragment computes them. What tells which branch is chosen has a
fragment of its own, before the others, where that is little and the rest is not: the host reads it meanwhile.
"""

import dataclasses
import heapq
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Any

from jax.extend.core import Var

from partjit.plan.ir.calls import Order, orders_of
from partjit.plan.ir.nodes import Branch, ColocatedCall, Equation, Forward, Group, VarBlock, VarNode
from partjit.plan.ir.walk import is_host
from partjit.plan.passes.cost import amortizes_a_brief_call, amortizes_a_dispatch, amortizes_leaving, cost_of
from partjit.plan.passes.from_numbers import Numbers, operations_on_numbers
from partjit.plan.passes.postpone import postponed

__all__ = ["cut", "grouped", "head_of"]

_NO_NUMBERS = Numbers()


class _Graph:
    """The nodes of a block with what each depends on, by position.

    Attributes:
        nodes: the nodes, in program order.
        data, order: for each the nodes whose results it needs, and those it must come after.
        is_host: for each whether the host makes or drives it: a call, loop or branch.
    """

    def __init__(self, nodes: Sequence[VarNode]) -> None:
        self.nodes = nodes
        self._costs: list[float | None] = [None] * len(nodes)
        self.is_host = [is_host(node) for node in nodes]
        self.data: list[list[int]] = []
        self.order: list[Sequence[int]] = []
        producer: dict[Var, int] = {}
        last: dict[Order, int] = {}
        for i, node in enumerate(nodes):
            self.data.append([producer[a] for a in node.inputs if isinstance(a, Var) and a in producer])
            orders = orders_of(node)
            self.order.append([last[order] for order in orders if order in last] if orders else ())
            last.update(dict.fromkeys(orders, i))
            for var in node.outputs:
                producer[var] = i

    def cost(self, i: int) -> float:
        """The cost of a node on the devices."""
        cost = self._costs[i]
        if cost is None:
            node = self.nodes[i]
            cost = self._costs[i] = cost_of(node.eqn) if isinstance(node, Equation) else 0.0
        return cost

    def levels(self) -> list[int]:
        """For each item the number of calls the devices must have waited for before."""
        levels: list[int] = []
        for i, (data, order) in enumerate(zip(self.data, self.order, strict=True)):
            level = 0
            for before in data:
                level = max(level, levels[before] + (self.is_host[before] and not self.is_host[i]))
            for before in order:
                level = max(level, levels[before])
            levels.append(level)
        return levels

    def awaited(self, afterwards: Container[Var] = ()) -> list[bool]:
        """For each call whether the devices wait for it, directly or through another call.

        Args:
            afterwards: variables that they wait for after the last item.
        """
        awaited = [
            flag and any(var in afterwards for var in node.outputs)
            for node, flag in zip(self.nodes, self.is_host, strict=True)
        ]
        for i in reversed(range(len(self.nodes))):
            if not self.is_host[i] or awaited[i]:
                for before in self.data[i]:
                    if self.is_host[before]:
                        awaited[before] = True
        return awaited


def cut(
    block: VarBlock,
    afterwards: Container[Var],
    donated: Collection[Var],
    can_be_answered: Callable[[ColocatedCall[Any, Any]], bool],
    *,
    reads_early: bool,
    numbers: Numbers = _NO_NUMBERS,
) -> VarBlock:
    """Cuts a block into groups of equations and calls, in the order in which they are taken up.

    Args:
        block: a block whose results are computed, or forwarded.
        afterwards: variables that are awaited as soon as it has ended.
        donated: its inputs that its groups may donate.
        can_be_answered: whether an executable can wait for a call.
        reads_early: whether it is worth a fragment to read early which branch is chosen.
        numbers: the arguments from which the host, or one device, computes which branch is chosen, if that follows
            from them.
    """
    graph = _Graph(block.nodes)
    awaited = graph.awaited(afterwards)
    branches = [node for node in block.nodes if isinstance(node, Branch) and not node.on_devices]
    cutting = _Cutting(
        graph, block.consts, can_be_answered, reads_early, operations_on_numbers(block, branches, numbers)
    )
    left: list[int] = []
    for level in _by_level(graph):
        left = cutting.add_level(left, level, awaited)
    if left:  # nothing waits any more
        cutting.add_level(left, [], [False] * len(awaited))
    return dataclasses.replace(block, nodes=tuple(postponed(cutting.nodes, cutting.position, donated)))


def grouped(nodes: Sequence[VarNode], afterwards: Container[Var]) -> list[VarNode]:
    """Equations in groups such that `cut` can do with the groups, in a larger program, what it could do with them.

    Args:
        nodes: equations and calls in program order.
        afterwards: the variables that are used after the last one.
    """
    graph = _Graph(nodes)
    awaited = graph.awaited(afterwards)
    found: list[VarNode] = []
    for here in _by_level(graph):
        ancestors = _ancestors(graph, [i for i in here if graph.is_host[i] and awaited[i]], set())
        device = [i for i in here if not graph.is_host[i]]
        for group in ([i for i in device if i in ancestors], [i for i in device if i not in ancestors]):
            if group:
                found.append(_group(graph, group, {}))
        found += [nodes[i] for i in here if graph.is_host[i]]
    return found


def _before_predicate(graph: _Graph, branch: int, done: set[int]) -> set[int]:
    """What computes the predicate of a branch, of what is not done."""
    predicate = graph.nodes[branch].inputs[0]
    makers = {i for i in graph.data[branch] if predicate in graph.nodes[i].outputs} - done
    return makers | _ancestors(graph, makers, done)


def _by_level(graph: _Graph) -> list[list[int]]:
    levels: dict[int, list[int]] = {}
    for i, level in enumerate(graph.levels()):
        levels.setdefault(level, []).append(i)
    return [levels[level] for level in sorted(levels)]


def _group(graph: _Graph, positions: Sequence[int], consts: Container[Var]) -> Group:
    nodes = [node for i in positions if isinstance(node := graph.nodes[i], Equation | Forward)]
    own: set[Var] = set()
    found: dict[Var, None] = {}
    for node in nodes:
        for atom in node.inputs:
            if isinstance(atom, Var) and atom not in own and atom not in consts:
                found[atom] = None
        own.update(node.outputs)
    return Group(tuple(nodes), tuple(found), sum(map(graph.cost, positions)))


def head_of(nodes: Sequence[VarNode], *, of_all: bool = False) -> tuple[set[int], float]:
    """What an iteration does on the devices before the first calls that they wait for, and what it costs.

    Nothing, if it would be the only fragment of the iteration anyhow, or has effects of jax's own.

    Args:
        nodes: the iteration.
        of_all: whether it is what comes before all of the first calls, and may be the only fragment.
    """
    graph = _Graph(nodes)
    awaited = graph.awaited()
    first = [
        i for i, level in enumerate(graph.levels()) if level == 0 and (awaited[i] or (of_all and graph.is_host[i]))
    ]
    head = {i for i in _ancestors(graph, first, set()) if not graph.is_host[i]}
    is_only = not of_all and all(graph.is_host[i] or i in head for i in range(len(nodes)))
    if is_only or any(isinstance(node := nodes[i], Equation) and node.eqn.effects for i in head):
        return set(), 0.0
    return head, sum(map(graph.cost, head))


class _Cutting:
    """The nodes that a block is cut into.

    Attributes:
        nodes: those there are so far.
        position: for each call, loop or branch which node of the block it was.
    """

    def __init__(
        self,
        graph: _Graph,
        consts: Container[Var],
        can_be_answered: Callable[[ColocatedCall[Any, Any]], bool],
        reads_early: bool,
        by_one: Collection[int],
    ) -> None:
        self._graph = graph
        self._consts = consts
        self._can_be_answered = can_be_answered
        self._reads_early = reads_early
        self._by_one = by_one  # what the host, or one device, computes
        self._done: set[int] = set()
        self.nodes: list[VarNode] = []
        self.position: dict[VarNode, int] = {}

    def add_level(self, left: Sequence[int], own: Sequence[int], awaited: Sequence[bool]) -> list[int]:
        """Adds the nodes of a level, and those left from the one before; gives those that are left for the next."""
        graph, done = self._graph, self._done
        here = sorted([*left, *own])
        device = [i for i in here if not graph.is_host[i]]
        calls = [i for i in here if graph.is_host[i]]
        self._add_group(self._early(device, calls) if self._reads_early else [])
        by_one = [i for i in device if i in self._by_one]
        device = [i for i in device if i not in done and i not in self._by_one]
        waited_for = [i for i in calls if awaited[i]]
        if not waited_for:
            self._add_group(device)
            self._add_group(by_one, by_one_device=True)
            self._add_calls(calls, set())
            return []
        self._add_group(by_one, by_one_device=True)
        ancestors = _ancestors(graph, waited_for, done)
        rest = [i for i in device if i not in ancestors]
        # What was called ahead is there, as a rule.
        may_overlap = not all(_is_ahead(graph.nodes[i]) for i in waited_for)
        nodes = [graph.nodes[i] for i in waited_for]
        are_here = all(isinstance(node, ColocatedCall) and node.callee.options.mode == "inline" for node in nodes)
        are_answered = all(isinstance(node, ColocatedCall) and self._can_be_answered(node) for node in nodes)
        amortizes = amortizes_leaving if are_answered else amortizes_a_dispatch
        if all(map(_is_of_numbers, nodes)):
            amortizes = amortizes_a_brief_call
        overlaps = may_overlap and not are_here and amortizes(sum(graph.cost(i) for i in rest))
        # A little work delays a call less than a dispatch would; and what precedes it must not be lost if it fails.
        if not overlaps and (len(rest) < len(device) or _precedes(graph, calls, waited_for, done | {*rest})):
            ancestors.update(rest)
        self._add_group([i for i in device if i in ancestors])
        if overlaps and not all(isinstance(graph.nodes[i], ColocatedCall) for i in waited_for):
            # The calling thread drives a loop or branch, so what is to overlap with it is dispatched before.
            self._add_group(rest)
            rest = []
        inline = set() if overlaps else _inline(graph, waited_for)
        later = self._add_calls(calls, inline)
        rest = [i for i in rest if i not in ancestors]
        if overlaps:
            self._add_group(rest)
            return self._add_calls(later, inline)
        return sorted([*rest, *later])

    def _early(self, device: Sequence[int], calls: Sequence[int]) -> list[int]:
        """What tells which branches are chosen, if that is little beside the rest, which the devices do meanwhile."""
        graph = self._graph
        early: set[int] = set()
        for i in calls:
            if isinstance(graph.nodes[i], Branch):
                early |= _before_predicate(graph, i, self._done).difference(self._by_one)
        rest = [i for i in device if i not in early]
        is_little = early.issubset(device) and not amortizes_a_dispatch(sum(map(graph.cost, early)))
        return sorted(early) if is_little and amortizes_a_dispatch(sum(map(graph.cost, rest))) else []

    def _add_group(self, device: Sequence[int], *, by_one_device: bool = False) -> None:
        if device:
            group = _group(self._graph, device, self._consts)
            self.nodes.append(dataclasses.replace(group, by_one_device=by_one_device))
            self._done.update(device)

    def _add_calls(self, calls: Sequence[int], inline: set[int]) -> list[int]:
        """Adds the calls whose arguments are there: first those that others run, then what the calling thread runs."""
        graph, done = self._graph, self._done
        here = _before_inline(graph, calls, inline)
        missing: dict[int, int] = {}
        waiting: dict[int, list[int]] = {}
        for i in calls:
            if i not in done:
                before = {*graph.data[i], *graph.order[i]} - done
                missing[i] = len(before)
                for earlier in before:
                    waiting.setdefault(earlier, []).append(i)
        ready = [(i in here or _is_inline(graph, i, inline), i) for i, count in missing.items() if not count]
        heapq.heapify(ready)
        while ready:
            is_here, i = heapq.heappop(ready)
            node = graph.nodes[i]
            if isinstance(node, ColocatedCall) and i in here:
                node = dataclasses.replace(node, is_before_inline=True)
            elif isinstance(node, ColocatedCall) and is_here:
                node = dataclasses.replace(node, is_inline=True, is_emitted=i in inline and self._can_be_answered(node))
            self.nodes.append(node)
            self.position[node] = i
            done.add(i)
            del missing[i]
            for later in waiting.get(i, ()):
                missing[later] -= 1
                if not missing[later]:
                    heapq.heappush(ready, (later in here or _is_inline(graph, later, inline), later))
        return [*missing]


def _precedes(graph: _Graph, calls: Sequence[int], waited_for: Sequence[int], done: set[int]) -> bool:
    """Whether a call with effects comes before one that is waited for, and could be made by then."""
    return any(
        i < max(waited_for)
        and i not in waited_for
        and orders_of(graph.nodes[i])
        and graph.data[i]
        and done.issuperset(graph.data[i])
        for i in calls
        if i not in done
    )


def _inline(graph: _Graph, waited_for: Sequence[int]) -> set[int]:
    """The calls that the calling thread runs: those of one stream, while others run theirs."""
    streams = {
        i: node.stream
        for i, node in ((i, graph.nodes[i]) for i in waited_for)
        if isinstance(node, ColocatedCall) and not _is_ahead(node)
    }
    return {i for i, stream in streams.items() if stream is streams[max(streams)]}


def _before_inline(graph: _Graph, calls: Iterable[int], inline: set[int]) -> set[int]:
    """The calls without results for whose end an inline call on their stream waits: a thread would take longer."""
    last = max(inline, default=-1)
    awaited = graph.nodes[last] if inline else None
    if not isinstance(awaited, ColocatedCall):
        return set()
    found = set[int]()
    for i in calls:
        node = graph.nodes[i]
        if i < last and i not in inline and isinstance(node, ColocatedCall) and not node.outputs:
            options = node.callee.options
            if node.stream is awaited.stream and options.mode in (None, "auto") and not options.run_ahead:
                found.add(i)
    return found


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


def _is_of_numbers(node: VarNode) -> bool:
    """Whether a node is a call from numbers to numbers that nobody has said takes long: a schedule, a clock, a seed."""
    if not isinstance(node, ColocatedCall) or node.callee.options.mode not in (None, "auto"):
        return False
    callee = node.callee
    return node.stream is None and all(not aval.ndim for aval in (*callee.in_avals, *callee.out_avals))


def _is_ahead(node: VarNode) -> bool:
    return isinstance(node, ColocatedCall) and bool(node.callee.options.run_ahead)


def _is_inline(graph: _Graph, i: int, inline: set[int]) -> bool:
    node = graph.nodes[i]
    if not isinstance(node, ColocatedCall):
        return True
    mode = node.callee.options.mode
    return mode == "inline" or (mode != "stream" and i in inline)
