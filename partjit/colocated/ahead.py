"""Calls made before they are asked for.

A call without arguments can be made early: an input pipeline does. What was made and not yet taken waits here, for
whichever execution asks next, in the order of the calls; nothing is dropped when an execution fails.
"""

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Ahead"]


class Ahead:
    """The calls of one function that were made early.

    Attributes:
        count: how many may be.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._made: collections.deque[tuple[Any, Sequence[Any]]] = collections.deque()
        self._lock = threading.RLock()

    def take(self, out_specs: Any, submit: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """The results of the next call, and has others made in its place.

        Args:
            out_specs: what the results should look like.
            submit: makes a call and gives its results.
        """
        with self._lock:  # so that calls are made and taken in one order
            made_for, results = self._made.popleft() if self._made else (out_specs, submit())
            while len(self._made) < self.count:
                self._made.append((out_specs, submit()))
        return _fitted(made_for, results, out_specs)

    def made(self, out_specs: Any) -> Sequence[Any] | None:
        """The results of the next call if it was made already, else None."""
        with self._lock:
            return _fitted(*self._made.popleft(), out_specs=out_specs) if self._made else None


def _fitted(made_for: Any, results: Sequence[Any], out_specs: Any) -> Sequence[Any]:
    if made_for is out_specs:
        return results
    # It was made by another program or outside of any, where the results lie elsewhere.
    return [spec.fit(result.value()) for spec, result in zip(out_specs.leaves, results, strict=True)]
