"""Which NumPy arrays that a function returned nobody else refers to: they are used as they are, without a copy.

Whoever changes an array later has to refer to it now, and CPython counts who does.
"""

import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from partjit._jax.types import PyTree

__all__ = ["OF_A_LIST", "unshared"]


def _counted() -> tuple[int, int]:
    values = [np.zeros(1)]
    value = values[0]
    view = np.zeros(1).view()
    return sys.getrefcount(value), sys.getrefcount(view.base)


OF_A_LIST, _OF_A_VIEW = _counted()
"""The counts of what only a container and a variable refer to, and of an array that only a view refers to.

They depend on the version of Python.
"""


def unshared(returned: Sequence[PyTree], least: int) -> Collection[int]:
    """The ids of the NumPy arrays in the result of a function that nobody else can change.

    Args:
        returned: a list of the result alone. The caller itself must not refer to the result in another way.
        least: the size, in bytes, below which they are not looked for.
    """
    return [id(array) for array in _arrays(returned) if array.nbytes >= least]


def _arrays(container: Iterable[Any]) -> Iterator[np.ndarray]:
    """The arrays that only a container refers to, and those in such containers in it."""
    for value in container:
        if sys.getrefcount(value) != OF_A_LIST:
            continue
        kind = type(value)
        if kind is np.ndarray and _has_own_memory(value):
            yield value
        elif kind is tuple or kind is list:
            yield from _arrays(value)
        elif kind is dict:
            yield from _arrays(value.values())


def _has_own_memory(array: np.ndarray) -> bool:
    """Whether nothing but the array refers to all the memory that it keeps."""
    if weakref.getweakrefcount(array):
        return False
    if array.base is None:
        return array.flags.owndata
    if type(array.base) is not np.ndarray or sys.getrefcount(array.base) != _OF_A_VIEW:
        return False
    return array.base.flags.owndata and array.base.nbytes == array.nbytes and not weakref.getweakrefcount(array.base)
