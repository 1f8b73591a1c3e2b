"""Residual streams: arrays of one shape to which layer after layer adds its output.

No weight says how they are sharded, so that the partitioner takes the sharding from whatever meets them first: often
from the parameters of an embedding, and then every layer gathers them.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from partjit.inspect.annotated import AnnotatedEquation, AnnotatedJaxpr, AnnotatedValue
from partjit.inspect.why.dataflow import crossings
from partjit.primitive import sharding_constraint_p

__all__ = ["ResidualStream", "residual_streams"]

_FEWEST_SUMS = 3  # in one execution of the program; fewer are no layers

_BACKWARD = ("transpose(", "rematted_computation")
_CONSTRAINTS = ("sharding_constraint", sharding_constraint_p.name)
_SAME = ("convert_element_type", "name", "copy", "optimization_barrier", "reduce_precision")


@dataclasses.dataclass(frozen=True, eq=False)
class ResidualStream:
    """A residual stream in the forward pass of a program.

    Attributes:
        first: its first value that is no argument of the program.
        made_by: the equation that computes it.
        sums: the sums of a value and the output of a layer, in their order; one in a loop stands for all iterations.
    """

    first: AnnotatedValue
    made_by: AnnotatedEquation
    sums: tuple[AnnotatedValue, ...]

    @property
    def values(self) -> tuple[AnnotatedValue, ...]:
        """The first value and the sums."""
        return tuple({value.number: value for value in (self.first, *self.sums)}.values())


def residual_streams(tree: AnnotatedJaxpr) -> Iterator[ResidualStream]:
    """The residual streams of a program that no constraint shards."""
    joined = _Joined()
    sums, constrained, carried = list[tuple[AnnotatedValue, int]](), list[AnnotatedValue](), list[AnnotatedValue]()
    made: dict[int, tuple[AnnotatedValue, AnnotatedEquation]] = {}
    for equation, times in _forward(tree, 1):
        made.update((value.number, (value, equation)) for value in equation.outputs)
        if equation.bodies:
            joined.add_all(crossings(equation))
            carried += _carried(equation)
            continue
        results = [value for value in equation.outputs if value.is_array and len(value.aval.shape) > 1]
        shape = results[0].aval.shape if results else ()
        alike = [value for value in equation.inputs if shape and value.is_array and value.aval.shape == shape]
        if equation.primitive == "add":
            joined.add_all((value, results[0]) for value in alike)
            if len(alike) == 2 and alike[0].number != alike[1].number:
                sums.append((results[0], times))
        elif equation.primitive in (*_SAME, *_CONSTRAINTS):
            joined.add_all(zip(alike, results, strict=False))
            constrained += results if equation.primitive in _CONSTRAINTS else ()
    stated, in_loops = ({joined.of(value.number) for value in values} for values in (constrained, carried))
    streams: dict[int, list[tuple[AnnotatedValue, int]]] = {}
    for value, times in sums:
        streams.setdefault(joined.of(value.number), []).append((value, times))
    for stream, own in streams.items():
        # A sum in a loop is one of another array in each iteration, unless that is carried.
        count = sum(times for _, times in own) if stream in in_loops else len(own)
        if stream not in stated and count >= _FEWEST_SUMS:
            shape = own[0][0].aval.shape  # an array of which it is a slice, or that slices are stacked to, has another
            alike = (found for number, found in made.items() if joined.of(number) == stream)
            first, equation = next(found for found in alike if found[0].aval.shape == shape)
            yield ResidualStream(first, equation, tuple(value for value, _ in own if value.aval.shape == shape))


def _carried(equation: AnnotatedEquation) -> Sequence[AnnotatedValue]:
    """What a loop carries, in its body."""
    body = equation.bodies.get("jaxpr") or equation.bodies.get("body_jaxpr")
    if body is None or equation.primitive not in ("scan", "while"):
        return ()
    return body.inputs[equation.constants : equation.constants + equation.carried]


def _forward(tree: AnnotatedJaxpr, times: int) -> Iterator[tuple[AnnotatedEquation, int]]:
    """The equations of the forward pass, those of bodies after the equation that they are in, and how often each runs.

    A loop of unknown trip count counts as two iterations.
    """
    for equation in tree.equations:
        if any(backward in equation.scope for backward in _BACKWARD):
            continue
        yield equation, times
        inside = times * (2 if equation.trip_count is None else equation.trip_count)
        for body in equation.bodies.values():
            yield from _forward(body, inside)


class _Joined:
    """Values of which each is joined with others, by their numbers."""

    def __init__(self) -> None:
        self._before: dict[int, int] = {}

    def of(self, number: int) -> int:
        """The same number for all values that are joined."""
        while (before := self._before.get(number, number)) != number:
            self._before[number] = self._before.get(before, before)  # so that no way gets long
            number = before
        return number

    def add_all(self, pairs: Iterable[tuple[AnnotatedValue, AnnotatedValue]]) -> None:
        """Joins pairs of values."""
        for one, other in pairs:
            if one.number >= 0 and other.number >= 0 and (a := self.of(one.number)) != (b := self.of(other.number)):
                self._before[max(a, b)] = min(a, b)
