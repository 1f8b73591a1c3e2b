"""How a participant and the coordinator reach each other: over a connection, or within one process."""

import contextlib
import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

from partjit.colocated.agreement.votes import Decision, Gone, Join, Vote

__all__ = ["Line", "Remote", "Within"]

Message = Decision | Gone | Join | None


class Line(Protocol):
    """A participant's end."""

    def tell(self, vote: Vote | None) -> None:
        """Sends a vote, or None, which asks for a sign of life; threads take turns."""
        ...

    def hear(self) -> Message:
        """What comes next.

        Raises:
            EOFError, OSError: the coordinator's process has ended.
            TimeoutError: nothing comes for as long as something should.
        """
        ...


class Remote(Line):
    """A line to another process.

    Args:
        connection: to its coordinator.
        timeout: seconds within which something comes.
    """

    def __init__(self, connection: Connection, timeout: float) -> None:
        self._connection = connection
        self._timeout = timeout
        self._telling = threading.Lock()  # of threads that no signal interrupts

    def tell(self, vote: Vote | None) -> None:
        """Sends a vote; if the other end is gone, `hear` finds out."""
        with self._telling, contextlib.suppress(OSError):
            self._connection.send(vote)

    def hear(self) -> Any:
        """What comes next."""
        if not self._connection.poll(self._timeout):
            raise TimeoutError
        return self._connection.recv()


class Within(Line):
    """A line to the coordinator of the same process, which ends with it.

    Args:
        count: takes a vote.
    """

    def __init__(self, count: Callable[[Vote], None]) -> None:
        self._count = count
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.put = self._messages.put

    def tell(self, vote: Vote | None) -> None:
        """Counts a vote."""
        if vote is not None:
            self._count(vote)

    def hear(self) -> Message:
        """What comes next."""
        return self._messages.get()
