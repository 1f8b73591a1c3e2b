"""The entry of a call: from its request, over its run, to its record."""

import contextvars
import itertools
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import jax

from partjit._jax.types import PyTree
from partjit.colocated.journaling.contents import Done, Key, Site, call_record, failure_record, path_in
from partjit.colocated.journaling.identity import UNRECORDED, Scope, current_scope
from partjit.colocated.journaling.payloads import Piece, described, digest_of, packed, pieces_of, put, unpacked
from partjit.colocated.runtime.history import History
from partjit.colocated.runtime.out_specs import OutSpecs
from partjit.colocated.runtime.shards import coordinates_here
from partjit.errors import JournalError

__all__ = ["Ahead", "Entry", "Recorder"]


class Recorder(Protocol):
    """What entries are written to.

    Attributes:
        keeps_results: whether results are recorded.
        prefix, suffix: what idempotency keys begin and end with.
        names: the names of the objects whose state is kept, by what orders their calls.
    """

    keeps_results: bool
    prefix: str
    suffix: str
    names: Mapping[History, str]

    def write(self, record: bytes) -> None:
        """Appends a record."""
        ...

    def scope_number(self, key: Key) -> int:
        """The number of a call as one that makes others."""
        ...


class _InCall:
    """The `with` block in which a call runs."""

    __slots__ = ("_token",)
    _inside: Scope

    def __enter__(self) -> Self:
        self._token: contextvars.Token[Scope | None] = current_scope.set(self._scope_inside())
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        current_scope.reset(self._token)
        if error is not None:
            self.failed(error)

    def _scope_inside(self) -> Scope:
        raise NotImplementedError

    def failed(self, error: BaseException) -> None:
        """Records that the call raised."""
        raise NotImplementedError


