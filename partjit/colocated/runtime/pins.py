"""Pins: arguments that stay intact while a call waits or runs.

The caller may donate an array to the next step, or delete it, right after passing it to an asynchronous call. An
external reference to an array's buffers makes donations copy. Taking one costs microseconds per device if the array is
ready, but would wait for an array that is still being computed; such an array is copied instead, asynchronously.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import jax

from partjit._jax.arrays import (
    ArrayImpl,
    PRNGKeyArray,
    array_of_buffers,
    array_of_capsule,
    buffers_of,
    capsule_of,
    copy_of,
    device_of,
    is_computed,
    shareable,
    with_key_data,
)
from partjit.colocated.runtime.failures import PoisonedError
from partjit.colocated.runtime.pending import PendingArray, when_received

__all__ = ["Take", "distinct", "pin", "unpinned"]

_OWN_KINDS = (None, "device")

Take = Callable[[], jax.Array]
"""Returns the pinned array; to be called once, where the function runs."""


def pin(array: jax.Array) -> Take:
    """Keeps an array as it is now, without waiting.

    Args:
        array: an argument of a call.

    Raises:
        RuntimeError: it was deleted.
    """
    if type(array) is PendingArray:
        return _pin_pending(array)
    if type(array) is PRNGKeyArray:
        take_data = pin(array._base_array)
        return lambda: with_key_data(array, take_data())
    if type(array) is not ArrayImpl:
        return lambda: array
    if array.is_deleted():  # on jax 0.10, `is_ready` of such an array aborts the process
        raise _deleted(array)
    # A capsule does not record its kind of memory: an array made of it is in that of the device.
    is_pinnable = array.sharding.memory_kind in _OWN_KINDS and is_computed(array)
    return _pin_ready(array) if is_pinnable else _copied(array)


def unpinned(array: jax.Array) -> Take:
    """What returns an array that will not be donated."""
    if type(array) is PendingArray:
        return array.value_for_call
    shareable(array)
    return lambda: array


def _pin_ready(array: ArrayImpl) -> Take:
    buffers = buffers_of(array)
    try:
        capsules = [*map(capsule_of, buffers)]
    except (jax.errors.JaxRuntimeError, BufferError, TypeError):  # DLPack does not support the dtype
        return _copied(array)

    def take() -> jax.Array:
        devices = [device_of(buffer) for buffer in buffers]
        aliases = [*map(array_of_capsule, capsules, devices)]
        return array_of_buffers(array, aliases)

    return take


def _copied(array: ArrayImpl) -> Take:
    if not jax.numpy.issubdtype(array.dtype, jax.numpy.number) and array.dtype != bool:
        return lambda: array  # strings, which cannot be donated to a program
    copy = copy_of(array)
    return lambda: copy


def _pin_pending(array: PendingArray) -> Take:
    if array.is_deleted():
        raise _deleted(array)
    pinned: list[Take] = []

    def pin_value(value: jax.Array) -> None:
        try:
            pinned.append(pin(value))
        except RuntimeError as error:  # it was deleted before the value came
            pinned.append(functools.partial(_raise, error))

    when_received(array, pin_value)

    def take() -> jax.Array:
        try:
            array.value_for_call()
        except PoisonedError:
            pinned.clear()
            raise
        return pinned.pop()()

    return take


def _raise(error: RuntimeError) -> NoReturn:
    raise error


def _deleted(array: jax.Array) -> RuntimeError:
    return RuntimeError(f"a colocated function was called with a deleted array: {array.aval.str_short()}")


def distinct(
    results: Sequence[jax.Array], given: Sequence[jax.Array], which: Iterable[int] | None = None
) -> Sequence[jax.Array]:
    """The results, with those at `which` (by default all) distinct from the arguments and from each other."""
    seen = {*map(id, given)}
    own = [*results]
    for i in range(len(own)) if which is None else which:
        if id(results[i]) in seen:
            own[i] = pin(results[i])()
        seen.add(id(results[i]))
    return own
