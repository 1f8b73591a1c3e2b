"""Fragments dispatched at once, of which an interrupt has to leave known whether they were.

A signal handler runs between any two bytecodes of the main thread, and may raise there; not while C runs, which
dispatches a fragment like an earlier one, and puts its results into a list, without a bytecode in between. The first
one of its kind needs Python: another thread dispatches it, under the caller's settings, on which the kind depends.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from partjit._jax.threads import ThreadSettings
from partjit.colocated.agreement.participant import is_thread_of_agreement

__all__ = ["AtOnce", "require_uninterrupted"]

_MOST_MISSES = 20
"""So often a fragment is one of another kind than before, until other threads dispatch all of them."""


class _InterruptibleError(Exception):
    """What is to be done needs Python, in a thread that signals interrupt."""


def require_uninterrupted() -> None:
    """Raises what makes `AtOnce` leave it to another thread, unless this is one that no signal interrupts."""
    if not is_thread_of_agreement():
        raise _InterruptibleError


class AtOnce:
    """Dispatches a fragment.

    Args:
        dispatch: dispatches it: a C function, which calls `require_uninterrupted` where it needs Python.
    """

    def __init__(self, dispatch: Callable[..., Any]) -> None:
        self._dispatch = dispatch
        self._is_known = False
        self._misses = 0

    def here(self, args: Sequence[object], results: list[Any]) -> bool:
        """Dispatches it in this thread, if that needs no Python, and adds what it returns to a list; whether it did."""
        if self._is_known:
            try:
                results.extend(itertools.starmap(self._dispatch, (args,)))
            except _InterruptibleError:
                self._is_known = False
                self._misses += 1
        return bool(results)

    def elsewhere(self, args: Sequence[object]) -> Callable[[], Any]:
        """A function that dispatches it in another thread."""
        settings = ThreadSettings.here()

        def dispatch() -> Any:
            result = settings.run(self._dispatch, *args)
            self._is_known = self._misses < _MOST_MISSES
            return result

        return dispatch
