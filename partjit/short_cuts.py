"""Short cuts: entries of C++ functions by which calls of programs with calls are dispatched before Python sees them.

Python looks at every other call of such a program, as somebody may observe or record it, or have put it on a stream
that the program uses itself. So there are short cuts only while none of that is so: what begins to observe or record
closes all of them, and allows them again at its end; a stream that is entered closes those of programs that use it.
"""

import weakref
from collections.abc import Collection
from typing import Protocol

__all__ = ["HasShortCut", "allow", "close", "closed_for_now", "opened"]


class HasShortCut(Protocol):
    """The entries of one program.

    Attributes:
        streams: those that the program itself puts calls on.
        may_shorten: whether to look at its next call for a short cut.
    """

    may_shorten: bool

    @property
    def streams(self) -> Collection[object]:
        """See above."""
        ...

    def clear(self) -> None:
        """Removes them, the short cut among them; the next call makes another one."""
        ...


_open: "weakref.WeakSet[HasShortCut]" = weakref.WeakSet()
_closed: "weakref.WeakSet[HasShortCut]" = weakref.WeakSet()
"""Those that are to have one as soon as it is allowed."""


def opened(entries: HasShortCut) -> None:
    """Says that there is a short cut now."""
    _open.add(entries)


def closed_for_now(entries: HasShortCut) -> None:
    """Says that there would be one if it were allowed."""
    _closed.add(entries)


def close(stream: object = None) -> None:
    """Closes all short cuts, or those of the programs that use a stream."""
    for entries in [*_open]:
        if stream is None or stream in entries.streams:
            _open.discard(entries)
            entries.clear()


def allow() -> None:
    """Allows them again."""
    while _closed:
        _closed.pop().may_shorten = True
