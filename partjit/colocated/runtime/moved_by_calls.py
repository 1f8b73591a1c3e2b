"""Arguments on accelerators that the calls which need them move to the hosts, in their threads.

To move an array from a GPU to its host waits until it is computed. The first call that needs one of several, such as
the metrics of a step, begins to move all that are computed by then, so that the transfers run beside each other.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import TypeAlias

import jax
from jax.sharding import Sharding

from partjit._jax.arrays import is_computed
from partjit._jax.moves import begun, moved_to
from partjit.colocated.runtime.pending import OnDemand

__all__ = ["MOST_BYTES_COPIED_THERE", "Around", "Beside", "MovedByCall", "moved_around"]

MOST_BYTES_COPIED_THERE = 2**26
"""Of an argument on accelerators that is copied there for a call on a thread, which moves the copy to its host."""

Around: TypeAlias = Callable[[int], contextlib.AbstractContextManager[None]]
"""Of so many bytes, the block in which they are moved."""

Beside: TypeAlias = "list[weakref.ref[MovedByCall]]"
"""Those that begin to move when the first of them does."""


class MovedByCall(OnDemand):
    """An array on accelerators that the first call that needs it moves to the hosts, in its thread.

    Args:
        source: the array there; or what waits for it and returns it, once.
        sharding: that on the hosts.
        beside: where those that are moved together are listed.
        around: what is around the move, if there is somebody who listens.
    """

    __slots__ = ("_around", "_beside", "_end", "_lock", "_moved", "_sharding", "_source")

    def __init__(
        self,
        source: jax.Array | Callable[[], jax.Array],
        sharding: Sharding,
        beside: Beside,
        around: Around | None = None,
    ) -> None:
        self._source: jax.Array | Callable[[], jax.Array] | None = source
        self._sharding = sharding
        self._beside = beside
        self._around = around
        self._end: Callable[[], jax.Array] | None = None
        self._moved: jax.Array | None = None
        self._lock = threading.Lock()
        beside.append(weakref.ref(self))

    @property
    def moved_from(self) -> object:
        """What is still to be moved, or what returns it; None once it is moved."""
        return self._source

    def __call__(self) -> jax.Array:
        """The array on the hosts."""
        with self._lock:  # calls of several streams may need it at the same time
            if self._moved is None:
                source = self._source
                assert source is not None
                array = source if isinstance(source, jax.Array) else source()
                self._source = array  # should the move fail, for the next call
                if len(self._beside) > 1:
                    jax.block_until_ready(array)
                    self._begin_others()
                self._moved = moved_around(array, self._sharding, self._around, self._end)
                self._source = self._end = None  # which keep memory of the accelerators
            return self._moved

    def _begin_others(self) -> None:
        while self._beside:
            with contextlib.suppress(IndexError):  # another thread took the last one
                other = self._beside.pop()()
                if other is not None:  # this one is locked, and leaves itself out
                    other._begin()

    def _begin(self) -> None:
        """Begins to move it, if it is computed and nobody else does."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            array = self._source
            if self._end is None and isinstance(array, jax.Array) and is_computed(array):
                with contextlib.suppress(Exception):  # whoever needs it finds out
                    self._end = begun(array, self._sharding)
        finally:
            self._lock.release()


def moved_around(
    array: jax.Array, sharding: Sharding, around: Around | None, end: Callable[[], jax.Array] | None = None
) -> jax.Array:
    """An array on the hosts.

    Args:
        array: that on accelerators.
        sharding: the one on the hosts.
        around: what is around the move, if there is somebody who listens.
        end: ends the move, if it has begun.
    """
    if around is None:
        return moved_to(array, sharding) if end is None else end()
    jax.block_until_ready(array)  # the move does not account for the time in which it is computed
    with around(array.nbytes):
        return jax.block_until_ready(moved_to(array, sharding) if end is None else end())