class Entry(_InCall):
    """A call from its request to its record; in the `with` block in which it runs it counts the calls that it makes.

    Attributes:
        specs: a tree of the specs of its results, if nothing says after a restart what they are; None otherwise.
    """

    __slots__ = ("_history", "_key", "_known", "_name", "_number", "_outer", "_site", "counts", "log", "specs")
    program, execution = "", 0

    def __init__(
        self,
        log: Recorder,
        outer: Scope,
        key: Key,
        site: Site,
        known: Done | None,
        history: History | None,
        name: str | None,
    ) -> None:
        self.log, self._outer, self._key, self._site = log, outer, key, site
        self._known, self._history, self._name = known, history, name
        self._number: int | None = None
        self.counts: dict[object, itertools.count[int]] = {}
        self.specs: PyTree = None

    # A call that is known

    @property
    def is_known(self) -> bool:
        """Whether it was made before."""
        return self._known is not None

    def results(self, out_specs: OutSpecs) -> list[Any]:
        """The flat results that it had then, as arrays."""
        found = self._pieces()
        expected = [f"{spec.aval.str_short()}" for spec in out_specs.leaves]
        if len(found) != len(expected):
            raise self._other_results(f"{len(found)} results", f"{len(expected)}")
        arrays = []
        for pieces, spec in zip(found, out_specs.leaves, strict=True):
            try:
                arrays.append(put(spec, pieces))
            except (ValueError, TypeError, KeyError) as error:
                shape = f"{pieces[0].data.dtype.name}{[*pieces[0].data.shape]}"
                raise self._other_results(shape, spec.aval.str_short()) from error
        return arrays

    def numpy_results(self) -> list[Any]:
        """The flat results that it had then, as NumPy arrays."""
        return [pieces[0].data for pieces in self._pieces()]

    def tree(self) -> PyTree:
        """The result that it had then, in which the arrays are as they were then."""
        found, specs, _ = self._payload()
        leaves, tree = jax.tree.flatten(specs)
        if len(leaves) != len(found):
            raise JournalError(f"the journal does not say what the results of {self._site} are: give it output specs")
        return tree.unflatten([put(leaf.spec, pieces) for leaf, pieces in zip(leaves, found, strict=True)])

    def _pieces(self) -> list[list[Piece]]:
        return self._payload()[0]

    def _payload(self) -> Any:
        assert self._known is not None
        if not self._known.payload:
            raise JournalError(f"the journal has no results of {self._site}: open it with results=True")
        return unpacked(self._known.payload, f"the result of {self._site}")

    def _other_results(self, recorded: str, here: str) -> JournalError:
        return JournalError(f"the journal has other results of {self._site}: {recorded} where there should be {here}")

    # A call that is made

    @property
    def number(self) -> int:
        """Its number as one that makes others."""
        if self._number is None:
            self._number = self.log.scope_number(self._key)
        return self._number

    @property
    def path(self) -> str:
        """Which one it is, in words."""
        outer = f"{self._outer.path}/" if self._outer.path else ""
        return outer + path_in(self._site._replace(program=""), 0, self._key.iteration)

    def key(self) -> str:
        """Its idempotency key."""
        coordinates = "" if self._site.shard else coordinates_here()
        shard = f"/shard-{[*coordinates.values()]}" if coordinates else ""
        return f"{self.log.prefix}{self.path}{self.log.suffix}{shard}"

    def done(self, results: Sequence[Any], tree: PyTree = None) -> None:
        """Records what it returned, while nothing else uses its object: the state of that is recorded as well.

        Args:
            results: the flat results.
            tree: the result, if nothing has said before what it is.
        """
        self.record([*map(pieces_of, results)], tree, self.state())

    def state(self) -> dict[str, object]:
        """The state of its object, by name."""
        if self._name is None or not self.log.keeps_results:
            return {}
        assert self._history is not None
        return {self._name: self._history.save()}

    def record(self, results: list[list[Piece]], tree: PyTree, state: dict[str, object]) -> None:
        """Records what it returned, in a tree if nothing else says what that is, and the state of its object then."""
        payload = b""
        if self.log.keeps_results:
            unspecified = self.specs if tree is None else tree
            specs = None if unspecified is None else jax.tree.map(described, unspecified)
            payload = packed((results, specs, state), f"the result of {self._site}")
        self.log.write(call_record(self._key, digest_of(results), payload))

    def failed(self, error: BaseException) -> None:
        """Records that it raised."""
        self.log.write(failure_record(self._key, traceback.format_exception_only(error)[0].strip()))

    def take(self, ahead: "Ahead | None", results: Sequence[Any]) -> None:
        """Takes a call with these results that was made ahead; None if that was before the journal was opened."""
        if ahead is None:
            self.done(results)
        else:
            ahead.taken(self)

    def _scope_inside(self) -> Scope:
        return self


class Ahead(_InCall):
    """A call that is made ahead. It is recorded when it has returned and is taken, whichever is later."""

    __slots__ = ("_ended", "_entry", "_history", "_log", "_writers")

    def __init__(self, log: Recorder, history: History | None) -> None:
        self._log, self._history = log, history
        self._entry: Entry | None = None
        self._ended: tuple[list[list[Piece]], dict[str, object]] | BaseException | None = None
        self._writers = itertools.count()

    def done(self, results: Sequence[Any]) -> None:
        """Keeps what it returned."""
        name = None if self._history is None else self._log.names.get(self._history)
        keeps = name is not None and self._log.keeps_results and self._history is not None and self._history.can_save
        state = {name: self._history.save()} if keeps and self._history is not None and name is not None else {}
        self._ended = [*map(pieces_of, results)], state
        self._write()

    def failed(self, error: BaseException) -> None:
        """Keeps what it raised."""
        self._ended = error
        self._write()

    def taken(self, entry: Entry) -> None:
        """Says which call it is."""
        self._entry = entry
        self._write()

    def _write(self) -> None:
        entry, ended = self._entry, self._ended
        if entry is None or ended is None or next(self._writers):
            return
        if isinstance(ended, BaseException):
            entry.failed(ended)
        else:
            results, state = ended
            entry.record(results, None, state)

    def _scope_inside(self) -> Scope:
        return UNRECORDED
