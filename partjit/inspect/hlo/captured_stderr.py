"""Capturing what C++ code of this process writes to standard error.

XLA writes to file descriptor 2, not to `sys.stderr`, so the descriptor is redirected to a file for a while. With a
pipe, a thread that fills it while it holds the GIL would deadlock.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

__all__ = ["take_lines"]

_STDERR = 2
# There is one such descriptor in a process. Blocks of one thread nest: the inner one takes its lines first.
_lock = threading.RLock()
_originals: list[int | None] = []
"""What blocks have redirected, the outermost first."""


@contextlib.contextmanager
def take_lines(take: Callable[[str], bool]) -> Iterator[None]:
    r"""Captures what the process writes to file descriptor 2 in the block, and reads it when the block ends.

    Lines that are not taken are then written to the original descriptor in order, also if the block raises, unless it
    is closed. The output of other threads is captured as well. If the process dies in the block, as it does when a
    check of XLA fails, all that was captured is written: the reason is in it.

    Args:
        take: is called with each line, without its end; returns whether to drop the line.

    Example:
        >>> lines = []
        >>> with take_lines(lambda line: lines.append(line) is None):
        ...     _ = os.write(2, b"one\ntwo")
        >>> lines
        ['one', 'two']
    """
    with _lock, tempfile.NamedTemporaryFile() as file, contextlib.ExitStack() as stack:
        _flush()
        saved = _duplicate()
        _originals.append(saved)
        stack.callback(_originals.pop)
        if _originals[0] is not None:
            stack.enter_context(_written_after_death(file.name, _originals[0]))
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


@contextlib.contextmanager
def _written_after_death(path: str, into: int) -> Iterator[None]:
    """Another process writes a file to a descriptor, and removes it, if this one dies in the block.

    It waits for a line, which it does not get from a process that died.
    """
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r line || { cat "$0" >&2; rm -f "$0"; }', path],
            stdin=subprocess.PIPE,
            stderr=into,
            start_new_session=True,  # an interrupt is for this process
        )
    except OSError:  # no shell, or no more processes
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # somebody has ended it
            process.communicate(b"\n")


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
