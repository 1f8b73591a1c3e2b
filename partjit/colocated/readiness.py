"""Whether the arguments of a call are there, or soon are: whoever makes it then waits for no device."""

import time
from collections.abc import Sequence
from typing import Any

from partjit._jax.arrays import ArrayImpl
from partjit.colocated.runtime.host_values import HostArgument

__all__ = ["Readiness"]

_MOMENT = 5e-5
"""Handing a call to a thread takes about as many seconds of its caller, and of what the thread then takes from it."""
_MOST_IN_VAIN = 10
"""After so many moments in vain, a thousand calls are not waited for before the next one is."""


class Readiness:
    """Whether the arguments of the calls of a function are there; where a moment was in vain, few are waited for."""

    __slots__ = ("_left_out", "_vain")

    def __init__(self) -> None:
        self._vain = self._left_out = 0

    def of(self, leaves: Sequence[Any], *, may_wait: bool) -> bool:
        """Whether none of the flat arguments is still computed, after a moment that may be waited for them."""
        arrays = [leaf for leaf in leaves if type(leaf) is not HostArgument]
        if not all(map(_may_be_asked, arrays)):
            return False
        pending = [array for array in arrays if not array.is_ready()]
        if not pending or not may_wait:
            return not pending
        if self._left_out:
            self._left_out -= 1
            return False
        until = time.perf_counter() + _MOMENT
        while time.perf_counter() < until:
            time.sleep(0)  # other threads may run meanwhile
            if all(array.is_ready() for array in pending):
                self._vain = 0
                return True
        self._vain = min(self._vain + 1, _MOST_IN_VAIN)
        self._left_out = 2**self._vain - 1
        return False


def _may_be_asked(leaf: Any) -> bool:
    """Whether it is an array that says whether it is computed: on jax 0.10 one that was deleted ends the process."""
    return type(leaf) is ArrayImpl and not leaf.is_deleted()
