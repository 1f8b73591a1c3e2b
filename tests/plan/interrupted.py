"""Programs that the handler of a signal interrupts."""

import contextlib
import gc
import signal


class Interrupt(Exception):
    """What a signal handler raises."""


@contextlib.contextmanager
def interrupting(kind):
    """Has the handler of alarms raise an exception."""

    def interrupt(*_):
        raise kind

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # jax is called back by the collector, where an exception is lost
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()


def run_for_a_while(program, *args):
    """Runs a program until an alarm."""
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    program(*args)
