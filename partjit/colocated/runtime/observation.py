"""The events of a call: queued, started, and finished or failed."""

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator

import jax

from partjit import events
from partjit._jax.dispatch import is_profiled
from partjit._jax.types import PyTree
from partjit.colocated.runtime.streams import Stream

__all__ = ["Observer", "node_of_program", "observe_call", "profiled"]

_numbers = itertools.count()
_unprofiled = contextlib.nullcontext()
_node: "contextvars.ContextVar[tuple[str, int, str] | None]" = contextvars.ContextVar("partjit_node", default=None)

Observer = Callable[[Callable[..., PyTree]], Callable[..., PyTree]]
"""Wraps a function so that it emits events when it starts and ends."""


def _unobserved(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    return function


@contextlib.contextmanager
def node_of_program(program: str, execution: int, node: str) -> Iterator[None]:
    """Attributes the call made in the block to a node of a program."""
    token = _node.set((program, execution, node))
    try:
        yield
    finally:
        _node.reset(token)


def profiled(name: str) -> contextlib.AbstractContextManager[object]:
    """Names what runs in the block in a profile of jax, if one is being taken."""
    return jax.profiler.TraceAnnotation(name) if is_profiled() else _unprofiled


def observe_call(name: str, stream: Stream, node: str | None = None) -> Observer:
    """Emits that a call is queued, and returns the wrapper that emits the rest; without listeners it wraps nothing.

    Args:
        name: the name of the function.
        stream: the stream of the call.
        node: which node of its program it is, if not the one that the context names.
    """
    if not events.listeners:
        return _unobserved
    number, where = next(_numbers), stream.name or ("caller" if stream.is_private else "without a name")
    program, execution, around = _node.get() or (None, None, None)
    own = around if program is None else node or around
    events.emit(events.CallQueued(number, name, where, program, execution, own))

    def observe(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
        def observed(*args: PyTree, **kwargs: PyTree) -> PyTree:
            _node.set(None)  # calls made inside are not that node
            # The call does not account for the time in which the devices compute its arguments.
            with contextlib.suppress(RuntimeError):
                jax.block_until_ready((args, kwargs))
            with events.span(events.CallStarted(number, name, where)):
                return function(*args, **kwargs)

        return observed

    return observe
