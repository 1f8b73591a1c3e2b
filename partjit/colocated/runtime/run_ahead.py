"""Calls made before they are asked for.

A call without arguments can be made early: an input pipeline does. What was made and not yet taken waits here, for
whichever execution asks next, in the order of the calls; nothing is dropped when an execution fails.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from partjit.colocated.runtime import scheduler
from partjit.colocated.runtime.call import Call
from partjit.colocated.runtime.deadlocks import would_never_end

__all__ = ["Prepared", "RunAhead"]


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A call that can be submitted, and its results.

    Attributes:
        call: the call.
        results: what it gives, pending.
        out_specs: what they look like.
    """

    call: Call
    results: Sequence[Any]
    out_specs: Any

    def submit(self) -> Sequence[Any]:
        """Lets it run, and gives its results."""
        scheduler.submit(self.call)
        return self.results


class RunAhead:
    """The calls of one function that were made early.

    Attributes:
        count: how many may be.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._made: collections.deque[Prepared] = collections.deque()

    def take(self, out_specs: Any, prepare: Callable[[], Prepared]) -> Sequence[Any]:
        """The results of the next call, and has others made in its place.

        A call is put here at the moment it enters its lanes. So calls are taken in the order in which they run, and
        nobody who waits for room in a stream keeps another one waiting here.

        Args:
            out_specs: what the results should look like.
            prepare: makes a call.
        """
        if scheduler.is_changing_lanes():  # it cannot enter lanes now
            return prepare().submit()
        taken = self._pop()
        while taken is None:
            self._make(prepare(), self.count + 1)
            taken = self._pop()
        while len(self._made) < self.count:
            self._make(prepare(), self.count)
        return _fitted(taken, out_specs)

    def made(self, out_specs: Any) -> Sequence[Any] | None:
        """The results of the next call if it was made already and does not wait for the call that asks, else None."""
        first = next(iter([*self._made]), None)
        if first is None or would_never_end(first.call):
            return None
        taken = self._pop()
        return None if taken is None else _fitted(taken, out_specs)

    def _make(self, prepared: Prepared, most: int) -> None:
        def entering() -> bool:
            if len(self._made) >= most:  # another thread was quicker
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
            if not prepared.call.was_given_up:  # an interrupt came between
                return prepared


def _fitted(taken: Prepared, out_specs: Any) -> Sequence[Any]:
    if taken.out_specs is out_specs:
        return taken.results
    # It was made by another program or outside of any, where the results lie elsewhere.
    return [spec.fit(result.value()) for spec, result in zip(out_specs.leaves, taken.results, strict=True)]
