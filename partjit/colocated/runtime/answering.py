"""Calls that executables make and wait for: the function runs in a thread of the devices, which go on with its results.

Such a function must not use jax, which could wait for these very devices. An execution has a number, which the
executable gets as an argument. Each call gives the number of the next one, so that the devices keep their order.
On several devices all of them come to a call, each in a thread of its own: the first one that has all arguments or the
last one that brings a shard runs the function, the others wait for it, as they wait for each other in a collective.

The executable may make calls of other streams besides, for which nobody waits: the devices hand these over to another
`Execution`, which counts them by a number of their own.
"""

import collections
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np

from partjit._jax.types import PyTree
from partjit.colocated.runtime.call import Call
from partjit.colocated.runtime.caller import Caller
from partjit.colocated.runtime.device_threads import keep_state
from partjit.colocated.runtime.emission import Execution
from partjit.colocated.runtime.failures import site_text
from partjit.colocated.runtime.giving_way import give_way
from partjit.colocated.runtime.handed_over import owned

__all__ = ["NEXT_BESIDE", "Answered", "Answering", "answer", "hand_over_beside"]

_PATIENCE = 1.0
"""Seconds after which a device that waits for others looks whether their execution has failed."""

_NEXT = np.array([0, 1, 0], np.int32)
"""How much the numbers of a call are less than those of the next one."""

NEXT_BESIDE = np.array([0, 0, 1], np.int32)
"""The same of a call for which nobody waits."""

_SECONDS_UNTIL_WARNING = 5.0
"""After which a call that cannot come in between is named."""

_logger = logging.getLogger("partjit.colocated")
_executions: "dict[int, Answering]" = {}


class Answered(Protocol):
    """A call that an executable waits for.

    Attributes:
        positions: those of the devices, in the order of the mesh, whose shards it needs.
        is_replicated: whether any other device has all of these as well.
        devices: how many devices make it.
    """

    @property
    def positions(self) -> frozenset[int]:
        """See above."""
        ...

    @property
    def is_replicated(self) -> bool:
        """See above."""
        ...

    @property
    def devices(self) -> int:
        """See above."""
        ...

    def answer(
        self, handed_over: Mapping[int, Sequence[np.ndarray]], following: np.ndarray
    ) -> Sequence[Sequence[PyTree]]:
        """Runs the function; gives what each device gets: the numbers of the `following` call, and its results."""
        ...

    def answer_one(self, arrays: Sequence[np.ndarray], following: np.ndarray) -> Sequence[PyTree]:
        """As `answer`, where there is one device only."""
        ...


class Answering:
    """One execution of an executable that waits for its calls, in a `with` block.

    It is made by the thread in which the calls take their turn.

    Args:
        calls: the calls of the executable.
        number: what that gets to know the execution by.
        place: the call that they are in the place of, if others may come in between.
        beside: gets what the devices hand over for calls of the executable for which they do not wait.

    Attributes:
        failure: the position of the call that ended it among those of the executable, and its exception.
    """

    def __init__(
        self, calls: Sequence[Answered], number: int, place: Call | None, beside: Execution | None = None
    ) -> None:
        self.failure: tuple[int, BaseException] | None = None
        self._calls = calls
        self._number = number
        self._place = place
        self._queues = [] if place is None else [lane.calls for lane in place.lanes]
        self._beside = beside
        self._caller = Caller()
        self._meetings: dict[int, _Meeting] = {}
        self._behind: Call | None = None
        self._behind_since = 0.0
        self._has_warned = False

    def __enter__(self) -> Self:
        _executions[self._number] = self
        return self

    def __exit__(self, *_: object) -> None:
        del _executions[self._number]

    def answer(self, which: int, numbers: Any, position: int, shards: Sequence[Any]) -> Sequence[PyTree]:
        """What a device gets: the numbers of the next call, and its shards of the results.

        Args:
            which: the position of the call among those of the executable.
            numbers: those of the execution and of the call in it.
            position: that of the device in the mesh.
            shards: what it hands over, which is valid until it goes on.
        """
        call, number = self._calls[which], int(numbers[1])
        try:
            meeting = self._meetings.get(number)
            if meeting is None:
                meeting = self._meetings.setdefault(number, _Meeting())  # atomic: all devices get the same one
            answers = meeting.answers or self._meet(meeting, which, numbers, position, shards)
            if next(meeting.left) == call.devices - 1:
                del self._meetings[number]
            return answers[position]
        except BaseException as error:
            self._fail(which, error)
            raise

    def answer_one(self, which: int, numbers: Any, arrays: Sequence[Any]) -> Sequence[PyTree]:
        """As `answer`, for the only device."""
        try:
            if self.failure is not None:
                raise _failed_before()
            for calls in self._queues:
                if len(calls) > 1:
                    self._give_way(to_users_of_jax=True)
                    break
            return self._caller.run(self._calls[which].answer_one, arrays, numbers)  # nobody counts them
        except BaseException as error:
            self._fail(which, error)
            raise

    def hand_over(self, which: int, numbers: Any, position: int, shards: Sequence[Any]) -> Sequence[PyTree]:
        """Takes what a device hands over for a call that it does not wait for; gives the numbers of the next one."""
        try:
            if self.failure is not None:
                raise _failed_before()
            assert self._beside is not None, "such calls have an execution of their own"
            self._beside.receive(which, int(numbers[2]), position, [*map(owned, shards)])
            return (numbers + NEXT_BESIDE,)
        except BaseException as error:
            self._fail(which, error)
            raise

    def _give_way(self, *, to_users_of_jax: bool) -> None:
        """Lets calls of other threads run that wait for this execution: this is between two of its calls."""
        for calls in self._queues:
            if len(calls) > 1:
                self._caller.run(functools.partial(give_way, to_users_of_jax=to_users_of_jax), self._place)
                if not to_users_of_jax:
                    self._warn_of(next(itertools.islice([*calls], 1, None), None))
                break

    def _warn_of(self, behind: Call | None) -> None:
        """Says of a call that may use jax, once, that it waits for the executable, which may be waiting for it."""
        if self._place is None or behind is None or not behind.uses_jax or self._has_warned:
            return
        if behind is not self._behind:
            self._behind, self._behind_since = behind, time.monotonic()
        elif time.monotonic() > self._behind_since + _SECONDS_UNTIL_WARNING:
            self._has_warned = True
            _logger.warning(
                "the colocated call of %r made at %s waits until a program has ended whose devices wait for calls of "
                "%r: it may use jax, which would wait for these devices. If it is to end that program, say "
                "uses_jax=False of its class",
                behind.name,
                site_text(behind.site),
                self._place.name,
            )

    def _fail(self, which: int, error: BaseException) -> None:
        if self.failure is None:
            self.failure = which, error

    def _run(
        self, call: Answered, numbers: Any, found: Mapping[int, Sequence[np.ndarray]]
    ) -> Sequence[Sequence[PyTree]]:
        if self.failure is not None:
            raise _failed_before()
        self._give_way(to_users_of_jax=False)
        return self._caller.run(call.answer, found, numbers + _NEXT)

    def _meet(
        self, meeting: "_Meeting", which: int, numbers: Any, position: int, shards: Sequence[Any]
    ) -> Sequence[Sequence[PyTree]]:
        call = self._calls[which]
        if meeting.has_all(call, position, shards):
            try:
                meeting.answers = self._run(call, numbers, meeting.found)
            except BaseException as error:
                self._fail(which, error)  # before the other devices go on, and fail as well
                raise
            finally:
                meeting.end()
        else:
            meeting.wait(lambda: self.failure is not None)
        if meeting.answers is None:
            raise RuntimeError("the call failed")
        return meeting.answers


