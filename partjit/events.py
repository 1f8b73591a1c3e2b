"""What running programs and their colocated calls do, as one stream of typed events.

Code that does something worth observing emits an event; a listener subscribes. While there are no listeners, an event
costs one look at a tuple, so code asks before it makes one:

    if events.listeners:
        events.emit(events.FragmentDispatched("step", 3, "fragment_0"))

The words of the fields: a *program* has a name and numbers its *executions*; it consists of *fragments*, which run on
the devices, and of *nodes* between them, which are colocated calls and transfers. A *call* has a number that is unique
in the process, and belongs to a *stream*; it is queued once, started once, and finished or failed once, also if its
caller runs it itself. What started finishes, also if it failed, unless there is an event for its failure.
"""

import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from partjit import short_cuts
from partjit.checks import require_callable, wrong_type

__all__ = [
    "CallFailed",
    "CallFinished",
    "CallQueued",
    "CallStarted",
    "Event",
    "FragmentDispatched",
    "FragmentFailed",
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
    "span",
    "subscribe",
]

_logger = logging.getLogger("partjit.events")
_lock = threading.RLock()  # a finalizer that emits may come in between


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened.

    Attributes:
        time: when, in seconds of `time.perf_counter()`; now by default.
        thread: in which thread, as `threading.get_ident()` gives it; the current one by default.

    Example:
        >>> from partjit import events
        >>> events.FragmentReady("step", 3, "fragment_0", time=0.25, thread=1)
        FragmentReady(time=0.25, thread=1, program='step', execution=3, fragment='fragment_0')
    """

    time: float = field(default_factory=time.perf_counter)
    thread: int = field(default_factory=threading.get_ident)


@dataclass(frozen=True, slots=True)
class _OfExecution(Event):
    program: str
    execution: int


@dataclass(frozen=True, slots=True)
class _OfFragment(_OfExecution):
    fragment: str


@dataclass(frozen=True, slots=True)
class _OfNode(_OfExecution):
    node: str


@dataclass(frozen=True, slots=True)
class _OfCall(Event):
    call: int
    name: str
    stream: str


@dataclass(frozen=True, slots=True)
class ProgramStarted(_OfExecution):
    """A program was called; its caller is the thread of this event."""


@dataclass(frozen=True, slots=True)
class ProgramFinished(_OfExecution):
    """The caller got the results of a program, of which some may still be pending."""


@dataclass(frozen=True, slots=True)
class ProgramFailed(_OfExecution):
    """The caller of a program got an exception.

    Attributes:
        error: its type and message, as the last line of a traceback has them.
    """

    error: str


@dataclass(frozen=True, slots=True)
class FragmentDispatched(_OfFragment):
    """A fragment is enqueued on the devices, which run it after what was enqueued before.

    Attributes:
        processes: the processes whose devices run it, if they are several: it may begin when the last of them is here.
    """

    processes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FragmentReady(_OfFragment):
    """The results of a fragment exist on the devices."""


@dataclass(frozen=True, slots=True)
class FragmentFailed(_OfFragment):
    """A fragment has no results: dispatching it raised, as where another process does not come to it.

    Attributes:
        error: the type and message, as the last line of a traceback has them.
    """

    error: str


@dataclass(frozen=True, slots=True)
class CallQueued(_OfCall):
    """A colocated call was made, by the thread of this event; if that thread runs it itself, `CallStarted` is next.

    Attributes:
        program: the program whose node it is, with the execution and the node; None for a call outside of programs.
    """

    program: str | None = None
    execution: int | None = None
    node: str | None = None


@dataclass(frozen=True, slots=True)
class CallStarted(_OfCall):
    """The function of a colocated call begins to run, in the thread of this event."""


@dataclass(frozen=True, slots=True)
class CallFinished(_OfCall):
    """The results of a colocated call exist."""


@dataclass(frozen=True, slots=True)
class CallFailed(_OfCall):
    """A colocated call raised an exception, or could not run.

    Attributes:
        error: the type and message of the exception, as the last line of a traceback has them.
    """

    error: str


@dataclass(frozen=True, slots=True)
class TransferStarted(_OfNode):
    """The values that a node needs began to move between devices and host."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class TransferFinished(_OfNode):
    """The values that a node needs have arrived, or never will."""


