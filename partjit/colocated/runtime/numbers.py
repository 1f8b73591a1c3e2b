"""The numbers of executions, as arrays on the devices that get them: putting one there takes longer than a call."""

import collections
import itertools
from collections.abc import Callable

import jax
import numpy as np

__all__ = ["Number", "Numbers"]

_MOST = 2**31
_numbers = itertools.count()


class Number:
    """The number of one execution at a time.

    Attributes:
        value: the number.
        array: the array, on the devices.
    """

    __slots__ = ("array", "value")

    def __init__(self, put: Callable[[np.ndarray], jax.Array]) -> None:
        self.value = next(_numbers) % _MOST
        self.array = put(np.array(self.value, np.int32))


class Numbers:
    """The numbers for the executions of one executable.

    Args:
        put: puts one to its devices.
    """

    def __init__(self, put: Callable[[np.ndarray], jax.Array]) -> None:
        self._put = put
        self._free: collections.deque[Number] = collections.deque()

    def take(self) -> Number:
        """A number that no execution has."""
        try:
            return self._free.pop()
        except IndexError:
            return Number(self._put)

    def give_back(self, number: Number) -> None:
        """Says that an execution has ended: none of its devices uses its number any more."""
        self._free.append(number)
