"""Calls, and the lanes in which they run one after another.

A lane is an order: its calls run one at a time, as they came. A call stands in one lane or several (its stream's, and
that of the object whose method it is) and runs when it is the first of all of them. It enters all of them at once, so
what it waits for always came before it, and the order alone never locks lanes up.

The handler of a signal may raise between any two steps of the main thread. So what a call does to its lanes can be done
again: to enter is undone, to leave is repeated, and whoever wants to run a call or to give it up claims it first.

A call that waits for another (for its result, or for room in its stream) may: then a circle is possible, and waiting
raises an error instead of closing one.
"""

import collections
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from partjit.colocated import workers
from partjit.colocated.failures import Failure, PoisonedError, Site

__all__ = [
    "NOT_FREE",
    "Call",
    "Lane",
    "current_calls",
    "descends_from",
    "forget_after_fork",
    "resize",
    "roots_so_far",
    "run_here",
    "submit",
    "unfinished",
]


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
        stream: the stream it was made on.
        lanes: the lanes it stands in: that stream, unless the call that makes it is in there, and that of its object.
        receivers: gives those who wait for the results and are still there when the function has run.
        root: counts the calls that no call made; calls made inside of one have its number.
        waits_for: the call that it waits for in the middle of its body.
    """

    def __init__(self, name: str, site: Site, stream: Any, lanes: Sequence[Lane], body: Callable[[], Any]) -> None:
        self.name = name
        self.site = site
        self.stream = stream
        self.lanes = lanes
        self.receivers: Callable[[], Sequence[Any]] = tuple
        self.waits_for: Call | None = None
        running = _here.calls
        self._parent = running[-1] if running else None
        self.root = running[-1].root if running else next(_roots)
        self._body: Callable[[], Any] | None = body
        self._is_claimed = False
        self._turn: threading.Event | None = None  # of a call that its caller runs
        self._ended = threading.Event()

    @property
    def parent(self) -> "Call | None":
        """The innermost call that has not ended of those that made it."""
        # A function that goes on by calling itself would otherwise keep all of its calls.
        while self._parent is not None and self._parent.has_ended:
            self._parent = self._parent._parent
        return self._parent

    @property
    def has_ended(self) -> bool:
        """Whether the results, or the failure, are there."""
        return self._ended.is_set()

    def join(self, deadline: float | None = None) -> None:
        """Waits for the end.

        Raises:
            TimeoutError: it did not end before the deadline, in seconds of `time.monotonic`.
            RuntimeError: it never will, because it waits for the call that is waiting here.
        """
        if self._ended.is_set():
            return
        with _Waiting(self):
            if not self._ended.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"the colocated call of {self.name!r} has not ended")

    def execute(self) -> None:
        """Runs the function and hands over what it returned or raised."""
        body, self._body = self._body, None
        assert body is not None, "a call runs once"
        _here.calls.append(self)
        try:
            values = body()
            # Looked up after the function has run: a result that nobody has any more is dropped at once.
            for receiver, value in zip(self.receivers(), values, strict=True):
                if receiver is not None:
                    receiver.receive(value)
        except PoisonedError as error:
            self._hand_over(error.failure)
        except BaseException as error:
            self._fail(error)
        finally:
            _here.calls.pop()

    def claim(self) -> bool:
        """Whether it is the asker who runs it, or gives it up: only one does."""
        with _lock:
            is_free, self._is_claimed = not self._is_claimed, True
        return is_free

    def give_up(self, error: BaseException | None) -> None:
        """Ends it without running it, unless somebody runs it; without an error if nobody has its results."""
        if self.claim():
            self._body = None
            try:
                if error is not None:
                    self._fail(error)
            finally:
                _leave(self)

    def _fail(self, error: BaseException) -> None:
        self._hand_over(Failure(error, self.name, self.site, self.stream, self.parent))

    def _hand_over(self, failure: Failure) -> None:
        for receiver in self.receivers():
            if receiver is not None:
                receiver.receive_failure(failure)


def descends_from(made: Any, maker: Call) -> bool:
    """Whether a call, or the call of a failure, was made by `maker`, or by a call that was."""
    ancestor = made.parent
    while ancestor is not None and ancestor is not maker:
        ancestor = ancestor.parent
    return ancestor is not None


class _Here(threading.local):
    def __init__(self) -> None:
        self.calls: list[Call] = []


_here = _Here()
_roots = itertools.count()
_lock: Any = threading.RLock()  # a finalizer that makes calls may come in between: it is told apart
_room = threading.Condition(_lock)
_unfinished: dict[Call, None] = {}


def current_calls() -> Sequence[Call]:
    """The calls in whose bodies this thread is, the innermost last."""
    return _here.calls


def unfinished() -> list[Call]:
    """The calls that have not ended, in the order they were made."""
    with _lock:
        return [*_unfinished]


def roots_so_far() -> int:
    """A number above those of all calls so far."""
    return next(_roots)


def resize(lane: Lane, size: int) -> None:
    """Sets how many calls may be in a lane, and lets in who waits for that."""
    with _lock:
        lane.size = size
        _room.notify_all()


def submit(call: Call) -> None:
    """Lets a call run on a thread, when its turn comes. Waits while its stream is full."""
    if _lock._is_owned():  # by a finalizer, in the middle of a change to the lanes of this thread
        workers.run_later(lambda: submit(call))
        return
    workers.start_deferred()
    try:
        if _enter(call):
            workers.start(lambda: _drive(call))
    except BaseException:  # no thread to be had, or an interrupt: the caller is told by this
        _insist(lambda: call.give_up(None))
        raise


NOT_FREE = object()
"""What `run_here` gives where the call would have had to wait."""


def run_here(call: Call, *, only_if_free: bool = False) -> Any:
    """Runs a call in this thread, when its turn comes, and gives what its body returns or raises what that raises.

    Args:
        call: a call without receivers.
        only_if_free: do nothing and return `NOT_FREE` if it would have to wait for its turn.

    Raises:
        RuntimeError: a finalizer made the call in the middle of another one's submission.
    """
    if _lock._is_owned():
        raise RuntimeError(
            f"{call.name!r} was called by a finalizer, which cannot wait for its turn: use mode='stream'"
        )
    call._turn = threading.Event()
    call._is_claimed = True
    try:
        if only_if_free:
            with _lock:
                if any(lane.calls for lane in call.lanes):
                    return NOT_FREE
                _stand_in_lanes(call)
        elif not _enter(call):
            with _Waiting(call):
                call._turn.wait()
        _here.calls.append(call)
        assert call._body is not None
        return call._body()
    finally:
        _insist(lambda: _end_here(call))


def _end_here(call: Call) -> None:
    if call in _here.calls:
        _here.calls.remove(call)
    call._body = None
    _leave(call)


def _insist(action: Callable[[], None]) -> None:
    """Does what must be done, although handlers of signals raise in between; raises it then."""
    for attempts_left in reversed(range(100)):
        try:
            action()
        except BaseException:
            if attempts_left == 0:
                raise
        else:
            return


def forget_after_fork() -> None:
    """In the child of a fork no call of the parent will ever end: each fails, and says why."""
    global _lock, _room
    _lock = threading.RLock()
    _room = threading.Condition(_lock)
    workers.forget_after_fork()
    calls = [*_unfinished]
    _unfinished.clear()
    for call in calls:
        for lane in call.lanes:
            lane.calls.clear()
        if call not in _here.calls:
            call._fail(RuntimeError("the process was forked: colocated calls go on in the parent only"))
            call._ended.set()


def _enter(call: Call) -> bool:
    """Puts a call at the end of its lanes; whether it is the first of all of them."""
    stream = call.lanes[0]
    with _lock:
        while len(stream.calls) >= stream.size:
            with _Waiting(stream.calls[0]):
                _room.wait()
        _stand_in_lanes(call)
        return _is_first(call)


def _stand_in_lanes(call: Call) -> None:
    _unfinished[call] = None
    for lane in call.lanes:
        lane.calls.append(call)


def _leave(call: Call) -> None:
    """Takes a call out of its lanes, if it is there, and starts those whose turn it is; may be done again."""
    for follower in _out_of_lanes(call):
        _start(follower)


def _out_of_lanes(call: Call) -> list[Call]:
    with _lock:
        for lane in call.lanes:
            if lane.calls and lane.calls[0] is call:
                lane.calls.popleft()
            elif call in lane.calls:
                lane.calls.remove(call)
        _unfinished.pop(call, None)
        call._ended.set()
        _room.notify_all()
        return [lane.calls[0] for lane in call.lanes if lane.calls and _is_first(lane.calls[0])]


def _is_first(call: Call) -> bool:
    return all(lane.calls and lane.calls[0] is call for lane in call.lanes)


def _start(call: Call) -> None:
    """Lets a call run whose turn it is; a second time does nothing."""
    if call._turn is not None:
        call._turn.set()
        return
    try:
        workers.start(lambda: _drive(call))
    except RuntimeError as error:  # no more threads
        call.give_up(error)


def _drive(call: Call | None) -> None:
    """Runs a call, and the one that comes next, and so on."""
    while call is not None and call.claim():
        is_driving = False
        try:
            call.execute()
            is_driving = True
        finally:  # even an exception thrown into this thread from outside must not keep those behind waiting
            following = _out_of_lanes(call)
            call = next((candidate for candidate in following if is_driving and candidate._turn is None), None)
            for candidate in following:
                if candidate is not call:
                    _start(candidate)


class _Waiting:
    """Says that the calls of this thread wait for another; raises if that would be a circle."""

    def __init__(self, target: Call) -> None:
        self._target = target

    def __enter__(self) -> None:
        running = _here.calls
        if not running:
            return
        with _lock:
            for call in running:
                call.waits_for = self._target
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
