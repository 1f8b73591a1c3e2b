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
    """Has a call started within a moment, unless it has been run by then."""
    _waiting.append((call, start))
    if not _watching:
        _watching.append(None)
        threads.start(_watch)


def _watch() -> None:
    while _waiting:
        time.sleep(_SECONDS)
        for _ in range(len(_waiting)):
            call, start = _waiting.popleft()
            start(call)
            del call, start  # which nothing may keep while this sleeps
    _watching.clear()
    if _waiting and not _watching:  # one has come in between
        _watching.append(None)
        _watch()


def forget_after_fork() -> None:
    """Forgets, in a forked child, the parent's calls."""
    _waiting.clear()
    _watching.clear()
