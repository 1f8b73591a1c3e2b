"""What running programs and their host calls do, as one stream of typed events.

Whoever has something to tell emits an event; whoever wants to know subscribes. As long as nobody does, an event costs
the question whether somebody does, so those who emit ask before they make one:

    if events.listeners:
        events.emit(events.FragmentDispatched("step", 3, "fragment_0"))

The words of the fields: a *program* has a name and numbers its *executions*; it consists of *fragments*, which run on
the devices, and of *nodes* between them, which are host calls. A *call* has a number that is unique in the process, and
stands in a *stream*; it is queued once, started once, and finished or failed once, also if its caller runs it itself.
What started finishes, also if it failed, unless the event of a failure says so instead.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from partjit.checks import require_callable

__all__ = [
    "CallFailed",
    "CallFinished",
    "CallQueued",
    "CallStarted",
    "Event",
    "FragmentDispatched",
    "FragmentReady",
    "ProgramFailed",
    "ProgramFinished",
    "ProgramStarted",
    "Subscription",
    "TransferFinished",
    "TransferStarted",
    "WaitFinished",
    "WaitStarted",
    "emit",
    "listeners",
    "subscribe",
]

_logger = logging.getLogger("partjit.events")
_lock = threading.RLock()  # a finalizer that emits may come in between


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened.

    Attributes:
        time: when, in seconds of `time.perf_counter()`; now, unless stated.
        thread: in which thread, as `threading.get_ident()` gives it; in this one, unless stated.

    Example:
        >>> from partjit import events
        >>> events.FragmentReady("step", 3, "fragment_0", time=0.25, thread=1)
        FragmentReady(time=0.25, thread=1, program='step', execution=3, fragment='fragment_0')
    """

    time: float = field(default_factory=time.perf_counter)
    thread: int = field(default_factory=threading.get_ident)


@dataclass(frozen=True, slots=True)
class ProgramStarted(Event):
    """A program was called; its caller is the thread of this event.

    Example:
        >>> from partjit import events
        >>> events.ProgramStarted("step", 3).execution
        3
    """

    program: str
    execution: int


@dataclass(frozen=True, slots=True)
class ProgramFinished(Event):
    """The caller got the results of a program. Pending ones may still come.

    Example:
        >>> from partjit import events
        >>> events.ProgramFinished("step", 3).program
        'step'
    """

    program: str
    execution: int


@dataclass(frozen=True, slots=True)
class ProgramFailed(Event):
    """The caller of a program got an exception.

    Example:
        >>> from partjit import events
        >>> events.ProgramFailed("step", 3, "ValueError: no data").error
        'ValueError: no data'
    """

    program: str
    execution: int
    error: str


@dataclass(frozen=True, slots=True)
class FragmentDispatched(Event):
    """The devices were told to run a fragment, after what they were told before.

    Example:
        >>> from partjit import events
        >>> events.FragmentDispatched("step", 3, "fragment_0").fragment
        'fragment_0'
    """

    program: str
    execution: int
    fragment: str


@dataclass(frozen=True, slots=True)
class FragmentReady(Event):
    """The results of a fragment exist on the devices.

    Example:
        >>> from partjit import events
        >>> events.FragmentReady("step", 3, "fragment_0").fragment
        'fragment_0'
    """

    program: str
    execution: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallQueued(Event):
    """A host call was made, by the thread of this event. If that one runs it itself, its start comes right after this.

    Attributes:
        program: the program whose node it is, with the execution and the node; None for a call outside of programs.

    Example:
        >>> from partjit import events
        >>> events.CallQueued(7, "load", "io").program is None
        True
    """

    call: int
    name: str
    stream: str
    program: str | None = None
    execution: int | None = None
    node: str | None = None


@dataclass(frozen=True, slots=True)
class CallStarted(Event):
    """The function of a host call runs from here on, in the thread of this event.

    Example:
        >>> from partjit import events
        >>> events.CallStarted(7, "load", "io").stream
        'io'
    """

    call: int
    name: str
    stream: str


@dataclass(frozen=True, slots=True)
class CallFinished(Event):
    """The results of a host call are there.

    Example:
        >>> from partjit import events
        >>> events.CallFinished(7, "load", "io").call
        7
    """

    call: int
    name: str
    stream: str


