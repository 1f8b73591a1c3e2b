"""Results without specs: NumPy arrays and numbers among them are replicated over the devices of the call."""

from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from partjit._jax.shardings import device_list
from partjit._jax.types import Device, PyTree
from partjit.arguments import check_results
from partjit.colocated.devices import replicated_over
from partjit.colocated.runtime.host_values import HostValue
from partjit.colocated.runtime.out_specs import flat_values

__all__ = ["UnspecifiedResults"]


class UnspecifiedResults:
    """The results of a specialization whose function says nothing about them.

    Args:
        name: the name of the function, in messages.
        shardings: those of the arguments.
        uncommitted: those of the arguments that are not committed to their devices.
        devices: those of the call.
        are_devices_given: whether an option says which these are.
    """

    def __init__(
        self,
        name: str,
        shardings: Sequence[Sharding],
        uncommitted: Sequence[Sharding],
        devices: Sequence[Device],
        *,
        are_devices_given: bool,
    ) -> None:
        self._name = name
        self._shardings = shardings
        self._uncommitted = uncommitted
        self._devices = devices
        self._are_devices_given = are_devices_given

    def sharding(self) -> Sharding:
        """Replicated over the devices of the call."""
        if self._uncommitted and len(self._uncommitted) == len(self._shardings) and not self._are_devices_given:
            return self._uncommitted[0]
        for sharding in self._shardings:
            is_named = isinstance(sharding, NamedSharding)
            if is_named and (*device_list(sharding),) == (*self._devices,):
                return NamedSharding(sharding.mesh, PartitionSpec())
        return replicated_over(self._devices)

    def as_arrays(self, result: PyTree) -> PyTree:
        """The result, with arrays in place of NumPy arrays and numbers.

        Raises:
            ValueError: something in it is none of these, or has no array.
            OverflowError: it is an integer too large for its dtype.
        """
        flat, tree = flat_values(result, self._name)
        if HostValue not in map(type, flat):
            return result
        try:
            return tree.unflatten([self._put(value) if type(value) is HostValue else value for value in flat])
        except OverflowError:
            with_paths = jax.tree_util.tree_leaves_with_path(result)
            paths = [f"result{jax.tree_util.keystr(path)}" for path, _ in with_paths]
            check_results([leaf for _, leaf in with_paths], paths, self._name)
            raise

    def _put(self, value: HostValue) -> jax.Array:
        large = value.too_large_for(value.dtype)
        if large is not None:
            raise OverflowError(f"the result of {self._name} has {large}, which does not fit {value.dtype}")
        sharding = self.sharding()
        committed = not any(sharding is other for other in self._uncommitted)
        return value.put(value.aval, sharding, committed, is_explicit=True)
