"""A process that answers messages, so that what ends it does not end the user's process.

It is a fresh interpreter, which is kept between messages; a new one is started if it ended.
"""

import contextlib
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import IO, Any

__all__ = ["KeptProcess", "ProcessEndedError", "answer_messages"]

_LENGTH = struct.Struct("<Q")
_FATAL = re.compile(r"F\d{4} ")  # of absl's log
_GRACE = 10.0  # seconds that a process has to end
_SHOWN = 400  # characters of what it wrote at last


class ProcessEndedError(RuntimeError):
    """The process ended without an answer; the message says how, and what it wrote at last."""


class KeptProcess:
    """A process that answers messages, one after the other.

    Args:
        program: gives the Python that it runs, which ends with a call of `answer_messages`, for a search path of
            modules. It is asked each time that a process is started.
        environment: variables of the process, besides those of this one; None for one that it does not have.
    """

    def __init__(self, program: Callable[[list[str]], str], environment: Mapping[str, str | None]) -> None:
        self._program, self._environment = program, environment
        self._only = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._written: IO[bytes] | None = None
        self._is_killed = False

    @property
    def pid(self) -> int | None:
        """The id of the process, None if there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the process if there is none, without waiting for it: that takes as long as to import jax."""
        with self._only:
            self._start()

    def answer(self, message: object) -> Any:
        """The answer to a message that can be pickled.

        Raises:
            ProcessEndedError: the process ended.
            Exception: what was raised there instead of an answer.
        """
        with self._only:
            self._start()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                _send(process.stdin, pickle.dumps(message))
                reply = _received(process.stdout)
            except OSError:
                reply = None
            except BaseException:  # an interrupt: the answer would be taken for that to the next message
                self._end()
                raise
            if reply is None:
                raise ProcessEndedError(self._how_it_ended())
            answer, error = pickle.loads(reply)
            if error is not None:
                raise error
            return answer

    def close(self) -> None:
        """Ends the process, if there is one."""
        with self._only:
            self._end()

    def kill(self) -> None:
        """Ends the process for good, also while another thread waits for an answer, where `answer` then raises."""
        self._is_killed = True
        process = self._process
        if process is not None:
            process.kill()

    def _start(self) -> None:
        if self._process is not None:
            return
        if self._is_killed:
            raise ProcessEndedError("it was ended for good")
        given = {**os.environ, **self._environment}
        environment = {name: value for name, value in given.items() if value is not None}
        path = [os.path.abspath(entry) for entry in sys.path]
        self._written = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the process has ended
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._program(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._written,
            env=environment,
            start_new_session=True,  # an interrupt is for this process
        )
        if self._is_killed:  # meanwhile
            self._process.kill()

    def _how_it_ended(self) -> str:
        process, written = self._process, self._written
        assert process is not None
        assert written is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        code = process.poll()
        self._process, self._written = None, None
        _close(process)
        written.seek(0)
        last = _last_words(written.read().decode("utf-8", "replace").strip())
        written.close()
        how = "it closed its connection" if code is None else f"it exited with code {code}"
        if code is not None and code < 0:
            how = f"it was killed by signal {-code}, {signal.strsignal(-code)}"
        return f"{how}{f'. It wrote: {last}' if last else ''}"

    def _end(self) -> None:
        process, written = self._process, self._written
        self._process, self._written = None, None
        if process is not None:
            _close(process)
        if written is not None:
            written.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the interpreter
            self._end()


def _last_words(text: str) -> str:
    """The failed check in what a process wrote, before the addresses of its stack; without one, the end of it."""
    failed = [line for line in text.splitlines() if _FATAL.match(line)]
    return failed[-1][-_SHOWN:] if failed else text[-_SHOWN:]


def _close(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _send(pipe: IO[bytes], content: bytes) -> None:
    pipe.write(_LENGTH.pack(len(content)) + content)
    pipe.flush()


def _received(pipe: IO[bytes]) -> bytes | None:
    """The next message; None if the other side has ended."""
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    content = pipe.read(length)
    return content if len(content) == length else None


def answer_messages(answer: Callable[[Any], object]) -> None:
    """The program of such a process: answers the messages that come through its standard input."""
    messages, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints is no answer
    while (message := _received(messages)) is not None:
        given, error = None, None
        try:
            given = answer(pickle.loads(message))
        except Exception as raised:  # it is raised where the message was sent
            error = raised
        _send(answers, pickle.dumps((given, error)))
