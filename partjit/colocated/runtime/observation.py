"""The events of a call: queued, started, and finished or failed."""

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from partjit import events
from partjit.colocated.runtime.streams import Stream

__all__ = ["Observer", "node_of_program", "observe_call"]

_numbers = itertools.count()
_node: "contextvars.ContextVar[tuple[str, int, str] | None]" = contextvars.ContextVar("partjit_node", default=None)

Observer = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes of a function one that emits an event when it starts and one when it ends."""


@contextlib.contextmanager
def node_of_program(program: str, execution: int, node: str) -> Iterator[None]:
    """Makes the call made in the block that of a program's node."""
    token = _node.set((program, execution, node))
    try:
        yield
    finally:
        _node.reset(token)


def observe_call(name: str, stream: Stream) -> Observer:
    """Emits that a call is queued, and returns what observes its function; without listeners nothing does."""
    if not events.listeners:
        return _unobserved
    number, where = next(_numbers), stream.name or ("caller" if stream.is_private else "without a name")
    events.emit(events.CallQueued(number, name, where, *(_node.get() or (None, None, None))))

    def observe(function: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:
            _node.set(None)  # calls made inside are not that node
            # The time in which the devices compute what it is called with is not its own.
            with contextlib.suppress(RuntimeError):
                jax.block_until_ready((args, kwargs))
            with events.span(events.CallStarted(number, name, where)):
                return function(*args, **kwargs)

        return observed

    return observe


def _unobserved(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
