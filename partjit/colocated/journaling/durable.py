"""Files that survive the end of the machine once they are said to be written."""

import json
import os
import zlib
from typing import Any, NamedTuple

from partjit.checks import abridged
from partjit.errors import JournalError

__all__ = ["Checksum", "checked", "read_json", "sync_directory", "write", "write_json"]


class Checksum(NamedTuple):
    """What is known of a file.

    Attributes:
        length: its bytes.
        crc: their CRC-32.
    """

    length: int
    crc: int


def write(path: str, data: bytes) -> Checksum:
    """Writes a file; it is on the disk when this returns."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Checksum(len(data), zlib.crc32(data))


def checked(path: str, expected: Checksum) -> bytes:
    """What a file has.

    Raises:
        JournalError: that is not what was written, or it is not there.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise JournalError(f"{path}, a file of a commit, cannot be read: {error}") from error
    if Checksum(len(data), zlib.crc32(data)) != expected:
        raise JournalError(
            f"{path}, a file of a commit, is damaged: its checksum is another one than when it was written"
        )
    return data


def write_json(path: str, data: Any) -> None:
    """Replaces a file by another one, at once: whoever reads it finds the old one or the new one."""
    write(f"{path}.new", json.dumps(data, indent=1).encode())
    os.replace(f"{path}.new", path)
    sync_directory(os.path.dirname(path))


def read_json(path: str) -> Any:
    """What a file has, or None if it is not there.

    Raises:
        JournalError: it is damaged, or cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        text = f"{abridged(path)}, the manifest of a journal, cannot be read: {error.strerror}"
        raise JournalError(text) from None
    except ValueError as error:
        raise JournalError(f"{path}, the manifest of a journal, is damaged: {error}") from error


def sync_directory(path: str) -> None:
    """Makes the names in a directory survive the end of the machine."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
