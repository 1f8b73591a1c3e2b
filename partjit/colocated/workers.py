"""The threads that run colocated calls, and one for what must not run where it comes up."""

import queue
import threading
from collections.abc import Callable

__all__ = ["drain_deferred", "forget_after_fork", "run_later", "start", "start_deferred"]

_IDLE_SECONDS = 10.0
"""How long a thread without work stays: starting one costs more than waking one."""


class _Pool:
    """As many threads as there are jobs that run at once: a job may wait for another, so there is no limit."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = 0  # threads that wait for a job, less the jobs that are on their way to one
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

    def _work(self, job: Callable[[], None] | None) -> None:
        while job is not None:
            try:
                job()
            finally:  # whatever came out of it ends this thread, not its successors
                job = None
            with self._lock:
                self._idle += 1
            job = self._next()

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
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # whose put() may interrupt itself
        self._started = False
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._lock:
            if not self._started:
                threading.Thread(target=self._work, name="partjit finalizers", daemon=True).start()
                self._started = True

    def run_later(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def drain(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            job()

    def _work(self) -> None:
        while True:
            self._jobs.get()()


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
    if not _deferred._started:
        _deferred.start()


def run_later(job: Callable[[], None]) -> None:
    """Runs a job on another thread, soon; may be called by a finalizer."""
    _deferred.run_later(job)


def drain_deferred() -> None:
    """Runs here what `run_later` was given and nobody ran yet."""
    _deferred.drain()


def forget_after_fork() -> None:
    """The child of a fork has none of its parent's threads."""
    global _pool, _deferred
    _pool, _deferred = _Pool(), _Deferred()
