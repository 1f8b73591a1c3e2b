"""Arrays: their buffers, what makes them quickly, and types that jax accepts as arrays."""

import functools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax._src import ad_util, config, core, dtypes
from jax._src.array import ArrayImpl
from jax._src.interpreters import mlir, pxla
from jax._src.lax import lax
from jax._src.lib import _jax, guard_lib
from jax._src.lib import xla_client as xc
from jax._src.literals import TypedComplex, TypedFloat, TypedInt
from jax._src.random.prng import PRNGKeyArray
from jax.core import ShapedArray
from jax.sharding import Sharding

from partjit._jax.shardings import device_list
from partjit._jax.types import Device, PyTree
from partjit._jax.versions import RELEASE

__all__ = [
    "OF_64_BITS",
    "ArrayImpl",
    "PRNGKeyArray",
    "TypedComplex",
    "TypedFloat",
    "TypedInt",
    "are_transfers_guarded",
    "array_of_buffers",
    "array_of_capsule",
    "array_of_shards",
    "aval_of_struct",
    "buffers_of",
    "capsule_of",
    "capsules_of",
    "constant_of",
    "copy_of",
    "data_of",
    "device_put",
    "for_another_thread",
    "is_computed",
    "is_laid_out_as_numpy",
    "is_of_one_process",
    "is_on_one_host_device",
    "item_of",
    "keys_of_data",
    "kind_of_keys",
    "memory_of",
    "numpy_putter",
    "of_same_buffers",
    "put_explicitly",
    "register_array_type",
    "replica_of",
    "shareable",
    "type_and_sharding",
    "type_sharding_and_commitment",
    "with_key_data",
    "with_sharding",
    "with_weak_type",
]

# Where every microsecond counts: the public properties of these are Python functions. Only plain arrays have them all.
type_and_sharding = operator.attrgetter("aval", "_sharding")
type_sharding_and_commitment = operator.attrgetter("aval", "_sharding", "_committed")


def kind_of_keys(keys: PRNGKeyArray) -> object:
    """The same of typed keys: of their data, and what they are keys for."""
    return keys._impl, *type_sharding_and_commitment(keys._base_array)


# jax 0.10 lists the single-device arrays of an array when they are first asked for, with Python in between: whoever
# asks at the same time gets a part of the list, or fills it as well, and then every device is in it twice for good.
_BUFFERS_ARE_LISTED_IN_STEPS = RELEASE < (0, 12)
_listing = threading.RLock()  # a finalizer may come in between


_Value = TypeVar("_Value")
_Array = TypeVar("_Array", bound=jax.Array)


def shareable(value: _Value) -> _Value:
    """The value itself; if it is an array, several threads may use it at once from now on."""
    if _BUFFERS_ARE_LISTED_IN_STEPS:
        array = value._base_array if type(value) is PRNGKeyArray else value
        if type(array) is ArrayImpl:
            with _listing:
                _ = array._arrays
    return value


def for_another_thread(array: ArrayImpl) -> ArrayImpl:
    """An array that another thread may use at the same time: the array itself, or one of the same buffers.

    To list the buffers of an array over several devices takes many times as long as to make another array of them,
    whose list concerns only the thread that uses it. If one of the two is deleted or donated, so is the other.
    """
    other = of_same_buffers(array) if _BUFFERS_ARE_LISTED_IN_STEPS else None
    return shareable(array) if other is None else other


def of_same_buffers(array: ArrayImpl) -> ArrayImpl | None:
    """Another array over several devices with the buffers of one; None of other arrays."""
    if array.sharding.num_devices == 1 or not array.committed or not array.is_fully_addressable or array.is_deleted():
        return None
    return xc.reorder_shards(array, array.sharding, xc.ArrayCopySemantics.REUSE_INPUT)


def device_put(values: PyTree, shardings: PyTree) -> PyTree:
    """What `jax.device_put` does, for arrays that other threads may move or use here at the same time."""
    return jax.device_put(jax.tree.map(shareable, values) if _BUFFERS_ARE_LISTED_IN_STEPS else values, shardings)


def is_of_one_process(value: object, sharding: Sharding) -> bool:
    """Whether it is an array that this process has all of, to be sharded over others as well, and puts its own part."""
    return isinstance(value, jax.Array) and value.is_fully_addressable and not sharding.is_fully_addressable


def buffers_of(array: ArrayImpl) -> Sequence[ArrayImpl]:
    """The arrays that an array has on the devices of this process, one each."""
    return shareable(array)._arrays


def replica_of(array: Any) -> ArrayImpl:
    """The array that a replicated array has on one of the devices of this process."""
    # Not in the list of its buffers: this neither fills that nor depends on it.
    return array._fully_replicated_shard()


def memory_of(array: Any) -> list[int]:
    """Where an array is in the memory of the devices of this process; does not wait until it is computed."""
    array = data_of(array)
    if type(array) is not ArrayImpl or not array.size or array.is_deleted():
        return []
    try:
        return [buffer.unsafe_buffer_pointer() for buffer in buffers_of(array)]
    except RuntimeError:  # another thread has just deleted or donated it
        return []


