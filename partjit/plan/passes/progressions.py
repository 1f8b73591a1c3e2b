"""Integers that a loop counts: what is in each iteration a number more than in the one before.

    fori_loop(1, n, ...), scan(..., (step, state)) with step + 1, scan(..., jnp.arange(n))

They follow from the number of the iteration. If the host drives the loop, it knows them without asking a device.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal, Primitive, Var, primitives
from jax.typing import ArrayLike

from partjit._jax.arrays import with_weak_type
from partjit._jax.jaxprs import Atom, called_jaxpr, scan_counts, type_of

__all__ = ["Progression", "progressions"]

_MOST = 64
"""How many values are looked at to find out what an integer is."""
_LEAST, _LARGEST = (int(bound) for bound in (np.iinfo(np.int32).min, np.iinfo(np.int32).max))


class Progression(NamedTuple):
    """The integers `first`, `first + step`, `first + 2 * step` and so on, in the iterations of a loop."""

    first: int
    step: int

    def reversed(self, length: int) -> "Progression":
        """The same of so many iterations, the last one first."""
        return Progression(self.after(length - 1), -self.step)

    def after(self, iterations: int) -> int:
        """What it is after so many iterations."""
        return self.first + self.step * iterations

    def in_iteration(self, aval: ShapedArray) -> Callable[[jax.Array], jax.Array]:
        """A function of the number of the iteration, which returns the integer in this type."""
        return lambda i: with_weak_type((self.first + self.step * i).astype(aval.dtype), aval.weak_type)


def progressions(
    eqn: JaxprEqn, makers: Mapping[Var, JaxprEqn], consts: Mapping[Var, ArrayLike]
) -> dict[int, Progression]:
    """Those among the arguments of the iterations of a scan, by their positions.

    Args:
        eqn: the equation of the scan.
        makers: the equations before it, by what they compute.
        consts: the constants, with their values.
    """
    length, jaxpr = eqn.params["length"], eqn.params["jaxpr"].jaxpr
    num_consts, num_carry = scan_counts(eqn)
    inside = {var: inner for inner in jaxpr.eqns for var in inner.outvars}
    found: dict[int, Progression] = {}
    for k, (atom, var) in enumerate(zip(eqn.invars, jaxpr.invars, strict=True)):
        own: Progression | None = None
        if not _is_integer(var.aval):
            continue
        if k >= num_consts + num_carry:
            own = _sequence(atom, makers, consts)
            own = own and own.reversed(length) if eqn.params["reverse"] else own
        elif k >= num_consts:
            first = _sequence(atom, makers, consts)
            step = _sequence(jaxpr.outvars[k - num_consts], inside, {}, var)  # what is added to 0, 1, 2, ...
            is_one = first is not None and first.step == 0 and step is not None and step.step == 1
            own = Progression(first.first, step.first) if is_one and first and step else None
        if own is not None and _fits(own, length, cast(ShapedArray, var.aval)):
            found[k] = own
    return found


def _is_integer(aval: Any) -> bool:
    return isinstance(aval, ShapedArray) and aval.shape == () and jnp.issubdtype(aval.dtype, np.integer)


def _fits(own: Progression, length: int, aval: ShapedArray) -> bool:
    """Whether it stays in its type, and is computed of the number of the iteration in that of this."""
    bounds = jnp.iinfo(aval.dtype)
    least, largest = max(int(bounds.min), _LEAST), min(int(bounds.max), _LARGEST)
    return all(least <= number <= largest for number in (own.first, own.after(length), own.step * length))


def _sequence(
    atom: Atom, makers: Mapping[Var, JaxprEqn], consts: Mapping[Var, ArrayLike], counted: Var | None = None
) -> Progression | None:
    """What a vector of integers has in it, or an integer as one that is the same everywhere; None if many compute it.

    Args:
        atom: the vector or integer.
        makers, consts: as of `progressions`.
        counted: a variable that is taken for the sequence 0, 1, 2, ...
    """
    found: dict[Var, Progression | None] = {}  # each is looked at once, however often it is used

    def of(atom: Atom) -> Progression | None:
        if isinstance(atom, Literal):
            return _of_constant(np.asarray(atom.val))
        if atom not in found and len(found) < _MOST:
            found[atom] = None  # it counts while its operands are looked at
            found[atom] = computed(atom)
        return found.get(atom)

    def computed(var: Var) -> Progression | None:
        if var is counted:
            return Progression(0, 1)
        if var in consts:
            return _of_constant(np.asarray(consts[var]))
        eqn = makers.get(var)
        if eqn is None or not jnp.issubdtype(type_of(var).dtype, np.integer):
            return None
        if eqn.primitive is primitives.iota_p:
            return Progression(0, 1) if len(eqn.params["shape"]) == 1 else None
        called = called_jaxpr(eqn)
        if called is not None:  # as of jit(arange)
            inner, values = called
            inside = {own: each for each in inner.eqns for own in each.outvars}
            constants = dict(zip(inner.constvars, values, strict=True))
            return _sequence(inner.outvars[eqn.outvars.index(var)], inside, constants)
        combine = _COMBINED.get(eqn.primitive)
        operands = [] if combine is None else [of(operand) for operand in eqn.invars]
        return None if combine is None or None in operands else combine(*operands)

    return of(atom)


def _of_constant(value: np.ndarray) -> Progression | None:
    if value.dtype.kind not in "iu" or value.ndim > 1 or not value.size:
        return None
    numbers = value.reshape(-1)
    first, step = int(numbers[0]), int(numbers[1]) - int(numbers[0]) if numbers.size > 1 else 0
    is_one = np.array_equal(numbers.astype(object), first + step * np.arange(numbers.size).astype(object))
    return Progression(first, step) if is_one else None


def _product(a: Progression, b: Progression) -> Progression | None:
    if a.step and b.step:
        return None
    return Progression(a.first * b.first, a.first * b.step + a.step * b.first)


def _same(a: Progression) -> Progression:
    return a


_COMBINED: Mapping[Primitive, Callable[..., Progression | None]] = {
    primitives.add_p: lambda a, b: Progression(a.first + b.first, a.step + b.step),
    primitives.sub_p: lambda a, b: Progression(a.first - b.first, a.step - b.step),
    primitives.mul_p: _product,
    primitives.convert_element_type_p: _same,
    primitives.broadcast_in_dim_p: _same,
    primitives.copy_p: _same,
}
