"""The threads that run colocated calls, and one for what must not run where it comes up."""

import queue
import threading
import time
from collections.abc import Callable

__all__ = ["forget_after_fork", "run_later", "start", "start_deferred", "stop"]

_IDLE_SECONDS = 10.0
"""How long a thread without work stays: starting one costs more than waking one."""


class _Pool:
    """As many threads as there are jobs that run at once: a job may wait for another, so there is no limit."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = 0  # threads that wait for a job, less the jobs that are on their way to one
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()

    def start(self, job: Callable[[], None]) -> None:
        with self._lock:
            has_idle = self._idle > 0
            if has_idle:
                self._idle -= 1
        if has_idle:
            self._jobs.put(job)
        else:
            threading.Thread(target=self._work, args=(job,), name="partjit colocated", daemon=True).start()

    def stop(self, deadline: float) -> None:
        with self._lock:
            threads = [*self._threads]
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self, job: Callable[[], None] | None) -> None:
        self._threads.add(threading.current_thread())
        try:
            while job is not None:
                job()
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
                thread.start()
                self._thread = thread

    def run_later(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def stop(self, deadline: float) -> None:
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


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


def stop(seconds: float) -> None:
    """At exit, ends the threads that have nothing to do; a thread that is inside of jax when Python goes may crash.

    Args:
        seconds: how long to wait for them.
    """
    deadline = time.monotonic() + seconds
    _deferred.stop(deadline)  # first, since what it does may start threads
    _pool.stop(deadline)


def forget_after_fork() -> None:
    """The child of a fork has none of its parent's threads."""
    global _pool, _deferred
    _pool, _deferred = _Pool(), _Deferred()
