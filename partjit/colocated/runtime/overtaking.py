"""The order of calls in a lane, where one made by another goes before some that are there.

A call made by another goes before those that wait for the end of that one, and so do calls that it waits for. What has
begun stays where it is, but for its own parts: a method may call another object, whose method calls the first object,
and waits for it. All of this changes the order alone, under the mutual exclusion of `lanes`.
"""

import bisect
import collections
import itertools
import operator
from collections.abc import Callable, Sequence

from partjit.colocated.runtime.call import Call, Lane, current_calls, descends_from
from partjit.colocated.runtime.deadlocks import calls_before, needed_by, waits_for_any

__all__ = ["blocked", "has_later_before", "is_first", "let_ahead", "make_way", "overtake", "put_later_behind"]


def overtake(call: Call) -> bool:
    """Moves a call that is last in its lanes to where it belongs; returns whether it is first in all of them now.

    It stays the last one if it waits for one of those behind it then: for a call of another thread that waits for them.
    """
    overtaken = {lane: others for lane in call.lanes if (others := blocked(call, lane))}
    if not overtaken:
        return False
    for lane, others in overtaken.items():
        _move(call, lane, len(others))
    # Looked at afterwards: who begins to wait meanwhile finds this call before them.
    if waits_for_any(call, [other for others in overtaken.values() for other in others]):
        for lane in overtaken:
            _move(call, lane, 0)
    return is_first(call)


def blocked(call: Call, lane: Lane) -> list[Call]:
    """The calls of an object, the last ones there, that can only run when the one has ended that makes a call.

    None of them is one that the call itself comes after, by the order of its own stream.
    """
    there = [] if lane is call.stream else [other for other in [*lane.calls] if other is not call]
    if not there:
        return []
    makers = _makers()
    earlier, _ = _by_stream(call, there)
    begun = [i for i, other in enumerate(there) if _has_begun(other)]
    least = max(there.index(earlier[-1]) if earlier else -1, *begun, -1) + 1
    return there[bisect.bisect_left(there, True, least, key=lambda other: waits_for_any(other, makers)) :]


def _makers() -> Sequence[Call]:
    """The calls of this thread, and those that have made them, directly or not, and have not ended.

    The latter may come to wait for what is made here only later.
    """
    makers: dict[Call, None] = {}
    for call in current_calls():
        maker: Call | None = call
        while maker is not None and maker not in makers:
            makers[maker] = None
            maker = maker.parent
    return [*makers]


def _by_stream(call: Call, others: Sequence[Call]) -> tuple[Sequence[Call], Sequence[Call]]:
    """The calls of the same outermost stream that come before one which this thread makes, and those that come after.

    Args:
        call: the call.
        others: calls in the order of a lane, with those of other streams.
    """
    makers = _makers()
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
    """As that of `lanes`."""
    overtaken = {lane: others for lane in call.lanes if (others := _later(call, lane))}
    later = [other for others in overtaken.values() for other in others]
    for lane, others in overtaken.items():
        _let_pass(call, lane, others)
    if waits_for_any(call, later):
        make_way(call, _makers())
    if waits_for_any(call, later):
        for lane in overtaken:
            _move(call, lane, 0)


def _later(call: Call, lane: Lane) -> Sequence[Call]:
    """The calls before one in a lane that come after it by the order of their stream."""
    before = () if lane is call.stream else calls_before(call, lane)
    return [other for other in _by_stream(call, before)[1] if not _has_begun(other)] if before else ()


def let_ahead(other: Call, call: Call) -> bool:
    """As that of `lanes`."""
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
    """As that of `lanes`."""
    _let_parts_ahead(target)

    def before(call: Call, lane: Lane) -> Sequence[Call]:
        if lane is not call.stream:
            _let_pass(call, lane, [other for other in calls_before(call, lane) if _is_behind(other, makers)])
        return calls_before(call, lane)

    if not _is_behind(target, makers):
        collections.deque(needed_by(target, before), maxlen=0)


def _let_parts_ahead(target: Call) -> None:
    """Has what a target waits for go before calls of the same object that wait for it and that it is a part of.

    A method may call another object, whose method calls the first object: in the lane of that is the call that waits.
    """
    needed = {*needed_by(target)}
    for lane in {lane: None for call in needed for lane in call.lanes}:
        calls = lane.calls
        if not lane.is_of_object or any(call.keeps_place for call in [*calls]):
            continue
        for call in [*calls]:  # in this order, so that those before the same call stay in theirs
            if call in needed:
                whole = next((other for other in calls_before(call, lane) if _is_part(call, other)), None)
                if whole is not None:
                    whole.has_parts_ahead = True
                    _move(call, lane, len(calls) - 1 - calls.index(whole))


def _is_part(call: Call, other: Call) -> bool:
    """Whether a call was made by another one, directly or not, which goes on only when the call has ended."""
    waits = [wait for wait in other.waits if wait.is_on and wait.is_for_turn]
    return descends_from(call, other) and any(call in {*needed_by(wait.target)} for wait in waits)


def _fixed(call: Call, lane: Lane) -> Sequence[Call]:
    """The calls before one in a lane that stay there: of its stream, of streams nested in the same one, and begun."""
    before = calls_before(call, lane)
    if lane is call.stream:
        return before
    root = call.stream.root
    return [other for other in before if other.stream.root is root or _has_begun(other)]


def _let_pass(call: Call, lane: Lane, blocked: Sequence[Call]) -> None:
    """Moves blocked calls that are before one in a lane to right behind it, unless calls there were made ahead."""
    calls = lane.calls
    if any(other.keeps_place for other in [*calls]):
        return
    for other in reversed(blocked):
        behind = len(calls) - 1 - calls.index(call)  # counted so, as the first one may leave the lane meanwhile
        calls.insert(-behind if behind else len(calls), other)
        calls.remove(other)  # the former one: whoever looks meanwhile finds it


def _has_begun(call: Call) -> bool:
    """Whether a call runs, or may begin at any time."""
    return call.has_parts_ahead or is_first(call)


def is_first(call: Call) -> bool:
    """Whether a call is first in all of its lanes."""
    return not [lane for lane in call.lanes if not lane.calls or lane.calls[0] is not call]
