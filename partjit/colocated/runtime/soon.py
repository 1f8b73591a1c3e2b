"""Calls that come soon after each other: a thread that has nothing more to run waits a moment for the next one.

Waking a thread for each of them takes its caller a system call, and then both want the interpreter, which together
takes longer than a short function. Calls for which a thread waits already are put in its lane, and run a few at a time:
when the moment is over, or when somebody waits for one of them.
"""

import time
from collections.abc import Sequence

from partjit.colocated.runtime import threads
from partjit.colocated.runtime.call import Call, Lane
from partjit.colocated.runtime.interrupts import Exclusive, Flag, Presence

__all__ = ["Waiter", "end_wait", "hurry", "next_call", "served"]

_SECONDS = 5e-4
_IN_VAIN_SECONDS = 2e-3
"""How long no thread waits after a caller wanted the result of the one call that had come."""


class Waiter(Presence):
    """What runs calls in a thread, and waits for the next one.

    Attributes:
        calls: what it runs, and what it is to run next.
        lane: where it waits, if it does.
        hurry: set when somebody waits for what it waits for.
    """

    def __init__(self, *calls: Call) -> None:
        self.calls: tuple[Call, ...] = calls
        self.lane: Lane | None = None
        self.hurry = Flag()


served: dict[Lane, Waiter] = {}
"""The lanes at which somebody waits for the next call, which so needs no other thread; changed under exclusion."""


def next_call(waiter: Waiter, lanes: Sequence[Lane], order: Exclusive) -> Call | None:
    """The call that comes within a moment, where the last one did; waits for it.

    Args:
        waiter: who waits.
        lanes: those of the call that has ended.
        order: under which calls enter their lanes.
    """
    if len(lanes) != 1:
        return None
    lane, now = lanes[0], time.monotonic()
    is_soon, lane.latest = 0 <= now - lane.latest < _SECONDS, max(now, lane.latest)
    if not is_soon or threads.has_no_threads():
        return None
    waiter.hurry, waiter.lane = Flag(), lane
    if not order.run(_begin_wait, waiter, lane):
        return None
    is_wanted = waiter.hurry.wait(now + _SECONDS)
    is_alone = len(lane.calls) == 1
    call = order.run(end_wait, waiter, lane)
    if call is not None:
        lane.latest = time.monotonic() + (_IN_VAIN_SECONDS if is_wanted and is_alone else 0)
    return call


def _begin_wait(waiter: Waiter, lane: Lane) -> bool:
    if lane.calls or lane in served:  # whoever has added one starts it
        return False
    served[lane] = waiter
    return True


def end_wait(waiter: Waiter, lane: Lane) -> Call | None:
    """Ends a wait, under exclusion; the call that it is to run, if one came and nobody else runs it."""
    if served.get(lane) is not waiter:
        return None
    first = lane.calls[0] if lane.calls else None
    if first is not None and (len(first.lanes) > 1 or first.turn is not None or first.claimant is not None):
        first = None
    waiter.calls = () if first is None else (first,)  # before it is forgotten that this one is to run it
    del served[lane]
    waiter.lane = None
    return first


def hurry(call: Call) -> None:
    """Has a call begin at once, for somebody waits for it."""
    if served:
        for lane in call.lanes:
            waiter = served.get(lane)
            if waiter is not None:
                waiter.hurry.set()
