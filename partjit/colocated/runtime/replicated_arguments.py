"""Small replicated arguments of calls on threads, such as the loss of a step: what one device has of them is enough.

To keep that for a call costs a fraction of pinning all of them. A function that reads a number needs no more. What else
it does with the argument, it does with an array on all of the devices.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.core import ShapedArray
from jax.sharding import Sharding

from partjit._jax.arrays import (
    ArrayImpl,
    copy_of,
    is_computed,
    is_laid_out_as_numpy,
    numpy_putter,
    replica_of,
    shareable,
)
from partjit._jax.shardings import addressable_devices
from partjit._jax.to_numpy import as_numpy
from partjit.colocated.runtime.pending import OnDemand, PendingArray

__all__ = ["SMALL", "KeptTogether", "is_replicated_number", "kept_number", "kept_replica", "of_replica"]

_NUMBERS = frozenset("biuf")
"""The kinds of dtypes whose numbers are Python's, too."""
SMALL = 2**14
"""The bytes of an array that is put on several devices in less time than it takes to pin it there."""


def is_replicated_number(array: ArrayImpl) -> bool:
    """Whether an array is a number that each of several CPU devices of this process has, or had if it was deleted."""
    return not array.shape and array.dtype.kind in _NUMBERS and _is_replicated_on_cpus(array)


def kept_number(array: ArrayImpl) -> Callable[[], PendingArray] | None:
    """What returns an array of the number that an array is now, for calls; None if it is no replicated number.

    It neither waits until the array is computed nor depends on it any more.
    """
    if not is_replicated_number(array):
        return None
    replica = replica_of(array)
    return of_replica(array, np.array(replica) if is_computed(replica) else copy_of(replica))


class KeptTogether:
    """Copies of numbers of one dtype that one of the devices had, in one array.

    Args:
        array: the array.
    """

    __slots__ = ("_numbers", "array")

    def __init__(self, array: jax.Array) -> None:
        self.array = array
        self._numbers: Sequence[bool | int | float] | None = None

    def number(self, which: int) -> bool | int | float:
        """One of them; waits until they are computed."""
        numbers = self._numbers
        if numbers is None:
            numbers = self._numbers = np.asarray(self.array).tolist()
        return numbers[which]


def of_replica(
    array: ArrayImpl, kept: np.ndarray | jax.Array | KeptTogether, which: int = 0
) -> Callable[[], PendingArray]:
    """What returns an array of a replicated number for calls.

    Args:
        array: the replicated number.
        kept, which: a copy of the one of a device; or copies of several, and which of them it is.
    """
    if isinstance(kept, KeptTogether):
        number: _KeptNumber = _OneOfSeveral(kept, which, array.aval, array.sharding)
    else:
        number = _KeptNumber(kept, array.aval, array.sharding)
    return functools.partial(PendingArray.made_by, number, array.aval, array.sharding, array.committed)


def kept_replica(array: ArrayImpl) -> Callable[[], jax.Array] | None:
    """What makes arrays like a computed array is now, which share memory; None if it is not small and replicated."""
    if not _is_replicated_on_cpus(array) or array.nbytes > SMALL or not is_laid_out_as_numpy(array.dtype):
        return None
    value = np.array(as_numpy(replica_of(array)))
    if not value.flags.c_contiguous:  # laid out in an order of its own, which an array that is put does not have
        return None
    return functools.partial(numpy_putter(array.aval, array.sharding, committed=True, is_explicit=True), value)


def _is_replicated_on_cpus(array: ArrayImpl) -> bool:
    """Whether each of several CPU devices, all of this process, has all of an array."""
    sharding = array.sharding
    if sharding.num_devices == 1 or not sharding.is_fully_addressable or not sharding.is_fully_replicated:
        return False
    return addressable_devices(sharding)[0].platform == "cpu"


class _KeptNumber(OnDemand):
    """A number that one of the devices had.

    Args:
        kept: a copy of it.
        aval, sharding: those of the replicated array.
    """

    __slots__ = ("_aval", "_kept", "_sharding")

    def __init__(self, kept: np.ndarray | jax.Array, aval: ShapedArray, sharding: Sharding) -> None:
        self._kept = kept
        self._aval, self._sharding = aval, sharding

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


class _OneOfSeveral(_KeptNumber):
    """One of several numbers that are kept together."""

    __slots__ = ("_together", "_which")

    def __init__(self, together: KeptTogether, which: int, aval: ShapedArray, sharding: Sharding) -> None:
        super().__init__(together.array, aval, sharding)
        self._together = together
        self._which = which

    @property
    def number(self) -> bool | int | float:
        """See `_KeptNumber`."""
        return self._together.number(self._which)

    def __call__(self) -> jax.Array:
        """See `_KeptNumber`."""
        put = numpy_putter(self._aval, self._sharding, committed=True, is_explicit=True)
        return shareable(put(np.array(self.number, self._aval.dtype)))
