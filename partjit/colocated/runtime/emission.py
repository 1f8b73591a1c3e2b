"""Calls that executables make: each device hands over its shards of the arguments and goes on.

An execution has a number, which the executable gets as an argument, and so has each call in it. The devices hand over
shards in any order; a call runs once all of its own are there and the calls before it have run. All calls of an
execution run in the place of one call in the lanes, which ends when the executable has said how many there were. No
thread of the devices ever waits for Python, other than for the lock of the interpreter.
"""

import itertools
import queue
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from partjit._jax.arrays import is_computed
from partjit.colocated.runtime.interrupts import is_interrupt
from partjit.colocated.runtime.streams import Stream

__all__ = ["END", "Execution", "hand_over"]

END = -1
"""In the place of a call's number among those of an executable: the number in the execution is how many were made."""

_MOST_EXECUTIONS = 2**31
_FAILED = -1
_PATIENCE = 1.0
"""Seconds without anything new after which the executable may have failed."""

_numbers = itertools.count()
_executions: "weakref.WeakValueDictionary[int, Execution]" = weakref.WeakValueDictionary()


class Emitted(Protocol):
    """A call that an executable makes.

    Attributes:
        positions: those of the devices, in the order of the mesh, whose shards it needs.
    """

    @property
    def positions(self) -> frozenset[int]: ...
    def run(self, stream: Stream, handed_over: Mapping[int, Sequence[np.ndarray]]) -> None: ...


class Execution:
    """One execution of an executable that makes calls.

    Attributes:
        number: what the executable gets to know it by.
        interrupt: what a signal handler raised in a thread that handed something over.
    """

    def __init__(self, calls: Sequence[Emitted], stream: Stream) -> None:
        self.number = next(_numbers) % _MOST_EXECUTIONS
        self.interrupt: BaseException | None = None
        self._calls = calls
        self._stream = stream
        self._arrived: queue.SimpleQueue[tuple[int, int, int, Sequence[np.ndarray]]] = queue.SimpleQueue()
        self._result: jax.Array | None = None
        _executions[self.number] = self

    def dispatched(self, result: jax.Array) -> None:
        """Says which array exists when the executable has run, or holds its failure."""
        self._result = result

    def abandon(self) -> None:
        """Says that the executable hands over nothing more, because it has failed."""
        self.receive(END, _FAILED, 0, [])

    def receive(self, which: int, number: int, position: int, shards: Sequence[np.ndarray]) -> None:
        """Takes what a device hands over; a second time changes nothing."""
        self._arrived.put((which, number, position, shards))

    def run_calls(self) -> None:
        """Runs the calls as they come, in their order, until the executable has made all of them."""
        waiting: dict[int, tuple[int, dict[int, Sequence[np.ndarray]]]] = {}
        following, total = 0, float("inf")
        while following < total:
            try:
                which, number, position, shards = self._arrived.get(timeout=_PATIENCE)
            except queue.Empty:
                if self._has_failed():
                    return
                continue
            if which == END:
                if number == _FAILED:
                    return
                total = number
            elif number >= following:
                waiting.setdefault(number, (which, {}))[1][position] = shards
            while following in waiting:
                which, found = waiting[following]
                if not self._calls[which].positions <= found.keys():
                    break
                del waiting[following]
                following += 1
                self._calls[which].run(self._stream, found)

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


def hand_over(which: int) -> Callable[..., tuple[()]]:
    """What the devices call, to hand over their shards of the arguments of a call: these are copied, not kept.

    Args:
        which: the position of the call among those of the executable, or `END`.

    Returns:
        A function of the numbers of the execution and of the call in it, the position of the device, and the shards.
    """

    def receive(execution: Any, number: Any, position: Any, *shards: Any) -> tuple[()]:
        copies = None
        while True:
            try:
                if copies is None:
                    copies = [_copy(shard) for shard in shards]
                found = _executions.get(int(execution))
                if found is not None:
                    found.receive(which, int(number), int(position), copies)
                return ()
            except BaseException as error:
                if not is_interrupt(error):
                    raise
                _interrupted(int(execution), error)  # what a signal handler raised, the caller gets later

    return receive


def _copy(shard: Any) -> np.ndarray:
    copy = np.array(shard)
    copy.flags.writeable = False
    return copy


def _interrupted(number: int, error: BaseException) -> None:
    execution = _executions.get(number)
    if execution is not None and execution.interrupt is None:
        execution.interrupt = error
