"""Calls that executables make: each device hands over its shards of the arguments and goes on.

An execution has a number, which the executable gets as an argument, and so has each call in it. The devices hand over
shards in any order; a call runs once all of its own are there and the calls before it have run. All calls of an
execution run in the place of one call in the lanes, which ends when the executable has said how many there were. They
run on a thread of their own, so that no thread of the devices waits for Python, other than for the lock of the
interpreter; or, where that costs more than they take, in the thread of the device that hands over what was missing.
"""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from partjit._jax.arrays import is_computed
from partjit.colocated.runtime.call import Call
from partjit.colocated.runtime.caller import Caller
from partjit.colocated.runtime.device_threads import keep_state
from partjit.colocated.runtime.gathered import GatheredCalls
from partjit.colocated.runtime.handed_over import owned
from partjit.colocated.runtime.interrupts import is_interrupt
from partjit.colocated.runtime.streams import Stream

__all__ = ["END", "PATIENCE", "Emitted", "Execution", "hand_over"]

END = -1
"""In the place of a call's number among those of an executable: the number in the execution is how many were made."""

_FAILED = -1
PATIENCE = 1.0
"""Seconds without anything new after which the executable may have failed."""

_executions: "weakref.WeakValueDictionary[int, Execution]" = weakref.WeakValueDictionary()


class Emitted(Protocol):
    """A call that an executable makes.

    Attributes:
        positions: those of the devices, in the order of the mesh, whose shards it needs.
        devices: how many devices make it.
    """

    @property
    def positions(self) -> frozenset[int]:
        """See above."""
        ...

    @property
    def devices(self) -> int:
        """See above."""
        ...

    def run(self, stream: Stream, parent: Call | None, handed_over: Mapping[int, Sequence[np.ndarray]]) -> None:
        """Runs it, with what each device has handed over."""
        ...

    def run_one(self, stream: Stream, parent: Call | None, arrays: Sequence[np.ndarray]) -> None:
        """As `run`, where there is one device only, in a context that is the call's own."""
        ...


