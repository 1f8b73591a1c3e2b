"""Recording the calls that are made, and finding those that were made before a restart.

A call begins an entry where it is requested, in the thread of its caller: there the order is that of the program. The
entry is written when the call has returned, wherever that is. While no journal is open, all of this costs a call one
look at `current`.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from partjit import short_cuts
from partjit.colocated.journaling.contents import (
    Contents,
    Done,
    Key,
    Site,
    path_in,
    place_record,
    scope_record,
)
from partjit.colocated.journaling.entries import Ahead, Entry
from partjit.colocated.journaling.identity import Execution, Place, Scope, current_scope, next_in
from partjit.colocated.journaling.payloads import unpacked
from partjit.colocated.journaling.records import RecordFile
from partjit.colocated.runtime.history import History
from partjit.colocated.runtime.shards import coordinates_here
from partjit.colocated.runtime.streams import entered_stream
from partjit.errors import JournalError

__all__ = ["Log"]


class Log:
    """The calls of this process since a commit, of which some may be known already.

    Args:
        file: where they are recorded; None to play back only: then every call has to be known.
        records: what was recorded before.
        prefix, suffix: what idempotency keys begin and end with.
        keeps_results: whether results are recorded as well, and calls that are known not made again.
        names: the names of the objects whose state is kept, by what orders their calls.

    Attributes:
        plays_only: whether no call is made.
    """

    def __init__(
        self,
        file: RecordFile | None,
        records: Sequence[bytes],
        prefix: str,
        suffix: str,
        keeps_results: bool,
        names: Mapping[History, str],
    ) -> None:
        self.names = names
        self.keeps_results = keeps_results
        self.prefix, self.suffix = prefix, suffix
        self.plays_only = file is None
        self._file = file
        self._changes, self._writing = threading.Lock(), threading.Lock()
        contents = Contents(records)
        self._root = Execution(self, None)
        self._places = {site: number for number, site in contents.places.items()}
        self._scopes = {key: number for number, key in contents.scopes.items()}
        self._found: dict[tuple[Place, str, str, str], tuple[int, Site]] = {}
        self._slots: dict[tuple[str, ...], int] = {}
        self._known: dict[tuple[int, tuple[str, ...], int, int], tuple[Site, Done]] = {}
        for done in contents.calls if self.keeps_results else ():
            site = contents.places[done.key.place]
            self._known[done.key.scope, site.slot, done.key.execution, done.key.iteration] = site, done

    def states(self, records: Sequence[bytes]) -> dict[str, object]:
        """The states of objects after the last of their calls that are known."""
        found: dict[str, object] = {}
        for done in Contents(records).calls:
            if done.payload:
                _, _, state = unpacked(done.payload, "the state of an object")
                found.update(state)
        return found

    def executing(self, program: str, execute: Callable[..., Any]) -> Callable[..., Any]:
        """A function that executes a program, with a number of its own."""

        def execute_numbered(*args: object) -> Any:
            outer = current_scope.get() or self._root
            if outer.log is not self:
                return execute(*args)
            stream = entered_stream()
            name = f"{program}@{stream.name}" if stream and stream.name else program  # each may be another thread's
            token = current_scope.set(Execution(self, outer, name, next_in(outer, name)))
            try:
                return execute(*args)
            finally:
                current_scope.reset(token)

        return execute_numbered

    def begin(self, place: Place, stream: str, history: History | None) -> "Entry | None":
        """Begins the entry of a call that is requested here; None inside of what this does not record.

        That is a call made ahead, and what began before the last commit.

        Args:
            place: what is called, and where.
            stream: the name of its stream.
            history: what orders the calls of its object, if this has a state that the call may change.

        Raises:
            JournalError: the journal has another call in its place; or none, and no call is made; or the state of the
                object would be lost.
        """
        scope = current_scope.get() or self._root
        if scope.log is not self:
            return None
        coordinates = coordinates_here()
        shard = str([*coordinates.values()]) if coordinates else ""
        cached = place, scope.program, stream, shard
        found = self._found.get(cached)
        if found is None:
            site = Site(scope.program, place.node, place.name, stream, shard, place.types(), place.line)
            found = self._found[cached] = self._number(site), site
        number, site = found
        iteration = next_in(scope, site.slot)
        key = Key(scope.number, number, scope.execution, iteration)
        known = self._known.pop((key.scope, site.slot, key.execution, iteration), None) if self._known else None
        if known is not None:
            return self._play(scope, key, site, *known)
        if self.plays_only:
            raise JournalError(
                f"the journal has no call {path_in(site, key.execution, iteration)}: {site}{self._others(key)}"
            )
        name = None
        if history is not None and history.can_save:
            name = self.names.get(history)
            if name is None:
                raise JournalError(
                    f"{place.name} is a method of an object with a state, of which the journal does not know: name it, "
                    "as in colocated.journal(path, objects={'name': object}), so that the state is committed"
                )
        return Entry(self, scope, key, site, None, history, name)

    def _play(self, scope: Scope, key: Key, site: Site, recorded: Site, done: Done) -> "Entry":
        if recorded.types != site.types:
            raise JournalError(
                f"the journal has another call in this place:\n  recorded: {recorded}\n  here:     {site}"
            )
        if done.error is not None:
            raise JournalError(f"the recorded call of {site} raised {done.error}")
        return Entry(self, scope, key, site, done, None, None)

    def _others(self, key: Key) -> str:
        """What is recorded, for the error of a call that is not."""
        inside = [
            (site, done.key.iteration)
            for (scope, _, execution, _), (site, done) in self._known.items()
            if (scope, execution) == (key.scope, key.execution)
        ]
        if not inside:
            return "\nThere it has nothing that is not played yet"
        listed = "".join(f"\n  {site}, number {iteration}" for site, iteration in inside[:5])
        return f" is called here. What it has there and is not played yet:{listed}"

    def _number(self, site: Site) -> int:
        with self._changes:
            number = self._places.get(site)
            if number is None:
                number = max(self._places.values(), default=0) + 1
                self.write(place_record(number, site))
                self._places[site] = number
            return number

    def scope_number(self, key: Key) -> int:
        """The number of a call as one that makes others."""
        with self._changes:
            number = self._scopes.get(key)
            if number is None:
                number = max(self._scopes.values(), default=0) + 1
                self.write(scope_record(number, key))
                self._scopes[key] = number
            return number

    def write(self, record: bytes) -> None:
        """Appends a record."""
        with self._writing:
            if self._file is not None:
                self._file.append(record)

    def end(self) -> None:
        """Records nothing any more, also not of calls that another thread has begun before."""
        with self._writing:
            self._file = None

    def ahead(self, history: History | None) -> "Ahead":
        """What gets the results of a call that is made ahead."""
        return Ahead(self, history)


current: Log | None = None
"""That of the journal that is open, or played back; `set_current` changes it."""


def set_current(log: Log | None) -> None:
    """Has calls written to a journal from here on, or to none."""
    global current
    current = log
    if log is None:
        short_cuts.allow()
    else:
        short_cuts.close()