def _failed_before() -> RuntimeError:
    return RuntimeError("an earlier call failed")


class _Meeting:
    """The devices at one call.

    Attributes:
        found: what they have handed over.
        answers: what each of them gets; None as long as the function has not returned.
        left: counts those that go on.
    """

    def __init__(self) -> None:
        self.found: dict[int, Sequence[Any]] = {}
        self.answers: Sequence[Sequence[PyTree]] | None = None
        self.left = itertools.count()
        self._arrived = itertools.count(1)
        self._has_ended = False
        self._waiting: collections.deque[threading.Lock] = collections.deque()

    def has_all(self, call: Answered, position: int, shards: Sequence[Any]) -> bool:
        """Takes what a device hands over; whether that was what was missing."""
        if call.is_replicated:
            (position,) = call.positions
        elif position not in call.positions:
            return False
        self.found.setdefault(position, shards)
        return next(self._arrived) == len(call.positions)

    def wait(self, is_in_vain: Callable[[], bool]) -> None:
        """Waits until the function has returned or failed; `is_in_vain` says that it will not."""
        # Each has a lock of its own: with one for all of them, each would wake the next one, after the interpreter's.
        own = threading.Lock()
        own.acquire()
        self._waiting.append(own)
        while not self._has_ended and not own.acquire(timeout=_PATIENCE) and not is_in_vain():
            pass

    def end(self) -> None:
        """Lets the devices go on."""
        self._has_ended = True  # before any is woken: who waits afterwards does not
        while self._waiting:
            self._waiting.pop().release()


def answer(which: int, has_position: bool) -> Callable[..., Sequence[PyTree]]:
    """What the devices call, for the results of a call.

    Args:
        which: the position of the call among those of the executable.
        has_position: whether there are several devices.

    Returns:
        A function of the numbers of the execution and of the call in it, in one array, the position of the device if
        there are several, and its shards of the arguments. It returns the numbers of the next call and the shards of
        the results.
    """

    def receive(numbers: Any, position: Any, *shards: Any) -> Sequence[PyTree]:
        keep_state()
        return _executions[int(numbers[0])].answer(which, numbers, int(position), shards)

    def receive_one(numbers: Any, *arrays: Any) -> Sequence[PyTree]:
        keep_state()
        return _executions[numbers.item(0)].answer_one(which, numbers, arrays)

    return receive if has_position else receive_one


def hand_over_beside(which: int, has_position: bool) -> Callable[..., Sequence[PyTree]]:
    """What the devices call for a call that they do not wait for, in an executable that waits for others.

    Args:
        which: the position of the call among those of the executable.
        has_position: whether there are several devices.

    Returns:
        A function of what that of `answer` gets. It returns the numbers of the next call.
    """

    def receive(numbers: Any, *operands: Any) -> Sequence[PyTree]:
        keep_state()
        position, shards = (int(operands[0]), operands[1:]) if has_position else (0, operands)
        return _executions[int(numbers[0])].hand_over(which, numbers, position, shards)

    return receive
