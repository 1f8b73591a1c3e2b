"""Telling those who listen what becomes of a call."""

import contextlib
import contextvars
import itertools
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from partjit import events
from partjit.colocated.streams import Stream

__all__ = ["node_of_program", "telling"]

_numbers = itertools.count()
_node: "contextvars.ContextVar[tuple[str, int, str] | None]" = contextvars.ContextVar("partjit_node", default=None)


@contextlib.contextmanager
def node_of_program(program: str, execution: int, node: str) -> Iterator[None]:
    """Makes the call made in the block that of a program's node."""
    token = _node.set((program, execution, node))
    try:
        yield
    finally:
        _node.reset(token)


def telling(body: Callable[[], Any], name: str, stream: Stream) -> Callable[[], Any]:
    """The body of a call that tells when it starts and ends; that it is queued is told at once."""
    number, where = next(_numbers), stream.name or ("caller" if stream.is_private else "without a name")
    events.emit(events.CallQueued(number, name, where, *(_node.get() or (None, None, None))))

    def told() -> Any:
        _node.set(None)  # calls made inside are not that node
        events.emit(events.CallStarted(number, name, where))
        try:
            result = body()
        except BaseException as error:
            what = traceback.format_exception_only(type(error), error)[0].strip()
            events.emit(events.CallFailed(number, name, where, what))
            raise
        events.emit(events.CallFinished(number, name, where))
        return result

    return told
