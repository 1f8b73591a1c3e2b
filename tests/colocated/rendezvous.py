"""Where colocated functions and tests meet.

What a colocated function captures is copied, modules are not: so events and logs that both sides see live in a module.
Waiting for an event is bounded: what should happen and does not fails the test instead of stopping it.
"""

import collections
import threading

SECONDS = 20.0
_events = {}
logs = collections.defaultdict(list)
barriers = {}
programs = {}


def clear():
    _events.clear()
    logs.clear()
    barriers.clear()
    programs.clear()


def _event(name):
    # A defaultdict makes two where two threads are the first to ask for it: an event is made by Python.
    return _events.setdefault(name, threading.Event())


def say(name):
    """Makes an event happen."""
    _event(name).set()


def hear(name):
    """Waits for an event."""
    assert _event(name).wait(SECONDS), f"{name} did not happen"


def has_happened(name):
    return _event(name).is_set()


def meet(name, count):
    """Waits until `count` threads are here."""
    barriers.setdefault(name, threading.Barrier(count)).wait(SECONDS)
