"""Lanes: how calls enter and leave them.

The calls of a lane run one at a time, in order. A call is in one lane or several (that of its stream, and that of the
object whose method it is), and is to run when it is first in all of them. It enters all of them at once, behind the
calls that are there; but a call made by another goes before those that wait for the end of that one: see `overtaking`.
Nothing here waits or runs a call: `scheduler` does, with what these functions say is first now.
"""

import collections
import itertools
import operator
from collections.abc import Callable, Sequence

from partjit.colocated.runtime import overtaking
from partjit.colocated.runtime.call import NOBODY, Call, Lane
from partjit.colocated.runtime.interrupts import Exclusive, Flag
from partjit.colocated.runtime.overtaking import has_later_before, is_first

__all__ = [
    "end",
    "enter",
    "enter_behind",
    "enter_if_free",
    "forget_after_fork",
    "has_later_before",
    "is_first",
    "let_ahead",
    "make_way",
    "order",
    "pass_on",
    "put_later_behind",
    "unfinished",
]

order = Exclusive()
"""Under which calls enter and leave lanes."""
_busy: dict[Lane, None] = {}  # all lanes with calls


def unfinished() -> list[Call]:
    """The calls that have not ended, in the order they were made."""
    made = {call: None for lane in [*_busy] for call in [*lane.calls]}
    return sorted(made, key=operator.attrgetter("number"))


# Entering


def enter(call: Call) -> bool | Flag:
    """Appends a call to its lanes, or returns the flag to wait for.

    Returns:
        Whether it is first in all of them, and no thread waits for it there that will run it; or the flag.
    """
    return order.run(_append, call)


def enter_behind(call: Call) -> bool:
    """Appends a call to its lanes if a thread will run it there that needs no start; returns whether.

    An interrupt leaves nothing undone: the call before it, or the thread that waits at the lane, sees to it.
    """
    return order.run(_append_for_another, call, nested=_append_behind)


def enter_if_free(call: Call) -> bool:
    """Appends a call to its lanes if they are empty; returns whether. Not in the middle of a change to them."""
    return order.run(_append_if_free, call, nested=lambda _: False)


def _append(call: Call) -> bool | Flag:
    full = call.lanes[0].fullness()
    if full is not None and not call.needs_no_room:
        return full
    if call.entering is not None and _is_given_up_entering(call):
        return False
    is_first = True
    for lane in call.lanes:
        _busy[lane] = None
        lane.calls.append(call)
        is_first = is_first and lane.calls[0] is call
    if call.may_overtake:
        is_first = overtaking.overtake(call) or is_first
    return is_first and not (call.claimant is None and _is_waited_for(call.lanes[0]))


def _append_behind(call: Call) -> bool:
    """If that has room, and the call is not first."""
    if len(call.lanes) > 1 or call.entering is not None:
        return False
    lane = call.lanes[0]
    if not 0 < len(lane.calls) < lane.size:
        return False
    lane.calls.append(call)
    return True


def _append_for_another(call: Call) -> bool:
    """If the first lane has room, and there are calls in one of them, or a thread waits for the call."""
    first = call.lanes[0]
    if len(first.calls) >= first.size:
        return False
    if not first.calls:
        others = [lane for lane in call.lanes if lane.calls]
        if not others and not _is_waited_for(first):
            return False
    if call.may_overtake and any(overtaking.blocked(call, lane) for lane in call.lanes):
        return False
    if call.entering is not None and _is_given_up_entering(call):
        return True
    if len(call.lanes) == 1:
        _busy[first] = None
        first.calls.append(call)
        return True
    for lane in call.lanes:
        _busy[lane] = None
    # C adds it to all: no interrupt comes in between, which would leave it in some.
    any(map(_append_to, [lane.calls for lane in call.lanes], itertools.repeat(call)))
    return True


def put_later_behind(call: Call) -> None:
    """Has the calls that come after one that this thread makes go behind it, unless it waits for one of them."""
    order.run(overtaking.put_later_behind, call)


def let_ahead(other: Call, call: Call) -> bool:
    """Has another call go right before one that is first in all of its lanes; returns whether.

    That is so if it is behind that one or first, in each of its own, and may leave those behind it.
    """
    return order.run(overtaking.let_ahead, other, call)


def make_way(target: Call, makers: Sequence[Call]) -> None:
    """Has calls that can only run when others have ended go behind those that a target of the others waits for.

    A call is in the lane of its object from when it is made, though its stream may be blocked for long. So calls of two
    objects can be in one order in the lane of one, and have to run in the other for what is running already. None
    is moved if the target itself can only run when the others have ended. What the target waits for goes before calls
    of the same object that wait for it and that it is a part of.

    Args:
        target: what the others wait for.
        makers: the others.
    """
    order.run(overtaking.make_way, target, makers)


_append_to: Callable[[collections.deque[Call], Call], None] = collections.deque.append


def _is_given_up_entering(call: Call) -> bool:
    """Whether it does not enter its lanes after all, now that it is to do so."""
    entering, call.entering = call.entering, None  # which may refer to the call
    if entering is None or entering():
        return False
    call.claim(NOBODY)
    call.set()
    return True


def _is_waited_for(lane: Lane) -> bool:
    """Whether a thread waits for the next call of a lane, which it then runs."""
    waiter = lane.waiter
    if waiter is None:
        return False
    if waiter.is_to_begin:
        waiter.hurry.set()
    return True


def _append_if_free(call: Call) -> bool:
    for lane in call.lanes:
        if lane.calls:
            return False
    if call.entering is not None and _is_given_up_entering(call):
        return False
    for lane in call.lanes:
        _busy[lane] = None
        lane.calls.append(call)
    return True


# Leaving


def end(call: Call) -> list[Call]:
    """Removes a call from its lanes, and says that it has ended; returns those that are first now. Idempotent."""
    following = order.run(_remove, call)
    call.set()
    for lane in call.lanes:
        if not lane.room.is_set:  # else nobody waits for it: who would, replaces it before looking for room again
            lane.room.set()
    return following


def pass_on(call: Call) -> list[Call]:
    """As `end`, for a call that runs in this thread and that another is behind, as a rule.

    Nobody else removes the first call of a lane. So its driver may do that at any time, as long as the lane keeps one;
    when two threads then find the same call to be first, one of them claims it.
    """
    lane = call.lanes[0]
    calls = lane.calls
    if len(call.lanes) > 1 or len(calls) < 2 or calls[0] is not call:
        return end(call)
    calls.popleft()
    call.set()
    if not lane.room.is_set:
        lane.room.set()
    try:
        first = calls[0]
    except IndexError:  # it was given up in between
        return end(call)
    # Another thread may end one of several lanes meanwhile, unless it is kept from that.
    return [first] if len(first.lanes) == 1 or order.run(is_first, first) else []


def _remove(call: Call) -> list[Call]:
    following = []
    for lane in call.lanes:
        calls = lane.calls
        if calls and calls[0] is call:
            calls.popleft()
        elif call in calls:
            calls.remove(call)
        if calls:
            first = calls[0]
            if len(first.lanes) == 1 or is_first(first):
                following.append(first)
        else:
            _busy.pop(lane, None)
    return following


def forget_after_fork() -> list[Call]:
    """Empties all lanes in a forked child; returns the calls of the parent that were in them."""
    global order
    order = Exclusive()
    calls = unfinished()
    _busy.clear()
    for call in calls:
        for lane in call.lanes:
            lane.calls.clear()
    return calls
