"""Waiting without deadlocks: a wait that could never end raises an error instead.

A call waits for the calls before it in its lanes, and in its body for the result of another call, for room in a full
stream or for its turn in a lane. All waits in bodies are made here. Before waiting, a thread follows what the target
waits for; if that leads back to a call of this thread, the wait would never end.
"""

from collections.abc import Callable, Iterator, Sequence

from partjit.colocated.runtime.call import Call, Lane, Wait, current_calls
from partjit.colocated.runtime.interrupts import Flag

__all__ = ["calls_before", "needed_by", "wait_for", "waits_for_any", "would_never_end"]


def wait_for(
    target: Call, flag: Flag, deadline: float | None, make_way: Callable[[Call, Sequence[Call]], None]
) -> bool:
    """Waits for a flag that is set when the target makes progress; returns whether it was set by the deadline.

    Args:
        target, flag, deadline: what is waited for.
        make_way: reorders calls so that the target need not wait for those of this thread, if that can be.

    Raises:
        RuntimeError: it never will be, because the target waits for a call of this thread.
    """
    if flag.is_set:
        return True
    if not current_calls():  # no call waits for this thread
        return flag.wait(deadline)
    wait = Wait(target, deadline is None and (flag is target or flag is target.turn))
    return wait.of(_wait, wait, flag, deadline, make_way)()


def _wait(wait: Wait, flag: Flag, deadline: float | None, make_way: Callable[[Call, Sequence[Call]], None]) -> bool:
    here = current_calls()
    for call in here:
        call.waits = [*(other for other in call.waits if other.is_on), wait]
    if here and _comes_back(here, wait.target):  # other threads doing the same have recorded their waits before
        make_way(wait.target, here)
    if here and _comes_back(here, wait.target):
        raise RuntimeError(
            f"deadlock: the colocated call of {here[-1].name!r} waits for that of {wait.target.name!r}, which "
            "can only go on when the former has ended. Give one of the two a stream of its own, or return the "
            "result without using it"
        )
    return flag.wait(deadline)


def would_never_end(target: Call) -> bool:
    """Whether waiting for the target here could never end."""
    return _comes_back(current_calls(), target)


def waits_for_any(call: Call, others: Sequence[Call]) -> bool:
    """Whether a call can only run, or end, when one of others has."""
    return _comes_back(others, call)


def calls_before(call: Call, lane: Lane) -> Sequence[Call]:
    """Those before a call in one of its lanes."""
    there = [*lane.calls]
    return there[: there.index(call)] if call in there else ()


def _comes_back(here: Sequence[Call], target: Call) -> bool:
    return any(call in here for call in needed_by(target))


def needed_by(target: Call, before: Callable[[Call, Lane], Sequence[Call]] = calls_before) -> Iterator[Call]:
    """A call and those that have to end, or to run, before it does.

    Args:
        target: the call.
        before: returns the calls that one runs after in one of its lanes.
    """
    seen: set[Call] = set()
    stack = [target]
    while stack:
        call = stack.pop()
        yield call
        if call in seen or call.has_ended:
            continue
        seen.add(call)
        stack += [wait.target for wait in call.waits if wait.is_on]
        for lane in call.lanes:
            stack += before(call, lane)
