"""Waiting for what may never be there, because another process is gone that has to do its part."""

import time
from collections.abc import Callable

__all__ = ["LAST_SECONDS", "LOOK_SECONDS", "gone_within", "wait_or_gone"]

LAST_SECONDS = 1.0
"""What is waited for once a process is gone: devices may have its part already, or find out by themselves."""
_SHORTEST_SECONDS, _GROWTH, _LONGEST_SECONDS = 5e-5, 1.25, 1e-3
"""Between two looks at what devices compute: a short wait becomes a quarter longer at most."""
LOOK_SECONDS = 0.05
"""Between two looks at the others, where something else can be waited for meanwhile."""

Gone = Callable[[], str | None]
"""Says which process is gone, if any."""


def wait_or_gone(is_there: Callable[[], bool], gone: Gone) -> str | None:
    """Waits for something; returns None when it is there, or which process is gone, so that it will not be.

    Example:
        >>> wait_or_gone(lambda: True, lambda: None)
        >>> wait_or_gone(lambda: False, lambda: "process 1: it has ended")
        'process 1: it has ended'
    """
    seconds = _SHORTEST_SECONDS
    while not is_there():
        if gone() is not None:
            deadline = time.monotonic() + LAST_SECONDS
            while not is_there():
                if time.monotonic() > deadline:
                    return gone()
                time.sleep(_LONGEST_SECONDS)
            return None
        time.sleep(seconds)
        seconds = min(_GROWTH * seconds, _LONGEST_SECONDS)
    return None


def gone_within(gone: Gone, seconds: float = LAST_SECONDS) -> str | None:
    """Which process is gone, now or so many seconds later: devices may know of it first.

    Example:
        >>> gone_within(lambda: None, seconds=0.0)
    """
    deadline = time.monotonic() + seconds
    while (found := gone()) is None and time.monotonic() < deadline:
        time.sleep(_LONGEST_SECONDS)
    return found
