"""Where colocated functions and tests meet.

What a colocated function captures is copied, modules are not: so events and logs that both sides see live in a module.
Waiting for an event is bounded: what should happen and does not fails the test instead of stopping it.
"""

import collections
import threading

SECONDS = 5.0
_events = collections.defaultdict(threading.Event)
logs = collections.defaultdict(list)
barriers = {}
programs = {}


def clear():
    _events.clear()
    logs.clear()
    barriers.clear()
    programs.clear()


def say(name):
    """Makes an event happen."""
    _events[name].set()


def hear(name):
    """Waits for an event."""
    assert _events[name].wait(SECONDS), f"{name} did not happen"


def has_happened(name):
    return _events[name].is_set()


def meet(name, count):
    """Waits until `count` threads are here."""
    barriers.setdefault(name, threading.Barrier(count)).wait(SECONDS)
