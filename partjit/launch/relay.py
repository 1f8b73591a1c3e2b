"""What processes write, line by line, each with the number of its process in front."""

import os
import select
import selectors
import threading
from collections.abc import Callable

__all__ = ["Relay"]

_COLORS = (36, 33, 32, 35, 34, 31)
_LONGEST = 1 << 20  # bytes that are kept of a line that does not end
_CHUNK = 1 << 16
_PIPE = 1 << 20  # bytes, the most that Linux keeps in a pipe


class Relay:
    """Copies lines from pipes to file descriptors, on a thread of its own.

    A line is written as one, whatever the others write meanwhile. A carriage return ends a line as well, so that
    progress bars are seen; what a process writes last needs no end of line.

    Args:
        on_closed: called if nobody reads an output any more; what is written to it is dropped from then on.
    """

    def __init__(self, on_closed: Callable[[], None]) -> None:
        self._on_closed = on_closed
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._closed: set[int] = set()
        self._thread = threading.Thread(target=self._copy, name="partjit launch relay", daemon=True)
        self._wake_reader, self._wake_writer = os.pipe()
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)

    def add(self, pipe: int, number: int, output: int) -> None:
        """Copies from the pipe of a process to an output; before `start`."""
        self._selector.register(pipe, selectors.EVENT_READ, _Source(prefix(number, _has_colors(output)), output))

    def start(self) -> None:
        """Starts to copy."""
        self._thread.start()

    def write(self, text: str, output: int) -> None:
        """Writes a line of the launcher's own."""
        self._write(f"{text}\n".encode(), output)

    def finish(self, seconds: float) -> None:
        """Copies what is left, and for at most so many seconds what comes from programs that keep a pipe open."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
            os.write(self._wake_writer, b"x")
            self._thread.join()  # as long as the reader of an output takes
        for descriptor in (self._wake_reader, self._wake_writer):
            os.close(descriptor)
        self._selector.close()

    def _copy(self) -> None:
        woken = False
        while len(self._selector.get_map()) > 1 and not woken:
            woken = any(self._copy_from(key) for key, _ in self._selector.select())
        for _ in range(_PIPE // _CHUNK):  # what was in the pipes when all ended
            for key, _ in self._selector.select(0):
                self._copy_from(key)
        for key in [*self._selector.get_map().values()]:
            if key.data is not None and (lines := key.data.take(b"")):
                self._write(lines, key.data.output)

    def _copy_from(self, key: selectors.SelectorKey) -> bool:
        """Copies what is there; True for the pipe that only wakes the thread."""
        if key.data is None:
            return True
        data = os.read(key.fd, _CHUNK)
        if lines := key.data.take(data):
            self._write(lines, key.data.output)
        if not data:
            self._selector.unregister(key.fd)
        return False

    def _write(self, data: bytes, output: int) -> None:
        with self._lock:
            view = memoryview(data)
            while view and output not in self._closed:
                try:
                    view = view[os.write(output, view) :]
                except BlockingIOError:  # whoever started us has made it so
                    select.select([], [output], [])
                except OSError:
                    self._closed.add(output)
                    self._on_closed()


class _Source:
    """A pipe: where its lines go, and the line that has not ended."""

    def __init__(self, start: bytes, output: int) -> None:
        self.output = output
        self._start = start
        self._rest = b""
        self._returned = False

    def take(self, data: bytes) -> bytes:
        """The lines that end in the data, or all that is left if there is no more data."""
        if self._returned and data.startswith(b"\n"):  # the second half of an end of line
            data = data[1:]
        self._returned = data.endswith(b"\r")
        *lines, self._rest = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        if self._rest and (not data or len(self._rest) > _LONGEST):
            lines.append(self._rest)
            self._rest = b""
        return b"".join(self._start + line + b"\n" for line in lines)


def prefix(number: int, colors: bool) -> bytes:
    r"""What stands before the lines of a process.

    Example:
        >>> prefix(1, colors=False), prefix(1, colors=True)
        (b'[1] ', b'\x1b[33m[1]\x1b[0m ')
    """
    label = f"[{number}]"
    return f"\x1b[{_COLORS[number % len(_COLORS)]}m{label}\x1b[0m ".encode() if colors else f"{label} ".encode()


def _has_colors(output: int) -> bool:
    return os.isatty(output) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
