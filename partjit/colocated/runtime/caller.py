"""What functions see of the thread that dispatches an executable, when threads of the devices run them."""

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

from partjit._jax.threads import ThreadSettings
from partjit.colocated.runtime.call import current_calls
from partjit.colocated.runtime.streams import Stream, inside

__all__ = ["Caller"]

_Result = TypeVar("_Result")


class Caller:
    """This thread: its context variables, its settings of jax, and the calls that it is running.

    Args:
        stream: what functions see as the current stream; None for that of this thread.
    """

    def __init__(self, stream: Stream | None = None) -> None:
        self._context = contextvars.copy_context()
        if stream is not None:
            self._context.run(inside, stream)
        self._settings = ThreadSettings.here()
        self._is_plain = stream is None
        self._thread = threading.get_ident()
        self._calls = [*current_calls()]

    def run(self, function: Callable[..., _Result], *args: object) -> _Result:
        """Calls a function as if this thread did; in any thread, in several at a time."""
        if threading.get_ident() == self._thread:
            return function(*args) if self._is_plain else self._context.copy().run(function, *args)
        here = current_calls()
        here += self._calls
        try:
            return self._settings.run(lambda: self._context.copy().run(function, *args))
        finally:
            del here[len(here) - len(self._calls) :]
