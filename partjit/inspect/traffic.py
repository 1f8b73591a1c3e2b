"""Bytes that a device reads from its memory and writes to it, estimated from the equations of a program.

An equation that is computed where its result is used reads and writes nothing by itself; any other one reads the arrays
that its operands are computed from, and writes its results. Of what is sliced or gathered the result counts, and of
what is updated the update. A loop of unknown trip count counts as one iteration, and of branches the one that moves the
most.
"""

import collections
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Var

from partjit._jax.jaxprs import Atom, control_flow_kind
from partjit._jax.shard_maps import shard_map_p
from partjit.inspect.fusion import UPDATES, is_fused, used_equations, users_of
from partjit.inspect.inlining import InlinedProgram
from partjit.inspect.loop_counts import loop_counts
from partjit.shardy import TensorSharding

__all__ = ["Moved", "bytes_moved", "count_traffic"]

_SLICES = ("slice", "dynamic_slice", "gather")


class Moved(NamedTuple):
    """An array that is read and written so often in a step.

    Attributes:
        number: of the array in the program.
        shape, itemsize: of the array.
        times: reads and writes of all of it.
    """

    number: int
    shape: tuple[int, ...]
    itemsize: int
    times: float


def bytes_moved(arrays: Iterable[Moved], shardings: Mapping[int, TensorSharding]) -> float:
    """The bytes on a device with these shardings of the arrays, by their numbers."""
    total = 0.0
    for number, shape, itemsize, times in arrays:
        if (sharding := shardings.get(number)) is not None:
            parts = map(math.prod, sharding.parts)
            total += times * itemsize * math.prod(-(-n // k) for n, k in zip(shape, parts, strict=False))
    return total


def count_traffic(inlined: InlinedProgram) -> tuple[Moved, ...]:
    """How often a program reads and writes each of its arrays, whatever their shardings."""
    jaxpr = inlined.jaxpr.jaxpr
    arguments = {var: frozenset([var]) for var in (*jaxpr.constvars, *jaxpr.invars)}
    times = _Counting(inlined).body(jaxpr, arguments)[0]
    return tuple(
        Moved(inlined.numbers[var], var.aval.shape, var.aval.dtype.itemsize, count)
        for var, count in times.items()
        if var in inlined.numbers and isinstance(var.aval, ShapedArray)
    )


_Roots: TypeAlias = frozenset[Var]
_NONE: _Roots = frozenset()
_Times: TypeAlias = collections.Counter[Var]


class _Counting:
    def __init__(self, inlined: InlinedProgram) -> None:
        self._equation_of = inlined.equation_of

    def body(self, jaxpr: Jaxpr, known: Mapping[Var, _Roots]) -> tuple[_Times, dict[Var, _Roots]]:
        """The reads and writes of one run of a jaxpr, and the arrays that its variables are computed from."""
        times: Any = collections.Counter()
        roots = dict(known)
        eqns, results = used_equations(jaxpr), {var for var in jaxpr.outvars if isinstance(var, Var)}
        users = users_of(eqns)
        for eqn in eqns:
            of_operands = [_roots_of(atom, roots) for atom in eqn.invars]
            read = _NONE.union(*of_operands)
            if eqn.primitive.name == "optimization_barrier":
                roots.update(zip(eqn.outvars, of_operands, strict=True))
                continue
            if len(eqn.outvars) == 1 and is_fused(eqn, users, results, len(read)):
                roots[eqn.outvars[0]] = read
                continue
            roots.update((var, frozenset([var])) for var in eqn.outvars)
            for var, count in self._own(eqn, of_operands).items():
                times[var] += count
        return times, roots

    def _own(self, eqn: JaxprEqn, operands: list[_Roots]) -> _Times:
        times: Any = collections.Counter()
        kind, equation = control_flow_kind(eqn), self._equation_of(eqn)
        count = 1 if equation is None or equation.trip_count is None else equation.trip_count
        if kind == "scan":
            (inner,) = _bodies(eqn, "jaxpr")
            constants = loop_counts(eqn)[0]
            found, _ = self.body(inner, _known(inner, operands[:constants]))
        elif kind == "while":
            cond, inner = (*_bodies(eqn, "cond_jaxpr"), *_bodies(eqn, "body_jaxpr"))
            of_cond, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            found, _ = self.body(inner, _known(inner, operands[of_cond : of_cond + of_body]))
            found += self.body(cond, _known(cond, operands[:of_cond]))[0]
        elif kind == "cond":
            branches = [self.body(inner, _known(inner, operands[1:]))[0] for inner in _bodies(eqn, "branches")]
            found = max(branches, key=_whole)
        elif eqn.primitive is shard_map_p:
            (inner,) = _bodies(eqn, "jaxpr")
            found, _ = self.body(inner, _known(inner, ()))
        else:
            return _of_operation(eqn, operands)
        for var, own in found.items():
            times[var] += own * count
        return times


def _of_operation(eqn: JaxprEqn, operands: list[_Roots]) -> _Times:
    name = eqn.primitive.name
    times: Any = collections.Counter()
    if name in UPDATES:
        update = eqn.invars[1 if name == "dynamic_update_slice" else 2]
        if isinstance(update, Var):
            times[update] += 2
        return times
    read = operands[1:] if name in _SLICES else operands
    for var in (*_NONE.union(*read), *eqn.outvars):
        times[var] += 1
    if name in _SLICES:
        times[eqn.outvars[0]] += 1
    return times


def _bodies(eqn: JaxprEqn, name: str) -> list[Jaxpr]:
    param = eqn.params[name]
    return [getattr(jaxpr, "jaxpr", jaxpr) for jaxpr in (param if isinstance(param, tuple) else (param,))]


def _known(inner: Jaxpr, operands: Iterable[_Roots]) -> dict[Var, _Roots]:
    """Arguments are arrays of their own, but for the first ones, which are computed from these."""
    own = {var: frozenset([var]) for var in (*inner.constvars, *inner.invars)}
    return {**own, **dict(zip(inner.invars, operands, strict=False))}


def _whole(times: _Times) -> float:
    return sum(count * math.prod(var.aval.shape) for var, count in times.items() if isinstance(var.aval, ShapedArray))


def _roots_of(atom: Atom, roots: Mapping[Var, _Roots]) -> _Roots:
    return roots[atom] if isinstance(atom, Var) else _NONE
