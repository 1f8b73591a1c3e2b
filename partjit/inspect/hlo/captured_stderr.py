"""What this process writes to its standard error from C++, line by line.

`sys.stderr` is a matter of Python: XLA writes to the file descriptor 2. So that one is pointed at a file for a while. A
pipe would be read at once, but whoever fills it while holding Python's lock would wait for ever.
"""

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

__all__ = ["take_lines"]

_STDERR = 2
# There is one such descriptor in a process. A block in a block of the same thread takes its lines first.
_lock = threading.RLock()


@contextlib.contextmanager
def take_lines(take: Callable[[str], bool]) -> Iterator[None]:
    r"""Reads what the process writes to the file descriptor 2 in the block, when the block ends.

    What is not taken is written on then, in its order, also if the block raises; if the descriptor is closed, there is
    nowhere to write it to. What other threads write meanwhile is held back likewise. If the process dies in the block,
    so does what it wrote there.

    Args:
        take: is called with each line, without its end; returns whether the line is not to be written on.

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
    """What Python holds back of its own goes where it was meant to go."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there may be no such stream, or it is closed
        sys.stderr.flush()


def _write(data: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more
        while data:
            data = data[os.write(_STDERR, data) :]
