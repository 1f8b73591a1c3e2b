"""What the calls of an object see: the state that the program has consumed, not what was made ahead.

Calls of a method with `run_ahead` run before the program requests their results. To the program they have not happened
until it takes them. So a call of another method, when it enters the lane of the object, revokes those not taken: the
ones that have not begun are skipped, and before the next call runs the object is restored to the state before the first
of the others. An object that cannot be restored refuses such a call instead.

A failure of a call made ahead concerns nobody until the call is taken; the calls made behind it are skipped as well, so
that nothing runs ahead of an error which the program has not seen.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax

from partjit.colocated.runtime.call import Call
from partjit.colocated.runtime.failures import Failure
from partjit.colocated.runtime.interrupts import is_interrupt
from partjit.colocated.runtime.out_specs import OutSpecs
from partjit.colocated.runtime.pending import PendingArray

__all__ = ["History", "Made"]

_NOTHING = object()


class _Dropping:
    """Who drops a call."""


class Made:
    """A call made ahead: taken or dropped, once.

    Attributes:
        call: the call.
        results: its pending results.
        out_specs: the specs of the results.
        record: what records it once it is taken; None without a journal.
        saved: the state of its object before it ran, if that can be saved.
        error: what it raised, which is handed over when it is taken.
        has_run: whether it succeeded.
        is_crossed: whether a call of another method that cannot undo it came behind it.
    """

    __slots__ = ("_claims", "call", "error", "has_run", "is_crossed", "out_specs", "record", "results", "saved")

    def __init__(self, call: Call, results: Sequence[PendingArray], out_specs: OutSpecs, record: Any = None) -> None:
        self.call = call
        self.record = record
        self.results = results
        self.out_specs = out_specs
        self.saved: object = _NOTHING
        self.error: BaseException | None = None
        self.has_run = False
        self.is_crossed = False
        self._claims: dict[str, object] = {}  # whose `setdefault` is atomic

    @property
    def is_open(self) -> bool:
        """Whether it is neither taken nor dropped."""
        return "end" not in self._claims

    @property
    def is_dropped(self) -> bool:
        """Whether nobody will take it."""
        return type(self._claims.get("end")) is _Dropping

    def drop(self) -> bool:
        """Drops it, unless it was taken or dropped before; returns whether."""
        dropping = _Dropping()
        return self._claims.setdefault("end", dropping) is dropping

    def take(self) -> bool:
        """Takes it, unless it was taken or dropped; if it has failed, its results get the failure."""
        if self.call.was_given_up:  # an interrupt came in between
            return False
        taker = object()
        if self._claims.setdefault("end", taker) is not taker:
            return False
        if self.error is not None and self._is_first_to_report():
            call = self.call
            failure = Failure(self.error, call.name, call.site, call.stream, call.parent, call.lanes)
            for result in self.results:
                result.receive_failure(failure)
        return True

    def give_back(self) -> None:
        """Undoes that it was taken."""
        self._claims.pop("end")

    def run(self, body: Callable[[], Sequence[jax.Array]], is_behind_a_failure: bool) -> Sequence[jax.Array]:
        """Runs its function, unless it is dropped; a failure is kept until it is taken."""
        if (is_behind_a_failure and self.drop()) or self.is_dropped:
            return self._nothing()
        try:
            values = body()
        except BaseException as error:
            if is_interrupt(error):
                raise
            self.error = error  # before it is read whether it was taken: `take` does it the other way round
            if self.is_open or self.is_dropped or not self._is_first_to_report():
                return self._nothing()
            raise
        self.has_run = True
        return values

    def _is_first_to_report(self) -> bool:
        reporter = object()
        return self._claims.setdefault("report", reporter) is reporter

    def _nothing(self) -> Sequence[jax.Array]:
        self.call.receivers = ()
        return ()


class History:
    """The order of the calls of one object, with those made ahead.

    Args:
        save: returns the state of the object.
        restore: sets it; both are None if the object cannot be restored.
    """

    def __init__(
        self, save: Callable[[], object] | None = None, restore: Callable[[object], object] | None = None
    ) -> None:
        self._save = save
        self._restore = restore
        self._queues: list[collections.deque[Made]] = []
        self._revoked: collections.deque[Made] = collections.deque()
        self._shown: Made | None = None

    def order(self, call: Call, *, shows_state: bool = False) -> None:
        """Makes a call of a method see the state that the program has consumed.

        Args:
            call: the call, before it enters the lane of the object; one in the place of calls of several objects is
                ordered by each of them.
            shows_state: whether it only returns what `save` does; then nothing has to be undone for it.
        """
        crossed: list[Made] = []
        body, enters_others = call.body, call.entering
        assert body is not None

        def entering() -> bool:
            crossed.extend(self.crossed(shows_state=shows_state))
            return enters_others is None or enters_others()

        def in_turn() -> object:
            self.catch_up(call.name, () if shows_state else crossed)
            if not shows_state:
                return body()
            self._shown = next((made for made in crossed if made.saved is not _NOTHING), None)
            call.keeps_place = self._shown is not None  # what comes in between could change what is shown
            try:
                return body()
            finally:
                self._shown = None
                crossed.clear()

        call.entering, call.body = entering, in_turn

    @property
    def can_save(self) -> bool:
        """Whether the object has a state that can be saved."""
        return self._save is not None

    def save(self) -> object:
        """The state of the object, in the turn of a call of it."""
        assert self._save is not None
        return self._save()

    def restore(self, state: object) -> None:
        """Sets the state of the object, in the turn of a call of it."""
        assert self._restore is not None
        self._restore(state)

    def shown(self) -> tuple[object, ...]:
        """The state that a call which only returns it has to show; empty if it is that of the object now."""
        return () if self._shown is None else (self._shown.saved,)

    @property
    def is_ahead(self) -> bool:
        """Whether calls were made ahead, or some have to be undone."""
        return any(self._queues) or bool(self._revoked)

    def has_nothing_ahead(self) -> bool:
        """Whether a call that enters the lane now sees the state that the program has consumed."""
        return not self.is_ahead

    def crossed(self, *, shows_state: bool = False) -> Sequence[Made]:
        """The calls made ahead that a call of a method, which enters the lane now, must not see; its `order` says how.

        Called by one thread at a time.
        """
        if not self._queues:  # as a rule
            return ()
        return self._untaken()[:1] if shows_state else self.cross()

    def cross(self, own: "collections.deque[Made] | None" = None) -> list[Made]:
        """The calls made ahead and not taken that a call which enters the lane must not see: all but those of `own`.

        Called by one thread at a time.
        """
        crossed = self._untaken(own)
        if self._restore is None:
            for made in crossed:
                made.is_crossed = True
        else:
            self.revoke(crossed)
        self._queues = [queue for queue in self._queues if queue and queue is not own]
        if own is not None:
            self._queues.append(own)
        return crossed

    def revoke(self, calls: Sequence[Made]) -> int:
        """Drops those of the calls that are not taken, and returns how many.

        Those that have not begun are skipped; what the others did is undone before the next call runs, if it can be.
        """
        dropped = [made for made in calls if made.drop()]
        if self._restore is not None:
            self._revoked.extend(dropped)
        return len(dropped)

    def catch_up(self, name: str, crossed: Sequence[Made]) -> None:
        """Undoes what was revoked, in the turn of the next call; as a rule nothing.

        Args:
            name: what the call calls.
            crossed: the calls made ahead that it must not see.

        Raises:
            RuntimeError: they have run and cannot be undone.
        """
        if not crossed and not self._revoked:
            return
        if self._restore is None:
            seen = [made.call.name for made in crossed if made.has_run]
            if seen:
                raise _unconsumed(name, seen)
            return
        revoked = [*self._revoked]
        first = next((made for made in revoked if made.saved is not _NOTHING), None)
        if first is not None:
            self._restore(first.saved)
        for made in revoked:
            self._revoked.remove(made)

    def save_before(self, made: Made) -> None:
        """Saves the state before a call made ahead."""
        if self._save is not None:
            made.saved = self._save()

    def _untaken(self, own: "collections.deque[Made] | None" = None) -> list[Made]:
        return [made for queue in self._queues if queue is not own for made in [*queue] if made.is_open]


def _unconsumed(name: str, ahead: Sequence[str]) -> RuntimeError:
    what = "a call" if len(ahead) == 1 else f"{len(ahead)} calls"
    return RuntimeError(
        f"{name} would see the state after {what} of {ahead[0]} made ahead, whose results the program has not taken. "
        "Give colocated_python_class(state=(..., ...)) the names of the methods that return and set the state of the "
        "object, let the method that runs ahead return the state as well, or drop what was made with discard_ahead()"
    )
