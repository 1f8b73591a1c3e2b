"""What an exception cannot break, wherever it is raised.

The handler of a signal runs in the main thread between two bytecodes, whichever they are, and may raise there: before
the first line of a `finally` as well as in the middle of `Event.set`, which then keeps a lock for ever. Python code can
therefore not promise to undo what it did. C code can, because it runs to its end: here it is C that releases a lock,
wakes those who wait, and notices that a function is over.
"""

import _thread
import contextvars
import functools
import queue
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = [
    "Errands",
    "Exclusive",
    "Flag",
    "Presence",
    "deadline_of",
    "forget_after_fork",
    "is_interrupt",
    "run_reporting",
    "stop",
]

_Result = TypeVar("_Result")


class Exclusive:
    """Functions of which one runs at a time, over all threads; meant for a few lines that neither wait nor raise.

    A context can be entered once at a time, and `Context.run` leaves it again in C, so that nothing is left locked.
    """

    __slots__ = ("_context",)

    def __init__(self) -> None:
        self._context = contextvars.Context()

    def run(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Calls a function when no other one runs; at once where this thread is in one, as a finalizer may be."""
        pause = 0.0
        while True:
            try:
                return self._context.run(self._inside, function, args)
            except RuntimeError as error:
                if not _is_of_c(error):
                    raise
            if self._is_around():
                return function(*args)
            time.sleep(pause)
            pause = min(pause + 1e-5, 1e-3)

    def is_owned(self) -> bool:
        """Whether this thread is in one of the functions."""
        try:
            self._context.run(int)
        except RuntimeError as error:
            if not _is_of_c(error):
                raise
            return self._is_around()
        return False

    def _inside(self, function: Callable[..., _Result], args: tuple[Any, ...]) -> _Result:
        return function(*args)

    def _is_around(self) -> bool:
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is Exclusive._inside.__code__ and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back
        return False


def _is_of_c(error: RuntimeError) -> bool:
    """Whether a C function that was called here has raised, rather than what ran inside of it or came in between."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


class Flag:
    """What happens once. Each who waits has a lock of its own, so that nobody who is interrupted takes another's.

    Attributes:
        is_set: whether it has happened.
    """

    __slots__ = ("_waiting", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiting: list[Any] = []

    def set(self) -> None:
        """Lets it happen, and lets all go on who wait; may be done again, which an interrupted one needs."""
        self.is_set = True
        for lock in [*self._waiting]:
            try:
                lock.release()
            except RuntimeError as error:  # it was released before
                if not _is_of_c(error):
                    raise

    def wait(self, deadline: float | None = None) -> bool:
        """Waits until it has happened; whether it has, by the deadline, in seconds of `time.monotonic`."""
        lock = _thread.allocate_lock()
        lock.acquire()
        self._waiting.append(lock)
        try:
            while not self.is_set:  # looked at after the lock can be seen: whoever sets it later releases the lock
                seconds = threading.TIMEOUT_MAX if deadline is None else deadline - time.monotonic()
                if seconds <= 0:
                    break
                lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))
        finally:
            self._waiting.remove(lock)
        return self.is_set


class Presence:
    """Whether a function is running. That it is over is noticed however it ends, and done about it what is to be done.

    An object that only the interpreter's stack refers to, because it is being called, goes when the call is over, and
    takes its weak reference with it: C code does both.
    """

    __slots__ = ("_reference",)

    def __init__(self) -> None:
        self._reference: weakref.ref[Any] | None = None

    @property
    def is_on(self) -> bool:
        """Whether the function runs, or is about to."""
        reference = self._reference
        return reference is not None and reference() is not None

    def of(
        self, function: Callable[..., _Result], *args: Any, otherwise: Callable[[], None] | None = None
    ) -> Callable[[], _Result]:
        """The call of a function; to be called at once, and referred to by nothing else.

        Args:
            function, args: what is to be called.
            otherwise: what another thread does soon after it is over, unless it has called `leave`.
        """
        call = functools.partial(function, *args)
        report: Any = None
        if otherwise is not None:
            _cleaner.start()
            report = functools.partial(_cleaner.left.put, otherwise)  # its second argument, the reference, is ignored
        self._reference = weakref.ref(call, report)
        return call

    def leave(self) -> None:
        """Says that the function has done all there was to do."""
        self._reference = None


class Errands:
    """A thread that does, one after another, what must not be done where it comes up. No signal is handled there.

    Attributes:
        is_started: whether there is such a thread.
        left: what it has still to do; `put` may interrupt itself.
    """

    def __init__(self, start_thread: Callable[[Callable[[], None]], Any]) -> None:
        self.left: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.is_started = False
        self._start_thread = start_thread
        self._only = _thread.allocate_lock()
        self._has_ended = Flag()

    def start(self) -> None:
        """Starts the thread; where there are no more threads, the next call tries again."""
        if not self.is_started:
            try:
                self._start_thread(self._work)
            except RuntimeError as error:
                if is_interrupt(error):
                    raise
                return
            self.is_started = True

    def stop(self, deadline: float) -> None:
        """Ends the thread, and waits for that until the deadline."""
        if self.is_started:
            self.left.put(None)
            self._has_ended.wait(deadline)

    def _work(self) -> None:
        if not self._only.acquire(blocking=False):  # two threads started it
            return
        while (errand := self.left.get()) is not None:
            run_reporting(errand)
            del errand
        self._has_ended.set()


def run_reporting(job: Callable[[], None]) -> None:
    """Runs what has no caller to raise to, and is not the last of its thread."""
    try:
        job()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)


def _new_cleaner() -> Errands:
    return Errands(lambda work: _thread.start_new_thread(work, ()))


_cleaner = _new_cleaner()


def stop(deadline: float) -> None:
    """At exit, ends the thread that does what was left undone."""
    _cleaner.stop(deadline)


def forget_after_fork() -> None:
    """The child of a fork has none of its parent's threads."""
    global _cleaner
    _cleaner = _new_cleaner()


def is_interrupt(error: BaseException) -> bool:
    """Whether the handler of a signal raised this, rather than the code that it came in between."""
    if threading.get_ident() != threading.main_thread().ident:
        return False
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    tb = error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code in handlers:
            return True
        tb = tb.tb_next
    return False


def _code_of(handler: Any) -> types.CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not isinstance(handler, types.FunctionType | types.MethodType):
        # Its code is wanted, not whether it can be called.
        handler = getattr(type(handler), "__call__", None)  # noqa: B004
    return getattr(getattr(handler, "__func__", handler), "__code__", None)


def deadline_of(timeout: float | None) -> float | None:
    """When so many seconds are over, in seconds of `time.monotonic`; None if they never are."""
    if timeout is None or timeout > threading.TIMEOUT_MAX:  # some whole numbers are too large for a float
        return None
    return time.monotonic() + timeout
