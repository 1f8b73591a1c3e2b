"""Waiting for what was started in a block, so that what listened to it has heard how it ended."""

import contextlib
from collections.abc import Iterator

from partjit.colocated.runtime.arrivals import settle
from partjit.colocated.runtime.call import roots_so_far
from partjit.colocated.runtime.streams import join
from partjit.plan.run.observe import wait_for_fragments

__all__ = ["completing"]


@contextlib.contextmanager
def completing(wait: bool) -> Iterator[None]:
    """Waits at the end of the block for the calls made in it, and for the programs run in it for listeners.

    Args:
        wait: False for a block that waits for nothing. What a block raises is raised at once in any case.

    Example:
        >>> with completing(wait=True):
        ...     pass  # call programs
    """
    since = roots_so_far()
    yield
    if wait:
        settle(None)
        join(None, since=since)
        wait_for_fragments()
