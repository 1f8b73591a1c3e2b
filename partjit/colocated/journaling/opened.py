"""What a journal that is open has, and one that is played back as well."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from partjit.colocated.journaling import log as active
from partjit.colocated.journaling.directory import Manifest
from partjit.colocated.journaling.processes import Group
from partjit.colocated.journaling.records import RecordFile
from partjit.colocated.journaling.state import read_state
from partjit.colocated.runtime.history import History
from partjit.errors import JournalError

__all__ = ["Opened", "log_of", "refuse_second", "restored_state"]

_State = TypeVar("_State")


class Opened:
    """What an open journal has.

    Attributes:
        group: the processes.
        lock: the descriptor that keeps others out.
        manifest: what is committed.
        file: the calls since then.
        log: what records them.
    """

    def __init__(self, group: Group, lock: int, manifest: Manifest, file: RecordFile, log: active.Log) -> None:
        self.group = group
        self.lock = lock
        self.manifest = manifest
        self.file = file
        self.log = log


def refuse_second(what: str) -> None:
    """Raises JournalError if a journal is open, or played back."""
    if active.current is not None:
        raise JournalError(f"{what}: another journal is open in this process, or played back; leave its block first")


def log_of(
    manifest: Manifest,
    process: int,
    file: RecordFile | None,
    records: Sequence[bytes],
    names: Mapping[History, str],
) -> active.Log:
    """What records the calls of a process, or plays them back."""
    return active.Log(
        file, records, f"{manifest.journal}/{manifest.commit}/", f"/process-{process}", manifest.results, names
    )


def restored_state(path: str, manifest: Manifest, like: _State) -> _State:
    """The state of the program in a commit; see `Journal.restore`."""
    if not manifest.commit:
        return like
    if not manifest.has_state:
        raise JournalError("Journal.restore: the last commit has no state of the program: give one to Journal.commit")
    files = {
        manifest.file(path, name): checksum
        for own in manifest.files
        for name, checksum in own.items()
        if name.startswith("state-")
    }
    return read_state(files, like)