@dataclass(frozen=True, slots=True)
class WaitStarted(_OfNode):
    """The caller of a program waits for the result of a colocated call, because a fragment needs it."""


@dataclass(frozen=True, slots=True)
class WaitFinished(_OfNode):
    """The caller of a program goes on, with the result it waited for or with the exception in its place."""


listeners: tuple[Callable[[Event], None], ...] = ()
"""The open subscriptions. The tuple is replaced, never changed, so that reading it takes no lock."""


def emit(event: Event) -> None:
    """Calls every listener with an event, in the current thread.

    Example:
        >>> from partjit import events
        >>> seen = []
        >>> with events.subscribe(seen.append):
        ...     events.emit(events.ProgramStarted("step", 0))
        >>> events.emit(events.ProgramFinished("step", 0))  # the subscription has ended
        >>> [type(event).__name__ for event in seen]
        ['ProgramStarted']
    """
    for listener in listeners:
        listener(event)


_ENDS: Mapping[type[Event], tuple[type[Event], type[Event]]] = {
    ProgramStarted: (ProgramFinished, ProgramFailed),
    CallStarted: (CallFinished, CallFailed),
    TransferStarted: (TransferFinished, TransferFinished),
    WaitStarted: (WaitFinished, WaitFinished),
}
"""What ends, and what ends with an exception, what has started."""


@contextlib.contextmanager
def span(started: Event) -> Iterator[None]:
    """Emits the events of a block: `started` before it, and that it finished, or failed, after it.

    Args:
        started: a `ProgramStarted`, `CallStarted`, `TransferStarted` or `WaitStarted`.

    Raises:
        TypeError: when it is entered: `started` is none of these.

    Example:
        >>> from partjit import events
        >>> seen = []
        >>> with events.subscribe(seen.append), events.span(events.WaitStarted("step", 3, "load")):
        ...     pass
        >>> [(type(event).__name__, event.node) for event in seen]
        [('WaitStarted', 'load'), ('WaitFinished', 'load')]
    """
    if type(started) not in _ENDS:
        raise wrong_type("span", "started", started, "an event that something has started, as a ProgramStarted")
    finished, failed = _ENDS[type(started)]
    emit(started)
    try:
        yield
    except BaseException as error:
        emit(_end(failed, started, error))
        raise
    emit(_end(finished, started))


def _end(end: type[Event], started: Event, error: BaseException | None = None) -> Event:
    known: dict[str, Any] = {each.name: getattr(started, each.name, None) for each in fields(end) if not each.kw_only}
    if "error" in known and error is not None:
        known["error"] = traceback.format_exception_only(error)[0].strip()
    return end(**known)


class Subscription(contextlib.AbstractContextManager["Subscription", None]):
    """What `subscribe` returns: it ends with `close()`, or at the end of its `with` block.

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
        """Passes an event to the listener, and ends if that raises: a program does not fail because it is observed."""
        if not self._is_open:  # it may have been emitted with a tuple of listeners from before the end
            return
        try:
            self._listener(event)
        except Exception:
            if self._end():
                _logger.exception("the listener %r raised on %r; it is not called any more", self, event)

    def close(self) -> None:
        """Ends it; a second time does nothing. A listener that runs in another thread at this moment is not waited for.

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
        short_cuts.close()

    def _end(self) -> bool:
        """Whether it was open until now."""
        global listeners
        with _lock:
            was_open, self._is_open = self._is_open, False
            listeners = tuple(other for other in listeners if other is not self)
        if not listeners:
            short_cuts.allow()
        return was_open

    def __repr__(self) -> str:
        return f"Subscription({self._listener!r}, {'open' if self._is_open else 'closed'})"


def subscribe(listener: Callable[[Event], None]) -> Subscription:
    """Calls a function with every event, until the `with` block ends or the subscription is closed.

    The function is called by the code that emits, in any thread and in several at the same time, so it should be quick.
    If it raises, this is logged and the function is not called again.

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