class Execution:
    """One execution of an executable that makes calls.

    Args:
        calls: the calls of the executable.
        gathered: those of them that are handed over for several iterations at once, whose positions follow.
        number: what that gets to know the execution by.
        stream: the stream of their place.
        parent: the call that the program is a part of.
        caller: the thread that threads of the devices run the calls for; None if `run_calls` runs them.

    Attributes:
        interrupt: what a signal handler raised in a thread that handed something over.
    """

    def __init__(
        self,
        calls: Sequence[Emitted],
        gathered: Sequence[GatheredCalls],
        number: int,
        stream: Stream,
        parent: Call | None,
        caller: Caller | None = None,
    ) -> None:
        self.interrupt: BaseException | None = None
        self._calls = calls
        self._gathered = gathered
        self._stream = stream
        self._parent = parent
        self._caller = caller
        self._is_of_one_device = calls[0].devices == 1
        self._arrived: queue.SimpleQueue[tuple[int, int, int, Sequence[np.ndarray]]] = queue.SimpleQueue()
        self._waiting: dict[int, tuple[int, dict[int, Sequence[np.ndarray]]]] = {}
        self._following, self._total = 0, float("inf")
        self._turn = threading.Lock()
        self._result: jax.Array | None = None
        _executions[number] = self

    def dispatched(self, result: jax.Array) -> None:
        """Says which array exists when the executable has run, or holds its failure."""
        self._result = result

    @property
    def is_complete(self) -> bool:
        """Whether the executable has made all of its calls, and they have run."""
        return self._following == self._total

    def join(self) -> None:
        """Waits until the executable has run, or failed, which its other results show."""
        if self._result is not None:
            with contextlib.suppress(Exception):
                self._result.block_until_ready()

    def end(self, made: int) -> None:
        """Says how many calls the executable has made in all, where it does not say so itself."""
        self.receive(END, made, 0, [])

    def abandon(self) -> None:
        """Says that the executable hands over nothing more, because it has failed."""
        self.end(_FAILED)

    def receive(self, which: int, number: int, position: int, shards: Sequence[np.ndarray]) -> None:
        """Takes what a device hands over; a second time changes nothing."""
        caller = self._caller
        if caller is None:
            self._arrived.put((which, number, position, shards))
            return
        if self._is_of_one_device and self._arrived.empty() and self._turn.acquire(blocking=False):
            try:
                caller.run(self._take_next, which, number, shards)
            finally:
                self._turn.release()
            if self._arrived.empty():
                return
        else:
            self._arrived.put((which, number, position, shards))
        caller.run(self._run_arrived)

    def _run_arrived(self) -> None:
        """Runs the calls that have all they need, unless another thread does; it takes what comes meanwhile."""
        while not self._arrived.empty() and self._turn.acquire(blocking=False):
            try:
                while not self._arrived.empty():
                    self._take(*self._arrived.get())
            finally:
                self._turn.release()

    def _take_next(self, which: int, number: int, arrays: Sequence[np.ndarray]) -> None:
        """As `_take`, from the only device, in a context of its own: most calls come in their order."""
        if not 0 <= which < len(self._calls) or number != self._following or self._waiting:
            self._take(which, number, 0, arrays)
        else:
            self._following += 1
            self._calls[which].run_one(self._stream, self._parent, arrays)

    def run_calls(self) -> None:
        """Runs the calls as they come, in their order, until the executable has made all of them."""
        while self._following < self._total:
            try:
                self._take(*self._arrived.get(timeout=PATIENCE))
            except queue.Empty:
                if self._has_failed():
                    return

    def _take(self, which: int, number: int, position: int, shards: Sequence[np.ndarray]) -> None:
        """Takes what has arrived, and runs the calls that it was missing for."""
        if which == END:
            self._total = number
        elif which < len(self._calls):
            self._keep(which, number, position, shards)
        else:
            for call, its_number, own in self._gathered[which - len(self._calls)].taken_apart(number, shards):
                self._keep(call, its_number, position, own)
        while self._following in self._waiting:
            which, found = self._waiting[self._following]
            if not self._calls[which].positions <= found.keys():
                break
            self._run(which, found)

    def _keep(self, which: int, number: int, position: int, shards: Sequence[np.ndarray]) -> None:
        """Keeps what a device has handed over for a call that has not been run."""
        if number >= self._following:
            self._waiting.setdefault(number, (which, {}))[1][position] = shards

    def _run(self, which: int, found: Mapping[int, Sequence[np.ndarray]]) -> None:
        """Runs the call that is next, with what each device has handed over for it."""
        del self._waiting[self._following]
        self._following += 1
        self._calls[which].run(self._stream, self._parent, found)

    def _has_failed(self) -> bool:
        """Whether the executable has ended without saying so, which it does if it fails."""
        result = self._result
        if result is None or not is_computed(result):
            return False
        try:
            result.block_until_ready()
        except Exception:  # the caller gets it with the results
            return self._arrived.empty()
        return False


def hand_over(which: int, has_position: bool) -> Callable[..., tuple[()]]:
    """What the devices call, to hand over their shards of the arguments of a call: these are copied, not kept.

    Args:
        which: the position of the call among those of the executable, or `END`.
        has_position: whether there are several devices.

    Returns:
        A function of the numbers of the execution and of the call in it, in one array, the position of the device if
        there are several, and the shards.
    """

    def receive(numbers: Any, *operands: Any) -> tuple[()]:
        copies = None
        while True:
            try:
                keep_state()
                if copies is None:
                    copies = [*map(owned, operands[1:] if has_position else operands)]
                execution, number = numbers.tolist()
                found = _executions.get(execution)
                if found is not None:
                    found.receive(which, number, int(operands[0]) if has_position else 0, copies)
                return ()
            except BaseException as error:
                if not is_interrupt(error):
                    raise
                _interrupted(int(numbers[0]), error)  # what a signal handler raised, the caller gets later

    return receive


def _interrupted(number: int, error: BaseException) -> None:
    execution = _executions.get(number)
    if execution is not None and execution.interrupt is None:
        execution.interrupt = error
