"""Moves of arrays to other devices: those between accelerators and the CPU devices of their hosts are the reason.

To `jax.device_put` such a move is one between any two sets of devices. To read what is on a GPU, and to put that on a
CPU device, takes about half as long: NumPy arrays are put there without a copy. Where several shards or arrays are
read, all are asked for first, so that the transfers run beside each other.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src.dispatch import update_dp_aval
from jax.core import ShapedArray
from jax.sharding import Sharding

from partjit._jax.arrays import (
    ArrayImpl,
    device_put,
    is_laid_out_as_numpy,
    is_of_one_process,
    numpy_putter,
    of_same_buffers,
    put_explicitly,
    replica_of,
)
from partjit._jax.shardings import addressable_devices, device_list, kind_of_memory, parts_of
from partjit._jax.to_numpy import as_numpy
from partjit._jax.types import Device

__all__ = ["begun", "moved", "moved_to", "resharded"]


def moved_to(array: jax.Array, sharding: Sharding) -> jax.Array:
    """The array with a sharding; as it is if it has that."""
    return moved([array], [sharding])[0]


def begun(array: jax.Array, sharding: Sharding) -> Callable[[], jax.Array]:
    """Begins to move an array; what is returned waits for the end, and returns the array with the sharding."""
    way = _way_of(array, sharding)
    if way is None:
        return functools.partial(device_put, array, sharding)
    parts = way.parts(array)
    way.ask_for(parts)
    return functools.partial(way.moved, parts)


def moved(arrays: Sequence[jax.Array], shardings: Sequence[Sharding]) -> list[jax.Array]:
    """Each array with the sharding wanted of it; as it is if it has that."""
    found = [*arrays]
    left: list[int] = []
    reads: list[tuple[int, _Way, Sequence[ArrayImpl]]] = []
    for i, (array, sharding) in enumerate(zip(arrays, shardings, strict=True)):
        if array.sharding == sharding:
            continue
        way = _way_of(array, sharding)
        if way is None:
            left.append(i)
        else:
            reads.append((i, way, way.parts(array)))
    if left:
        values = device_put([arrays[i] for i in left], [shardings[i] for i in left])
        for i, value in zip(left, values, strict=True):
            found[i] = value
    if sum(len(own) for *_, own in reads) > 1:
        for _, way, own in reads:
            way.ask_for(own)
    for i, way, own in reads:
        found[i] = way.moved(own)
    return found


def resharded(value: jax.Array, sharding: Sharding) -> jax.Array:
    """An array with another sharding; of one that this process has all of, it puts its part without the others."""
    if not is_of_one_process(value, sharding):
        return moved_to(value, sharding)
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
    aval = ShapedArray(value.shape, value.dtype, value.aval.weak_type)
    return numpy_putter(aval, sharding, True)(np.asarray(value))


class _Way(NamedTuple):
    """How arrays of a type and sharding get to the devices of another sharding.

    Attributes:
        aval, sharding: the type and sharding that they get.
        devices: those of it.
        is_transfer: whether to read them is a transfer, as from accelerators.
        sources: the positions of the buffers that are read; None if that is one for all, or the array in whole.
        taken: for each device the position of what it gets among what is read, and which part of that.
    """

    aval: ShapedArray
    sharding: Sharding
    devices: Sequence[Device]
    is_transfer: bool
    sources: Sequence[int] | None
    taken: Sequence[tuple[int, Any]]

    def parts(self, array: Any) -> Sequence[ArrayImpl]:
        """What is read: arrays of their own, for one that is read keeps what was read as long as it lives."""
        if array.is_fully_replicated:
            return [replica_of(array)]
        same = of_same_buffers(array)
        if same is None:  # another thread has just deleted it
            return [array]
        return [same] if self.sources is None else [same._arrays[k] for k in self.sources]

    def ask_for(self, parts: Sequence[ArrayImpl]) -> None:
        """Begins to read parts of an array."""
        if self.is_transfer:
            for part in parts:
                part.copy_to_host_async()

    def moved(self, parts: Sequence[ArrayImpl]) -> jax.Array:
        """The array, of the parts of another one."""
        values = [*map(_read, parts)]
        shards = [values[k][part] for k, part in self.taken]
        return put_explicitly(self.aval, self.sharding, shards, self.devices, True)


def _way_of(array: jax.Array, sharding: Sharding) -> _Way | None:
    if not isinstance(array, ArrayImpl) or array.is_deleted():
        return None
    return _way(array.aval, array.sharding, sharding)


@functools.lru_cache(maxsize=4096)
def _way(aval: ShapedArray, source: Sharding, target: Sharding) -> _Way | None:
    """The way between devices of different kinds, in this process and in their own memory; None if jax moves it."""
    is_here = source.is_fully_addressable and target.is_fully_addressable
    in_memory = {kind_of_memory(source), kind_of_memory(target)} == {"device"}
    are_alike = _is_on_hosts(source) == _is_on_hosts(target)
    if are_alike or not (is_here and in_memory and is_laid_out_as_numpy(aval.dtype)):
        return None
    wanted, held = (parts_of(sharding, aval.shape) for sharding in (target, source))
    sources, taken = None, [(0, part.slices) for part in wanted]
    if not source.is_fully_replicated:
        bounds, needed = ([part.bounds for part in parts] for parts in (held, wanted))
        if {*needed} <= {*bounds}:
            read = [*dict.fromkeys(needed)]
            sources, taken = [*map(bounds.index, read)], [(read.index(own), ...) for own in needed]
    aval, devices = update_dp_aval(aval, target), addressable_devices(target)
    return _Way(aval, target, devices, not _is_on_hosts(source), sources, taken)


def _is_on_hosts(sharding: Sharding) -> bool:
    return bool(device_list(sharding)[0].platform == "cpu")


def _read(array: ArrayImpl) -> np.ndarray:
    return as_numpy(array)
