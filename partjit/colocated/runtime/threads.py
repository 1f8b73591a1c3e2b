"""The threads that run colocated calls, and those for jobs of finalizers."""

import _thread
import collections
import contextlib
import functools
import queue
import sys
import threading
import time
from collections.abc import Callable

from partjit.colocated.runtime import interrupts
from partjit.colocated.runtime.interrupts import BackgroundThread, Exclusive, run_reporting

__all__ = [
    "close",
    "forget_after_fork",
    "has_no_threads",
    "is_for_deferred",
    "is_one_of_them",
    "may_have_no_more",
    "run_deferred",
    "run_later",
    "run_later_on_few",
    "start",
    "start_deferred",
    "stop",
]

_IDLE_SECONDS = 10.0
"""How long an idle thread is kept: starting one costs more than waking one."""
_FEW = 8
"""How many threads destroy objects at a time: thousands may be dropped at once, and some may take long."""


class _Pool:
    """A pool with a thread for every job in progress: jobs may wait for each other, so its size has no limit."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = 0  # at most the number of waiting threads less the jobs queued for them
        self._threads: set[threading.Thread] = set()
        self.is_closing = False
        self.is_refused = False
        self._changes = Exclusive()

    def start(self, job: Callable[[], None]) -> None:
        if self._changes.run(self._hand_to_idle, job):
            return
        try:
            _start_thread(functools.partial(self.work, job), "partjit colocated")
        except RuntimeError as error:
            if threading.main_thread().is_alive() or interrupts.is_interrupt(error):
                raise
            self.is_refused = True
            job()

    def stop(self, deadline: float) -> None:
        for _ in [*self._threads]:
            self._jobs.put(None)
        while self._threads and time.monotonic() < deadline:
            time.sleep(0.001)

    def work(self, job: Callable[[], None] | None) -> None:
        self._threads.add(threading.current_thread())
        try:
            while job is not None:
                run_reporting(job)
                job = None
                job = self._next()
        finally:
            self._threads.discard(threading.current_thread())

    def _next(self) -> Callable[[], None] | None:
        try:
            self._changes.run(self._rest)
            return self._jobs.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            return self._changes.run(self._retire)
        except BaseException:  # thrown into this thread from outside: a job may count on it
            job = self._changes.run(self._retire)
            if job is not None:
                self.start(job)
            raise

    def _hand_to_idle(self, job: Callable[[], None]) -> bool:
        if self._idle <= 0 and not self.is_closing:
            return False
        self._idle -= 1  # before the job is visible: a thread too many is better than one too few
        self._jobs.put(job)
        return True

    def _rest(self) -> None:
        self._idle += 1

    def _retire(self) -> Callable[[], None] | None:
        try:
            return self._jobs.get_nowait()
        except queue.Empty:
            self._idle = max(self._idle - 1, 0)
            return None


class _Few:
    """Jobs that a few threads of the pool run."""

    def __init__(self) -> None:
        self._jobs: collections.deque[Callable[[], None]] = collections.deque()
        self._running: list[None] = []  # an element for each thread; to append and to pop one are atomic

    def start(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        self._start_thread()

    def _start_thread(self) -> None:
        if not self._jobs or len(self._running) >= _FEW:
            return
        self._running.append(None)
        try:
            start(self._work)
        except BaseException:
            self._running.pop()
            raise

    def _work(self) -> None:
        try:
            with contextlib.suppress(IndexError):  # another thread took the last one
                while True:
                    run_reporting(self._jobs.popleft())
        finally:
            self._running.pop()
        self._start_thread()  # for what came after the last look


def _start_thread(work: Callable[[], None], name: str) -> None:
    """Starts a thread.

    `Thread.start` waits for the new thread, and interrupting that wait may block the thread for ever. So another thread
    calls it, in which no signals are handled.

    Raises:
        RuntimeError: the system has no more threads.
    """
    _thread.start_new_thread(_start_and_work, (work, name))


def _start_and_work(work: Callable[[], None], name: str) -> None:
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError:  # there is this thread, but no other
        work()


def _new_deferred() -> BackgroundThread:
    """For jobs of finalizers, which run anywhere, under any lock, and so must not do much themselves."""
    return BackgroundThread(lambda work: _start_thread(work, "partjit finalizers"))


_pool = _Pool()
_deferred = _new_deferred()
_few = _Few()


def start(job: Callable[[], None]) -> None:
    """Runs a job on a thread of its own; here, if the main thread has returned and no thread can be started.

    Raises:
        RuntimeError: the system has no more threads.
    """
    _pool.start(job)


def has_no_threads() -> bool:
    """Whether jobs run where they are started, because no thread can be."""
    return _pool.is_refused


def may_have_no_more() -> bool:
    """Whether a job that is started may have to run here: since Python 3.12 so after the main thread has returned."""
    return sys.version_info >= (3, 12) and not threading.main_thread().is_alive()


def is_one_of_them() -> bool:
    """Whether the current thread is one of those that run calls."""
    return threading.current_thread() in _pool._threads


def is_for_deferred() -> bool:
    """Whether the current thread is the one for `run_later`."""
    return _deferred.is_current()


def start_deferred() -> None:
    """Starts the thread for `run_later`; to be called where threads may be started."""
    if not _deferred.is_started:
        _deferred.start()


def run_deferred() -> None:
    """Runs the jobs of `run_later` here, if no thread can be started for them."""
    if not _deferred.is_started and may_have_no_more():
        _run_left()


def _run_left() -> None:
    while not _deferred.left.empty():
        job = _deferred.left.get()
        if job is not None:
            run_reporting(job)


def run_later(job: Callable[[], None]) -> None:
    """Runs a job on another thread, soon; finalizers may call this."""
    _deferred.left.put(job)


def run_later_on_few(job: Callable[[], None]) -> None:
    """As `run_later`, for jobs that may take long, and of which there may be many at a time."""
    run_later(functools.partial(_few.start, job))


def close() -> None:
    """Prepares for exit, when Python starts no more threads: the one for finalizers helps to run calls."""
    if not _deferred.is_started:
        _run_left()
    elif not _pool.is_closing:
        _pool.is_closing = True
        _deferred.left.put(lambda: _pool.work(lambda: None))


def stop(seconds: float) -> None:
    """Ends the idle threads, at exit: a thread that is inside jax when the interpreter finalizes may crash.

    Args:
        seconds: how long to wait for them.
    """
    deadline = time.monotonic() + seconds
    _pool.stop(deadline)
    _deferred.stop(deadline)
    interrupts.stop(deadline)


def forget_after_fork() -> None:
    """Starts anew in a forked child, which has none of its parent's threads."""
    global _pool, _deferred, _few
    _pool, _deferred, _few = _Pool(), _new_deferred(), _Few()
