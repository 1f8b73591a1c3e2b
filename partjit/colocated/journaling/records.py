"""The file of a journal: records that are appended, and read again as far as they are whole.

A record is its length, its CRC-32 and its bytes. A process that is killed leaves at most one that is not whole, at the
end; it is cut off, as is everything behind the first record that is not what its checksum says. The first record says
which journal the file belongs to.
"""

import itertools
import os
import struct
import zlib
from collections.abc import Callable, Iterator

from partjit.errors import JournalError

__all__ = ["RecordFile", "framed", "read_records"]

_HEADER = struct.Struct("<II")
_MOST = 2**32 - 1


def framed(body: bytes) -> bytes:
    """A record as it is in the file."""
    if len(body) > _MOST:
        raise JournalError(f"a record of a journal has at most {_MOST} bytes, and this one has {len(body)}")
    return _HEADER.pack(len(body), zlib.crc32(body)) + body


def read_records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The records at the beginning of some data that are whole, each with the position of its end."""
    position = 0
    while position + _HEADER.size <= len(data):
        length, checksum = _HEADER.unpack_from(data, position)
        start, end = position + _HEADER.size, position + _HEADER.size + length
        body = data[start:end]
        if len(body) < length or zlib.crc32(body) != checksum or not length:  # a hole in a file reads as zeros
            return
        yield end, body
        position = end


class RecordFile:
    """A file to which whole records are appended, by any thread; each is one `write`, so that none comes into another.

    What was written survives the end of the process, but not that of the machine, which needs `sync`.

    Args:
        path: where it is; a new one is made if there is none.
        title: its first record. A file with another one is refused.
        ends_at: whether a record that was found does not count any more, nor those behind it: they are cut off.

    Attributes:
        found: the records that were in it, without the first.

    Raises:
        JournalError: it is the file of something else.
    """

    def __init__(self, path: str, title: bytes, ends_at: Callable[[bytes], bool] = lambda _: False) -> None:
        self._path = path
        self._is_broken = False
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            with open(path, "rb") as file:
                data = file.read()
            records = [*itertools.takewhile(lambda record: not ends_at(record[1]), read_records(data))]
            if records and records[0][1] != title:
                raise JournalError(f"{path} belongs to another journal, or to another version of partjit")
            end = records[-1][0] if records else 0
            if end < len(data):
                os.ftruncate(self._file, end)
            self.found = [body for _, body in records[1:]]
            if not records:
                self.append(title)
        except BaseException:
            self.close()
            raise

    def append(self, body: bytes) -> None:
        """Appends a record.

        Raises:
            OSError: it could not be written, and neither will be any later one: these would be behind a torn one.
        """
        if self._is_broken:
            raise OSError(f"{self._path} could not be written: no call can be recorded any more")
        data = framed(body)
        try:
            is_whole = os.write(self._file, data) == len(data)
        except OSError:
            self._is_broken = True
            raise
        if not is_whole:
            self._is_broken = True
            raise OSError(f"{self._path} could not be written to its end: the disk is full, or a limit is reached")

    def sync(self) -> None:
        """Makes what was written survive the end of the machine."""
        os.fsync(self._file)

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
