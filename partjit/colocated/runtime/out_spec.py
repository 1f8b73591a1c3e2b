"""The spec of one result of a colocated function, and how what the function returned becomes an array of it."""

from collections.abc import Callable

import jax
import numpy as np
from jax.core import ShapedArray
from jax.sharding import Sharding

from partjit._jax.arrays import (
    ArrayImpl,
    copies_of,
    is_on_one_host_device,
    numpy_putter,
    resharded,
    with_weak_type,
)
from partjit._jax.shardings import device_list
from partjit.colocated.runtime.host_values import HostValue
from partjit.colocated.runtime.moves import is_of_several_processes, move_together

__all__ = ["OutSpec"]


class OutSpec:
    """The type and sharding of one result.

    Attributes:
        aval: its abstract value.
        sharding: its sharding.
        committed: whether it is committed to its devices.
    """

    __slots__ = ("_copies_on", "_putter", "aval", "committed", "dtype", "shape", "sharding", "weak_type")

    def __init__(self, aval: ShapedArray, sharding: Sharding, committed: bool) -> None:
        self.aval = aval
        self.sharding = sharding
        self.committed = committed
        self.shape, self.dtype, self.weak_type = aval.shape, aval.dtype, aval.weak_type
        # Replicated arrays are made several times as fast as by `jax.device_put`.
        is_simple = committed and sharding.is_fully_replicated and sharding.is_fully_addressable
        self._copies_on = device_list(sharding) if is_simple else None
        self._putter: Callable[[np.ndarray], jax.Array] | None = None

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
        if value.aval.weak_type != self.weak_type:
            value = with_weak_type(value, self.weak_type)
        if value.sharding == self.sharding and (value.committed or not self.committed):
            return value
        if is_of_several_processes(value, self.sharding):
            return move_together(value, self.sharding, what())
        return self.put(value)

    def put_numpy(self, value: np.ndarray) -> jax.Array:
        """The array of a NumPy array of the right shape and dtype, with this weak type and sharding."""
        if self._putter is None:
            self._putter = numpy_putter(self.aval, self.sharding, self.committed)
        return self._putter(value)

    def may_put(self, value: jax.Array) -> bool:
        """Whether nothing has to be done with a value but to `put` it."""
        return value.aval.weak_type == self.weak_type and not is_of_several_processes(value, self.sharding)

    def put(self, value: jax.Array) -> jax.Array:
        """The value, moved to this sharding by this process."""
        if self._copies_on is not None and type(value) is ArrayImpl and is_on_one_host_device(value):
            return copies_of(value, self.sharding, self._copies_on)
        return resharded(value, self.sharding)
