"""The processes of a launch, each in a process group of its own, and the guard that ends them if the launcher dies."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from partjit.launch import gate, guard

__all__ = ["Guard", "Started", "ending"]

_ALONE = (sys.executable, "-I", "-S")  # Python's own modules are enough, and start in 10 ms


class Guard:
    """The guard as the launcher sees it.

    Args:
        grace: seconds from SIGTERM to SIGKILL.
    """

    def __init__(self, grace: float) -> None:
        self._process = subprocess.Popen(
            [*_ALONE, os.fspath(pathlib.Path(guard.__file__)), str(grace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )

    def begins(self, group: int) -> None:
        """A process group is started."""
        self._write(f"+{group}\n")

    def ends(self, group: int) -> None:
        """A process group has ended."""
        self._write(f"-{group}\n")

    def close(self) -> None:
        """The launcher ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it; the launcher still ends what it started
            self._process.stdin.write(line.encode())


class Started:
    """A process of a launch, its children included.

    Args:
        number: of the process.
        command: what it runs.
        env: its environment.
        sentry: is told its group before it runs.

    Attributes:
        number: of the process.
        group: the number of its process group.
        stdout: the pipe of what it writes.
        stderr: the pipe of its errors.
    """

    def __init__(self, number: int, command: Sequence[str], env: Mapping[str, str], sentry: Guard) -> None:
        self.number = number
        reader, writer = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*_ALONE, os.fspath(pathlib.Path(gate.__file__)), str(reader), *command],
                stdin=subprocess.DEVNULL,  # a terminal stops processes of the background that read from it
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[reader],
                process_group=0,
                env=env,
            )
            self.group = self._process.pid
            sentry.begins(self.group)
            os.write(writer, b"x")
        finally:
            os.close(reader)
            os.close(writer)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.stdout, self.stderr = self._process.stdout.fileno(), self._process.stderr.fileno()

    def watch(self, on_end: Callable[[int, int], None]) -> None:
        """Calls a function with the number and the exit code of the process when it ends, on a thread.

        The process stays a zombie until `has_ended` or `kill`, so that nothing else gets the number of its group.
        """

        def wait() -> None:
            with contextlib.suppress(ChildProcessError):  # the launcher failed, and has waited for it
                found = os.waitid(os.P_PID, self.group, os.WEXITED | os.WNOWAIT)
                assert found is not None  # only WNOHANG returns without an answer
                on_end(self.number, exit_code(found.si_status, found.si_code != os.CLD_EXITED))

        threading.Thread(target=wait, name=f"partjit launch {self.number}", daemon=True).start()

    def signal(self, number: int) -> None:
        """Sends a signal to the process and its children."""
        guard.signal_group(self.group, number)

    def has_ended(self) -> bool:
        """Whether the process and its children are gone."""
        return self._process.poll() is not None and not guard.signal_group(self.group, 0)

    def kill(self) -> None:
        """Kills the process and its children."""
        guard.signal_group(self.group, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Closes the pipes."""
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()


def exit_code(status: int, signaled: bool) -> int:
    """The exit code that stands for how a process ended, as shells have it.

    Example:
        >>> exit_code(3, signaled=False), exit_code(signal.SIGKILL, signaled=True)
        (3, 137)
    """
    return 128 + status if signaled else status


def ending(code: int) -> str:
    """How a process ended, in words.

    Example:
        >>> ending(3), ending(137)
        ('ended with exit code 3', 'was ended by SIGKILL')
    """
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"
