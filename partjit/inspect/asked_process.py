"""A process that answers questions about a program, so that a failed check of the partitioner ends it, not the user's.

It is a fresh interpreter, which gets the lowered module as bytecode and all else as plain data, and uses no device. It
is kept between questions, and a new one is started if it ended.
"""

import dataclasses
import os
import pickle
import shutil
import tempfile
import weakref
from typing import Any, Protocol, cast

from jax.sharding import Mesh

from partjit._jax.lowering import as_bytecode, from_bytecode
from partjit.inspect.changes import Change, Facts
from partjit.inspect.kept_process import KeptProcess, ProcessEndedError, answer_messages
from partjit.inspect.outcomes import Outcome, outcome_of
from partjit.inspect.places import Known, Origin, known_of_copies, saved

__all__ = ["Asked", "AskedOutcome", "AskedProcess", "SavedProgram", "WhatIfError", "saved_facts", "serve"]

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
        def source(path: list[str]) -> str:
            return _PROGRAM.format(path=path, program=program.path)

        self._process = KeptProcess(source, {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"})

    @property
    def pid(self) -> int | None:
        """The id of the process, None if there is none."""
        return self._process.pid

    def start(self) -> None:
        """Starts the process if there is none, without waiting for it: that takes as long as to import jax."""
        self._process.start()

    def ask(self, change: Change) -> Any:
        """The answer for a change.

        Raises:
            WhatIfError: the process ended.
        """
        try:
            return self._process.answer(change)
        except ProcessEndedError as error:
            raise WhatIfError(f"the partitioner ended the process that was asked: {error}") from None

    def close(self) -> None:
        """Ends the process, if there is one."""
        self._process.close()

    def kill(self) -> None:
        """Ends the process for good, also while it is asked in another thread, where `ask` then raises."""
        self._process.kill()


def serve(path: str) -> None:
    """The program of such a process.

    Args:
        path: of the file of a `SavedProgram`.
    """
    program: list[Any] = []

    def answer(change: Change) -> Any:
        if not program:
            with open(path, "rb") as file:
                bytecode, asked = pickle.load(file)
            lowered = from_bytecode(bytecode).operation
            program.extend((asked, lowered, known_of_copies(lowered)))
        asked, lowered, known = program
        return asked.answer(lowered, change, known)

    answer_messages(answer)
