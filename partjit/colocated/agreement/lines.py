"""How a participant and the coordinator reach each other: over a connection, or within one process."""

import contextlib
import queue
import select
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

from partjit.colocated.agreement.votes import Message, Vote, from_bytes, to_bytes

__all__ = ["Channel", "Line", "Remote", "Within"]


class Channel:
    """A connection to another process, from which one thread hears.

    It does what `Connection.send`, `poll` and `recv` do in less time, all of which the processes of a program wait.

    Args:
        connection: to a process that is known to be one of ours.
        timeout: seconds within which something comes.
    """

    def __init__(self, connection: Connection, timeout: float) -> None:
        self._connection = connection
        self._timeout = timeout
        self._ready = select.poll()
        self._ready.register(connection.fileno(), select.POLLIN)

    def send(self, message: Message) -> None:
        """Sends a message; threads take turns by themselves."""
        self._connection.send_bytes(to_bytes(message))

    def receive(self) -> Message:
        """What comes next.

        Raises:
            EOFError, OSError: the other process has ended.
            TimeoutError: nothing comes for as long as something should.
        """
        if not self._ready.poll(self._timeout * 1e3):
            raise TimeoutError
        return from_bytes(self._connection.recv_bytes())

    def has_news(self) -> bool:
        """Whether `receive` would not wait."""
        return bool(self._ready.poll(0))


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

    def has_news(self) -> bool:
        """Whether `hear` would not wait."""
        ...


class Remote(Line):
    """A line to another process.

    Args:
        channel: to its coordinator.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._telling = threading.Lock()  # of threads that no signal interrupts

    def tell(self, vote: Vote | None) -> None:
        """Sends a vote; if the other end is gone, `hear` finds out."""
        with self._telling, contextlib.suppress(OSError):
            self._channel.send(vote)

    def hear(self) -> Message:
        """What comes next."""
        return self._channel.receive()

    def has_news(self) -> bool:
        """Whether something has come."""
        return self._channel.has_news()


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

    def has_news(self) -> bool:
        """Whether something has come."""
        return not self._messages.empty()
