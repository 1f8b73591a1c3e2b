"""Replicated numbers as arguments of calls on threads, such as the loss of a step.

A function that reads one needs that of one device, and to keep it for a call costs a fraction of pinning all of them.
What else the function does with the argument, it does with an array on all of the devices.
"""

import functools
from collections.abc import Callable

import jax
import numpy as np

from partjit._jax.arrays import ArrayImpl, copy_of, is_computed, numpy_putter, replica_of, shareable
from partjit.colocated.runtime.pending import OnDemand, PendingArray

__all__ = ["kept_number"]

_NUMBERS = frozenset("biuf")
"""The kinds of dtypes whose numbers are Python's, too."""


def kept_number(array: ArrayImpl) -> Callable[[], PendingArray] | None:
    """What returns an array of the number that an array is now, for calls; None if it is no replicated number.

    It neither waits until the array is computed nor depends on it any more.
    """
    if array.shape or array.sharding.num_devices == 1:
        return None
    if array.dtype.kind not in _NUMBERS or not array.is_fully_addressable:
        return None
    replica = replica_of(array)
    if replica.platform() != "cpu":
        return None
    number = _KeptNumber(array, replica)
    return functools.partial(PendingArray.made_by, number, array.aval, array.sharding, array.committed)


class _KeptNumber(OnDemand):
    """A number that one of the devices had.

    Args:
        array: the replicated array.
        shard: that of the device.
    """

    __slots__ = ("_aval", "_kept", "_sharding")

    def __init__(self, array: ArrayImpl, shard: ArrayImpl) -> None:
        self._kept: np.ndarray | ArrayImpl = np.array(shard) if is_computed(shard) else copy_of(shard)
        self._aval, self._sharding = array.aval, array.sharding

    @property
    def source(self) -> jax.Array | None:
        """What is still computed, if it was when it was kept."""
        return self._kept if isinstance(self._kept, ArrayImpl) else None

    @property
    def number(self) -> bool | int | float:
        """The number; waits until it is computed."""
        return np.asarray(self._kept).item()

    def __call__(self) -> jax.Array:
        """The replicated array; waits until the number is computed."""
        put = numpy_putter(self._aval, self._sharding, committed=True, is_explicit=True)
        return shareable(put(np.asarray(self._kept)))
