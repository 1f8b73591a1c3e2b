"""Synchronization that an exception cannot break, wherever it is raised.

A signal handler runs in the main thread between any two bytecodes and may raise there: before the first line of a
`finally`, or in the middle of `Event.set`, which then holds its lock for ever. So Python code cannot guarantee cleanup.
C code can, because it is not interrupted: here C releases locks, wakes waiters and notices that a function has
returned.
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
    "BackgroundThread",
    "Exclusive",
    "Flag",
    "Presence",
    "deadline_of",
    "forget_after_fork",
    "is_interrupt",
    "is_running",
    "run_reporting",
    "stop",
]

_Result = TypeVar("_Result")


class Exclusive:
    """Mutual exclusion between threads, for short functions that neither wait nor raise.

    A context can be entered once at a time, and `Context.run` leaves it in C, so nothing remains locked.
    """

    __slots__ = ("_context", "_enter")

    def __init__(self) -> None:
        self._context = contextvars.Context()
        self._enter = functools.partial(self._context.run, self._inside)

    def run(
        self, function: Callable[..., _Result], *args: object, nested: Callable[..., _Result] | None = None
    ) -> _Result:
        """Calls a function when no other one runs; at once if this thread is in one, as a finalizer may be.

        Args:
            function, args: what to call.
            nested: called in its place if this thread is in one.
        """
        pause = 0.0
        while True:
            try:
                return self._enter(function, args)
            except RuntimeError as error:
                if not _is_of_c(error):
                    raise
            if is_running(Exclusive._inside, self):
                return (nested or function)(*args)
            time.sleep(pause)
            pause = min(pause + 1e-5, 1e-3)

    def attempt(self, results: list[_Result], function: Callable[..., _Result], *args: object) -> bool:
        """Calls a function of C if no other one runs; returns whether it was called.

        C calls it and adds what it returns to the list: if it is there, the function was called, wherever an interrupt
        came.
        """
        try:
            results.extend(map(self._context.run, (function,), *zip(args)))  # one call, each argument a tuple
        except RuntimeError as error:
            if not _is_of_c(error):
                raise
            return False
        return True

    def is_owned(self) -> bool:
        """Whether this thread is in one of the functions."""
        try:
            self._context.run(int)
        except RuntimeError as error:
            if not _is_of_c(error):
                raise
            return is_running(Exclusive._inside, self)
        return False

    def _inside(self, function: Callable[..., _Result], args: tuple[object, ...]) -> _Result:
        return function(*args)


def is_running(method: types.FunctionType, of: object) -> bool:
    """Whether this thread is in a method of an object, as a signal handler or a finalizer of it may be.

    Args:
        method: as a function of its class, whose first parameter is `self`.
        of: the object.
    """
    code = method.__code__
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code and frame.f_locals["self"] is of:
            return True
        frame = frame.f_back
    return False


def _is_of_c(error: RuntimeError) -> bool:
    """Whether the C function called here raised, rather than code run by it or a signal handler."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


class Flag:
    """An event that is set once. Every waiter has its own lock, so an interrupted one cannot leave another's held.

    Attributes:
        is_set: whether it has been set.
    """

    __slots__ = ("_waiting", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiting: list[_thread.LockType] = []

    def set(self) -> None:
        """Sets it and wakes all waiters; to be repeated after an interrupt."""
        self.is_set = True
        if not self._waiting:
            return
        for lock in [*self._waiting]:
            try:
                if lock.locked():
                    lock.release()
            except RuntimeError as error:  # released in between
                if not _is_of_c(error):
                    raise

    def wait(self, deadline: float | None = None) -> bool:
        """Waits until it is set; returns whether it was by the deadline, in seconds of `time.monotonic`."""
        lock = _thread.allocate_lock()
        lock.acquire()
        self._waiting.append(lock)
        try:
            while not self.is_set:  # read after the lock is visible: a later `set` releases it
                if deadline is None:
                    lock.acquire()
                    continue
                seconds = deadline - time.monotonic()
                if seconds <= 0:
                    break
                lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))
        finally:
            self._waiting.remove(lock)
        return self.is_set


