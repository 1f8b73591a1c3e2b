"""`partjit.replay`: a recorded execution once more, without the functions on the hosts."""

import contextlib
import os
from typing import Self, TypeVar

import jax

from partjit.checks import require_integer, require_path, wrong_value
from partjit.colocated.journaling import log as active
from partjit.colocated.journaling.contents import Contents, JournaledCall
from partjit.colocated.journaling.directory import Manifest, log_records, read_manifest
from partjit.colocated.journaling.opened import log_of, refuse_second, restored_state
from partjit.colocated.runtime.streams import join
from partjit.errors import JournalError

__all__ = ["Replay", "replay"]

_State = TypeVar("_State")


class Replay(contextlib.AbstractContextManager["Replay", None]):
    """What `replay` returns: in its `with` block calls return what was recorded.

    Attributes:
        calls: the calls that were recorded, in the order in which they ended.
    """

    def __init__(self, path: str, manifest: Manifest, process: int) -> None:
        self._path, self._manifest, self._process = path, manifest, process
        self._records = log_records(path, manifest, process)
        self.calls: tuple[JournaledCall, ...] = Contents(self._records).listed()

    def __enter__(self) -> Self:
        refuse_second("partjit.replay")
        active.set_current(log_of(self._manifest, self._process, None, self._records, {}))
        return self

    def __exit__(self, *_: object) -> None:
        try:
            join(None)
        finally:
            active.set_current(None)

    def restore(self, like: _State) -> _State:
        """The state of the program in the commit with which the record begins; see `colocated.Journal.restore`."""
        return restored_state(self._path, self._manifest, like)

    def __repr__(self) -> str:
        return f"<replay of {len(self.calls)} calls in {self._path}>"


def replay(path: str | os.PathLike[str], *, process: int | None = None) -> Replay:
    """Runs programs with the results that calls had when a journal was written, and calls no function on the hosts.

    For a step that failed: its values can be looked at, or its code changed between the calls, without data to be
    loaded, or effects outside. What the devices compute, they compute again. The journal is not changed.

    Args:
        path: the directory of a journal that was opened with `results=True`. The calls since its last commit are
            played.
        process: whose calls; those of this process by default.

    Returns:
        A context manager, with `restore(like)` for the state of the program at that commit, and `calls`. In its block
        a call that differs from the record, by program, node, order or types, raises JournalError; so does one that
        was not recorded, or had raised.

    Raises:
        JournalError: there is no journal, or it has no results.
        TypeError: an argument is of a wrong type.
        ValueError: the path is empty, or the journal has no calls of `process`.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> import partjit
        >>> from partjit import colocated
        >>> def load(step):
        ...     print("loading")
        ...     return 2 * step
        >>> load = colocated.colocated_python(load, mode="inline")
        >>> with tempfile.TemporaryDirectory() as path:
        ...     with colocated.journal(path, results=True):
        ...         _ = load(jnp.float32(3))
        ...     with partjit.replay(path):
        ...         load(jnp.float32(3))
        loading
        Array(6., dtype=float32)
    """
    path = os.path.abspath(require_path("partjit.replay", "path", path))
    process = jax.process_index() if process is None else require_integer("partjit.replay", "process", process, 0)
    manifest = read_manifest(path)
    if manifest is None:
        raise JournalError(f"partjit.replay: there is no journal in {path}")
    if not manifest.results:
        raise JournalError(f"partjit.replay: the journal {path} has no results: open it with results=True")
    if process >= manifest.processes:
        expected = f"the number of a process that wrote the journal, of 0 to {manifest.processes - 1}"
        raise wrong_value("partjit.replay", "process", process, expected)
    return Replay(path, manifest, process)
