"""Exit and fork of the process, and what they mean for calls that have not ended."""

import atexit
import os
import sys

from partjit.colocated.isolation import functions, process
from partjit.colocated.runtime import arrivals, brief, failures, interrupts, lanes, soon, streams, threads
from partjit.colocated.runtime.call import current_calls
from partjit.colocated.runtime.instances import destroy_all
from partjit.colocated.runtime.interrupts import deadline_of
from partjit.colocated.runtime.timeouts import seconds_of

__all__ = ["watch"]

_EXIT_SECONDS = 60.0
_STOP_SECONDS = 1.0


def watch() -> None:
    """Registers what happens to calls at exit and after a fork."""
    atexit.register(_finish)
    os.register_at_fork(after_in_child=_forget_after_fork)


def _forget_after_fork() -> None:
    """Fails all calls of the parent in a forked child, where they would never end."""
    for module in (streams, interrupts, threads, soon, brief):
        module.forget_after_fork()
    for call in lanes.forget_after_fork():
        if call not in current_calls():
            call.fail(RuntimeError("the process was forked: colocated calls go on in the parent only"))
            call.set()
    functions.forget_after_fork()
    process.forget_after_fork()


def _finish() -> None:
    """Waits for calls in flight, not for ever; then reports those that did not end, and failures nobody has seen."""
    timeout = _exit_timeout()
    deadline = deadline_of(timeout)
    try:
        arrivals.settle(deadline)  # before the thread for that does other things
        threads.close()
        unfinished = streams.join(None, deadline)
        if unfinished:
            which = streams.still_there(unfinished, timeout)
            print(
                f"partjit: the process ends before its colocated calls: {which}. They are abandoned; "
                "PARTJIT_EXIT_TIMEOUT sets how many seconds to wait for them",
                file=sys.stderr,
            )
    finally:  # after an interrupt too: no thread should be inside jax when the interpreter finalizes
        destroy_all()
        process.end_all()
        threads.stop(_STOP_SECONDS)
        failures.report_unseen()


def _exit_timeout() -> float:
    try:
        return seconds_of("PARTJIT_EXIT_TIMEOUT", _EXIT_SECONDS)
    except ValueError as error:  # which nobody could catch at exit
        print(f"partjit: {error}", file=sys.stderr)
        return _EXIT_SECONDS
