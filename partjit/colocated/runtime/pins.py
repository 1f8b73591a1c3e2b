"""Pins: arguments that stay intact while a call waits or runs.

The caller may donate an array to the next step, or delete it, right after passing it to an asynchronous call. An
external reference to an array's buffers makes donations copy. Taking one costs microseconds per device if the array is
ready, but would wait for an array that is still being computed; such an array is copied instead, asynchronously.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from partjit._jax.arrays import (
    ArrayImpl,
    PRNGKeyArray,
    array_of_buffers,
    array_of_capsule,
    capsule_of,
    capsules_of,
    copy_of,
    for_another_thread,
    is_computed,
    shareable,
    with_key_data,
)
from partjit._jax.shardings import addressable_devices, kind_of_memory
from partjit.colocated.runtime.arrays_in_memory import ArraysInMemory
from partjit.colocated.runtime.failures import PoisonedError
from partjit.colocated.runtime.pending import OnDemand, PendingArray, when_received
from partjit.colocated.runtime.replicated_arguments import kept_number, kept_replica
from partjit.colocated.runtime.small_arguments import SmallArguments
from partjit.colocated.runtime.unshared import OF_A_LIST

__all__ = ["Pins", "Take", "Taken", "borrowed", "copied", "distinct", "given_back", "pin", "unpinned"]

Take = Callable[[], jax.Array]
"""Returns the pinned array; to be called once, where the function runs.

