"""Numbers that the host knows before the devices have computed them: integers that it counts along, and constants.

A program that counts its steps in a state returns `state.step + 1`, which is in time an array like others. The host
computes the same of the number that it knows of `state.step`, and remembers it for as long as the array lives. So the
next execution knows its step without waiting for the devices. What users read is still the array.
"""

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from jax.sharding import Sharding

from partjit._jax.arrays import ArrayImpl, item_of
from partjit.colocated.runtime.host_values import Destination
from partjit.plan.ir.integers import computed_by_host, integer_of, on_python_integers
from partjit.plan.ir.nodes import Value
from partjit.plan.ir.plan import Counted

__all__ = ["counting_along", "given_numbers", "integer_of_counter", "is_number", "know"]


class _Number(weakref.ref[ArrayImpl]):
    """A reference to an array, with the number that it has, and its id."""

    __slots__ = ("key", "number")

    key: int
    number: int | float


_ARRAYS = frozenset({ArrayImpl})
_known: dict[int, _Number] = {}
"""By the ids of arrays."""


def _forget(gone: _Number) -> None:
    if _known.get(gone.key) is gone:
        _known.pop(gone.key, None)  # another thread may have been quicker


def know(array: ArrayImpl, number: int | float) -> None:
    """Remembers the number that an array will have, for as long as it lives."""
    known = _Number(array, _forget)
    known.key, known.number = id(array), number
    _known[known.key] = known


def _number_of(array: ArrayImpl) -> int | float:
    """The number in an array; waits for the devices if it is not known yet."""
    known = _known.get(id(array))
    if known is not None and known() is array:
        return known.number
    number: int | float = item_of(array)
    know(array, number)
    return number


def _number_or_itself(arg: Any) -> Any:
    return _number_of(arg) if type(arg) is ArrayImpl else arg


def is_number(value: Value) -> bool:
    """Whether a value is what the host has as a Python number."""
    return value.aval.shape == () and isinstance(value.aval.dtype, np.dtype) and value.aval.dtype.kind in "biuf"


def integer_of_counter(arg: Any) -> int | None:
    """As `integer_of`, of arrays as well whose numbers the host knows."""
    return integer_of(_number_or_itself(arg))


def given_numbers(
    call: Callable[..., Sequence[Any]],
    inputs: Sequence[Value],
    numbers: Collection[Value],
    sharding_of: Callable[[Value], Sharding],
) -> Callable[..., Sequence[Any]]:
    """A call that is given numbers in place of arrays, which need be neither computed nor kept for it.

    Args:
        call: what makes the call.
        inputs: its arguments.
        numbers: the values whose numbers the host knows.
        sharding_of: where they are if the function wants arrays.
    """
    if not any(value in numbers for value in inputs):
        return call
    destinations = [
        Destination(v.aval, sharding_of(v), True, is_explicit=True) if v in numbers else None for v in inputs
    ]

    def run(*args: Any) -> Sequence[Any]:
        return call(
            *[
                arg if to is None or type(arg) is not ArrayImpl else to.argument(_number_of(arg))
                for arg, to in zip(args, destinations, strict=True)
            ]
        )

    return run


def counting_along(counted: Counted) -> Callable[..., None]:
    """A function of the results and then the arguments that the host counts along: afterwards it knows the former."""
    of_integers, of_anything = on_python_integers(counted.jaxpr), computed_by_host(counted.jaxpr, lambda *_: ())
    assert of_integers is not None, "the equations were chosen so"
    assert of_anything is not None
    count = len(counted.outputs)

    def know_results(*values: Any) -> None:
        args = values[count:]
        try:
            if _ARRAYS.issuperset(map(type, args)):
                numbers = of_integers(*map(_number_of, args))
            else:
                numbers = of_anything(*map(_number_or_itself, args))
        except ZeroDivisionError:
            return
        for array, number in zip(values, numbers, strict=False):
            if type(array) is ArrayImpl:
                know(array, number)

    return know_results
