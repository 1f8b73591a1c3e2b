"""Small arguments of calls on threads: a program copies all of them, which takes less time than a pin of each.

To compile it takes about as long as hundreds of pins, so that is done for calls that are made often.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from partjit._jax.arrays import ArrayImpl
from partjit._jax.copying import copier_of
from partjit._jax.dispatch import USE_OF_DONATED_BUFFERS_CRASHES, results_are_checked
from partjit._jax.shardings import device_list, kind_of_memory
from partjit.colocated.runtime.interrupts import is_interrupt

__all__ = ["SmallArguments"]

_SMALL = 2**14
"""The bytes on a device above which a copy takes longer than a pin."""
_MOST = 2**21
"""The bytes, on all devices, that a call copies at most: as many calls may wait as a stream holds."""
_PINS_OF_A_PROGRAM, _PINS_OF_AN_ARGUMENT = 1024, 16
"""How many pins take as long as to compile a program, and by how many each of its arguments adds to that."""


class SmallArguments:
    """The small ones among the arguments of calls with arguments of the same types and shardings."""

    __slots__ = ("_are_all", "_copier", "_last", "_pins", "_positions")

    def __init__(self) -> None:
        self._copier: Callable[..., Sequence[jax.Array]] | None = None
        self._positions: Sequence[int] | None = None
        self._are_all = False
        self._last: Sequence[Callable[[], ArrayImpl | None]] = ()  # the last arguments that are not gone
        self._pins = 0  # how many were made instead

    def copies(self, arrays: Sequence[ArrayImpl]) -> Sequence[Any] | None:
        """A copy of each argument that is small, as it is now, and None for each of the others.

        Returns:
            None in place of all if there are none, or where pins serve better: calls with the same arguments share
            them, and they say that an argument was deleted.
        """
        if self._are_last(arrays):
            return None
        copier, positions = self._copier, self._positions
        if copier is None or positions is None:
            copier = self._learn(arrays)
            if copier is None:
                return None
            positions = self._positions or ()
        if results_are_checked():  # for NaNs, which an argument may have
            return None
        if USE_OF_DONATED_BUFFERS_CRASHES and any(array.is_deleted() for array in arrays):
            return None
        try:
            if self._are_all:
                return copier(*arrays)
            made = copier(*[arrays[i] for i in positions])
        except Exception:
            if any(array.is_deleted() for array in arrays):
                return None
            raise
        copies: list[Any] = [None] * len(arrays)
        for i, copy in zip(positions, made, strict=True):
            copies[i] = copy
        return copies

    def _are_last(self, arrays: Sequence[ArrayImpl]) -> bool:
        """Whether these are the arguments of the last call; the next one is compared with these."""
        last = self._last
        if len(last) == len(arrays) and all(map(_refers_to, last, arrays)):
            return bool(arrays)
        self._last = [*map(weakref.ref, arrays)]
        return False

    def _learn(self, arrays: Sequence[ArrayImpl]) -> Callable[..., Sequence[jax.Array]] | None:
        """What copies them, once as many pins have been made as take as long as to compile it."""
        positions = self._positions
        if positions is None:
            positions = self._positions = [*_copied_together(arrays)]
        if not positions:
            return None
        self._pins += len(positions)
        if self._pins < _PINS_OF_A_PROGRAM + _PINS_OF_AN_ARGUMENT * len(positions):
            return None
        try:
            copier = copier_of([arrays[i] for i in positions])
        except Exception as error:
            if is_interrupt(error):
                raise
            copier = None  # it was deleted, or of a type that programs do not have
        if copier is None:
            self._positions = ()
        self._are_all = len(positions) == len(arrays)
        self._copier = copier
        return copier


def _refers_to(reference: Callable[[], ArrayImpl | None], array: ArrayImpl) -> bool:
    return reference() is array


def _copied_together(arrays: Sequence[ArrayImpl]) -> Iterator[int]:
    """The positions of those that one program copies in less time than it takes to pin them."""
    small = sorted((size, i) for i, array in enumerate(arrays) if (size := _bytes_on_all(array)) is not None)
    if not small:
        return
    first = arrays[small[0][1]]
    alike = [(size, i) for size, i in small if _place_of(arrays[i]) == _place_of(first)]
    if len(alike) < first.sharding.num_devices:
        return
    total = 0
    for size, i in alike:
        total += size
        if total <= _MOST:
            yield i


def _bytes_on_all(array: ArrayImpl) -> int | None:
    """The bytes of an array on all devices; None unless it is small and can be copied."""
    sharding, dtype = array.sharding, array.dtype
    if not any(jax.numpy.issubdtype(dtype, kind) for kind in (jax.numpy.number, jax.numpy.bool_)):
        return None
    if not sharding.is_fully_addressable or kind_of_memory(sharding) != "device":
        return None
    size = dtype.itemsize
    for count in sharding.shard_shape(array.shape):
        size *= count
    return size * sharding.num_devices if size <= _SMALL else None


def _place_of(array: ArrayImpl) -> tuple[object, bool]:
    return device_list(array.sharding), array.committed
