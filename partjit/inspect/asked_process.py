"""A process that answers questions about a program, so that a failed check of the partitioner ends it, not the user's.

It is a fresh interpreter, which gets the lowered module as bytecode and all else as plain data, and uses no device. It
is kept between questions, and a new one is started if it ended.
"""

import contextlib
import dataclasses
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from typing import IO, Any, Protocol, cast

from jax.sharding import Mesh

from partjit._jax.lowering import as_bytecode, from_bytecode
from partjit.inspect.changes import Change, Facts
from partjit.inspect.outcomes import Outcome, outcome_of
from partjit.inspect.places import Known, Origin, known_of_copies, saved

__all__ = ["Asked", "AskedOutcome", "AskedProcess", "SavedProgram", "WhatIfError", "saved_facts", "serve"]

_LENGTH = struct.Struct("<Q")
_GRACE = 10.0  # seconds that a process has to end
_SHOWN = 400  # characters of what it wrote at last
_PROGRAM = "import sys; sys.path[:] = {path!r}; from partjit.inspect.asked_process import serve; serve({program!r})"


class WhatIfError(RuntimeError):
    """The process that was asked ended without an answer; the message says how, and what it wrote at last.

    The next question is answered by another one.
    """


class Asked(Protocol):
    """What is asked about a lowered program: data that can be pickled."""

    def answer(self, lowered: Any, wanted: Change, known: Known) -> Any:
        """The answer for a change of the module; what attributes are known to say is added to `known`."""


@dataclasses.dataclass(frozen=True, eq=False)
class AskedOutcome:
    """Asks for outcomes.

    Attributes:
        facts: what is known of the program; see `saved_facts`.
    """

    facts: Facts

    def answer(self, lowered: Any, wanted: Change, known: Known) -> Outcome:
        """The outcome of a change."""
        return outcome_of(lowered, self.facts, wanted, known)


def saved_facts(facts: Facts) -> Facts:
    """Facts that can be pickled."""
    origin = facts.origin
    places = Origin(origin.name, cast(Mesh, origin.mesh.abstract_mesh), [*map(saved, origin.equations)])
    return dataclasses.replace(facts, origin=places)


class SavedProgram:
    """A program in a file, for as long as this object is there.

    Attributes:
        path: of the file.
    """

    def __init__(self) -> None:
        """There is no file yet."""
        folder = tempfile.mkdtemp(prefix="partjit-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = os.path.join(folder, "program")

    def write(self, module: Any, asked: Asked) -> None:
        """Writes the file: a lowered module, and what is asked about it."""
        with open(self.path, "wb") as file:
            pickle.dump((as_bytecode(module), asked), file)


class AskedProcess:
    """A process that answers questions about one program.

    Args:
        program: the program, which is in its file when the first question is asked.
    """

    def __init__(self, program: SavedProgram) -> None:
        self._program = program
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

    def ask(self, change: Change) -> Any:
        """The answer for a change.

        Raises:
            WhatIfError: the process ended.
        """
        with self._only:
            self._start()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                _send(process.stdin, pickle.dumps(change))
                reply = _received(process.stdout)
            except OSError:
                reply = None
            except BaseException:  # an interrupt: the answer would be taken for that to the next question
                self._end()
                raise
            if reply is None:
                raise WhatIfError(f"the partitioner ended the process that was asked: {self._how_it_ended()}")
            answer, error = pickle.loads(reply)
            if error is not None:
                raise error
            return answer

    def close(self) -> None:
        """Ends the process, if there is one."""
        with self._only:
            self._end()

    def kill(self) -> None:
        """Ends the process for good, also while it is asked in another thread, where `ask` then raises."""
        self._is_killed = True
        process = self._process
        if process is not None:
            process.kill()

    def _start(self) -> None:
        if self._process is not None:
            return
        if self._is_killed:
            raise WhatIfError("there is no process to be asked any more: it was ended")
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}
        path = [os.path.abspath(entry) for entry in sys.path]
        self._written = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the process has ended
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=path, program=self._program.path)],
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
        last = written.read().decode("utf-8", "replace").strip()[-_SHOWN:]
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


def serve(path: str) -> None:
    """The program of such a process: answers the questions that come through its standard input.

    Args:
        path: of the file of a `SavedProgram`.
    """
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints is no answer
    lowered: Any = None
    asked: Any = None
    known: Any = None
    while (question := _received(questions)) is not None:
        if asked is None:
            with open(path, "rb") as file:
                bytecode, asked = pickle.load(file)
            lowered = from_bytecode(bytecode).operation
            known = known_of_copies(lowered)
        answer, error = None, None
        try:
            answer = asked.answer(lowered, pickle.loads(question), known)
        except Exception as raised:  # it is raised where the question was asked
            error = raised
        _send(answers, pickle.dumps((answer, error)))
