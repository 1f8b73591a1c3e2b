"""Who waits for whom: a wait that could never end raises an error instead of beginning.

A call waits for those before it in its lanes, and, in the middle of its body, for whatever it asks for: the result of
another call, room in a full stream, its turn in a lane. All these waits are made here. Whoever is about to wait follows
what the target waits for; if that leads back to a call of this thread, it would wait for itself.
"""

from collections.abc import Sequence

from partjit.colocated.runtime.call import Call, Wait, current_calls
from partjit.colocated.runtime.interrupts import Flag

__all__ = ["wait_for", "would_never_end"]


def wait_for(target: Call, flag: Flag, deadline: float | None = None) -> bool:
    """Waits for what happens when the target goes on; whether it has, by the deadline.

    Raises:
        RuntimeError: it never will, because the target waits for what is waiting here.
    """
    if flag.is_set:
        return True
    wait = Wait(target)
    return wait.of(_wait, wait, flag, deadline)()


def _wait(wait: Wait, flag: Flag, deadline: float | None) -> bool:
    here = current_calls()
    for call in here:
        call.waits = [*(other for other in call.waits if other.is_on), wait]
    if here and _comes_back(here, wait.target):  # others who do the same at this moment have noted it before
        raise RuntimeError(
            f"deadlock: the colocated call of {here[-1].name!r} waits for that of {wait.target.name!r}, which "
            "can only go on when the former has ended. Give one of the two a stream of its own, or return the "
            "result without using it"
        )
    return flag.wait(deadline)


def would_never_end(target: Call) -> bool:
    """Whether waiting for the target here could never end."""
    return _comes_back(current_calls(), target)


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
        for lane in call.lanes:  # it comes after those before it
            before = [*lane.calls]
            if call in before:
                stack += before[: before.index(call)]
    return False