@dataclass(frozen=True, slots=True)
class CallFailed(Event):
    """A host call raised something, or could not run.

    Example:
        >>> from partjit import events
        >>> events.CallFailed(7, "load", "io", "OSError: disk full").error
        'OSError: disk full'
    """

    call: int
    name: str
    stream: str
    error: str


@dataclass(frozen=True, slots=True)
class TransferStarted(Event):
    """The values that a node needs began to move between devices and host.

    Example:
        >>> from partjit import events
        >>> events.TransferStarted("step", 3, "log", 4096).nbytes
        4096
    """

    program: str
    execution: int
    node: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TransferFinished(Event):
    """The values that a node needs have arrived, or never will.

    Example:
        >>> from partjit import events
        >>> events.TransferFinished("step", 3, "log").node
        'log'
    """

    program: str
    execution: int
    node: str


@dataclass(frozen=True, slots=True)
class WaitStarted(Event):
    """The caller of a program waits for the result of a host call, because a fragment needs it.

    Example:
        >>> from partjit import events
        >>> events.WaitStarted("step", 3, "load").node
        'load'
    """

    program: str
    execution: int
    node: str


@dataclass(frozen=True, slots=True)
class WaitFinished(Event):
    """The caller of a program goes on, with the result it waited for or with the exception in its place.

    Example:
        >>> from partjit import events
        >>> events.WaitFinished("step", 3, "load").node
        'load'
    """

    program: str
    execution: int
    node: str


listeners: tuple[Callable[[Event], None], ...] = ()
"""Who wants to know. It is replaced, never changed, so that reading it takes no lock."""


def emit(event: Event) -> None:
    """Tells everybody who listens, in the thread of whom it happened in.

    Example:
        >>> from partjit import events
        >>> seen = []
        >>> with events.subscribe(seen.append):
        ...     events.emit(events.ProgramStarted("step", 0))
        >>> events.emit(events.ProgramFinished("step", 0))  # nobody listens any more
        >>> [type(event).__name__ for event in seen]
        ['ProgramStarted']
    """
    for listener in listeners:
        listener(event)


class Subscription(contextlib.AbstractContextManager["Subscription", None]):
    """What `subscribe` gives: it ends with `close()`, or at the end of its `with` block.

    Example:
        >>> from partjit import events
        >>> subscription = events.subscribe(print)
        >>> subscription.close()
        >>> subscription
        Subscription(<built-in function print>, closed)
    """

    def __init__(self, listener: Callable[[Event], None]) -> None:
        self._listener = listener
        self._is_open = False

    def __call__(self, event: Event) -> None:
        """Hands an event to the listener, and ends if that raises: a program does not fail because it is watched."""
        if not self._is_open:  # whoever emitted it may have looked at the listeners before this one went
            return
        try:
            self._listener(event)
        except Exception:
            if self._end():
                _logger.exception("the listener %r raised on %r; it is not told anything any more", self, event)

    def close(self) -> None:
        """Ends it; a second time does nothing. A listener that another thread is in at this moment is not waited for.

        Example:
            >>> from partjit import events
            >>> events.subscribe(print).close()
        """
        self._end()

    def __exit__(self, *_: object) -> None:
        self._end()

    def _begin(self) -> None:
        global listeners
        with _lock:
            self._is_open = True
            listeners = (*listeners, self)

    def _end(self) -> bool:
        """Whether it was this that ended it."""
        global listeners
        with _lock:
            was_open, self._is_open = self._is_open, False
            listeners = tuple(other for other in listeners if other is not self)
        return was_open

    def __repr__(self) -> str:
        return f"Subscription({self._listener!r}, {'open' if self._is_open else 'closed'})"


def subscribe(listener: Callable[[Event], None]) -> Subscription:
    """Calls a function with every event from now on, until the `with` block ends or the subscription is closed.

    The function is called by whoever emits, in any thread and in several at the same time, so it is to be quick. If it
    raises, this is logged and the function is not called again.

    Raises:
        TypeError: it cannot be called.

    Example:
        >>> from partjit import events
        >>> with events.subscribe(print):
        ...     events.emit(events.ProgramStarted("step", 0, time=1.5, thread=1))
        ProgramStarted(time=1.5, thread=1, program='step', execution=0)
    """
    require_callable("subscribe", "listener", listener, "a function of an event")
    subscription = Subscription(listener)
    subscription._begin()
    return subscription
