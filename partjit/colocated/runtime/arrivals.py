"""Calls that executables of other wrappers make, such as those of `jax.jit`: how they enter their lanes.

Nothing of this package runs when such a program is started or has ended: its executable hands the arguments of a call
to Python, and goes on. One thread lets the calls enter their lanes, in the order in which they arrive; for a thread of
XLA that would be too long. jax orders them by the tokens of their effect: in a program, and in those that a thread
starts one after another.
"""

import collections
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
from jax.extend.core import Effect

from partjit._jax.effects import register_ordered_effect, wait_for_effect
from partjit.colocated.runtime import scheduler, threads
from partjit.colocated.runtime.call import Call, Lane
from partjit.colocated.runtime.interrupts import Flag

__all__ = ["Arrival", "ColocatedEffect", "effect", "settle"]

_MOST_IN_A_ROW = 128


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
    """The arrival of a call."""

    def __init__(self, arrived: Arrived) -> None:
        self._arrived = arrived
        self._has_entered = False

    def announce(self) -> None:
        """Lets the call enter its lanes, soon; a second time changes nothing."""
        _entering[self] = None
        threads.run_later(self._enter)

    def _enter(self) -> None:
        try:
            if not self._has_entered:
                self._has_entered = True
                _enter_lanes(self._arrived)
        finally:
            _entering.pop(self, None)


def _enter_lanes(arrived: Arrived) -> None:
    global _last
    lanes, row = arrived.lanes(), None if _last is None else _last()
    if row is None or not row.append(arrived, lanes):
        row = _Row(arrived, lanes)
        _last = weakref.ref(row)
        scheduler.submit(row.call)


class _Row:
    """Calls that arrive one after another and are in the same lanes, as one call: a thread runs as many as there are.

    Attributes:
        call: the call.
    """

    def __init__(self, first: Arrived, lanes: Sequence[Lane]) -> None:
        self._waiting = collections.deque([first])
        self._lanes = lanes
        self._room = _MOST_IN_A_ROW
        self._changes = threading.Lock()  # neither thread handles signals
        # The first lane is that whose size counts. What the devices have done already does not wait for room.
        self.call = first.in_place_of([Lane(), *lanes], self._run)

    def append(self, arrived: Arrived, lanes: Sequence[Lane]) -> bool:
        """Appends a call, unless the last one has ended or others have come in between."""
        if lanes != self._lanes or any(not lane.calls or lane.calls[-1] is not self.call for lane in lanes):
            return False
        with self._changes:
            if not self._room:
                return False
            self._room -= 1
            self._waiting.append(arrived)
            return True

    def _run(self) -> Sequence[jax.Array]:
        while (arrived := self._next()) is not None:
            arrived.run()
        return ()

    def _next(self) -> Arrived | None:
        with self._changes:
            if self._waiting:
                return self._waiting.popleft()
            self._room = 0
            return None


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
    if not _entering or threads.is_for_deferred():
        return True
    threads.start_deferred()  # a thread of XLA, which called `announce`, starts none
    have_entered = Flag()
    threads.run_later(have_entered.set)
    return have_entered.wait(deadline)


register_ordered_effect(ColocatedEffect)
