"""Few operations on integers, computed by the host: to dispatch a program takes longer than they in Python.

    i % 100 == 0, of an int32          becomes          def f(a): b = ...; return (b == 0,)

Of integers and booleans alone: their results are the same everywhere, and those of floating-point numbers need not be.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var, primitives

from partjit._jax.jaxprs import Atom, called_jaxpr, type_of
from partjit._jax.to_numpy import as_numpy

__all__ = ["computed_by_host", "integer_of", "is_computed_by_host", "on_python_integers"]

_Function = Callable[..., Sequence[Any]]


def _refused(*args: Any) -> Sequence[Any]:
    raise TypeError(f"expected integers in the ranges of their types, and no division by 0; got {args}")


def integer_of(arg: Any) -> int | None:
    """A number in Python, in NumPy, in an array, or as the `number` of an argument of the host; None for others."""
    if isinstance(arg, int):  # a boolean as well
        return arg
    number = getattr(arg, "number", None)
    if number is None:
        array = as_numpy(arg)
        if array.ndim or array.dtype.kind not in "biu":
            return None
        number = array.item()
    return number if isinstance(number, int) else None


def computed_by_host(
    jaxpr: ClosedJaxpr, otherwise: _Function = _refused, number_of: Callable[[Any], int | None] = integer_of
) -> _Function | None:
    """A function of integers that returns what a jaxpr computes of them, as Python has it.

    Args:
        jaxpr: the closed jaxpr, of arguments without dimensions.
        otherwise: computes it of what is no such integer, and where something is divided by 0, or raises; by default it
            raises.
        number_of: the integer that an argument is; None if it is none.

    Returns:
        None if the jaxpr has other operations or types than are known here.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr = jax.make_jaxpr(lambda i: (i + 1) % 100 == 0)(jnp.int32(0))
        >>> is_due = computed_by_host(jaxpr)
        >>> is_due(99), is_due(100)
        ((True,), (False,))
    """
    compute = on_python_integers(jaxpr)
    if compute is None:
        return None
    limits = [_limits(_integer_type(aval)) for aval in jaxpr.in_avals]

    def run(*args: Any) -> Sequence[Any]:
        numbers = []
        for arg, (low, high) in zip(args, limits, strict=True):
            number = number_of(arg)
            if number is None or not low <= number <= high:
                return otherwise(*args)
            numbers.append(number)
        try:
            return compute(*numbers)
        except ZeroDivisionError:
            return otherwise(*args)

    return run


def on_python_integers(jaxpr: ClosedJaxpr) -> _Function | None:
    """What `computed_by_host` calls: it takes integers of Python in the ranges of their types.

    It raises ZeroDivisionError where something is divided by 0.
    """
    writer = _Writer()
    try:
        for aval in jaxpr.in_avals:
            _integer_type(aval)
        results = writer.body(jaxpr.jaxpr, jaxpr.consts, [f"x{k}" for k in range(len(jaxpr.in_avals))])
    except _UnknownError:
        return None
    names = ", ".join(f"x{k}" for k in range(len(jaxpr.in_avals)))
    returned = "".join(f"{result}, " for result in results)
    lines = "".join(f"    {line}\n" for line in writer.lines)
    namespace = dict(_FUNCTIONS)
    exec(f"def compute({names}):\n{lines}    return ({returned})\n", namespace)
    compute: _Function = namespace["compute"]
    return compute


def is_computed_by_host(eqn: JaxprEqn) -> bool:
    """Whether an equation of a jaxpr is among what `computed_by_host` computes."""
    try:
        _Writer().equation(eqn, [f"x{k}" for k in range(len(eqn.invars))])
    except _UnknownError:
        return False
    return True


class _UnknownError(Exception):
    """There is an operation or a type that is not known here."""


def _integer_type(aval: Any) -> np.dtype[Any]:
    """The type of an integer or a boolean without dimensions."""
    if not isinstance(aval, ShapedArray) or aval.shape or not isinstance(aval.dtype, np.dtype):
        raise _UnknownError
    if aval.dtype.kind not in "biu":
        raise _UnknownError
    return aval.dtype


def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    return (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))


def _wrapped(text: str, dtype: np.dtype[Any]) -> str:
    """What is left of an integer in a type."""
    if dtype.kind == "b":
        return f"bool({text})"
    bits = 8 * dtype.itemsize
    if dtype.kind == "u":
        return f"(({text}) & {2**bits - 1})"
    half = 2 ** (bits - 1)
    return f"((({text}) + {half} & {2**bits - 1}) - {half})"


_EXACT: Mapping[Primitive, str] = {
    primitives.eq_p: "{0} == {1}",
    primitives.ne_p: "{0} != {1}",
    primitives.lt_p: "{0} < {1}",
    primitives.le_p: "{0} <= {1}",
    primitives.gt_p: "{0} > {1}",
    primitives.ge_p: "{0} >= {1}",
    primitives.and_p: "{0} & {1}",
    primitives.or_p: "{0} | {1}",
    primitives.xor_p: "{0} ^ {1}",
    primitives.max_p: "max({0}, {1})",
    primitives.min_p: "min({0}, {1})",
    primitives.sign_p: "({0} > 0) - ({0} < 0)",
    primitives.rem_p: "remainder({0}, {1})",
}
"""Operations whose results are in their types."""

_WRAPPED: Mapping[Primitive, str] = {
    primitives.add_p: "{0} + {1}",
    primitives.sub_p: "{0} - {1}",
    primitives.mul_p: "{0} * {1}",
    primitives.neg_p: "-{0}",
    primitives.abs_p: "abs({0})",
    primitives.not_p: "~{0}",
    primitives.div_p: "quotient({0}, {1})",
    primitives.convert_element_type_p: "{0}",
}
"""Operations whose results may be beyond their types."""


def _remainder(number: int, divisor: int) -> int:
    """As XLA has it, of the sign of the number; what it is for 0 depends on how XLA simplifies the program."""
    found = abs(number) % abs(divisor)
    return -found if number < 0 else found


def _quotient(number: int, divisor: int) -> int:
    """As XLA has it, truncated."""
    found = abs(number) // abs(divisor)
    return -found if (number < 0) != (divisor < 0) else found


_FUNCTIONS: Mapping[str, Any] = {"remainder": _remainder, "quotient": _quotient}


class _Writer:
    """Equations as lines of Python; what they compute of constants alone is computed here."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def body(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[str]) -> list[str]:
        """Writes the equations of a jaxpr with these arguments; returns what its results are."""
        names: dict[Var, str] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            _integer_type(var.aval)
            names[var] = _constant(const)
        names.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Atom) -> str:
            if not isinstance(atom, Literal):
                return names[atom]
            _integer_type(atom.aval)
            return _constant(atom.val)

        for eqn in jaxpr.eqns:
            names.update(zip(eqn.outvars, self.equation(eqn, [*map(read, eqn.invars)]), strict=True))
        return [*map(read, jaxpr.outvars)]

    def equation(self, eqn: JaxprEqn, operands: Sequence[str]) -> list[str]:
        """Writes an equation with these operands; returns what its results are."""
        called = called_jaxpr(eqn)
        return [self._result(eqn, operands)] if called is None else self.body(*called, operands)

    def _result(self, eqn: JaxprEqn, operands: Sequence[str]) -> str:
        dtype = _integer_type(type_of(eqn.outvars[0]))
        for atom in eqn.invars:
            _integer_type(type_of(atom))
        if eqn.primitive in _EXACT:
            text = _EXACT[eqn.primitive].format(*operands)
        elif eqn.primitive is primitives.not_p and dtype.kind == "b":
            text = f"not {operands[0]}"
        elif eqn.primitive in _WRAPPED:
            text = _wrapped(_WRAPPED[eqn.primitive].format(*operands), dtype)
        elif eqn.primitive is primitives.select_n_p and type_of(eqn.invars[0]).dtype == bool:
            text = f"({', '.join(operands[1:])},)[{operands[0]}]"
        elif eqn.primitive is primitives.clamp_p:
            text = "min(max({1}, {0}), {2})".format(*operands)
        else:
            raise _UnknownError
        if not any(operand[0] in "xy" for operand in operands):
            try:
                return _constant(eval(text, dict(_FUNCTIONS)))
            except ZeroDivisionError:
                raise _UnknownError from None
        name = f"y{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name


def _constant(number: Any) -> str:
    return f"({np.asarray(number).item()!r})"
