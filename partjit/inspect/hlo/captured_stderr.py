"""Capturing what C++ code of this process writes to standard error.

XLA writes to file descriptor 2, not to `sys.stderr`, so the descriptor is redirected to a file for a while. With a
pipe, a thread that fills it while it holds the GIL would deadlock.
"""

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

__all__ = ["take_lines"]

_STDERR = 2
# There is one such descriptor in a process. Blocks of one thread nest: the inner one takes its lines first.
_lock = threading.RLock()


@contextlib.contextmanager
def take_lines(take: Callable[[str], bool]) -> Iterator[None]:
    r"""Captures what the process writes to file descriptor 2 in the block, and reads it when the block ends.

    Lines that are not taken are then written to the original descriptor in order, also if the block raises, unless it
    is closed. The output of other threads is captured as well. If the process dies in the block, the output is lost.

    Args:
        take: is called with each line, without its end; returns whether to drop the line.

    Example:
        >>> lines = []
        >>> with take_lines(lambda line: lines.append(line) is None):
        ...     _ = os.write(2, b"one\ntwo")
        >>> lines
        ['one', 'two']
    """
    with _lock, tempfile.TemporaryFile() as file:
        _flush()
        saved = _duplicate()
        os.dup2(file.fileno(), _STDERR)
        try:
            yield
        finally:
            _flush()
            if saved is None:
                os.close(_STDERR)
            else:
                os.dup2(saved, _STDERR)
                os.close(saved)
            file.seek(0)
            kept = written = file.read().splitlines(keepends=True)
            try:
                kept = [line for line in written if not take(line.decode("utf-8", "replace").rstrip("\r\n"))]
            finally:
                if saved is not None:
                    _write(b"".join(kept))


def _duplicate() -> int | None:
    try:
        return os.dup(_STDERR)
    except OSError:
        return None


def _flush() -> None:
    """Flushes what Python has buffered for the descriptor."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there may be no such stream, or it is closed
        sys.stderr.flush()


def _write(data: bytes) -> None:
    with contextlib.suppress(OSError):  # the other end of a pipe is closed
        while data:
            data = data[os.write(_STDERR, data) :]
