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
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

from partjit.colocated.runtime import threads
from partjit.colocated.runtime.interrupts import is_interrupt

__all__ = [
    "CodeSite",
    "Failure",
    "PoisonedError",
    "Site",
    "add_note",
    "call_site",
    "code_site",
    "raise_left",
    "raise_unseen",
    "report_unseen",
    "site_of",
    "site_text",
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
_reports: "weakref.WeakValueDictionary[tuple[int, int], _Report]" = weakref.WeakValueDictionary()
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


def code_site(depth: int = 1) -> CodeSite:
    """Where the user's code called the package, for `site_of`.

    Args:
        depth: how many callers up it is at least, unless C code made the call and there are not as many.
    """
    try:
        frame = sys._getframe(depth)
    except ValueError:
        frame = sys._getframe(1)
    code = frame.f_code  # read once, as both are audited: any audit hook in the process makes them slow
    while code.co_filename.startswith(_libraries) and frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
    return code, frame.f_lasti


def site_of(site: Site | CodeSite) -> Site:
    """Where a call was made."""
    if len(site) == 3:
        return site
    code, instruction = site
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    return code.co_filename, next(lines, None) or code.co_firstlineno, code.co_name


def site_text(site: Site | CodeSite) -> str:
    """Where a call was made, in words."""
    file, line, function = site_of(site)
    return f"{file}:{line} in {function}"


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an exception, unless it is immutable."""
    try:
        error.add_note(note)
    except Exception as refusal:
        if is_interrupt(refusal):
            raise


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


class _Report:
    """What was reported of an exception: several calls may raise the same one, as those of a failed constructor do.

    Attributes:
        raised: the exception, and the stream of the calls.
        is_seen: whether it was raised to somebody.
        is_logged: whether it was logged.
    """

    __slots__ = ("__weakref__", "is_logged", "is_seen", "raised")

    def __init__(self, *raised: object) -> None:
        self.raised = raised
        self.is_seen = self.is_logged = False

    @staticmethod
    def of(error: BaseException, stream: object) -> "_Report":
        """The report on an exception; another one for calls that raise it after somebody has seen it."""
        key = id(error), id(stream)  # the report keeps both: nothing else has their ids
        report = _reports.get(key)
        if report is None or report.is_seen:
            report = _reports[key] = _Report(error, stream)
        return report


class Failure:
    """The exception of a call.

    Attributes:
        name: the name of the function.
        site: where it was called.
        error: the exception, with a note of name and site and a traceback that starts in the function.
        stream: the stream of the call.
        parent: the call that made it, if any.
        lanes: those of the call, unless its caller got the failure.
    """

    __slots__ = (
        "__weakref__",
        "_context",
        "_notes",
        "_number",
        "_report",
        "_traceback",
        "error",
        "lanes",
        "name",
        "parent",
        "site",
        "stream",
    )

    def __init__(
        self, error: BaseException, name: str, site: Site, stream: Any, parent: Any, lanes: Sequence[Any] = ()
    ) -> None:
        error = without_stop(error, name)
        self.error = error
        self.name = name
        self.site = site
        self.stream = stream
        self.parent = parent
        self.lanes = lanes
        self._traceback = _without_own_frames(error.__traceback__)
        self._notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith(_NOTE)]
        self._context = error.__context__
        self._report = _Report.of(error, stream)
        self._annotate()
        self._number = next(_numbers)  # from here on it will be reported
        threads.start_deferred()
        _held[self._number] = weakref.ref(self)

    def raise_(self) -> NoReturn:
        """Raises the exception, which counts as seen from then on."""
        self._annotate()
        error = self.error.with_traceback(self._traceback)
        self._report.is_seen = True  # last: after an earlier interrupt, another use still raises it
        try:
            raise error
        finally:  # what the function refers to would stay until this cycle is found: the traceback has this frame
            del error, self

    def take(self) -> None:
        """Counts the exception as seen, which the caller raises in its own way."""
        self._report.is_seen = True

    def log(self, what_next: str) -> None:
        """Logs the failure, unless its exception has been seen or logged."""
        if self._report.is_seen or self._report.is_logged:
            return
        self._report.is_logged = True
        self._annotate()
        error = (type(self.error), self.error, self._traceback)
        _logger.error(
            "the colocated call of %r made at %s failed; %s", self.name, self.site_text, what_next, exc_info=error
        )
        traceback.clear_frames(self._traceback)  # they cannot be inspected any more, and their variables may be large

    @property
    def site_text(self) -> str:
        """Where it was called, in words."""
        return site_text(self.site)

    def _annotate(self) -> None:
        try:  # each time: several calls may raise the same exception
            self.error.__notes__ = [*self._notes, f"{_NOTE} {self.name!r} made at {self.site_text}"]
            self.error.__traceback__ = self._traceback
            self.error.__context__ = self._context  # not the exception being handled where it is raised again
        except Exception as error:  # an exception may be immutable
            if is_interrupt(error):
                raise

    def _is_like(self, other: "Failure") -> bool:
        """Whether whoever waits for one waits for the other as well, and has both when they see one."""
        return self._report is other._report and self.parent is other.parent

    def __str__(self) -> str:
        what = traceback.format_exception_only(type(self.error), self.error)[0].strip()
        return f"the colocated call of {self.name!r} made at {self.site_text}: {what}"

    def __del__(self) -> None:
        if not hasattr(self, "_number"):
            return
        _held.pop(self._number, None)
        if not self._report.is_seen and not sys.is_finalizing():
            if not any(self._is_like(other) for other in [*_orphans]):
                _orphans.append(self)
            threads.run_later(lambda: self.log("no result of it is left, so the next colocated.wait() raises this"))


class PoisonedError(Exception):
    """An argument is the result of a call that failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__()
        self.failure = failure


def raise_unseen(concerned: Callable[[Failure], bool]) -> None:
    """Raises the first of the unseen failures concerned; those of other exceptions are listed in a note, and logged."""
    failures = _unseen(concerned)
    if not failures:
        return
    first, *others = failures
    for other in others:
        if other.error is first.error:  # on another stream
            other.take()
    others = [other for other in others if other.error is not first.error]
    for other in others:
        other.log("another failure is raised")
        other.take()
    if others:
        counts = collections.Counter(map(str, others))
        texts = [f"  {text}" if count == 1 else f"  {text} ({count} times)" for text, count in counts.items()]
        first._notes.append("\n".join(["Other colocated calls failed as well:", *texts]))
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
        failure.take()
    _forget_seen()


def _unseen(concerned: Callable[[Failure], bool]) -> list[Failure]:
    """The first failure of each report that nobody has seen."""
    held = [reference() for reference in [*_held.values()]]
    known = {failure for failure in (*held, *[*_orphans]) if failure is not None}
    unseen: dict[_Report, Failure] = {}
    for failure in sorted(known, key=lambda failure: failure._number):
        if not failure._report.is_seen and concerned(failure):
            unseen.setdefault(failure._report, failure)
    return [*unseen.values()]


def _forget_seen() -> None:
    for failure in [*_orphans]:
        if failure._report.is_seen:
            with contextlib.suppress(ValueError):  # another thread did it
                _orphans.remove(failure)


def _without_own_frames(tb: types.TracebackType | None) -> types.TracebackType | None:
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(_package):
        tb = tb.tb_next
    return tb
