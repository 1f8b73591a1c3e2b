"""Arguments that stay intact while a call waits or runs.

The caller may donate an array to the next step, or delete it, right after it was given to an asynchronous call. Whoever
holds a reference from outside of the runtime to an array's memory keeps the runtime from giving it away: a donation
then copies. Such a reference is taken per device, in microseconds, if the array is there. To take one of an array that
is still being computed would wait for it; such an array is copied instead, which is only queued.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import jax

from partjit._jax.arrays import ArrayImpl, PRNGKeyArray, array_of_buffers, array_of_capsule, buffers_of, with_key_data
from partjit.colocated.runtime.failures import PoisonedError
from partjit.colocated.runtime.pending import PendingArray, when_received

__all__ = ["distinct", "hold"]

_OWN_KINDS = (None, "device")

Take = Callable[[], Any]
"""Gives the array that was held; to be called once, where the function runs."""


def hold(array: Any) -> Take:
    """Keeps an array as it is now, without waiting.

    Args:
        array: what a function is called with.

    Raises:
        RuntimeError: it was deleted already.
    """
    kind = type(array)
    if kind is PendingArray:
        return _hold_pending(array)
    if kind is PRNGKeyArray:
        take_data = hold(array._base_array)
        return lambda: with_key_data(array, take_data())
    if kind is not ArrayImpl:
        return lambda: array
    if array.is_deleted():  # asking such an array whether it is ready ends the process on jax 0.10
        raise _deleted(array)
    # A capsule does not say in which kind of memory it is: what is made of it is in the device's own.
    is_pinnable = array.sharding.memory_kind in _OWN_KINDS and array.is_ready()
    return _hold_ready(array) if is_pinnable else _copied(array)


def _hold_ready(array: Any) -> Take:
    buffers = buffers_of(array)
    try:
        capsules = [buffer.__dlpack__() for buffer in buffers]
    except (jax.errors.JaxRuntimeError, BufferError, TypeError):  # DLPack does not know the dtype
        return _copied(array)
    devices = [next(iter(buffer.devices())) for buffer in buffers]

    def take() -> Any:
        aliases = [array_of_capsule(capsule, device) for capsule, device in zip(capsules, devices, strict=True)]
        return array_of_buffers(array, aliases)

    return take


def _copied(array: Any) -> Take:
    if not jax.numpy.issubdtype(array.dtype, jax.numpy.number) and array.dtype != bool:
        return lambda: array  # strings, which no program can be given
    copy = jax.device_put(array, array.sharding, may_alias=False)
    return lambda: array_of_buffers(array, buffers_of(copy))


def _hold_pending(array: PendingArray) -> Take:
    if array.is_deleted():
        raise _deleted(array)
    held: list[Take] = []

    def hold_value(value: Any) -> None:
        try:
            held.append(hold(value))
        except RuntimeError as error:  # it was to be deleted when it came
            held.append(functools.partial(_raise, error))

    when_received(array, hold_value)

    def take() -> Any:
        try:
            array.value_for_call()
        except PoisonedError:
            held.clear()
            raise
        return held.pop()()

    return take


def _raise(error: RuntimeError) -> NoReturn:
    raise error


def _deleted(array: Any) -> RuntimeError:
    return RuntimeError(f"a colocated function was called with a deleted array: {array.aval.str_short()}")


def distinct(results: Sequence[Any], given: Sequence[Any], which: Iterable[int] | None = None) -> Sequence[Any]:
    """The results, of which those at `which`, all by default, are neither the arguments given nor each other."""
    seen = {*map(id, given)}
    own = [*results]
    for i in range(len(own)) if which is None else which:
        if id(results[i]) in seen:
            own[i] = hold(results[i])()
        seen.add(id(results[i]))
    return own
