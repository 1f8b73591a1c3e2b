"""Calls that executables make and wait for: the function runs in a thread of the devices, which go on with its results.

Such a function must not use jax, which could wait for these very devices. An execution has a number, which the
executable gets as an argument. Each call gives the number of the next one, so that the devices make them in their order.
On several devices all of them come to a call, each in a thread of its own: the first one that has all arguments or the
last one that brings a shard runs the function, the others wait for it, as they wait for each other in a collective.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from partjit.colocated.runtime.caller import Caller

__all__ = ["Answered", "Answering", "Answers", "answer"]

_MOST_EXECUTIONS = 2**31
_PATIENCE = 1.0
"""Seconds after which a device that waits for others looks whether their execution has failed."""

_numbers = itertools.count()
_executions: "weakref.WeakValueDictionary[int, Answering]" = weakref.WeakValueDictionary()

Answers: TypeAlias = Callable[[int], Sequence[np.ndarray]]
"""From the position of a device to what it gets."""


class Answered(Protocol):
    """A call that an executable waits for.

    Attributes:
        positions: those of the devices, in the order of the mesh, whose shards it needs.
        is_replicated: whether any other device has all of these as well.
        devices: how many devices make it.
    """

    @property
    def positions(self) -> frozenset[int]: ...
    @property
    def is_replicated(self) -> bool: ...
    @property
    def devices(self) -> int: ...
    def answer(self, handed_over: Mapping[int, Sequence[np.ndarray]]) -> Answers: ...


class Answering:
    """One execution of an executable that waits for its calls; made by the thread in which these take their turn.

    Attributes:
        number: what the executable gets to know it by.
        failure: the call that ended it, and its exception.
    """

    def __init__(self, calls: Sequence[Answered]) -> None:
        self.number = next(_numbers) % _MOST_EXECUTIONS
        self.failure: tuple[Answered, BaseException] | None = None
        self._calls = calls
        self._caller = Caller()
        self._meetings: dict[int, _Meeting] = {}
        _executions[self.number] = self

    def answer(self, which: int, number: int, position: int, shards: Sequence[Any]) -> Sequence[np.ndarray]:
        """What a device gets for the shards that it hands over, which are valid until it goes on."""
        call = self._calls[which]
        try:
            if call.devices == 1:
                return self._run(call, {position: shards})(position)
            return self._meet(call, number, position, shards)(position)
        except BaseException as error:
            if self.failure is None:
                self.failure = call, error
            raise

    def _run(self, call: Answered, found: Mapping[int, Sequence[np.ndarray]]) -> Answers:
        if self.failure is not None:
            raise RuntimeError("an earlier call failed")
        return self._caller.run(call.answer, found)

    def _meet(self, call: Answered, number: int, position: int, shards: Sequence[Any]) -> Answers:
        meeting = self._meetings.get(number)
        if meeting is None:
            meeting = self._meetings.setdefault(number, _Meeting())  # atomic: all devices get the same one
        if meeting.has_all(call, position, shards):
            try:
                meeting.answers = self._run(call, meeting.found)
            finally:
                meeting.end()
        else:
            meeting.wait(lambda: self.failure is not None)
        if next(meeting.left) == call.devices - 1:
            del self._meetings[number]
        if meeting.answers is None:
            raise RuntimeError("the call failed")
        return meeting.answers


class _Meeting:
    """The devices at one call.

    Attributes:
        found: what they have handed over.
        answers: what they get; None as long as the function has not returned.
        left: counts those that go on.
    """

    def __init__(self) -> None:
        self.found: dict[int, Sequence[Any]] = {}
        self.answers: Answers | None = None
        self.left = itertools.count()
        self._arrived = itertools.count(1)
        self._running = threading.Lock()
        self._running.acquire()

    def has_all(self, call: Answered, position: int, shards: Sequence[Any]) -> bool:
        """Takes what a device hands over; whether that was what was missing."""
        if call.is_replicated:
            position = next(iter(call.positions))
        elif position not in call.positions:
            return False
        self.found.setdefault(position, shards)
        return next(self._arrived) == len(call.positions)

    def wait(self, is_in_vain: Callable[[], bool]) -> None:
        """Waits until the function has returned or failed; `is_in_vain` says that it will not."""
        if self.answers is not None:  # as a rule where the first one runs it, which keeps the interpreter to itself
            return
        while not self._running.acquire(timeout=_PATIENCE):
            if is_in_vain():
                return
        self._running.release()

    def end(self) -> None:
        """Lets the devices go on."""
        self._running.release()


def answer(which: int) -> Callable[..., Sequence[np.ndarray]]:
    """What the devices call, for the results of a call.

    Args:
        which: the position of the call among those of the executable.

    Returns:
        A function of the numbers of the execution and of the call in it, the position of the device, and its shards of
        the arguments. It returns the number of the next call and the shards of the results.
    """

    def receive(execution: Any, number: Any, position: Any, *shards: Any) -> Sequence[np.ndarray]:
        found = _executions.get(int(execution))
        if found is None:
            raise RuntimeError("the execution has ended")
        return (number + np.int32(1), *found.answer(which, int(number), int(position), shards))

    return receive
