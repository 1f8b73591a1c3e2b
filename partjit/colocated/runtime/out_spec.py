"""The spec of one result of a colocated function, and how what the function returned becomes an array of it."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.sharding import Sharding

from partjit._jax.arrays import (
    ArrayImpl,
    are_transfers_guarded,
    is_computed,
    is_on_one_host_device,
    numpy_putter,
    shareable,
    with_sharding,
    with_weak_type,
)
from partjit._jax.layouts import in_default_layout
from partjit._jax.moves import resharded
from partjit._jax.shardings import kind_of_memory
from partjit._jax.to_numpy import as_numpy
from partjit.colocated.runtime.host_values import LARGE, HostValue
from partjit.colocated.runtime.moves import is_of_several_processes, move_together

__all__ = ["OutSpec"]


class OutSpec:
    """The type and sharding of one result.

    Attributes:
        aval: its abstract value.
        sharding: its sharding.
        committed: whether it is committed to its devices.
        scalar_type: that of the NumPy scalars which are numbers of exactly its dtype; None if it is no number.
        is_on_one_device: whether one device has all of it.
        is_left_to_dispatch: whether nothing but executables gets it, whose dispatch puts NumPy arrays on their device
            in less time than this would take.
    """

    __slots__ = (
        "_is_simple",
        "_putter",
        "aval",
        "committed",
        "dtype",
        "is_left_to_dispatch",
        "is_on_one_device",
        "scalar_type",
        "shape",
        "sharding",
        "weak_type",
    )

    def __init__(
        self, aval: ShapedArray, sharding: Sharding, committed: bool, *, is_left_to_dispatch: bool = False
    ) -> None:
        self.aval = aval
        self.sharding = sharding
        self.committed = committed
        self.shape, self.dtype, self.weak_type = aval.shape, aval.dtype, aval.weak_type
        is_number = aval.shape == () and isinstance(aval.dtype, np.dtype)
        self.scalar_type: type | None = aval.dtype.type if is_number else None
        self.is_left_to_dispatch = is_left_to_dispatch
        self.is_on_one_device = sharding.num_devices == 1
        self._is_simple = committed and sharding.is_fully_addressable
        self._putter: Callable[[np.ndarray], jax.Array] | None = None

    def is_number_here(self) -> bool:
        """Whether it is a number as Python has them, on devices of this process, which nothing but a `put` needs."""
        is_number = self.scalar_type is not None and self.dtype.kind in "biuf"
        return is_number and self.sharding.is_fully_addressable and not self.is_left_to_dispatch

    def is_large(self) -> bool:
        """Whether a NumPy array of this type is taken without a copy, if nobody else refers to it."""
        return isinstance(self.dtype, np.dtype) and self.aval.size * self.dtype.itemsize >= LARGE

    def fit(self, value: jax.Array | HostValue, what: Callable[[], str]) -> jax.Array:
        """The value, of the right shape and dtype, with this weak type and sharding.

        Args:
            value: the value.
            what: returns what it is, for messages.

        Raises:
            ValueError: several processes have to move it together, and cannot.
        """
        if isinstance(value, HostValue):
            return self.put_numpy(value.as_numpy(self.dtype))
        array: jax.Array = in_default_layout(value)  # others may not look for another one
        if array.aval.weak_type != self.weak_type:
            array = with_weak_type(array, self.weak_type)
        if array.sharding == self.sharding and (array.committed or not self.committed):
            return array
        if is_of_several_processes(array, self.sharding):
            return move_together(array, self.sharding, what())
        return self.put(array)

    def put_numpy(self, value: np.ndarray) -> Any:
        """The array of a NumPy array of the right shape and dtype, with this weak type and sharding.

        A NumPy array if it `is_left_to_dispatch`, in memory of its own; nobody may change what is passed here.
        """
        if self.is_left_to_dispatch and not are_transfers_guarded():  # the user has not asked for this one
            return value if value.flags.writeable else value.copy()  # else it may be that of a donated argument
        if self._putter is None:
            self._putter = numpy_putter(self.aval, self.sharding, self.committed, is_explicit=True)
        return self._putter(value)

    def may_put(self, value: jax.Array) -> bool:
        """Whether nothing has to be done with a value but to `put` it."""
        return value.aval.weak_type == self.weak_type and not is_of_several_processes(value, self.sharding)

    def put(self, value: jax.Array) -> jax.Array:
        """The value, moved to this sharding by this process."""
        if self._is_simple and type(value) is ArrayImpl and is_on_one_host_device(value):
            if _is_in_memory_of(value, self.sharding):
                return with_sharding(value, self.sharding)
            if self.sharding.is_fully_replicated or is_computed(value):  # else this would wait for it
                return self.put_numpy(as_numpy(shareable(value)))  # many times as fast as `jax.device_put`
        return resharded(value, self.sharding)


def _is_in_memory_of(value: jax.Array, sharding: Sharding) -> bool:
    """Whether an array is on the devices of a sharding, and in the kind of memory that it names."""
    own = value.sharding
    return own.device_set == sharding.device_set and kind_of_memory(own) == kind_of_memory(sharding)
