"""Brief calls: whoever waits for one runs it, which takes less time than to have another thread do so.

For those that nobody waits for, a thread looks now and then; it is there as long as there are any.
"""

import collections
import time
from collections.abc import Callable

from partjit.colocated.runtime import threads
from partjit.colocated.runtime.call import Call

__all__ = ["forget_after_fork", "start_soon"]

_SECONDS = 5e-4

_waiting: "collections.deque[tuple[Call, Callable[[Call], None]]]" = collections.deque()
_watching: list[None] = []  # one element while there is a thread; to append and to pop one are atomic


def start_soon(call: Call, start: Callable[[Call], None]) -> None:
    """Has a call started within a moment, unless it has been run by then.

    Raises:
        RuntimeError: the system has no more threads.
    """
    _waiting.append((call, start))
    if _watching:
        return
    try:
        _watching.append(None)
        threads.start(_watch)
    except BaseException:
        _watching.clear()
        raise


def _watch() -> None:
    """Starts what was there a moment ago. What has come since may be run by its caller yet: it has until the next."""
    there: collections.deque[tuple[Call, Callable[[Call], None]]] = collections.deque()
    while True:
        try:
            while there or _waiting:
                time.sleep(_SECONDS)
                while there:
                    call, start = there.popleft()
                    start(call)
                    del call, start  # which nothing may keep while this sleeps
                for _ in range(len(_waiting)):
                    call, start = _waiting.popleft()
                    if call.claimant is None:
                        there.append((call, start))
                    del call, start
        finally:
            _waiting.extend(there)
            _watching.clear()
        if not _waiting or _watching:  # else one has come in between
            return
        _watching.append(None)


def forget_after_fork() -> None:
    """Forgets, in a forked child, the parent's calls."""
    _waiting.clear()
    _watching.clear()
