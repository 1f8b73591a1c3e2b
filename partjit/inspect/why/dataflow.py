"""The dataflow of a program through nested jaxprs: the paths along which shardings propagate and values are
computed.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from partjit.inspect.annotated import AnnotatedEquation, AnnotatedJaxpr, AnnotatedValue

__all__ = ["Dataflow", "DataflowEdge", "crossings", "reachable"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class DataflowEdge:
    """An equation's operands and results, or one value inside and outside of a nested jaxpr.

    Attributes:
        equation: the equation.
        sources, targets: the numbers of the values.
        crosses: whether it connects a value inside of a loop, branch, `shard_map` or nested program to one outside.
    """

    equation: AnnotatedEquation
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    crosses: bool = False


class Dataflow:
    """The edges of a program, those of nested jaxprs included.

    Attributes:
        values: for each number the outermost value that has it.
        shard_maps: for each value in the bodies of `shard_map`s these equations, outermost first.
    """

    def __init__(self, tree: AnnotatedJaxpr) -> None:
        self.values: dict[int, AnnotatedValue] = {}
        self.shard_maps: dict[int, tuple[AnnotatedEquation, ...]] = {}
        self._note_shard_maps(tree, ())
        touching, made, used = (collections.defaultdict[int, list[DataflowEdge]](list) for _ in range(3))
        for value in _outermost_first(tree):
            self.values.setdefault(value.number, value)
        for equation in tree.walk():
            for edge in _edges(equation):
                both = (*edge.sources, *edge.targets)
                for edges, numbers in ((touching, both), (used, edge.sources), (made, edge.targets)):
                    for number in dict.fromkeys(numbers):
                        edges[number].append(edge)
        self._touching, self._made, self._used = touching, made, used

    def _note_shard_maps(self, tree: AnnotatedJaxpr, around: tuple[AnnotatedEquation, ...]) -> None:
        if around:
            self.shard_maps.update((value.number, around) for value in (*tree.constants, *tree.inputs))
        for equation in tree.equations:
            inside = (*around, equation) if equation.primitive == "shard_map" else around
            for body in equation.bodies.values():
                self._note_shard_maps(body, inside)
            if around:
                self.shard_maps.update((value.number, around) for value in equation.outputs)

    def made_by(self, number: int) -> Sequence[DataflowEdge]:
        """The edges to a value."""
        return self._made.get(number, ())

    def used_by(self, number: int) -> Sequence[DataflowEdge]:
        """The edges from a value."""
        return self._used.get(number, ())

    def way(
        self, starts: Iterable[int], goal: int, may_pass: Callable[[int], bool]
    ) -> tuple[AnnotatedEquation, ...] | None:
        """The equations on the shortest path from some values to another through values that `may_pass`.

        Edges are taken in both directions, as shardings propagate. None if there is no path.
        """
        before = self._spread(starts, may_pass, goal)
        if goal not in before:
            return None
        equations: list[AnnotatedEquation] = []
        at = before[goal]
        while at is not None:
            number, edge = at
            if not equations or equations[-1] is not edge.equation:
                equations.append(edge.equation)
            at = before[number]
        return tuple(reversed(equations))

    def nearest(self, starts: Iterable[int], may_pass: Callable[[int], bool]) -> Mapping[int, int]:
        """For each value that is reachable from some values, the nearest of these; of several the first."""
        found: dict[int, int] = {}
        for number, at in self._spread(starts, may_pass).items():  # in the order of their distances
            found[number] = number if at is None else found[at[0]]
        return found

    def _spread(
        self, starts: Iterable[int], may_pass: Callable[[int], bool], goal: int | None = None
    ) -> dict[int, tuple[int, DataflowEdge] | None]:
        before: dict[int, tuple[int, DataflowEdge] | None] = dict.fromkeys(starts)
        queue, seen = collections.deque(before), set()
        while queue and goal not in before:
            number = queue.popleft()
            for edge in self._touching.get(number, ()):
                if edge not in seen:
                    seen.add(edge)
                    for other in (*edge.targets, *edge.sources):
                        if other not in before and may_pass(other):
                            before[other] = number, edge
                            queue.append(other)
        return before


def reachable(starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """What is reachable from some nodes of a graph, these included, in breadth-first order."""
    seen = dict.fromkeys(starts)
    queue = collections.deque(seen)
    while queue:
        node = queue.popleft()
        yield node
        for other in following(node):
            if other not in seen:
                seen[other] = None
                queue.append(other)


def _outermost_first(tree: AnnotatedJaxpr) -> Iterator[AnnotatedValue]:
    yield from (*tree.constants, *tree.inputs)
    for equation in tree.equations:
        yield from equation.outputs
    yield from tree.outputs
    for equation in tree.equations:
        for body in equation.bodies.values():
            yield from _outermost_first(body)


def _edges(equation: AnnotatedEquation) -> Iterator[DataflowEdge]:
    if not equation.bodies:
        yield DataflowEdge(equation, _numbers(equation.inputs), _numbers(equation.outputs))
        return
    for source, target in crossings(equation):
        if source.number != target.number and source.number >= 0 and target.number >= 0:
            yield DataflowEdge(equation, (source.number,), (target.number,), crosses=True)


def _numbers(values: Sequence[AnnotatedValue]) -> tuple[int, ...]:
    return tuple(value.number for value in values if value.number >= 0)  # those of literals are negative


def crossings(equation: AnnotatedEquation) -> Iterator[tuple[AnnotatedValue, AnnotatedValue]]:
    """Pairs of values that are one value on both sides of the boundary of a nested jaxpr."""
    inputs, outputs, bodies = equation.inputs, equation.outputs, equation.bodies
    match equation.primitive:
        case "while":
            cond, body = bodies["cond_jaxpr"], bodies["body_jaxpr"]
            cond_consts, consts = len(cond.inputs) - equation.carried, equation.constants
            carried = inputs[cond_consts + consts :]
            yield from zip((*inputs[:cond_consts], *carried), cond.inputs, strict=True)
            yield from zip(inputs[cond_consts:], body.inputs, strict=True)
            yield from zip(body.outputs, body.inputs[consts:], strict=True)
            yield from zip(body.outputs, cond.inputs[cond_consts:], strict=True)
            yield from zip(body.outputs, outputs, strict=True)
        case "cond":
            for branch in bodies.values():
                yield from zip(inputs[1:], branch.inputs, strict=True)
                yield from zip(branch.outputs, outputs, strict=True)
        case _:
            (body,) = bodies.values()
            yield from zip(inputs, body.inputs, strict=True)
            yield from zip(body.outputs, outputs, strict=True)
            if equation.primitive == "scan":
                consts, carries = equation.constants, equation.carried
                yield from zip(body.outputs[:carries], body.inputs[consts : consts + carries], strict=True)
