"""Bytes that a device reads from its memory and writes to it, estimated from the equations of a program.

An equation that is computed where its result is used reads and writes nothing by itself; any other one reads the arrays
that its operands are computed from, and writes its results. Of what is sliced or gathered the result counts, and of
what is updated the update. A loop of unknown trip count counts as one iteration, and of branches the one that moves the
most.
"""

import collections
import functools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

from partjit.inspect.fusion import UPDATES, is_fused
from partjit.inspect.inlining import InlinedProgram
from partjit.inspect.skeleton import Body, Equation, Skeleton, Variable
from partjit.shardy import TensorSharding

__all__ = ["Moved", "bytes_moved", "count_traffic"]

_SLICES = ("slice", "dynamic_slice", "gather")
_ADDING = ("scatter-add", "scatter_add")  # these read what they update


class Moved(NamedTuple):
    """An array that an equation reads and writes so often in a step.

    Attributes:
        equation: the number of the equation; None if it has none.
        number: of the array in the program.
        shape, itemsize: of the array.
        times: reads and writes of all of it.
    """

    equation: int | None
    number: int
    shape: tuple[int, ...]
    itemsize: int
    times: float

    def on_device(self, sharding: TensorSharding) -> float:
        """The bytes on a device if the array has this sharding."""
        return self.times * _shard_bytes(self.shape, self.itemsize, sharding)


def bytes_moved(arrays: Iterable[Moved], shardings: Mapping[int, TensorSharding]) -> float:
    """The bytes on a device with these shardings of the arrays, by their numbers."""
    return sum(one.on_device(sharding) for one in arrays if (sharding := shardings.get(one.number)) is not None)


@functools.lru_cache(maxsize=4096)
def _shard_bytes(shape: tuple[int, ...], itemsize: int, sharding: TensorSharding) -> int:
    parts = map(math.prod, sharding.parts)
    return itemsize * math.prod(-(-n // k) for n, k in zip(shape, parts, strict=False))


def count_traffic(skeleton: Skeleton, inlined: InlinedProgram) -> tuple[Moved, ...]:
    """How often each equation of a program reads and writes arrays, whatever their shardings."""
    times = _Counting(inlined).body(skeleton.body, ())
    return tuple(
        Moved(equation, var.number, var.shape, var.itemsize, count)
        for (equation, var), count in times.items()
        if var.number is not None
    )


_Roots: TypeAlias = frozenset[Variable]
_NONE: _Roots = frozenset()
_Times: TypeAlias = dict[tuple[int | None, Variable], float]


class _Counting:
    def __init__(self, inlined: InlinedProgram) -> None:
        self._equations = inlined.equations

    def body(self, body: Body, operands: Iterable[_Roots]) -> _Times:
        """The reads and writes of one run of a jaxpr; the first arguments are computed from these arrays."""
        times: _Times = collections.defaultdict(float)
        roots = {var: frozenset([var]) for var in (*body.constvars, *body.invars)}
        roots.update(zip(body.invars, operands, strict=False))
        for eqn in body.equations:
            of_operands = [_NONE if isinstance(atom, str) else roots[atom] for atom in eqn.invars]
            read = _NONE.union(*of_operands)
            if eqn.name == "optimization_barrier":
                roots.update(zip(eqn.outvars, of_operands, strict=True))
                continue
            if len(eqn.outvars) == 1 and is_fused(eqn, body, len(read)):
                roots[eqn.outvars[0]] = read
                continue
            roots.update((var, frozenset([var])) for var in eqn.outvars)
            for key, count in self._own(eqn, of_operands).items():
                times[key] += count
        return times

    def _own(self, eqn: Equation, operands: list[_Roots]) -> _Times:
        equation = None if eqn.number is None else self._equations[eqn.number]
        count = 1 if equation is None or equation.trip_count is None else equation.trip_count
        match eqn.kind:
            case "scan":
                found = [self.body(eqn.bodies[0], operands[: eqn.constants])]
            case "while":
                starts = 0, eqn.constants, eqn.constants + eqn.carried
                each = zip(eqn.bodies, starts[:2], starts[1:], strict=True)
                found = [self.body(body, operands[start:end]) for body, start, end in each]
            case "cond":
                found = [max((self.body(branch, operands[1:]) for branch in eqn.bodies), key=_whole)]
            case _:
                return _of_operation(eqn, operands)
        times: _Times = collections.defaultdict(float)
        for of_body in found:
            for key, own in of_body.items():
                times[key] += own * count
        return times


def _of_operation(eqn: Equation, operands: list[_Roots]) -> _Times:
    times: _Times = collections.defaultdict(float)
    if eqn.name in UPDATES:
        update = eqn.invars[1 if eqn.name == "dynamic_update_slice" else 2]
        if isinstance(update, Variable):
            times[eqn.number, update] += 3 if eqn.name in _ADDING else 2
        return times
    read = operands[1:] if eqn.name in _SLICES else operands
    for var in (*_NONE.union(*read), *eqn.outvars):
        times[eqn.number, var] += 1
    if eqn.name in _SLICES:
        times[eqn.number, eqn.outvars[0]] += 1
    return times


def _whole(times: _Times) -> float:
    return sum(count * math.prod(var.shape) for (_, var), count in times.items())
