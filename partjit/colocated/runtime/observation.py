"""Telling those who listen what becomes of a call."""

import contextlib
import contextvars
import itertools
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax

from partjit import events
from partjit.colocated.runtime.streams import Stream

__all__ = ["Telling", "node_of_program", "telling"]

_numbers = itertools.count()
_node: "contextvars.ContextVar[tuple[str, int, str] | None]" = contextvars.ContextVar("partjit_node", default=None)

Telling = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes of a function one that tells when it starts and how it ends."""


@contextlib.contextmanager
def node_of_program(program: str, execution: int, node: str) -> Iterator[None]:
    """Makes the call made in the block that of a program's node."""
    token = _node.set((program, execution, node))
    try:
        yield
    finally:
        _node.reset(token)


def telling(name: str, stream: Stream) -> Telling:
    """Tells that a call is queued; what it gives tells the rest, of the function that it is given."""
    if not events.listeners:
        return _silently
    number, where = next(_numbers), stream.name or ("caller" if stream.is_private else "without a name")
    events.emit(events.CallQueued(number, name, where, *(_node.get() or (None, None, None))))

    def tell(function: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any, **kwargs: Any) -> Any:
            _node.set(None)  # calls made inside are not that node
            # The time in which the devices compute what it is called with is not its own.
            with contextlib.suppress(RuntimeError):
                jax.block_until_ready((args, kwargs))
            events.emit(events.CallStarted(number, name, where))
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                what = traceback.format_exception_only(type(error), error)[0].strip()
                events.emit(events.CallFailed(number, name, where, what))
                raise
            events.emit(events.CallFinished(number, name, where))
            return result

        return told

    return tell


def _silently(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
