"""How a participant and the coordinator reach each other: over a connection, or within one process."""

import collections
import contextlib
import os
import queue
import select
import socket
import struct
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

from partjit.colocated.agreement.votes import Message, Vote, from_bytes, to_bytes
from partjit.colocated.runtime.interrupts import Exclusive

__all__ = ["Channel", "Line", "Remote", "Within"]


_LENGTH = struct.Struct("!I")
_TIME = struct.Struct("ll")
"""Seconds and microseconds, as the system has them."""
_SHORT = 2**12
"""Bytes for which there is always room on the way, as a process has a vote or two under way in each of its threads."""
_MOST_READ = 2**16


class Channel:
    """A connection to another process, from which one thread hears.

    It does what `Connection.send`, `poll` and `recv` do in less time, all of which the processes of a program wait. So
    it is the system that notices when nothing comes: asking first whether something has come is another system call,
    after which this thread needs the lock of the interpreter once more.

    Args:
        connection: to a process that is known to be one of ours.
        timeout: seconds within which something comes.
    """

    def __init__(self, connection: Connection, timeout: float) -> None:
        self._connection = connection
        self._descriptor = connection.fileno()
        self._ready = select.poll()
        self._ready.register(self._descriptor, select.POLLIN)
        self._sending = Exclusive()
        self._come = bytearray()
        self._messages: collections.deque[Message] = collections.deque()
        with socket.socket(fileno=os.dup(self._descriptor)) as same:  # a vote does not wait for the answer to another
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            microseconds = max(1, int(timeout * 1e6))  # none at all would be no limit
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(*divmod(microseconds, 10**6)))

    def send(self, message: Message) -> None:
        """Sends a message; threads take turns by themselves."""
        data = _framed(message)
        if not (len(data) <= _SHORT and self._sending.attempt([], os.write, self._descriptor, data)):
            self._sending.run(self._send_all, data)

    def send_at_once(self, message: Message, sent: list[object]) -> bool:
        """Sends a short message if that need not wait, from a thread that a signal may interrupt.

        Args:
            message: to be sent.
            sent: gets an item if the message has been sent, however this function ends.

        Returns:
            Whether it was sent; if not, nothing of it was.

        Raises:
            OSError: the other process has ended.
        """
        data = _framed(message)
        return len(data) <= _SHORT and self._sending.attempt(sent, os.write, self._descriptor, data)

    def receive(self) -> Message:
        """What comes next.

        Raises:
            EOFError, OSError: the other process has ended.
            TimeoutError: nothing comes for as long as something should.
        """
        while not self._messages:
            try:
                data = os.read(self._descriptor, _MOST_READ)
            except BlockingIOError:
                raise TimeoutError from None
            if not data:
                raise EOFError
            self._take(data)
        return self._messages.popleft()

    def has_news(self) -> bool:
        """Whether `receive` would not wait, unless a message has come in part."""
        return bool(self._messages or self._ready.poll(0))

    def close(self) -> None:
        """Closes the connection, which nobody may use any more."""
        self._connection.close()

    def _take(self, data: bytes) -> None:
        come, at = self._come, 0
        come += data
        while len(come) - at >= _LENGTH.size:
            end = at + _LENGTH.size + _LENGTH.unpack_from(come, at)[0]
            if end > len(come):
                break
            self._messages.append(from_bytes(bytes(come[at + _LENGTH.size : end])))
            at = end
        del come[:at]

    def _send_all(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left) :]


def _framed(message: Message) -> bytes:
    data = to_bytes(message)
    return _LENGTH.pack(len(data)) + data


class Line(Protocol):
    """A participant's end."""

    def tell(self, vote: Vote | None) -> None:
        """Sends a vote, or None, which asks for a sign of life; threads take turns."""
        ...

    def tell_at_once(self, vote: Vote, sent: list[object]) -> bool:
        """Sends a vote if that need not wait; see `Channel.send_at_once`."""
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

    def tell(self, vote: Vote | None) -> None:
        """Sends a vote; if the other end is gone, `hear` finds out."""
        with contextlib.suppress(OSError):
            self._channel.send(vote)

    def tell_at_once(self, vote: Vote, sent: list[object]) -> bool:
        """Sends a vote if that need not wait."""
        try:
            return self._channel.send_at_once(vote, sent)
        except OSError:  # `hear` finds out
            return False

    def hear(self) -> Message:
        """What comes next."""
        return self._channel.receive()

    def has_news(self) -> bool:
        """Whether something has come."""
        return self._channel.has_news()


class Within(Line):
    """A line to the coordinator of the same process, which ends with it.

    A vote that nobody waits for is left to be counted with one of another process: it wakes no thread.

    Args:
        left: gets votes, each with the time at which it came.
        count: counts them.
        is_awaited: whether a group waits for a vote of this process alone, and will not come to count it.
    """

    def __init__(
        self,
        left: collections.deque[tuple[Vote, float]],
        count: Callable[[], None],
        is_awaited: Callable[[tuple[int, ...]], bool],
    ) -> None:
        self._left = left
        self._count = count
        self._is_awaited = is_awaited
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def tell(self, vote: Vote | None) -> None:
        """Leaves a vote, and counts it if it is awaited."""
        if vote is not None:
            self._left.append((vote, time.monotonic()))
            if vote.failure is not None or self._is_awaited(vote.group):
                self._count()
                self.wake()

    def tell_at_once(self, vote: Vote, sent: list[object]) -> bool:
        """Leaves a vote; to count it is not for a thread that a signal may interrupt."""
        sent.extend(map(self._left.append, ((vote, time.monotonic()),)))
        if self._is_awaited(vote.group):
            self.wake()
        return True

    def wake(self) -> None:
        """Ends the wait of who hears."""
        self._wakes.put(None)

    def hear(self) -> Message:
        """Waits until something is left to be counted, and counts it; what the coordinator says comes another way."""
        self._wakes.get()
        self._count()
        return None

    def has_news(self) -> bool:
        """Nothing has come that nobody hears."""
        return False
