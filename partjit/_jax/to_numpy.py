"""NumPy arrays of arrays.

Of a small array over several CPU devices jax makes one in several times what it takes to copy the shards.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import config
from jax.sharding import NamedSharding, Sharding

from partjit._jax.arrays import ArrayImpl, buffers_of, is_laid_out_as_numpy
from partjit._jax.shardings import device_list, kind_of_memory, parts_of

__all__ = ["as_numpy"]


def as_numpy(array: jax.Array) -> np.ndarray:
    """What `np.asarray` makes of an array; to jax's transfer guard it is an explicit transfer."""
    try:
        return _as_numpy(array)
    except jax.errors.JaxRuntimeError:  # of a guard, or what computed the array
        with config.explicit_device_get_scope():
            return _as_numpy(array)


def _as_numpy(array: Any) -> np.ndarray:
    if type(array) is ArrayImpl and type(array._sharding) is NamedSharding and array._sharding.num_devices > 1:
        parts = _parts(array._sharding, array.shape, array.dtype)
        if parts is not None and array._npy_value is None and not array.is_deleted():
            return _gathered(array, parts)
    return np.asarray(array)


def _gathered(array: ArrayImpl, parts: Sequence[tuple[int, Any]]) -> np.ndarray:
    buffers = buffers_of(array)
    gathered = np.empty(array.shape, array.dtype)
    for k, part in parts:
        gathered[part] = np.asarray(buffers[k])
    gathered.flags.writeable = False
    return gathered


@functools.lru_cache(maxsize=4096)
def _parts(sharding: Sharding, shape: tuple[int, ...], dtype: np.dtype) -> Sequence[tuple[int, Any]] | None:
    """The positions of the shards that an array is put together from, and where; None if jax is to do so."""
    if sharding.is_fully_replicated or not sharding.is_fully_addressable or kind_of_memory(sharding) != "device":
        return None
    if device_list(sharding)[0].platform != "cpu" or not is_laid_out_as_numpy(dtype) or dtype.kind == "T":
        return None
    found: dict[object, tuple[int, Any]] = {}
    for k, part in enumerate(parts_of(sharding, shape)):
        found.setdefault(part.bounds, (k, part.slices))
    return [*found.values()]
