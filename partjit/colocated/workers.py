"""The threads that run colocated calls, and one for what must not run where it comes up."""

import queue
import sys
import threading
import time
from collections.abc import Callable

__all__ = ["close", "forget_after_fork", "run_later", "start", "start_deferred", "stop"]

_IDLE_SECONDS = 10.0
"""How long a thread without work stays: starting one costs more than waking one."""


class _Pool:
    """As many threads as there are jobs that run at once: a job may wait for another, so there is no limit."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = 0  # threads that wait for a job, less the jobs that are on their way to one
        self._threads: set[threading.Thread] = set()
        self.is_closing = False
        self._lock = threading.RLock()  # a finalizer that starts a job may come in between

    def start(self, job: Callable[[], None]) -> None:
        with self._lock:
            has_idle = self._idle > 0
            if has_idle or self.is_closing:
                self._idle -= 1
        if has_idle or self.is_closing:  # then no thread can be started any more: whoever gets free does it
            self._jobs.put(job)
        else:
            threading.Thread(target=self.work, args=(job,), name="partjit colocated", daemon=True).start()

    def stop(self, deadline: float) -> None:
        for _ in [*self._threads]:
            self._jobs.put(None)
        while self._threads and time.monotonic() < deadline:
            time.sleep(0.001)

    def work(self, job: Callable[[], None] | None) -> None:
        self._threads.add(threading.current_thread())
        try:
            while job is not None:
                _run(job)
                job = None
                with self._lock:
                    self._idle += 1
                job = self._next()
        finally:
            self._threads.discard(threading.current_thread())

    def _next(self) -> Callable[[], None] | None:
        try:
            return self._jobs.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            with self._lock:
                if self._idle > 0:
                    self._idle -= 1
                    return None
            return self._jobs.get()  # one is on its way here


class _Deferred:
    """A thread for what finalizers want done: they run anywhere, under any lock, and must not do it themselves."""

    def __init__(self) -> None:
        # Of a kind whose put() may interrupt another one.
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="partjit finalizers", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads, or not at exit: what is left is done then, or told
                    return
                self._thread = thread

    def run_later(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def stop(self, deadline: float) -> None:
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            _run(job)


def _run(job: Callable[[], None]) -> None:
    try:
        job()
    except BaseException as error:  # it has nobody to raise to, and those after it have nothing to do with it
        sys.excepthook(type(error), error, error.__traceback__)


_pool = _Pool()
_deferred = _Deferred()


def start(job: Callable[[], None]) -> None:
    """Runs a job on a thread of its own.

    Raises:
        RuntimeError: the system gives no more threads.
    """
    _pool.start(job)


def start_deferred() -> None:
    """Sees to it that there is a thread for `run_later`; to be called where threads may be started."""
    if _deferred._thread is None:
        _deferred.start()


def run_later(job: Callable[[], None]) -> None:
    """Runs a job on another thread, soon; may be called by a finalizer."""
    _deferred.run_later(job)


def close() -> None:
    """At exit, when Python starts no more threads: the one for finalizers does what others have no time for."""
    if not _pool.is_closing:
        _pool.is_closing = True
        _deferred.run_later(lambda: _pool.work(lambda: None))


def stop(seconds: float) -> None:
    """At exit, ends the threads that have nothing to do; a thread that is inside of jax when Python goes may crash.

    Args:
        seconds: how long to wait for them.
    """
    deadline = time.monotonic() + seconds
    _pool.stop(deadline)
    _deferred.stop(deadline)


def forget_after_fork() -> None:
    """The child of a fork has none of its parent's threads."""
    global _pool, _deferred
    _pool, _deferred = _Pool(), _Deferred()
