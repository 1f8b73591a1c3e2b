"""Calls that come soon after each other: a thread that has nothing more to run waits a moment for the next one.

Waking a thread for each of them takes its caller a system call, and then both want the interpreter, which together
takes longer than a short function. Calls for which a thread waits already are put in its lane, and run a few at a time:
when the moment is over, or when somebody waits for one of them. A call in several lanes is waited for in its first one,
that of its stream. Where calls kept coming the next wait is longer, as their caller has to get the interpreter back
each time. Where callers want their calls one by one, waiting for more is in vain: then each call is begun as soon as it
comes. So it is where they wait for results, and where no more calls come, as who has asked a server waits for the
answer that a call sends.
"""

import time
import weakref

from partjit.colocated.runtime import lanes, threads
from partjit.colocated.runtime.call import Call, Lane, Waiter
from partjit.colocated.runtime.interrupts import Flag

__all__ = ["are_one_by_one", "begin_wait", "end_wait", "forget_after_fork", "hurry", "next_call"]

_SECONDS = 5e-4
_MOST_MOMENTS = 4
"""How many times as long a thread waits where calls kept coming."""
_AT_ONCE_SECONDS = 2e-3
"""How long calls are begun as they come after a caller wanted the result of the one call that had come."""
_MOST_AT_ONCE_SECONDS = 0.1
"""The same after many waits for more calls that were in vain, each of them the longer."""
_LONG_SECONDS = 2e-2
"""How long a thread waits for these."""

_waiting: set[Waiter] = set()
"""Those that wait; changed under exclusion."""


def begin_wait(waiter: Waiter, call: Call) -> bool:
    """Whether somebody is to wait for the call after one that has ended, which is so where the last ones came soon.

    Args:
        waiter: who waits; refers to nothing of the call.
        call: the one that has ended.
    """
    lane, now = call.lanes[0], time.monotonic()
    is_soon, lane.latest = 0 <= now - lane.latest < lane.moments * _SECONDS, max(now, lane.latest)
    if not is_soon or threads.has_no_threads():
        return False
    waiter.hurry, waiter.lane, waiter.is_to_begin = Flag(), weakref.ref(lane), now < lane.at_once_until
    return lanes.order.run(_begin, waiter, lane)


def _begin(waiter: Waiter, lane: Lane) -> bool:
    if lane.calls or lane.waiter is not None:  # whoever has added one starts it
        return False
    _waiting.add(waiter)
    lane.waiter = waiter
    return True


def next_call(waiter: Waiter) -> Call | None:
    """The call that comes within a moment; waits for it. Nothing else may refer to the lane meanwhile."""
    is_vain = False
    if waiter.is_to_begin:
        waiter.hurry.wait(time.monotonic() + _LONG_SECONDS)
        is_wanted = False
    else:
        half = _moments(waiter) * _SECONDS / 2
        middle = time.monotonic() + half
        is_wanted = waiter.hurry.wait(middle)
        if not is_wanted:
            count = _count(waiter)
            is_wanted = waiter.hurry.wait(middle + half)
            is_vain = not is_wanted and 0 < count == _count(waiter)
    lane = _lane_of(waiter)
    is_alone = lane is not None and len(lane.calls) == 1
    call = end_wait(waiter)
    if lane is not None and call is not None:
        lane.latest = time.monotonic()
        if is_wanted and is_alone:
            lane.at_once_until = lane.latest + _AT_ONCE_SECONDS
        elif is_vain:
            lane.at_once_seconds = min(2 * max(lane.at_once_seconds, _AT_ONCE_SECONDS), _MOST_AT_ONCE_SECONDS)
            lane.at_once_until = lane.latest + lane.at_once_seconds
        elif not waiter.is_to_begin:
            lane.at_once_seconds = 0.0
        lane.moments = 1 if is_wanted or is_vain or waiter.is_to_begin else min(2 * lane.moments, _MOST_MOMENTS)
    return call


def are_one_by_one(lane: Lane) -> bool:
    """Whether callers want the calls of a lane one by one now, as far as one can tell."""
    return time.monotonic() < lane.at_once_until


def _count(waiter: Waiter) -> int:
    lane = _lane_of(waiter)
    return 0 if lane is None else len(lane.calls)


def _moments(waiter: Waiter) -> int:
    lane = _lane_of(waiter)
    return 1 if lane is None else lane.moments


def end_wait(waiter: Waiter) -> Call | None:
    """Ends a wait; the call that it is to run, if one came and nobody else runs it. Idempotent."""
    return lanes.order.run(_end_wait, waiter)


def _end_wait(waiter: Waiter) -> Call | None:
    lane, first = _lane_of(waiter), None
    if lane is not None and lane.waiter is waiter:
        first = lane.calls[0] if lane.calls else None
        if first is not None and not _is_for_waiter(first, lane):
            first = None
        waiter.calls = () if first is None else (first,)  # before it is forgotten that this one is to run it
        lane.waiter = None
    waiter.lane = None
    _waiting.discard(waiter)
    return first


def _is_for_waiter(first: Call, lane: Lane) -> bool:
    """Whether who waits at a lane is to run the first call there: others run those whose turn comes in another lane."""
    return first.lanes[0] is lane and first.turn is None and first.claimant is None and lanes.is_first(first)


def _lane_of(waiter: Waiter) -> Lane | None:
    return None if waiter.lane is None else waiter.lane()


def hurry(call: Call) -> None:
    """Has a call, and what is before it in its lanes, begin at once, for somebody waits for it."""
    for lane in call.lanes:
        _hurry_in(lane)
        if len(call.lanes) > 1:
            for first in [*lane.calls][:1]:
                _hurry_in(first.lanes[0])


def _hurry_in(lane: Lane) -> None:
    waiter = lane.waiter
    if waiter is not None:
        waiter.hurry.set()


def forget_after_fork() -> None:
    """Forgets, in a forked child, the parent's threads that wait."""
    for waiter in _waiting:
        lane = _lane_of(waiter)
        if lane is not None:
            lane.waiter = None
    _waiting.clear()
