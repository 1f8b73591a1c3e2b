"""What the records of a journal say, as bytes and as data."""

import dataclasses
import json
import struct
from collections.abc import Sequence
from typing import NamedTuple

from partjit.colocated.journaling.payloads import DIGEST_SIZE
from partjit.errors import JournalError

__all__ = [
    "Contents",
    "Done",
    "JournaledCall",
    "Key",
    "Site",
    "call_record",
    "failure_record",
    "is_failure",
    "path_in",
    "place_record",
    "scope_record",
]

_KEY = struct.Struct("<cIIII")
_CALL, _FAILURE, _PLACE, _SCOPE = b"c", b"f", b"p", b"s"


class Key(NamedTuple):
    """The numbers of a call.

    Attributes:
        scope: that of the call that makes it; 0 if none does.
        place: that of its place.
        execution: that of the execution of its program in the scope, from 0; 0 outside of programs.
        iteration: how many calls of the same place came before in the execution.
    """

    scope: int
    place: int
    execution: int
    iteration: int


class Site(NamedTuple):
    """Where calls are made, and of what.

    Attributes:
        program: the name of their program, with that of the named stream it is on; empty outside of programs.
        node: their node in it; empty outside of programs.
        name: the name of the function.
        stream: the name of their stream; empty if it has none.
        shard: the coordinates of the shard that makes them by itself; empty for others.
        types: those of the arguments.
        line: where the user's code makes them; empty outside of programs.
    """

    program: str
    node: str
    name: str
    stream: str
    shard: str
    types: str
    line: str

    @property
    def slot(self) -> tuple[str, ...]:
        """What calls are counted by."""
        return self[:5]

    def __str__(self) -> str:
        where = f"{self.node} of {self.program}" if self.program else "outside of programs"
        stream = f" on stream {self.stream!r}" if self.stream else ""
        return f"{self.name}({self.types}), {where}{stream}{f' at {self.line}' if self.line else ''}"


@dataclasses.dataclass(frozen=True)
class JournaledCall:
    """A call that has ended, as the journal has it.

    Attributes:
        name: that of the function.
        program: that of the program, as `step` or `step@stream`; empty for a call outside of programs.
        execution: the number of the execution of the program since the last commit, or in the call that makes it.
        node: its node in the program, as the plan shows it.
        line: where the user's code makes it, as "file:line"; empty outside of programs.
        iteration: how many calls of the same node, or of the same function outside of programs, came before.
        stream: the name of its stream; empty if that has none.
        shard: the coordinates of the shard that made it, where each makes its own.
        types: those of the arguments.
        digest: 32 hexadecimal digits of what it returned in this process.
        error: what it raised; None if it returned.
        path: all of that in short, beginning with the calls that it is a part of.
    """

    name: str
    program: str
    execution: int
    node: str
    line: str
    iteration: int
    stream: str
    shard: str
    types: str
    digest: str
    error: str | None
    path: str


class Done(NamedTuple):
    """A call that has ended.

    Attributes:
        key: which one.
        digest: of its results.
        payload: its results; empty if they were not kept.
        error: what it raised; None if it returned.
    """

    key: Key
    digest: bytes
    payload: bytes
    error: str | None


def call_record(key: Key, digest: bytes, payload: bytes) -> bytes:
    """The record of a call that has returned."""
    return _KEY.pack(_CALL, *key) + digest + payload


def failure_record(key: Key, error: str) -> bytes:
    """The record of a call that has raised."""
    return _KEY.pack(_FAILURE, *key) + error.encode(errors="replace")


def is_failure(record: bytes) -> bool:
    """Whether it is the record of a call that has raised."""
    return record[:1] == _FAILURE


def place_record(number: int, site: Site) -> bytes:
    """The record that gives a place its number."""
    return _PLACE + json.dumps([number, *site]).encode()


def scope_record(number: int, key: Key) -> bytes:
    """The record that gives a call which makes others its number."""
    return _KEY.pack(_SCOPE, *key) + number.to_bytes(4, "little")


class Contents:
    """What the records of a file say.

    Args:
        records: those behind the title.

    Attributes:
        places: by number; None for one that nothing says anything of.
        scopes: the calls that make others, by number.
        calls: those that have ended, in order.
    """

    def __init__(self, records: Sequence[bytes]) -> None:
        self.places: dict[int, Site] = {}
        self.scopes: dict[int, Key] = {}
        self.calls: list[Done] = []
        for record in records:
            try:
                self._take(record)
            except (ValueError, struct.error) as error:
                raise JournalError(f"a record of the journal is of another version of partjit: {error}") from error

    def _take(self, record: bytes) -> None:
        kind = record[:1]
        if kind == _PLACE:
            number, *fields = json.loads(record[1:])
            self.places[number] = Site(*fields)
            return
        key, rest = Key(*_KEY.unpack_from(record)[1:]), record[_KEY.size :]
        if kind == _SCOPE:
            self.scopes[int.from_bytes(rest, "little")] = key
        elif kind == _FAILURE:
            self.calls.append(Done(key, b"", b"", rest.decode()))
        elif kind == _CALL:
            self.calls.append(Done(key, rest[:DIGEST_SIZE], rest[DIGEST_SIZE:], None))
        else:
            raise ValueError(f"there is no kind {kind!r}")

    def path(self, key: Key) -> str:
        """A call in words, beginning with those that it is a part of."""
        outer = f"{self.path(self.scopes[key.scope])}/" if key.scope else ""
        return outer + path_in(self.places[key.place], key.execution, key.iteration)

    def listed(self) -> tuple[JournaledCall, ...]:
        """The calls, for users."""
        return tuple(
            JournaledCall(
                site.name,
                site.program,
                done.key.execution,
                site.node,
                site.line,
                done.key.iteration,
                site.stream,
                site.shard,
                site.types,
                done.digest.hex(),
                done.error,
                self.path(done.key),
            )
            for done in self.calls
            for site in [self.places[done.key.place]]
        )


def path_in(site: Site, execution: int, iteration: int) -> str:
    """A call in words, in its scope."""
    program = f"{site.program}:{execution}/" if site.program else ""
    stream = f"@{site.stream}" if site.stream else ""
    return f"{program}{site.node or site.name}{site.shard}{stream}:{iteration}"