It is an `OnDemand`, a method of what it may wait for, or a `functools.partial` that has this as its first argument:
`giving_way` asks whether it would wait.
"""

Taken = Take | ArrayImpl
"""The same, or an array that needs no pin."""


def pin(array: jax.Array) -> Take:
    """Keeps an argument of a call as it is now, without waiting.

    Raises:
        RuntimeError: it was deleted.
    """
    return _pin(array, kept_number)


def copied(array: jax.Array) -> Take:
    """Keeps an argument as `pin` does, by a copy where it is.

    Raises:
        RuntimeError: it was deleted.
    """
    return _pin(array, _copied)


def _pin(array: jax.Array, instead: Callable[[ArrayImpl], Take | None]) -> Take:
    """As `pin`, with what takes the place of the pin of some arrays."""
    if type(array) is PendingArray:
        return _pin_pending(array)
    if type(array) is PRNGKeyArray:
        return functools.partial(_of_key_data, pin(array._base_array), array)
    if type(array) is not ArrayImpl:
        return functools.partial(_itself, array)
    if array.is_deleted():  # on jax 0.10, `is_ready` of such an array aborts the process
        raise _deleted(array)
    kept = instead(array)
    if kept is not None:
        return kept
    # A capsule does not record its kind of memory: an array made of it is in that of the device.
    is_pinnable = kind_of_memory(array.sharding) == "device" and is_computed(array)
    return _pin_ready(array) if is_pinnable else _copied(array)


def unpinned(array: jax.Array) -> Taken:
    """An array that will not be donated, or what returns it."""
    if type(array) is PendingArray:
        return array.value_for_call
    return for_another_thread(array) if type(array) is ArrayImpl else functools.partial(_itself, array)


def _pin_ready(array: ArrayImpl) -> Take:
    make = kept_replica(array)
    if make is not None:
        return _PinOfReplica(array, make)
    if not _comes_back(array.dtype):
        return _copied(array)
    try:
        return Pin(array)
    except (jax.errors.JaxRuntimeError, BufferError, TypeError):  # DLPack does not support the dtype
        return _copied(array)


@functools.cache
def _comes_back(dtype: Any) -> bool:
    """Whether an array can be made of a capsule of this dtype: of small floats that jaxlib only exports, it cannot."""
    if jax.numpy.issubdtype(dtype, jax.numpy.floating) and dtype.itemsize == 1:
        device = jax.local_devices(backend="cpu")[0]
        try:
            array_of_capsule(capsule_of(jax.device_put(np.zeros(1, dtype), device)), device)
        except (jax.errors.JaxRuntimeError, BufferError, TypeError):
            return False
    return True


class Pin(OnDemand):
    """The pin of an array that is computed.

    Making an array of the pinned memory takes far longer than pinning it. So calls that run one after another borrow
    the same one, unless somebody keeps it.

    Attributes:
        array: the array.
        is_shared: whether several calls have it.
    """

    __slots__ = ("_capsules", "_free", "_source", "array", "is_shared")

    def __init__(self, array: ArrayImpl) -> None:
        self.array = array
        self._capsules = capsules_of(array)
        self._source: list[ArrayImpl] | None = None
        self.is_shared = False
        self._free: list[jax.Array] = []

    def share(self) -> None:
        """Lets several calls have it; the array must not be deleted yet."""
        self._source = self._of(capsules_of(self.array))
        self.is_shared = True

    def __call__(self) -> jax.Array:
        """Another array that shares the memory; unless calls share the pin, to be called once."""
        source = self._source  # a capsule makes one array
        capsules = self._capsules if source is None else [*map(capsule_of, source)]
        return array_of_buffers(self.array, self._of(capsules))

    def _of(self, capsules: Iterable[object]) -> list[ArrayImpl]:
        return [*map(array_of_capsule, capsules, addressable_devices(self.array.sharding))]

    def borrow(self) -> jax.Array:
        """An array that shares the memory, and that nobody else has until it is given back."""
        try:
            return self._free.pop()
        except IndexError:
            return self()

    def give_back(self, array: jax.Array) -> None:
        """Takes an array back."""
        if not array.is_deleted():
            self._free.append(array)

    def returned(self, array: jax.Array) -> OnDemand:
        """What takes the place of a borrowed array that the function returns."""
        return self if self.is_shared else _Returned(self, array)


class _PinOfReplica(Pin):
    """A pin that is a copy of what one device has of a small replicated array.

    Args:
        array: the array.
        make: makes arrays of the copy.
    """

    __slots__ = ("_make",)

    def __init__(self, array: ArrayImpl, make: Callable[[], jax.Array]) -> None:
        self.array = array
        self.is_shared = False
        self._free = []
        self._make = make

    def share(self) -> None:
        self.is_shared = True

    def __call__(self) -> jax.Array:
        return shareable(self._make())


class _Returned(OnDemand):
    """A borrowed array that is a result; until that is used, it keeps the pin for other calls."""

    __slots__ = ("_array", "_pin")

    def __init__(self, pin: Pin, array: jax.Array) -> None:
        self._pin = pin
        self._array = array

    def __call__(self) -> jax.Array:
        return self._array


class Pins:
    """The pins of the arguments of calls: one that a call in flight has pinned is not pinned again."""

    __slots__ = ("_latest", "_small")

    def __init__(self, count: int) -> None:
        self._latest: list[Callable[[], Pin | None]] = [_nothing] * count
        self._small = SmallArguments()

    def pin_all(self, arrays: Sequence[Any]) -> list[Taken]:
        """Keeps all arguments of a call as they are now; plain arrays of the same types and shardings each time."""
        shared = self._shared(arrays)
        if shared is not None:
            return shared
        copies = self._small.copies(arrays)
        if copies is None:
            return [*map(self.pin, range(len(arrays)), arrays)]
        return [self.pin(i, arrays[i]) if copy is None else copy for i, copy in enumerate(copies)]

    def _shared(self, arrays: Sequence[Any]) -> list[Taken] | None:
        """The pins of calls in flight, if these have the same arguments."""
        pins: list[Taken] = []
        for latest, array in zip(self._latest, arrays, strict=True):
            pin = latest()
            if pin is None or pin.array is not array or array.is_deleted():
                return None
            if not pin.is_shared:
                pin.share()
            pins.append(pin)
        return pins

    def pin(self, position: int, array: jax.Array) -> Take:
        """Keeps the argument at a position as it is now, as `pin` does."""
        latest = self._latest[position]()
        if latest is not None and latest.array is array and not array.is_deleted():
            if not latest.is_shared:
                latest.share()
            return latest
        take = pin(array)
        if isinstance(take, Pin):
            self._latest[position] = weakref.ref(take)
        return take


def _nothing(*_: object) -> None:
    return None


def borrowed(takes: Iterable[Taken]) -> list[jax.Array]:
    """The pinned arrays, to be given back after the call."""
    return [_borrowed(take) if callable(take) else take for take in takes]


def _borrowed(take: Take) -> jax.Array:
    return take.borrow() if isinstance(take, Pin) else take()


def given_back(takes: Sequence[Taken], arrays: list[jax.Array], results: list[Any]) -> list[Any]:
    """Takes back what nobody has kept of the borrowed arrays; in the results, pins take the place of their arrays.

    Args:
        takes, arrays: the pins, and what was borrowed of them.
        results: what the function returned; only these lists may still refer to the arrays.
    """
    own: ArraysInMemory | None = None
    others = len(results)
    position_of = _position_among_few if others <= _FEW else _Positions(results).find
    for i, take in enumerate(takes):
        if not isinstance(take, Pin):
            continue
        array = arrays[i]
        position = position_of(array, results) if others else None
        if position is not None:
            results[position] = take.returned(array)
            others -= 1
        if take.is_shared and sys.getrefcount(array) == OF_A_LIST:
            if own is None and others:
                own = ArraysInMemory(results)
            if own is None or array not in own:  # a result that was moved may be in its memory
                take.give_back(array)
    return results


_FEW = 4


def _position_among_few(array: object, results: Sequence[object]) -> int | None:
    # Not by `id`: that is audited, and takes many times as long if there is an audit hook.
    for position, result in enumerate(results):
        if result is array:
            return position
    return None


class _Positions:
    """The positions of results, of any number."""

    __slots__ = ("_by_id",)

    def __init__(self, results: Iterable[object]) -> None:
        self._by_id = {id(result): position for position, result in enumerate(results)}

    def find(self, array: object, _: object) -> int | None:
        return self._by_id.get(id(array))


def _copied(array: ArrayImpl) -> Take:
    if not jax.numpy.issubdtype(array.dtype, jax.numpy.number) and array.dtype != bool:
        return functools.partial(_itself, array)  # strings, which cannot be donated to a program
    return functools.partial(_itself, copy_of(array))


def _itself(array: jax.Array) -> jax.Array:
    return array


def _of_key_data(take: Take, keys: PRNGKeyArray) -> jax.Array:
    return with_key_data(keys, take())


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
    return functools.partial(_of_pending, array, pinned)


def _of_pending(array: PendingArray, pinned: list[Take]) -> jax.Array:
    try:
        array.value_for_call()
    except PoisonedError:
        pinned.clear()
        raise
    return pinned.pop()()


def _raise(error: RuntimeError) -> NoReturn:
    raise error


def _deleted(array: jax.Array) -> RuntimeError:
    return RuntimeError(f"a colocated function was called with a deleted array: {array.aval.str_short()}")


def distinct(
    results: Sequence[jax.Array], given: Sequence[jax.Array], which: Iterable[int] | None = None
) -> Sequence[jax.Array]:
    """The results, with those at `which` (by default all) distinct from the arguments and from each other.

    An array moved to a sharding that differs in words only is another one in the same memory, and ends with it.
    """
    seen = ArraysInMemory(given)
    own = [*results]
    for i in range(len(own)) if which is None else which:
        if type(results[i]) is np.ndarray:  # in memory of its own, left to the dispatch of what reads it
            continue
        if results[i] in seen:
            own[i] = _pin(results[i], _nothing)()
        seen.add(results[i])
    return own
