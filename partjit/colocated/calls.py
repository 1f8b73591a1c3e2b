"""Calls, and the lanes in which they run one after another.

A lane is an order: its calls run one at a time, as they came. A call stands in one lane or several (its stream's, and
that of the object whose method it is) and runs when it is the first of all of them. It enters all of them at once, so
what it waits for always came before it, and lanes by themselves never lock each other up.

A call that waits for another (for its result, or for room in its stream) may: then a circle is possible, and waiting
raises an error instead of closing one.
"""

import collections
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from partjit.colocated import workers
from partjit.colocated.failures import Failure, Site

__all__ = [
    "NOT_FREE",
    "Call",
    "Lane",
    "PoisonedError",
    "current_calls",
    "descends_from",
    "forget_after_fork",
    "run_here",
    "submit",
    "unfinished",
]


class PoisonedError(Exception):
    """An argument is the result of a call that failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__()
        self.failure = failure


class Lane:
    """An order of calls.

    Attributes:
        calls: those that have not ended, the first of which runs or may run.
        size: how many may be in it before those who add to it have to wait.
    """

    __slots__ = ("__weakref__", "calls", "size")

    def __init__(self, size: float = float("inf")) -> None:
        self.calls: collections.deque[Call] = collections.deque()
        self.size = size


class Call:
    """One call of a function, from its submission to its end.

    Attributes:
        name: the function's.
        site: where the call was made.
        lanes: the lanes it stands in, its stream first.
        receivers: gives those who wait for the results and are still there.
        parent: the call that made it, if one did.
        waits_for: the call that it waits for in the middle of its body.
    """

    __slots__ = ("_body", "_ended", "_turn", "lanes", "name", "parent", "receivers", "site", "waits_for")

    def __init__(self, name: str, site: Site, lanes: Sequence[Lane], body: Callable[[], Any]) -> None:
        self.name = name
        self.site = site
        self.lanes = lanes
        self.receivers: Callable[[], Sequence[Any]] = tuple
        self.waits_for: Call | None = None
        running = _here.calls
        self.parent = running[-1] if running else None
        self._body: Callable[[], Any] | None = body
        self._turn: Any = None  # a lock that is released when the call may run, if its caller runs it
        self._ended = threading.Lock()
        self._ended.acquire()

    @property
    def has_ended(self) -> bool:
        """Whether the results, or the failure, are there."""
        return not self._ended.locked()

    def join(self, deadline: float | None = None) -> None:
        """Waits for the end.

        Raises:
            TimeoutError: it did not end before the deadline, in seconds of `time.monotonic`.
            RuntimeError: it never will, because it waits for the call that is waiting here.
        """
        if not self._ended.locked():
            return
        with _Waiting(self):
            if not self._ended.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"the colocated call of {self.name!r} has not ended")
            self._ended.release()

    def execute(self) -> None:
        """Runs the function and hands over what it returned or raised."""
        body, self._body = self._body, None
        assert body is not None, "a call runs once"
        _here.calls.append(self)
        try:
            values = body()  # first: who waits for them may be gone by then
            for receiver, value in zip(self.receivers(), values, strict=True):
                if receiver is not None:
                    receiver.receive(value)
        except PoisonedError as error:
            self._hand_over(error.failure)
        except BaseException as error:
            self._hand_over(Failure(error, self.name, self.site, self.lanes[0], self.parent))
        finally:
            _here.calls.pop()

    def abandon(self, error: BaseException) -> None:
        """Ends a call that will not run."""
        self._body = None
        self._hand_over(Failure(error, self.name, self.site, self.lanes[0], self.parent))

    def _hand_over(self, failure: Failure) -> None:
        for receiver in self.receivers():
            if receiver is not None:
                receiver.receive_failure(failure)


def descends_from(made: Any, makers: Sequence[Call]) -> bool:
    """Whether a call, or the call of a failure, was made by one of the makers, or by a call that was."""
    ancestor = made.parent
    while ancestor is not None and ancestor not in makers:
        ancestor = ancestor.parent
    return ancestor is not None


class _Here(threading.local):
    def __init__(self) -> None:
        self.calls: list[Call] = []


_here = _Here()
_lock = threading.Lock()
_room = threading.Condition(_lock)
_unfinished: dict[Call, None] = {}


def current_calls() -> Sequence[Call]:
    """The calls in whose bodies this thread is, the innermost last."""
    return _here.calls


def unfinished() -> list[Call]:
    """The calls that have not ended, in the order they were made."""
    with _lock:
        return [*_unfinished]


def submit(call: Call) -> None:
    """Lets a call run on a thread, when its turn comes. Waits while its stream is full."""
    try:
        if _enter(call):
            workers.start(lambda: _drive(call))
    except BaseException as error:  # no thread to be had, or an interrupt: what stands in the lanes must leave them
        if call._body is not None and call in _unfinished:
            call.abandon(error)
            _leave_early(call)
        raise


NOT_FREE = object()
"""What `run_here` gives where the call would have had to wait."""


def run_here(call: Call, *, only_if_free: bool = False) -> Any:
    """Runs a call in this thread, when its turn comes, and gives what its body returns or raises what that raises.

    Args:
        call: a call without receivers.
        only_if_free: do nothing and return `NOT_FREE` if it would have to wait for its turn.
    """
    if only_if_free:
        with _lock:
            if any(lane.calls for lane in call.lanes):
                return NOT_FREE
            _stand_in_lanes(call)
    else:
        _wait_for_turn(call)
    _here.calls.append(call)
    try:
        assert call._body is not None
        return call._body()
    finally:
        _here.calls.pop()
        call._body = None
        _start(_leave(call))


def _wait_for_turn(call: Call) -> None:
    call._turn = threading.Lock()
    call._turn.acquire()
    try:
        if not _enter(call):
            with _Waiting(call):
                call._turn.acquire()
    except BaseException:
        _leave_early(call)
        raise


def forget_after_fork() -> None:
    """In the child of a fork no call of the parent will ever end: each fails, and says why."""
    global _lock, _room
    _lock = threading.Lock()
    _room = threading.Condition(_lock)
    workers.forget_after_fork()
    calls = [*_unfinished]
    _unfinished.clear()
    for call in calls:
        for lane in call.lanes:
            lane.calls.clear()
        if call not in _here.calls:
            call.abandon(RuntimeError("the process was forked: colocated calls go on in the parent only"))
            call._ended.release()


def _enter(call: Call) -> bool:
    """Puts a call at the end of its lanes; whether it is the first of all of them."""
    stream = call.lanes[0]
    with _lock:
        while len(stream.calls) >= stream.size:
            with _Waiting(stream.calls[0], is_locked=True):
                _room.wait()
        _stand_in_lanes(call)
        return _is_first(call)


def _stand_in_lanes(call: Call) -> None:
    for lane in call.lanes:
        lane.calls.append(call)
    _unfinished[call] = None


def _leave(call: Call) -> list[Call]:
    """Takes an ended call out of its lanes; the calls whose turn that makes it."""
    with _lock:
        next_calls = []
        for lane in call.lanes:
            lane.calls.popleft()
            if lane.calls and _is_first(lane.calls[0]):
                next_calls.append(lane.calls[0])
        _end(call)
    return next_calls


def _leave_early(call: Call) -> None:
    """Takes a call that did not run out of its lanes, wherever it stands in them, if it stands there."""
    with _lock:
        next_calls = []
        for lane in call.lanes:
            was_first = lane.calls and lane.calls[0] is call
            if call in lane.calls:
                lane.calls.remove(call)
            if was_first and lane.calls and _is_first(lane.calls[0]):
                next_calls.append(lane.calls[0])
        _end(call)
    _start(next_calls)


def _end(call: Call) -> None:
    _unfinished.pop(call, None)
    if call._ended.locked():
        call._ended.release()
    _room.notify_all()


def _is_first(call: Call) -> bool:
    return all(lane.calls and lane.calls[0] is call for lane in call.lanes)


def _start(calls: Iterable[Call]) -> None:
    for call in calls:
        if call._turn is not None:
            call._turn.release()
            continue
        try:
            workers.start(lambda call=call: _drive(call))
        except RuntimeError as error:  # no more threads
            call.abandon(error)
            _leave_early(call)


def _drive(call: Call | None) -> None:
    """Runs a call, and the one that comes next, and so on."""
    while call is not None:
        is_driving = False
        try:
            call.execute()
            is_driving = True
        finally:  # even an exception thrown into this thread from outside must not keep those behind waiting
            following = _leave(call)
            call = next((candidate for candidate in following if is_driving and candidate._turn is None), None)
            _start(candidate for candidate in following if candidate is not call)


class _Waiting:
    """Says that the calls of this thread wait for another; raises if that would be a circle."""

    def __init__(self, target: Call, is_locked: bool = False) -> None:
        self._target = target
        self._is_locked = is_locked

    def __enter__(self) -> None:
        running = _here.calls
        if not running:
            return
        for call in running:
            call.waits_for = self._target
        if self._is_locked:
            is_circle = _waits_for_one_of(running, self._target)
        else:
            with _lock:
                is_circle = _waits_for_one_of(running, self._target)
        if is_circle:
            self.__exit__()
            raise RuntimeError(
                f"deadlock: the colocated call of {running[-1].name!r} waits for that of {self._target.name!r}, which "
                "can only go on when the former has ended. Give one of the two a stream of its own, or return the "
                "result without using it"
            )

    def __exit__(self, *_: object) -> None:
        for call in _here.calls:
            call.waits_for = None


def _waits_for_one_of(waiting: Sequence[Call], target: Call) -> bool:
    seen, stack = set(), [target]
    while stack:
        call = stack.pop()
        if call in waiting:
            return True
        if call in seen or call not in _unfinished:
            continue
        seen.add(call)
        if call.waits_for is not None:
            stack.append(call.waits_for)
        for lane in call.lanes:  # it comes after those before it
            for other in lane.calls:
                if other is call:
                    break
                stack.append(other)
    return False
