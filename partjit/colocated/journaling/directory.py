"""The directory of a journal: a manifest that names the last commit, and a directory with the files of that.

A commit is there once the manifest names it, which happens in one rename, after all of its files are on the disk. What
the manifest does not name is left over from a process that was killed, and removed.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from typing import Any

from partjit.colocated.journaling.contents import is_failure
from partjit.colocated.journaling.durable import Checksum, read_json, sync_directory, write_json
from partjit.colocated.journaling.records import RecordFile, read_records
from partjit.errors import JournalError

__all__ = ["Manifest", "lock", "log_file", "log_records", "read_manifest", "remove_others", "write_manifest"]

_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What is committed.

    Attributes:
        journal: the id of the journal, in all of its idempotency keys.
        commit: the number of the last commit; 0 if there is none.
        directory: that of its files.
        files: for each process that took part the checksums of its files, by name.
        epoch: names the files with the calls since then. Those of other epochs count no more.
        processes: how many processes write such files.
        results: whether these have the results.
        has_state: whether a state of the program was committed.
    """

    journal: str
    commit: int
    directory: str
    files: tuple[Mapping[str, Checksum], ...]
    epoch: str
    processes: int
    results: bool
    has_state: bool

    @staticmethod
    def new(processes: int, results: bool) -> "Manifest":
        """That of a journal without commits."""
        return Manifest(secrets.token_hex(6), 0, "00000000", (), secrets.token_hex(4), processes, results, False)

    def in_new_epoch(self, processes: int, results: bool) -> "Manifest":
        """That of the same commit, of which the calls since then do not count any more."""
        return dataclasses.replace(self, epoch=secrets.token_hex(4), processes=processes, results=results)

    def to_json(self) -> dict[str, Any]:
        """Its data, as JSON can have it."""
        return {"format": _FORMAT, **dataclasses.asdict(self)}

    @staticmethod
    def from_json(data: Any) -> "Manifest":
        """Back from `to_json`; JournalError if it is something else."""
        try:
            if data["format"] != _FORMAT:
                raise JournalError(f"the journal has format {data['format']}, and this partjit reads {_FORMAT}")
            fields = {field.name: data[field.name] for field in dataclasses.fields(Manifest)}
            files = tuple({name: Checksum(*each) for name, each in own.items()} for own in fields.pop("files"))
            return Manifest(files=files, **fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise JournalError(f"the manifest of the journal is damaged: {error!r}") from error

    def file(self, path: str, name: str) -> str:
        """The path of a file of the commit, in the journal at `path`."""
        return os.path.join(path, self.directory, name)

    def title(self, process: int) -> bytes:
        """The first record of the file with the calls of a process."""
        return json.dumps(["partjit journal", _FORMAT, self.journal, self.commit, self.epoch, process]).encode()


def read_manifest(path: str) -> Manifest | None:
    """The manifest of the journal at a path, or None if there is none."""
    data = read_json(os.path.join(path, "manifest.json"))
    return None if data is None else Manifest.from_json(data)


def write_manifest(path: str, manifest: Manifest) -> None:
    """Commits."""
    write_json(os.path.join(path, "manifest.json"), manifest.to_json())


def log_file(path: str, manifest: Manifest, process: int) -> RecordFile:
    """The file with the calls of a process since the commit, to be continued where the first of them has raised.

    What came behind that depends on it: if the call does not raise when it is made again, other calls follow.
    """
    directory = os.path.join(path, manifest.directory)
    os.makedirs(directory, exist_ok=True)
    file = RecordFile(manifest.file(path, _log_name(manifest, process)), manifest.title(process), is_failure)
    file.sync()
    sync_directory(directory)
    sync_directory(path)
    return file


def log_records(path: str, manifest: Manifest, process: int) -> list[bytes]:
    """What is in that file, which is left as it is."""
    try:
        with open(manifest.file(path, _log_name(manifest, process)), "rb") as file:
            records = [body for _, body in read_records(file.read())]
    except FileNotFoundError:
        return []
    return records[1:] if records[:1] == [manifest.title(process)] else []


def _log_name(manifest: Manifest, process: int) -> str:
    return f"calls-{manifest.epoch}-{process}"


def remove_others(path: str, manifest: Manifest) -> None:
    """Removes what the manifest does not name; what cannot be removed does no harm."""
    for entry in os.scandir(path):
        if entry.is_dir() and entry.name[:8].isdigit() and entry.name != manifest.directory:
            shutil.rmtree(entry.path, ignore_errors=True)
    with contextlib.suppress(OSError):
        for entry in os.scandir(os.path.join(path, manifest.directory)):
            if entry.name.startswith("calls-") and not entry.name.startswith(f"calls-{manifest.epoch}-"):
                os.remove(entry.path)


def lock(path: str, process: int) -> int:
    """Takes the journal for this process, until the descriptor is closed or the process ends.

    Raises:
        JournalError: another process has it.
    """
    file = os.open(os.path.join(path, f"lock-{process}"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise JournalError(f"the journal {path} is open already, in this process or in another one") from None
    return file
