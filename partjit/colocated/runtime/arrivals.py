"""Calls that executables of other wrappers make, such as those of `jax.jit`: how they enter their lanes.

Nothing of this package runs when such a program is started or has ended: its executable hands the arguments of a call
to Python, and goes on. One thread lets the calls enter their lanes, in the order in which they arrive; for a thread of
XLA that would be too long. jax orders them by the tokens of their effect: in a program, and in those that a thread
starts one after another.
"""

import collections
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
from jax.extend.core import Effect

from partjit._jax.effects import register_ordered_effect
from partjit._jax.tokens import wait_for_effect
from partjit.colocated.runtime import scheduler, threads
from partjit.colocated.runtime.call import Call, Lane
from partjit.colocated.runtime.interrupts import Exclusive, Flag

__all__ = [
    "MOST_BYTES_WAITING",
    "MOST_SECONDS",
    "Arrival",
    "ColocatedEffect",
    "effect",
    "have_entered",
    "settle",
    "wait_for_room",
]

MOST_BYTES_WAITING = 64 * 2**20
"""Of arguments that may wait for their calls before the devices wait as well."""

_MOST_IN_A_ROW = 128
_PATIENCE = 1.0
"""How many seconds the devices wait while no call ends: it may wait for them."""
MOST_SECONDS = 10.0
"""How many they wait in all: XLA ends the process when a device does not come to a collective operation."""


class ColocatedEffect(Effect):  # type: ignore[misc]  # jax gives the base class no types
    """The effect of running Python on hosts."""

    def __str__(self) -> str:
        return "Colocated"


effect = ColocatedEffect()
"""The one of all calls: those of an object are ordered whatever streams they are on."""


class Arrived(Protocol):
    """A call that has arrived."""

    def lanes(self) -> Sequence[Lane]: ...
    def run(self) -> None: ...
    def in_place_of(self, lanes: Sequence[Lane], body: Callable[[], Sequence[jax.Array]]) -> Call:
        """A call in these lanes with another body."""
        ...


class Arrival:
    """The arrival of a call.

    Args:
        arrived: the call.
        size: that of its arguments, in bytes.
    """

    def __init__(self, arrived: Arrived, size: int) -> None:
        self._arrived = arrived
        self._size = size
        self._has_entered = False

    def announce(self) -> None:
        """Lets the call enter its lanes, soon; a second time changes nothing."""
        _backlog.add(self, self._size)
        _entering[self] = None
        threads.run_later(self._enter)

    def _enter(self) -> None:
        try:
            if self._has_entered:  # announced twice
                _backlog.remove(self)
            else:
                self._has_entered = True
                self._enter_lanes()
        finally:
            _entering.pop(self, None)

    def _enter_lanes(self) -> None:
        global _last
        lanes, row = self._arrived.lanes(), None if _last is None else _last()
        if row is None or not row.append(self, lanes):
            row = _Row(self, self._arrived, lanes)
            _last = weakref.ref(row)
            scheduler.submit(row.call)

    def run(self) -> None:
        """Runs the function."""
        try:
            self._arrived.run()
        finally:
            _backlog.remove(self)


class _Row:
    """Calls that arrive one after another, in lanes of the first, as one call: a thread runs as many as there are.

    Attributes:
        call: the call.
    """

    def __init__(self, first: Arrival, arrived: Arrived, lanes: Sequence[Lane]) -> None:
        self._waiting = collections.deque([first])
        self._room = _MOST_IN_A_ROW
        self._changes = threading.Lock()  # neither thread handles signals
        # The first lane is that whose size counts. What the devices have done already does not wait for room.
        self.call = arrived.in_place_of([Lane(), *lanes], self._run)

    def append(self, arrival: Arrival, lanes: Sequence[Lane]) -> bool:
        """Appends a call, unless the last one has ended or others have come in between."""
        if any(not lane.calls or lane.calls[-1] is not self.call for lane in lanes):
            return False
        with self._changes:
            if not self._room:
                return False
            self._room -= 1
            self._waiting.append(arrival)
            return True

    def _run(self) -> Sequence[jax.Array]:
        while (arrival := self._next()) is not None:
            arrival.run()
        return ()

    def _next(self) -> Arrival | None:
        with self._changes:
            if self._waiting:
                return self._waiting.popleft()
            self._room = 0
            return None


class _Backlog:
    """The arguments that wait for their calls."""

    def __init__(self) -> None:
        # Weak, since a call that is given up is never removed.
        self._sizes: weakref.WeakKeyDictionary[Arrival, int] = weakref.WeakKeyDictionary()
        self._total = self._ended = 0
        self._next_end = Flag()
        self._changes = Exclusive()

    def add(self, arrival: Arrival, size: int) -> None:
        self._changes.run(self._add, arrival, size)

    def _add(self, arrival: Arrival, size: int) -> None:
        if arrival not in self._sizes:
            self._sizes[arrival] = size
            self._total += size

    def remove(self, arrival: Arrival) -> None:
        was_full = self._is_full()
        self._changes.run(self._remove, arrival)
        if was_full:
            ended, self._next_end = self._next_end, Flag()
            ended.set()

    def _remove(self, arrival: Arrival) -> None:
        self._total -= self._sizes.pop(arrival, 0)
        self._ended += 1
        if not self._sizes:  # an interrupt may have come in the middle of a change, or a call have been given up
            self._total = 0

    def wait_for_room(self) -> None:
        latest = time.monotonic() + MOST_SECONDS
        while self._is_full() and time.monotonic() < latest:
            next_end, so_far = self._next_end, self._ended
            if self._is_full():
                next_end.wait(time.monotonic() + _PATIENCE)
            if self._ended == so_far:
                return

    def _is_full(self) -> bool:
        return self._total > MOST_BYTES_WAITING


_backlog = _Backlog()
wait_for_room = _backlog.wait_for_room
"""Waits while too much waits for calls, but not for one that waits for the devices itself."""

_entering: dict[Arrival, None] = {}
_last: weakref.ref[_Row] | None = None


def settle(deadline: float | None) -> bool:
    """Waits until the calls of the programs that this thread has started have entered their lanes.

    Args:
        deadline: in seconds of `time.monotonic`, or None.

    Returns:
        Whether they did by then.
    """
    if not wait_for_effect(effect, deadline):
        return False
    if _entering:
        threads.start_deferred()  # a thread of XLA, which called `announce`, starts none
    return have_entered(deadline)


def have_entered(deadline: float | None) -> bool:
    """Waits until the calls that have arrived so far have entered their lanes.

    Args:
        deadline: in seconds of `time.monotonic`, or None.

    Returns:
        Whether they did by then.
    """
    if not _entering or threads.is_for_deferred():
        return True
    all_of_them = Flag()
    threads.run_later(all_of_them.set)
    threads.run_deferred()
    return all_of_them.wait(deadline)


register_ordered_effect(ColocatedEffect)
