"""Calls made before their results are requested, as input pipelines do.

Only calls without arguments can run ahead. Results that are not taken yet wait here, in the order of the calls, for the
next execution that requests one; none is dropped when an execution fails. `history` has what other methods of the same
object see of them.
"""

import collections
import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from partjit.colocated.journaling.entries import Ahead, Entry
from partjit.colocated.runtime import scheduler
from partjit.colocated.runtime.call import Call
from partjit.colocated.runtime.deadlocks import would_never_end
from partjit.colocated.runtime.failures import PoisonedError
from partjit.colocated.runtime.history import History, Made
from partjit.colocated.runtime.out_spec import OutSpec
from partjit.colocated.runtime.out_specs import OutSpecs
from partjit.colocated.runtime.pending import PendingArray, settled

__all__ = ["Prepared", "RunAhead"]


class Prepared(NamedTuple):
    """A call ready to be submitted, and its results.

    Attributes:
        call: the call.
        results: its pending results.
        out_specs: the specs of the results.
        record: what records it once it is taken, if a journal is open.
    """

    call: Call
    results: Sequence[PendingArray]
    out_specs: OutSpecs
    record: Ahead | None = None

    def submit(self) -> Sequence[jax.Array]:
        """Submits the call and returns its results."""
        scheduler.submit(self.call)
        return self.results


class RunAhead:
    """The calls of one function that run ahead.

    Attributes:
        count: how many may do so.
    """

    def __init__(self, count: int, history: History | None) -> None:
        self.count = count
        self._history = history or History()
        self._made: collections.deque[Made] = collections.deque()

    @property
    def has_none(self) -> bool:
        """Whether no call is made ahead at present."""
        return not self._made

    def take(
        self,
        out_specs: OutSpecs,
        prepare: Callable[[], Prepared],
        entry: Entry | None = None,
        *,
        refills: bool = True,
    ) -> Sequence[jax.Array]:
        """The results of the next call; submits others in its place.

        A call is added here at the moment it enters its lanes. So calls are taken in the order in which they run, and a
        thread that waits for room in a stream does not block others here.

        Args:
            out_specs: the specs that the results must have.
            prepare: prepares a call.
            entry: that of the request in the journal.
            refills: whether others are submitted.
        """
        if scheduler.is_changing_lanes():  # a finalizer: it cannot enter lanes now
            prepared = prepare()
            if entry is not None:
                entry.take(prepared.record, prepared.results)
            return prepared.submit()
        taken = self._pop()
        while taken is None:
            self._make(prepare(), self.count + 1)
            taken = self._pop()
        try:
            while refills and len(self._made) < self.count:
                self._make(prepare(), self.count)
        except BaseException:  # an interrupt, or a deadlock
            taken.give_back()
            self._made.appendleft(taken)
            raise
        return _fitted(taken, out_specs, entry)

    def made(self, out_specs: OutSpecs, entry: Entry | None = None) -> Sequence[jax.Array] | None:
        """The results of the next call if it was made and does not wait for the requesting call, else None."""
        first = next(iter([*self._made]), None)
        if first is None or would_never_end(first.call):
            return None
        taken = self._pop()
        return None if taken is None else _fitted(taken, out_specs, entry)

    def discard(self) -> int:
        """Drops the calls that were made and not taken; returns how many. Those that have not begun are skipped."""
        made = [*self._made]
        dropped = self._history.revoke(made)
        for call in made:  # not `clear`: another thread may add one
            self._remove(call)
        return dropped

    def _make(self, prepared: Prepared, most: int) -> None:
        call, history, queue = prepared.call, self._history, self._made
        made = Made(call, prepared.results, prepared.out_specs, prepared.record)
        crossed: list[Made] = []
        body = call.body
        assert body is not None

        def entering() -> bool:
            if len(queue) >= most:  # another thread was faster
                return False
            crossed.extend(history.cross(queue))
            queue.append(made)
            return True

        def in_turn() -> Sequence[jax.Array]:
            history.catch_up(call.name, crossed)
            crossed.clear()
            history.save_before(made)
            return body()

        def run() -> Sequence[jax.Array]:
            return made.run(in_turn, any(other.is_open and other.error is not None for other in [*queue]))

        call.entering, call.body = entering, run
        call.may_overtake, call.keeps_place = False, True  # they are taken in the order in which they entered
        prepared.submit()

    def _pop(self) -> Made | None:
        with contextlib.suppress(IndexError):
            while True:
                first = self._made[0]
                if first.is_crossed and first.is_open:
                    # The program may have reset the object since: then a failure is none of its present state.
                    scheduler.join(first.call)
                    if first.error is not None:
                        first.drop()
                is_taken = first.take()
                self._remove(first)
                if is_taken:
                    return first
        return None

    def _remove(self, made: Made) -> None:
        with contextlib.suppress(ValueError):  # another thread has removed it
            self._made.remove(made)


def _fitted(taken: Made, out_specs: OutSpecs, entry: Entry | None) -> Sequence[jax.Array]:
    if entry is not None:
        entry.take(taken.record, taken.results)
    if taken.out_specs is out_specs:
        return [*map(settled, taken.results)]
    # It was made by another program or outside of any, with other shardings.
    what = f"a result of {taken.call.name} that was made ahead"
    return [_fitted_to(spec, result, what) for spec, result in zip(out_specs.leaves, taken.results, strict=True)]


def _fitted_to(spec: OutSpec, result: PendingArray, what: str) -> jax.Array:
    try:
        return spec.fit(result.value_for_call(), lambda: what)
    except PoisonedError as error:  # raised where it is used, as by any other call
        return PendingArray.failed(error.failure, spec.aval, spec.sharding, spec.committed)