def array_of_buffers(like: ArrayImpl, buffers: Sequence[ArrayImpl]) -> ArrayImpl:
    """An array of the type and sharding of `like` out of one array per device of this process."""
    return ArrayImpl(like.aval, like.sharding, list(buffers), committed=like._committed, _skip_checks=True)


def capsule_of(buffer: Any) -> object:
    """A DLPack capsule of an array on one device; the public way finds out first where that is."""
    # Deleting `buffer` itself would abort. This is what `addressable_data` returns.
    return _jax.buffer_to_dlpack_managed_tensor(buffer._fully_replicated_shard())


def capsules_of(array: ArrayImpl) -> list[object]:
    """A DLPack capsule of each of the buffers of an array."""
    own = of_same_buffers(array)
    if own is None:
        return [*map(capsule_of, buffers_of(array))]
    return [*map(_jax.buffer_to_dlpack_managed_tensor, own._arrays)]  # which nobody else has, and so nobody deletes


def array_of_capsule(capsule: object, device: Device) -> ArrayImpl:
    """The memory of a DLPack capsule as an array on a CPU device; the public way knows no device but the first."""
    return _jax.dlpack_managed_tensor_to_buffer(capsule, device, None)


def is_computed(array: Any) -> bool:
    """Whether an array is there; arrays of keys have no `is_ready`, their data has."""
    return data_of(array).is_ready()


def data_of(array: Any) -> Any:
    """The data of an array of typed keys, which the public way needs a program for; any other array as it is."""
    return getattr(array, "_base_array", array)


@functools.cache
def is_laid_out_as_numpy(dtype: Any) -> bool:
    """Whether NumPy arrays of a dtype are laid out in memory as those of the devices."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return False
    if jax.numpy.issubdtype(dtype, jax.numpy.floating):
        return jax.numpy.finfo(dtype).bits >= 8
    return not jax.numpy.issubdtype(dtype, jax.numpy.integer) or jax.numpy.iinfo(dtype).bits >= 8


def is_on_one_host_device(array: ArrayImpl) -> bool:
    """Whether an array is on a single device, a CPU."""
    arrays = buffers_of(array)
    return len(arrays) == 1 and arrays[0].platform() == "cpu"


def copy_of(array: ArrayImpl) -> ArrayImpl:
    """An array of the same type and sharding in memory of its own, copied once it is computed.

    `jax.device_put` does the same, and takes many times as long to find out what it has to do. Of an array over several
    processes it is a program of all their devices, which waits in this thread for those of a process that has stopped.
    """
    sharding = array.sharding
    if not sharding.is_fully_addressable:
        return array_of_buffers(array, [copy_of(shard) for shard in buffers_of(array)])
    devices = sharding._internal_device_list.addressable_device_list
    given = [array], [devices], [sharding], [xc.ArrayCopySemantics.ALWAYS_COPY]
    try:
        (copy,) = xc.batched_copy_array_to_devices_with_sharding(*given)
    except jax.errors.JaxRuntimeError:  # of a transfer guard, as in `put_explicitly`
        with config.explicit_device_put_scope():
            (copy,) = xc.batched_copy_array_to_devices_with_sharding(*given)
    return copy


def with_sharding(array: ArrayImpl, sharding: Sharding) -> jax.Array:
    """An array on a single device, in the same memory, with another sharding on that device.

    `jax.device_put` does the same, and takes a few times as long to find out what it has to do.
    """
    return ArrayImpl(array.aval, sharding, buffers_of(array), committed=True, _skip_checks=True)


def numpy_putter(
    aval: ShapedArray, sharding: Sharding, committed: bool, *, is_explicit: bool = False
) -> Callable[[np.ndarray], jax.Array]:
    """What puts NumPy arrays to the devices of a sharding: each gets its part of the memory, on a CPU without a copy.

    `jax.device_put` does the same, and takes a few times as long to find out what it has to do.

    Args:
        aval, sharding, committed: the type of the arrays, and where they are put.
        is_explicit: whether this is an explicit transfer to jax's transfer guard.
    """
    if np.dtype(aval.dtype).kind == "T":  # strings are not in one piece of memory
        return lambda value: jax.device_put(value, sharding)
    if not sharding.is_fully_addressable:
        # `jax.device_put` compares the values of all processes by a program of its own, which would run in each of them
        # whenever its call has ended: between other programs, and never where one process has no such call.
        return lambda value: jax.make_array_from_callback(
            aval.shape, sharding, lambda index: value[index], dtype=aval.dtype
        )
    devices = [*device_list(sharding)]
    put = put_explicitly if is_explicit else _put
    if sharding.is_fully_replicated:
        count = len(devices)
        if aval.dtype in OF_64_BITS:
            return lambda value: put(aval, sharding, [value] * count, devices, committed)

        def put_everywhere(value: np.ndarray) -> jax.Array:
            try:
                return xc.batched_device_put(aval, sharding, [value] * count, devices, committed)
            except jax.errors.JaxRuntimeError:  # of a guard
                return put(aval, sharding, [value] * count, devices, committed)

        return put_everywhere
    indices = [sharding.addressable_devices_indices_map(aval.shape)[device] for device in devices]
    return lambda value: put(aval, sharding, [value[index] for index in indices], devices, committed)


def put_explicitly(
    aval: ShapedArray, sharding: Sharding, values: Sequence[Any], devices: Sequence[Device], committed: bool
) -> jax.Array:
    """The array of a type and sharding of a NumPy array for each device of it in this process."""
    try:
        return _put(aval, sharding, values, devices, committed)
    except jax.errors.JaxRuntimeError:  # of a guard, which takes a transfer to be implicit unless this is entered
        with config.explicit_device_put_scope():
            return _put(aval, sharding, values, devices, committed)


def _put(
    aval: ShapedArray, sharding: Sharding, values: Sequence[Any], devices: Sequence[Device], committed: bool
) -> jax.Array:
    if aval.dtype in OF_64_BITS and not config.enable_x64.value:
        with config.enable_x64(True):  # or the values have 32 bits, whatever the type of the array says
            return xc.batched_device_put(aval, sharding, values, devices, committed)
    return xc.batched_device_put(aval, sharding, values, devices, committed)


def are_transfers_guarded() -> bool:
    """Whether jax's transfer guard has something to say about transfers from the host that nobody has asked for."""
    here, everywhere = guard_lib.thread_local_state().host_to_device, guard_lib.global_state().host_to_device
    return (everywhere if here is None else here) not in _UNGUARDED


