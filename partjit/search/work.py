"""What a device computes and moves through its memory in a step, equation by equation.

Which arrays are in memory, and what reads and writes them, is what `partjit.inspect.traffic` counts.
"""

import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from partjit.inspect.annotated import AnnotatedEquation, AnnotatedJaxpr
from partjit.inspect.flops import operations_of
from partjit.inspect.fusion import FUSED
from partjit.inspect.places import Place, saved
from partjit.inspect.traffic import Moved, bytes_moved
from partjit.search.machine import Machine, dtype_class
from partjit.shardy import TensorSharding

__all__ = ["Part", "Work", "seconds_of"]


class Part(NamedTuple):
    """What an equation does in a step, on the busiest device.

    Attributes:
        equation: the equation, or its place; None for the elementwise equations of the program, of which only the
            traffic counts.
        dtypes: the class of its dtypes; see `partjit.search.machine.CLASSES`.
        flops: floating point operations.
        traffic: bytes read from and written to memory.
        launches: how often it, or one of the equations that it stands for, begins.
    """

    equation: Place | None
    dtypes: str
    flops: float
    traffic: float
    launches: int = 0

    @property
    def primitive(self) -> str:
        """The name of the primitive; empty for elementwise equations."""
        return "" if self.equation is None else self.equation.primitive

    def seconds_on(self, machine: Machine) -> tuple[float, float, float]:
        """How long it computes, how much longer it waits for memory, and how long its launches take."""
        computing = self.flops / machine.rate(self.dtypes, self.primitive)
        waiting = max(0.0, self.traffic / machine.memory_bandwidth - computing)
        return computing, waiting, self.launches * machine.launch


@dataclasses.dataclass(frozen=True)
class _Item:
    """A part before it is known how its values are sharded: FLOPs on all devices, and what is moved."""

    equation: Place | None
    dtypes: str
    flops: float
    operands: tuple[int, ...]
    results: tuple[int, ...]
    traffic: tuple[Moved, ...]
    launches: int


class Work:
    """What a program computes and moves, for any shardings of its values.

    Args:
        program: the annotated program.
        traffic: what its equations read and write; see `partjit.inspect.traffic.count_traffic`. Of branches it has the
            one that moves the most, and only that counts.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from partjit.inspect import explain
        >>> from partjit.inspect.skeleton import skeleton_of
        >>> from partjit.inspect.traffic import count_traffic
        >>> report = explain(lambda x, w: jnp.tanh(x @ w), jnp.ones((8, 16)), jnp.ones((16, 4)))
        >>> inlined = report.whole.inlined
        >>> work = Work(inlined.tree, count_traffic(skeleton_of(inlined), inlined))
        >>> [(part.flops, part.traffic) for part in work.parts(inlined.shardings)]
        [(1024.0, 896.0), (0.0, 256.0)]
    """

    def __init__(self, program: AnnotatedJaxpr, traffic: Iterable[Moved]) -> None:
        moved: dict[int | None, list[Moved]] = {}
        for one in traffic:
            moved.setdefault(one.equation, []).append(one)
        self._items, elementwise, launches = list[_Item](), moved.pop(None, []), 0
        for equation, times in _computing(program, 1):
            own = moved.pop(equation.number, [])
            if equation.primitive in FUSED:
                elementwise += own
                launches += times if own else 0
            elif own:
                self._items.append(_of_equation(equation, times, own))
        if elementwise:
            self._items.append(_Item(None, "f32", 0.0, (), (), tuple(elementwise), launches))

    def saved(self) -> "Work":
        """The same, without what cannot be pickled."""
        other = copy.copy(self)
        other._items = [
            item if item.equation is None else dataclasses.replace(item, equation=saved(item.equation))
            for item in self._items
        ]
        return other

    def parts(
        self, shardings: Mapping[int, TensorSharding], constrained: Mapping[int, TensorSharding] | None = None
    ) -> list[Part]:
        """The parts on a device, by the shardings of values, and those in which constrained ones are used."""
        read = {**shardings, **constrained} if constrained else shardings
        found = []
        for item in self._items:
            devices = 1
            if item.flops:
                axes: dict[str, int] = {}
                for number in item.operands:
                    if number in read:
                        axes |= read[number].sizes
                for number in item.results:
                    if number in shardings:
                        axes |= shardings[number].sizes
                devices = math.prod(axes.values())
            traffic = bytes_moved(item.traffic, shardings)
            found.append(Part(item.equation, item.dtypes, item.flops / devices, traffic, item.launches))
        return found


def seconds_of(parts: Iterable[Part], machine: Machine) -> float:
    """The time of the parts, one after the other.

    Each part takes as long as its operations or its traffic, whichever is longer, and its launches besides.
    """
    return sum(sum(part.seconds_on(machine)) for part in parts)


def _computing(program: AnnotatedJaxpr, times: int) -> Iterator[tuple[AnnotatedEquation, int]]:
    """The equations that compute by themselves, and how often each runs."""
    for equation in program.equations:
        if not equation.bodies:
            yield equation, times
        for body in equation.bodies.values():
            yield from _computing(body, times * (equation.trip_count or 1))


def _of_equation(equation: AnnotatedEquation, times: int, traffic: Iterable[Moved]) -> _Item:
    arrays = [value for value in (*equation.inputs, *equation.outputs) if value.is_array]
    flops = operations_of(equation)
    dtype = arrays[0].aval.dtype.name if arrays else "float32"
    operands, results = (tuple(v.number for v in values) for values in (equation.inputs, equation.outputs))
    return _Item(equation, dtype_class(dtype), flops * times, operands, results, tuple(traffic), times)
