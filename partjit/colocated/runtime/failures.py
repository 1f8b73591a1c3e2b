"""Failures of colocated calls, until they are raised or reported.

An asynchronous call has no caller to raise to. Its results keep its failure and raise it where they are used, as does
`colocated.wait()`. When no result is left to raise it, it is logged, once; at exit, failures that were never raised are
reported.
"""

import collections
import contextlib
import itertools
import logging
import os
import sys
import traceback
import types
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from partjit.colocated.runtime import threads
from partjit.colocated.runtime.interrupts import is_interrupt

__all__ = [
    "CodeSite",
    "Failure",
    "PoisonedError",
    "Site",
    "call_site",
    "code_site",
    "raise_left",
    "raise_unseen",
    "report_unseen",
    "site_of",
    "without_stop",
]

_logger = logging.getLogger("partjit.colocated")
_package = os.path.abspath(__file__).removesuffix(os.path.join("colocated", "runtime", "failures.py"))
_libraries = (
    _package,
    os.path.dirname(os.path.abspath(jax.__file__)) + os.sep,  # it calls partjit under transformations
    "<plan of ",  # the function that a plan prints as
)
_numbers = itertools.count()
_held: "dict[int, weakref.ref[Failure]]" = {}  # by results; every operation is atomic, so there is no lock
_MOST_ORPHANS = 100
_orphans: "collections.deque[Failure]" = collections.deque(maxlen=_MOST_ORPHANS)  # with no result left

_NOTE = "This happened in the colocated call of"

Site = tuple[str, int, str]
"""Where a call was made: file, line, function."""

CodeSite = tuple[types.CodeType, int]
"""The same, before anybody asks for it: finding the line takes as long as much else of a call."""


def call_site() -> Site:
    """Where the user's code called the package."""
    return site_of(code_site())


def code_site() -> CodeSite:
    """Where the user's code called the package, for `site_of`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_libraries):
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def site_of(site: Site | CodeSite) -> Site:
    """Where a call was made."""
    if len(site) == 3:
        return site
    code, instruction = site
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    return code.co_filename, next(lines, None) or code.co_firstlineno, code.co_name


def without_stop(error: BaseException, name: str) -> BaseException:
    """The exception, or for StopIteration a RuntimeError with it as the cause, as PEP 479 has it for generators.

    Raised where a result is used, a StopIteration would end the user's own `for`, `map` or `next` there without a word.
    """
    if not isinstance(error, StopIteration):
        return error
    raised = RuntimeError(
        f"{name} raised StopIteration, which would silently end the loop that uses its result: let it return that "
        "there is no more, or raise another exception"
    ).with_traceback(error.__traceback__)
    raised.__cause__ = error
    return raised


class Failure:
    """The exception of a call.

    Attributes:
        name: the name of the function.
        site: where it was called.
        error: the exception, with a note of name and site and a traceback that starts in the function.
        stream: the stream of the call.
        parent: the call that made it, if any.
    """

    __slots__ = (
        "__weakref__",
        "_context",
        "_notes",
        "_number",
        "_seen",
        "_traceback",
        "error",
        "name",
        "parent",
        "site",
        "stream",
    )

    def __init__(self, error: BaseException, name: str, site: Site, stream: Any, parent: Any) -> None:
        error = without_stop(error, name)
        self.error = error
        self.name = name
        self.site = site
        self.stream = stream
        self.parent = parent
        self._traceback = _without_own_frames(error.__traceback__)
        self._notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith(_NOTE)]
        self._context = error.__context__
        self._seen = False
        self._annotate()
        self._number = next(_numbers)  # from here on it will be reported
        threads.start_deferred()
        _held[self._number] = weakref.ref(self)

    def raise_(self) -> NoReturn:
        """Raises the exception, which counts as seen from then on."""
        self._annotate()
        error = self.error.with_traceback(self._traceback)
        self._seen = True  # last: after an earlier interrupt, another use still raises it
        raise error

    def take(self) -> None:
        """Counts the exception as seen, which the caller raises in its own way."""
        self._seen = True

    def log(self, what_next: str) -> None:
        """Logs the failure, unless it has been seen."""
        if self._seen:
            return
        self._annotate()
        error = (type(self.error), self.error, self._traceback)
        _logger.error(
            "the colocated call of %r made at %s failed; %s", self.name, self.site_text, what_next, exc_info=error
        )
        traceback.clear_frames(self._traceback)  # they cannot be inspected any more, and their variables may be large

    @property
    def site_text(self) -> str:
        """Where it was called, in words."""
        file, line, function = self.site
        return f"{file}:{line} in {function}"

    def _annotate(self) -> None:
        # Several calls may raise the same exception: those of an object whose constructor failed do.
        try:
            self.error.__notes__ = [*self._notes, f"{_NOTE} {self.name!r} made at {self.site_text}"]
            self.error.__traceback__ = self._traceback
            self.error.__context__ = self._context  # not the exception being handled where it is raised again
        except Exception as error:  # an exception may be immutable
            if is_interrupt(error):
                raise

    def __str__(self) -> str:
        what = traceback.format_exception_only(type(self.error), self.error)[0].strip()
        return f"the colocated call of {self.name!r} made at {self.site_text}: {what}"

    def __del__(self) -> None:
        if not hasattr(self, "_number"):
            return
        _held.pop(self._number, None)
        if not self._seen and not sys.is_finalizing():
            _orphans.append(self)
            threads.run_later(lambda: self.log("no result of it is left, so the next colocated.wait() raises this"))


class PoisonedError(Exception):
    """An argument is the result of a call that failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__()
        self.failure = failure


def raise_unseen(concerned: Callable[[Failure], bool]) -> None:
    """Raises the first of the unseen failures concerned; the others are listed in a note, and logged."""
    failures = _unseen(concerned)
    if not failures:
        return
    first, *others = failures
    for other in others:
        other.log("another failure is raised")
        other._seen = True
    if others:
        first._notes.append("\n".join(["Other colocated calls failed as well:", *(f"  {other}" for other in others)]))
    try:
        first.raise_()
    finally:
        _forget_seen()


def raise_left() -> None:
    """Raises the first unseen failure of a call of which no result is left to raise it, as `raise_unseen` does."""
    if _orphans:
        left = {*_orphans}
        raise_unseen(left.__contains__)


def report_unseen() -> None:
    """Reports on stderr the failures that nobody has seen."""
    for failure in _unseen(lambda _: True):
        print(f"partjit: nobody looked at the failure of {failure}", file=sys.stderr)
        failure._seen = True
    _forget_seen()


def _unseen(concerned: Callable[[Failure], bool]) -> list[Failure]:
    held = [reference() for reference in [*_held.values()]]
    known = {failure for failure in (*held, *[*_orphans]) if failure is not None}
    return sorted((f for f in known if not f._seen and concerned(f)), key=lambda f: f._number)


def _forget_seen() -> None:
    for failure in [*_orphans]:
        if failure._seen:
            with contextlib.suppress(ValueError):  # another thread did it
                _orphans.remove(failure)


def _without_own_frames(tb: types.TracebackType | None) -> types.TracebackType | None:
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(_package):
        tb = tb.tb_next
    return tb
