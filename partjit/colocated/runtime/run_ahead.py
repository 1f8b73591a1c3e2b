"""Calls made before their results are requested, as input pipelines do.

Only calls without arguments can run ahead. Results that are not taken yet wait here, in the order of the calls, for the
next execution that requests one; none is dropped when an execution fails.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

import jax

from partjit.colocated.runtime import scheduler
from partjit.colocated.runtime.call import Call
from partjit.colocated.runtime.deadlocks import would_never_end
from partjit.colocated.runtime.pending import PendingArray
from partjit.colocated.runtime.specs import OutSpecs

__all__ = ["Prepared", "RunAhead"]


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A call ready to be submitted, and its results.

    Attributes:
        call: the call.
        results: its pending results.
        out_specs: the specs of the results.
    """

    call: Call
    results: Sequence[PendingArray]
    out_specs: OutSpecs

    def submit(self) -> Sequence[jax.Array]:
        """Submits the call and returns its results."""
        scheduler.submit(self.call)
        return self.results


class RunAhead:
    """The calls of one function that run ahead.

    Attributes:
        count: how many may do so.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._made: collections.deque[Prepared] = collections.deque()

    def take(self, out_specs: OutSpecs, prepare: Callable[[], Prepared]) -> Sequence[jax.Array]:
        """The results of the next call; submits others in its place.

        A call is added here at the moment it enters its lanes. So calls are taken in the order in which they run, and a
        thread that waits for room in a stream does not block others here.

        Args:
            out_specs: the specs that the results must have.
            prepare: prepares a call.
        """
        if scheduler.is_changing_lanes():  # a finalizer: it cannot enter lanes now
            return prepare().submit()
        taken = self._pop()
        while taken is None:
            self._make(prepare(), self.count + 1)
            taken = self._pop()
        while len(self._made) < self.count:
            self._make(prepare(), self.count)
        return _fitted(taken, out_specs)

    def made(self, out_specs: OutSpecs) -> Sequence[jax.Array] | None:
        """The results of the next call if it was made and does not wait for the requesting call, else None."""
        first = next(iter([*self._made]), None)
        if first is None or would_never_end(first.call):
            return None
        taken = self._pop()
        return None if taken is None else _fitted(taken, out_specs)

    def _make(self, prepared: Prepared, most: int) -> None:
        def entering() -> bool:
            if len(self._made) >= most:  # another thread was faster
                return False
            self._made.append(prepared)
            return True

        prepared.call.entering = entering
        prepared.submit()

    def _pop(self) -> Prepared | None:
        while True:
            try:
                prepared = self._made.popleft()
            except IndexError:
                return None
            if not prepared.call.was_given_up:  # an interrupt came in between
                return prepared


def _fitted(taken: Prepared, out_specs: OutSpecs) -> Sequence[jax.Array]:
    if taken.out_specs is out_specs:
        return taken.results
    # It was made by another program or outside of any, with other shardings.
    return [spec.fit(result.value()) for spec, result in zip(out_specs.leaves, taken.results, strict=True)]
