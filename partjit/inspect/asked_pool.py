"""Several processes that answer questions about one program at the same time."""

import concurrent.futures
import os
import queue
from collections.abc import Sequence
from typing import Any

from partjit.inspect.asked_process import AskedProcess, SavedProgram, WhatIfError
from partjit.inspect.changes import Change

__all__ = ["AskedPool", "processors"]


class AskedPool:
    """Processes that answer questions about a program; they are started at once, and end with `close`.

    Args:
        program: the program, which is in its file when the first question is asked.
        count: how many processes.

    Attributes:
        count: how many.
    """

    def __init__(self, program: SavedProgram, count: int) -> None:
        self.count = count
        self._processes = [AskedProcess(program) for _ in range(count)]
        self._free: queue.SimpleQueue[AskedProcess] = queue.SimpleQueue()
        for process in self._processes:
            process.start()
            self._free.put(process)
        self._threads = concurrent.futures.ThreadPoolExecutor(count)  # which wait, without holding the interpreter

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the processes that there are."""
        return tuple(process.pid for process in self._processes if process.pid is not None)

    def submit(self, change: Change) -> concurrent.futures.Future[Any]:
        """The answer for a change, once there is one; a `WhatIfError` if the question ends its process."""
        return self._threads.submit(self._asked, change)

    def outcomes(self, changes: Sequence[Change]) -> list[Any]:
        """The answers for changes, in their order; None for one that ended its process."""
        answers = [self.submit(change) for change in changes]
        return [None if isinstance(one.exception(), WhatIfError) else one.result() for one in answers]

    def close(self) -> None:
        """Ends the processes at once, in the middle of an answer if need be."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.close()

    def _asked(self, change: Change) -> Any:
        process = self._free.get()
        try:
            return process.ask(change)
        finally:
            self._free.put(process)


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
