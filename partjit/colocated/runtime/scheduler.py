"""The scheduler: it runs the calls of each lane one after another.

A call runs when it is first in all of its lanes. It enters all of them at once, so what it waits for always came before
it, and the order alone cannot deadlock. A call made by another may go before some that came earlier, but these wait for
the end of the other one anyway.

A signal handler may raise between any two steps of the main thread. So the operations on a call can be repeated, and
they are watched (`Presence`): what an interrupt leaves undone, another thread does. To run a call or to give it up a
thread claims it first, which succeeds once.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from partjit.colocated.runtime import brief, lanes, soon, threads
from partjit.colocated.runtime.call import NOBODY, Call, Lane, Waiter, current_calls
from partjit.colocated.runtime.deadlocks import wait_for
from partjit.colocated.runtime.failures import PoisonedError, Site
from partjit.colocated.runtime.interrupts import Flag, Presence, is_interrupt

__all__ = [
    "NOT_FREE",
    "entered_lanes",
    "is_changing_lanes",
    "join",
    "not_entered",
    "resize",
    "run_here",
    "run_if_free",
    "run_in_lanes",
    "run_unreceived",
    "start",
    "submit",
    "wait_for_room",
]

_Result = TypeVar("_Result")
_IN_BETWEEN = "a finalizer or the handler of a signal, in the middle of the submission of another call,"


def entered_lanes() -> list[Lane]:
    """The lanes of the calls that this thread is running."""
    return [lane for call in current_calls() for lane in call.lanes]


def not_entered(needed: Sequence[Lane]) -> Sequence[Lane]:
    """The lanes without those of the calls that this thread is running."""
    if not current_calls():
        return needed
    entered = entered_lanes()
    return [lane for lane in needed if lane not in entered]


def is_changing_lanes() -> bool:
    """Whether this is a finalizer or a signal handler that interrupts a change to the lanes."""
    return lanes.order.is_owned()


def resize(lane: Lane, size: int) -> None:
    """Sets how many calls a lane holds, and wakes callers that wait for room."""
    lane.size = size
    lane.room.set()


def join(call: Call, deadline: float | None = None) -> bool:
    """Waits for the end of a call; returns whether it came by the deadline, in seconds of `time.monotonic`.

    Raises:
        RuntimeError: it never will, because the call waits for one of this thread.
    """
    if call.has_ended:
        return True
    if lanes.order.is_owned():
        raise RuntimeError(f"{_IN_BETWEEN} waits for the colocated call of {call.name!r}, which cannot end meanwhile")
    if threads.has_no_threads():
        _run_ready_calls(call)
    if call.is_brief and deadline is None:
        driver = _Driver(call)
        driver.of(_run_awaited, driver, otherwise=driver.clean_up)()
        if call.has_ended:
            return True
    soon.hurry(call)
    return _wait_for(call, call, deadline)


def _wait_for(target: Call, flag: Flag, deadline: float | None = None) -> bool:
    return wait_for(target, flag, deadline, _make_way)


def _make_way(target: Call, makers: Sequence[Call]) -> None:
    """Has calls make way for those that a target of the makers waits for; another thread starts what is first then."""
    presence = Presence()
    presence.of(lanes.make_way, target, makers, otherwise=_start_first)()


def _start_first() -> None:
    for call in lanes.unfinished():
        if lanes.is_first(call) and (call.claimant is None or call.turn is not None):
            start(call)


# Submission


def submit(call: Call) -> None:
    """Submits a call to run on a thread when its turn comes. Waits while its stream is full."""
    if lanes.enter_behind(call):
        return
    threads.start_deferred()
    # A thread of the pool that is between two calls is in a finalizer: if it waited for room in a full stream, the call
    # that is to make room might be its own next one.
    if lanes.order.is_owned() or (threads.is_one_of_them() and not current_calls()):
        threads.run_later(functools.partial(submit, call))
        return
    submission = Presence()
    submission.of(_submit, call, submission, otherwise=functools.partial(_give_up, call, None))()


def _submit(call: Call, submission: Presence) -> None:
    try:
        if _enter(call):
            if call.is_brief:
                _start_soon(call)
            else:
                threads.start(_driving(call))
    except BaseException:  # no more threads, or an interrupt: this tells the caller
        _give_up(call, None)
        raise
    submission.leave()


NOT_FREE = object()
"""What `run_here` returns where the call would have had to wait."""


def run_here(call: Call, *, deadline: float | None = None) -> Any:
    """Runs a call in this thread when its turn comes, and returns what its body returns.

    Args:
        call: a call without receivers.
        deadline: in seconds of `time.monotonic`; by then its turn must have come.

    Raises:
        TimeoutError: it has not; the call is not made.
        RuntimeError: it is made by a finalizer or a signal handler that interrupts the submission of another call.
        BaseException: what the body raises.
    """
    if lanes.order.is_owned():
        raise RuntimeError(f"{_IN_BETWEEN} calls {call.name!r} and cannot wait for its turn: use mode='stream'")
    driver = _Driver(call)
    call.turn = Flag()
    call.claim(driver)
    return driver.of(_run_here, call, driver, deadline, otherwise=driver.clean_up)()


def run_if_free(call: Call) -> Any:
    """Runs a call in this thread if it need not wait for its turn, and returns what its body returns, or `NOT_FREE`.

    Args:
        call: a call without receivers.

    Raises:
        BaseException: what the body raises.
    """
    presence = Presence()
    call.claim(presence)
    return presence.of(_run_if_free, call, presence, otherwise=functools.partial(_leave, call))()


def run_unreceived(call: Call) -> None:
    """Runs a call in this thread when its turn comes, with the failure of one on a thread.

    Args:
        call: a call without receivers.

    Raises:
        BaseException: what a signal handler raised.
    """
    if lanes.order.is_owned():  # it cannot be run here
        submit(call)
        return
    try:
        run_here(call)
    except PoisonedError:  # the failure of what it was given
        return
    except BaseException as error:
        if is_interrupt(error):
            raise
        call.fail(error)


def run_in_lanes(
    name: str, site: Site, stream: Lane, needed: Sequence[Lane | None], body: Callable[[], _Result]
) -> _Result:
    """Runs a function in this thread as a call, in turn in those of the lanes that this thread has not entered."""
    free = not_entered([lane for lane in needed if lane is not None])
    return run_here(Call(name, site, stream, free, body)) if free else body()


def _run_here(call: Call, driver: "_Driver", deadline: float | None) -> Any:
    try:
        if not _enter(call):
            assert call.turn is not None
            soon.hurry(call)
            if not _wait_for(call, call.turn, deadline):
                raise TimeoutError(f"the colocated call of {call.name!r} waits for calls before it, which do not end")
        return _run_body(call)
    finally:
        call.body = call.needed = None
        _leave(call)
        driver.leave()


def _run_if_free(call: Call, presence: Presence) -> Any:
    if not lanes.enter_if_free(call):
        presence.leave()
        return NOT_FREE
    try:
        here = current_calls()
        here.append(call)
        try:  # as `_run_body`, without a frame for each
            assert call.body is not None
            return call.body()
        finally:
            here.remove(call)
    finally:
        call.body = None
        for follower in lanes.end(call):
            start(follower)
        presence.leave()


def _run_body(call: Call) -> Any:
    """Calls the body of a call of this thread, which is one of those that it is running meanwhile."""
    here = current_calls()
    here.append(call)
    try:
        assert call.body is not None
        return call.body()
    finally:
        here.remove(call)


def _enter(call: Call) -> bool:
    """Appends a call to its lanes, waiting for room; returns whether it is first in all of them."""
    while isinstance(entered := lanes.enter(call), Flag):
        wait_for_room(call.lanes[0])
    if call.may_overtake and not entered and lanes.has_later_before(call):
        presence = Presence()
        presence.of(lanes.put_later_behind, call, otherwise=_start_first)()
    return entered


def wait_for_room(lane: Lane) -> None:
    """Waits while a lane is full."""
    while (room := lane.fullness()) is not None:
        first = next(iter([*lane.calls]), None)
        if first is not None:
            soon.hurry(first)
            _wait_for(first, room)


# Running in turn


class _Driver(Waiter):
    """A thread that runs a call and then those that follow it."""

    def leave(self) -> None:
        """Declares that it is complete; calls and streams are freed when they are not used any more."""
        super().leave()
        self.calls = ()  # which refer to it

    def clean_up(self) -> None:
        """Does what it left undone."""
        for call in self.calls:
            if call.claimant is self:
                _leave(call)
            elif call.claimant is None:
                start(call)
        first = None if self.lane is None else soon.end_wait(self)
        if first is not None:
            start(first)


def _driving(call: Call) -> Callable[[], None]:
    """A job that runs a call, unless another claims it."""
    driver = _Driver(call)
    return driver.of(_drive, driver, otherwise=driver.clean_up)


def _drive(driver: _Driver) -> None:
    call: Call | None = driver.calls[0]
    try:
        while call is not None and call.claim(driver):
            call.execute()
            own = _take_over(driver, call, lanes.pass_on(call))
            if own is None and soon.begin_wait(driver, call):
                driver.calls, call = (), None  # which refer to the lane
                own = soon.next_call(driver)
            call = own
    except BaseException:  # thrown into this thread from outside; the calls behind must not be blocked
        driver.clean_up()
        driver.leave()
        raise
    driver.leave()


def _run_awaited(driver: _Driver) -> None:
    """Runs a call that this thread waits for, if it is its turn and nobody else runs it."""
    (call,) = driver.calls
    try:
        if lanes.is_first(call) and call.claim(driver):
            call.execute()
            for follower in lanes.end(call):
                _start_soon(follower)
    except BaseException:
        driver.clean_up()
        driver.leave()
        raise
    driver.leave()


def _start_soon(call: Call) -> None:
    """Starts a call that is first in its lanes; a brief one within a moment, unless it is run by then."""
    if call.is_brief and call.turn is None:
        brief.start_soon(call, _start_unless_run)
    else:
        start(call)


def _start_unless_run(call: Call) -> None:
    """Starts a call that nobody has waited for, if it is its turn."""
    if call.claimant is None and lanes.is_first(call):
        start(call)


def _take_over(driver: _Driver, call: Call, following: list[Call]) -> Call | None:
    """Starts the calls that follow one that a driver has run, but for one that it is to run itself."""
    own = None
    for follower in following:
        if own is None and follower.turn is None:
            own = follower
            driver.calls = (call, own)
        else:
            start(follower)
    return own


def _run_ready_calls(target: Call) -> None:
    """Runs, where there are no threads, the calls that a target may be waiting for, in the thread that waits for it."""
    while not target.has_ended:
        free = (call for call in lanes.unfinished() if call.claimant is None and lanes.is_first(call))
        call = next(free, None)
        if call is None:
            return
        _driving(call)()


def _give_up(call: Call, error: BaseException | None) -> None:
    """Ends a call without running it, unless a thread has claimed it; `error` is None if its results are unused."""
    if call.claim(NOBODY):
        call.drop()
        try:
            if error is not None:
                call.fail(error)
        finally:
            _leave(call)


def _leave(call: Call) -> None:
    """Removes a call from its lanes and starts those that are first now. Idempotent."""
    for follower in lanes.end(call):
        start(follower)


def start(call: Call) -> None:
    """Starts a call that is first in its lanes. Idempotent."""
    if call.turn is not None:
        call.turn.set()
        return
    try:
        threads.start(_driving(call))
    except RuntimeError as error:  # no more threads
        if is_interrupt(error):
            raise
        _give_up(call, error)
