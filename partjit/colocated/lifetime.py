"""The end of the process, and its doubling: what becomes of calls that have not ended."""

import atexit
import os
import sys

from partjit.colocated import calls, failures, workers
from partjit.colocated.object import destroy_all
from partjit.colocated.streams import join

__all__ = ["watch"]

_EXIT_SECONDS = 60.0
_STOP_SECONDS = 1.0


def watch() -> None:
    """Has the calls finished at exit, and told of after a fork."""
    atexit.register(_finish)
    os.register_at_fork(after_in_child=calls.forget_after_fork)


def _finish() -> None:
    """Waits for calls under way, not for ever; then tells which did not end, and which failed with nobody looking."""
    text = os.environ.get("PARTJIT_EXIT_TIMEOUT", "")
    try:
        timeout = float(text or _EXIT_SECONDS)
    except ValueError:
        print(f"partjit: PARTJIT_EXIT_TIMEOUT must be a number of seconds, but is {text!r}", file=sys.stderr)
        timeout = _EXIT_SECONDS
    workers.close()
    try:
        join(None, timeout)
    except TimeoutError as error:
        print(
            f"partjit: the process ends before its colocated calls: {error}. They are abandoned; "
            "PARTJIT_EXIT_TIMEOUT sets how many seconds to wait for them",
            file=sys.stderr,
        )
    destroy_all()
    workers.stop(_STOP_SECONDS)
    failures.report_unseen()
