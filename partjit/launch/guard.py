"""A program that outlives the launcher: if it dies, even by SIGKILL, this ends the processes that it leaves behind.

    python guard.py GRACE

reads lines from its standard input: `+PGID` for a process group that has been started, `-PGID` for one that has ended.
At the end of the input it sends SIGTERM to the groups that are left, and SIGKILL after `GRACE` seconds. It is in a
session of its own, where no Ctrl-C reaches it.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable

__all__ = ["POLL", "end_groups", "signal_group"]

POLL = 0.02
"""Seconds between two looks at whether a group has ended, for nobody but the parent of a process can wait for it."""


def signal_group(group: int, number: int) -> bool:
    """Sends a signal to a process group; False if nobody is in it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # the latter on macOS, where only a zombie is left
        return False
    return True


def end_groups(groups: Iterable[int], grace: float) -> None:
    """Ends process groups: SIGTERM, and SIGKILL after the grace, in seconds, for what is left."""
    left = {group for group in groups if signal_group(group, signal.SIGTERM)}
    deadline = time.monotonic() + grace
    while left and time.monotonic() < deadline:
        time.sleep(POLL)
        left = {group for group in left if signal_group(group, 0)}
    for group in left:
        signal_group(group, signal.SIGKILL)


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line.startswith("+") else groups.discard)(int(line[1:]))
    end_groups(groups, float(sys.argv[1]))


if __name__ == "__main__":
    _main()
