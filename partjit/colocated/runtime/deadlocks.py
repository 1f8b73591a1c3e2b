"""Waiting without deadlocks: a wait that could never end raises an error instead.

A call waits for the calls before it in its lanes, and in its body for the result of another call, for room in a full
stream or for its turn in a lane. All waits in bodies are made here. Before waiting, a thread follows what the target
waits for; if that leads back to a call of this thread, the wait would never end.
"""

from collections.abc import Sequence

from partjit.colocated.runtime.call import Call, Wait, current_calls
from partjit.colocated.runtime.interrupts import Flag

__all__ = ["wait_for", "waits_for_any", "would_never_end"]


def wait_for(target: Call, flag: Flag, deadline: float | None = None) -> bool:
    """Waits for a flag that is set when the target makes progress; returns whether it was set by the deadline.

    Raises:
        RuntimeError: it never will be, because the target waits for a call of this thread.
    """
    if flag.is_set:
        return True
    if not current_calls():  # no call waits for this thread
        return flag.wait(deadline)
    wait = Wait(target)
    return wait.of(_wait, wait, flag, deadline)()


def _wait(wait: Wait, flag: Flag, deadline: float | None) -> bool:
    here = current_calls()
    for call in here:
        call.waits = [*(other for other in call.waits if other.is_on), wait]
    if here and _comes_back(here, wait.target):  # other threads doing the same have recorded their waits before
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


def _comes_back(here: Sequence[Call], target: Call) -> bool:
    seen: set[Call] = set()
    stack = [target]
    while stack:
        call = stack.pop()
        if call in here:
            return True
        if call in seen or call.has_ended:
            continue
        seen.add(call)
        stack += [wait.target for wait in call.waits if wait.is_on]
        for lane in call.lanes:  # it runs after those before it
            before = [*lane.calls]
            if call in before:
                stack += before[: before.index(call)]
    return False
