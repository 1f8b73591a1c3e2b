"""Lanes: how calls enter and leave them.

The calls of a lane run one at a time, in order. A call is in one lane or several (that of its stream, and that of the
object whose method it is), and is to run when it is first in all of them. It enters all of them at once, behind the
calls that are there; but a call made by another goes before those that wait for the end of that one. Nothing here waits
or runs a call: `scheduler` does, with what these functions say is first now.
"""

import bisect
import collections
import itertools
import operator
from collections.abc import Callable, Sequence

from partjit.colocated.runtime.call import NOBODY, Call, Lane, current_calls
from partjit.colocated.runtime.deadlocks import calls_before, needed_by, waits_for_any
from partjit.colocated.runtime.interrupts import Exclusive, Flag

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
        is_first = _overtake(call) or is_first
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
    if call.may_overtake and any(_blocked(call, lane) for lane in call.lanes):
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


def _overtake(call: Call) -> bool:
    """Moves a call that is last in its lanes to where it belongs; returns whether it is first in all of them now.

    It stays the last one if it waits for one of those behind it then: for a call of another thread that waits for them.
    """
    overtaken = {lane: others for lane in call.lanes if (others := _blocked(call, lane))}
    if not overtaken:
        return False
    for lane, others in overtaken.items():
        _move(call, lane, len(others))
    # Looked at afterwards: who begins to wait meanwhile finds this call before them.
    if waits_for_any(call, [other for others in overtaken.values() for other in others]):
        for lane in overtaken:
            _move(call, lane, 0)
    return is_first(call)


def _blocked(call: Call, lane: Lane) -> list[Call]:
    """The calls of an object, the last ones there, that can only run when the one has ended that makes a call.

    None of them is one that the call itself comes after, by the order of its own stream.
    """
    if lane is call.stream:
        return []
    makers = current_calls()
    there = [other for other in [*lane.calls] if other is not call]
    earlier, _ = _by_stream(call, there)
    begun = there.index(earlier[-1]) + 1 if earlier else 1 if there and is_first(there[0]) else 0
    return there[bisect.bisect_left(there, True, begun, key=lambda other: waits_for_any(other, makers)) :]


def _by_stream(call: Call, others: Sequence[Call]) -> tuple[Sequence[Call], Sequence[Call]]:
    """The calls of the same outermost stream that come before one which this thread makes, and those that come after.

    Args:
        call: the call.
        others: calls in the order of a lane, with those of other streams.
    """
    makers = current_calls()
    own = [other for other in others if other.stream.root is call.stream.root]
    later = bisect.bisect_left(own, True, key=lambda other: _is_behind(other, makers))
    return own[:later], own[later:]


def _is_behind(call: Call, others: Sequence[Call]) -> bool:
    """Whether a call can only run when one of others has ended, in whatever order those of objects are."""
    return any(other in others for other in needed_by(call, _fixed))


def _move(call: Call, lane: Lane, behind: int) -> None:
    """Moves a call so that as many are behind it: counted so, as the first one may leave the lane meanwhile."""
    lane.calls.remove(call)
    lane.calls.insert(-behind if behind else len(lane.calls), call)


def has_later_before(call: Call) -> bool:
    """Whether calls that come after one that this thread makes are before it in the lane of an object."""
    return any(_later(call, lane) for lane in call.lanes)


def put_later_behind(call: Call) -> None:
    """Has the calls that come after one that this thread makes go behind it, unless it waits for one of them."""
    order.run(_put_later_behind, call)


def _put_later_behind(call: Call) -> None:
    overtaken = {lane: others for lane in call.lanes if (others := _later(call, lane))}
    later = [other for others in overtaken.values() for other in others]
    for lane, others in overtaken.items():
        _let_pass(call, lane, others)
    if waits_for_any(call, later):
        _make_way(call, current_calls())
    if waits_for_any(call, later):
        for lane in overtaken:
            _move(call, lane, 0)


def _later(call: Call, lane: Lane) -> Sequence[Call]:
    """The calls before one in a lane that come after it by the order of their stream."""
    return () if lane is call.stream else _by_stream(call, calls_before(call, lane))[1]


def let_ahead(other: Call, call: Call) -> bool:
    """Has another call go right before one that is first in all of its lanes; returns whether.

    That is so if it is behind that one or first, in each of its own, and may leave those behind it.
    """
    return order.run(_let_ahead, other, call)


def _let_ahead(other: Call, call: Call) -> bool:
    shared = [lane.calls for lane in other.lanes if lane in call.lanes]
    elsewhere = [lane.calls for lane in other.lanes if lane not in call.lanes]
    if other.keeps_place or call.keeps_place or any(not calls or calls[0] is not other for calls in elsewhere):
        return False
    if any(len(calls) < 2 or calls[0] is not call or calls[1] is not other for calls in shared):
        return False
    # C moves the call in all of them: nothing is added or removed in between, and no interrupt comes.
    any(itertools.starmap(operator.call, [step for calls in shared for step in _to_second(call, calls)]))
    return True


def _to_second(call: Call, calls: collections.deque[Call]) -> Sequence[tuple[Callable[..., None], *tuple[object, ...]]]:
    return (calls.remove, call), (calls.insert, 1, call)


def make_way(target: Call, makers: Sequence[Call]) -> None:
    """Has calls that can only run when others have ended go behind those that a target of the others waits for.

    A call is in the lane of its object from when it is made, though its stream may be blocked for long. So calls of two
    objects can be in one order in the lane of one, and have to run in the other for what is running already. Nothing is
    moved if the target itself can only run when the others have ended.

    Args:
        target: what the others wait for.
        makers: the others.
    """
    order.run(_make_way, target, makers)


def _make_way(target: Call, makers: Sequence[Call]) -> None:
    def before(call: Call, lane: Lane) -> Sequence[Call]:
        if lane is not call.stream:
            _let_pass(call, lane, [other for other in calls_before(call, lane) if _is_behind(other, makers)])
        return calls_before(call, lane)

    if not _is_behind(target, makers):
        collections.deque(needed_by(target, before), maxlen=0)


def _fixed(call: Call, lane: Lane) -> Sequence[Call]:
    """The calls before one in a lane that stay there: of its stream, of streams nested in the same one, and begun."""
    before = calls_before(call, lane)
    if lane is call.stream:
        return before
    root = call.stream.root
    return [other for i, other in enumerate(before) if other.stream.root is root or (i == 0 and is_first(other))]


def _let_pass(call: Call, lane: Lane, blocked: Sequence[Call]) -> None:
    """Moves blocked calls that are before one in a lane to right behind it, unless calls there were made ahead."""
    calls = lane.calls
    if any(other.keeps_place for other in [*calls]):
        return
    for other in reversed(blocked):
        behind = len(calls) - 1 - calls.index(call)  # counted so, as the first one may leave the lane meanwhile
        calls.insert(-behind if behind else len(calls), other)
        calls.remove(other)  # the former one: whoever looks meanwhile finds it


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


def is_first(call: Call) -> bool:
    """Whether a call is first in all of its lanes."""
    return not [lane for lane in call.lanes if not lane.calls or lane.calls[0] is not call]


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