_UNGUARDED = (None, guard_lib.TransferGuardLevel.ALLOW)
OF_64_BITS = frozenset(map(np.dtype, (np.int64, np.uint64, np.float64, np.complex128)))
"""The types that are of half as many bits where `jax_enable_x64` is not set."""


def item_of(array: jax.Array) -> Any:
    """What `array.item()` returns; to jax's transfer guard it is an explicit transfer."""
    try:
        return array.item()
    except jax.errors.JaxRuntimeError:
        with config.explicit_device_get_scope():
            return array.item()


def constant_of(value: Any) -> jax.Array:
    """What `jax.numpy.asarray` makes of a constant of a traced function; to jax's transfer guard, explicitly."""
    with config.explicit_device_put_scope():
        return jax.numpy.asarray(value)


def array_of_shards(
    aval: ShapedArray, sharding: Sharding, by_device: Mapping[Device, jax.Array | np.ndarray]
) -> jax.Array:
    """An array of a type and sharding, with a value on each of its devices in this process."""
    devices = [device for device in device_list(sharding) if device in by_device]
    shards = [by_device[device] for device in devices]
    if sharding.is_fully_addressable and all(type(s) is np.ndarray and s.dtype.kind != "T" for s in shards):
        # Moving them one by one takes several times as long, as in `numpy_putter`.
        return put_explicitly(aval, sharding, shards, devices, True)
    arrays = [
        shard if isinstance(shard, jax.Array) and shard.device is device else jax.device_put(shard, device)
        for shard, device in zip(shards, devices, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(aval.shape, sharding, arrays)


def with_key_data(key: PRNGKeyArray, data: jax.Array) -> PRNGKeyArray:
    """A typed PRNG key array of the implementation of `key`; the public way runs a program."""
    return PRNGKeyArray(key._impl, data)


def keys_of_data(dtype: Any, data: np.ndarray) -> PRNGKeyArray:
    """The typed PRNG keys of such a dtype with this data; the public way wants a key of its implementation."""
    return PRNGKeyArray(dtype._impl, jax.numpy.asarray(data))


def with_weak_type(array: jax.Array, weak_type: bool) -> jax.Array:
    """The same array with another weak type; the public conversion only makes types strong."""
    return cast(jax.Array, lax._convert_element_type(array, array.dtype, weak_type=weak_type))


def aval_of_struct(spec: jax.ShapeDtypeStruct) -> ShapedArray:
    """The abstract value of a ShapeDtypeStruct, the sharding left out."""
    return ShapedArray(spec.shape, spec.dtype, getattr(spec, "weak_type", False))


def register_array_type(array_type: type[_Array], value_of: Callable[[_Array], jax.Array]) -> None:
    """Makes jax accept `array_type` wherever it accepts an array.

    Args:
        array_type: a subclass of `jax.Array`, with its `aval`.
        value_of: the array it represents; called where jax needs its buffers.
    """

    def shard_args(
        xs: Sequence[_Array], shardings: Sequence[Sharding], layouts: Sequence[object], copy_semantics: Sequence[object]
    ) -> Sequence[ArrayImpl]:
        return pxla.shard_args(shardings, layouts, copy_semantics, [value_of(x) for x in xs])

    core.pytype_aval_mappings[array_type] = lambda x: core.update_aval_with_sharding(x.aval, x.sharding)
    dtypes.register_canonicalize_value_handler(array_type, None)
    pxla.shard_arg_handlers[array_type] = shard_args
    mlir.register_constant_handler(
        array_type, lambda val, aval: mlir.get_constant_handler(ArrayImpl)(value_of(val), aval)
    )
    ad_util.raw_jaxval_adders[array_type] = ad_util.raw_jaxval_adders[ArrayImpl]