class Presence:
    """Whether a function is running. Its end is noticed however it ends, and cleaned up after.

    An object that is being called and that only the interpreter's stack refers to is freed when the call ends, which
    clears its weak reference; C code does both.
    """

    _reference: weakref.ref[Any] | None = None

    @property
    def is_on(self) -> bool:
        """Whether the function is running, or about to run."""
        reference = self._reference
        return reference is not None and reference() is not None

    def of(
        self, function: Callable[..., _Result], *args: object, otherwise: Callable[[], None] | None = None
    ) -> Callable[[], _Result]:
        """The call of a function, to be called at once and not referred to by anything else.

        Args:
            function, args: what to call.
            otherwise: the cleanup that another thread runs soon after it ends, unless it has called `leave`.
        """
        call = functools.partial(function, *args)
        report: Any = None
        if otherwise is not None:
            if not _cleaner.is_started:
                _cleaner.start()
            report = functools.partial(_cleaner.left.put, otherwise)  # `put` takes the reference for `block`
        self._reference = weakref.ref(call, report)
        return call

    def leave(self) -> None:
        """Declares that the function is complete and needs no cleanup."""
        self._reference = None


class BackgroundThread:
    """A thread for jobs that must not run where they come up, one after another. No signal is handled there.

    Attributes:
        is_started: whether the thread was started.
        left: its queue, of a kind whose `put` is reentrant.
    """

    def __init__(self, start_thread: Callable[[Callable[[], None]], object]) -> None:
        self.left: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.is_started = False
        self._start_thread = start_thread
        self._only = _thread.allocate_lock()
        self._has_ended = Flag()
        self._ident: int | None = None

    def is_current(self) -> bool:
        """Whether this is the thread."""
        return _thread.get_ident() == self._ident

    def start(self) -> None:
        """Starts the thread unless it was started; if the system has no more threads, the next call tries again."""
        if not self.is_started:
            try:
                self._start_thread(self._work)
            except RuntimeError as error:
                if is_interrupt(error):
                    raise
                return
            self.is_started = True

    def stop(self, deadline: float) -> None:
        """Ends the thread, and waits for its end until the deadline."""
        if self.is_started:
            self.left.put(None)
            self._has_ended.wait(deadline)

    def _work(self) -> None:
        if not self._only.acquire(blocking=False):  # two threads called `start`
            return
        self._ident = _thread.get_ident()
        while (job := self.left.get()) is not None:
            run_reporting(job)
            del job
        self._has_ended.set()


def run_reporting(job: Callable[[], None]) -> None:
    """Runs a job that has no caller to raise to and must not end its thread."""
    try:
        job()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)


def _new_cleaner() -> BackgroundThread:
    return BackgroundThread(lambda work: _thread.start_new_thread(work, ()))


_cleaner = _new_cleaner()


def stop(deadline: float) -> None:
    """Ends the cleanup thread, at exit."""
    _cleaner.stop(deadline)


def forget_after_fork() -> None:
    """Starts anew in a forked child, which has none of its parent's threads."""
    global _cleaner
    _cleaner = _new_cleaner()


def is_interrupt(error: BaseException) -> bool:
    """Whether a signal handler raised this, rather than the code that it interrupted."""
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


def _code_of(handler: object) -> types.CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not isinstance(handler, types.FunctionType | types.MethodType):
        # Its code is needed, not whether it is callable.
        handler = getattr(type(handler), "__call__", None)  # noqa: B004
    return getattr(getattr(handler, "__func__", handler), "__code__", None)


def deadline_of(timeout: float | None) -> float | None:
    """The end of a timeout, in seconds of `time.monotonic`; None if there is none."""
    if timeout is None or timeout > threading.TIMEOUT_MAX:  # some integers are too large for a float
        return None
    return time.monotonic() + timeout
