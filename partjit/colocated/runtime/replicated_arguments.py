"""Small replicated arguments of calls on threads, such as the loss of a step: what one device has of them is enough.

To keep that for a call costs a fraction of pinning all of them. A function that reads a number needs no more. What else
it does with the argument, it does with an array on all of the devices.
"""

import functools
from collections.abc import Callable

import jax
import numpy as np

from partjit._jax.arrays import (
    ArrayImpl,
    as_numpy,
    copy_of,
    is_computed,
    is_laid_out_as_numpy,
    numpy_putter,
    replica_of,
    shareable,
)
from partjit.colocated.runtime.pending import OnDemand, PendingArray

__all__ = ["kept_number", "kept_replica"]

_NUMBERS = frozenset("biuf")
"""The kinds of dtypes whose numbers are Python's, too."""
_SMALL = 2**14
"""The bytes of an array that is put on several devices in less time than it takes to pin it there."""


def kept_number(array: ArrayImpl) -> Callable[[], PendingArray] | None:
    """What returns an array of the number that an array is now, for calls; None if it is no replicated number.

    It neither waits until the array is computed nor depends on it any more.
    """
    if array.shape or array.dtype.kind not in _NUMBERS:
        return None
    replica = _replica_of_several(array)
    if replica is None:
        return None
    number = _KeptNumber(array, replica)
    return functools.partial(PendingArray.made_by, number, array.aval, array.sharding, array.committed)


def kept_replica(array: ArrayImpl) -> Callable[[], jax.Array] | None:
    """What makes arrays like a computed array is now, which share memory; None if it is not small and replicated."""
    replica = _replica_of_several(array)
    if replica is None or array.nbytes > _SMALL or not is_laid_out_as_numpy(array.dtype):
        return None
    value = np.array(as_numpy(replica))
    if not value.flags.c_contiguous:  # laid out in an order of its own, which an array that is put does not have
        return None
    return functools.partial(numpy_putter(array.aval, array.sharding, committed=True, is_explicit=True), value)


def _replica_of_several(array: ArrayImpl) -> ArrayImpl | None:
    """What a CPU has of a replicated array on several devices, all of this process."""
    if array.sharding.num_devices == 1 or not array.is_fully_addressable or not array.is_fully_replicated:
        return None
    replica = replica_of(array)
    return replica if replica.platform() == "cpu" else None


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
