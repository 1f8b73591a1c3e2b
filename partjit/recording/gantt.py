"""A recording as a picture: which spans are shown, what stands in their bars, and between which times."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from partjit.checks import abridged, items_of, require, require_integer
from partjit.recording.critical_path import critical_path
from partjit.recording.spans import Span
from partjit.render.gantt import Bar, draw
from partjit.render.markup import Markup
from partjit.render.numbers import shown_duration

__all__ = ["chosen", "in_order", "to_svg"]

_FIRST = ("caller", "devices", "transfers")


def in_order(lanes: Collection[str]) -> list[str]:
    """The lanes as they are shown: the caller, the devices, and then the others by name.

    Example:
        >>> from partjit.recording.gantt import in_order
        >>> in_order({"stream io", "devices", "caller"})
        ['caller', 'devices', 'stream io']
    """
    return sorted(lanes, key=lambda lane: (_FIRST.index(lane) if lane in _FIRST else len(_FIRST), lane))


def chosen(
    spans: Sequence[Span], program: str | None, execution: int | Collection[int] | None, asked_by: str
) -> tuple[Span, ...]:
    """The spans of some executions; all of them if nothing is said.

    Args:
        spans: those of a recording.
        program: the name of a program.
        execution: one execution, or several.
        asked_by: who asks, for the message.

    Raises:
        ValueError: there are none.
        TypeError: `program` is no name, or `execution` no number.

    Example:
        >>> from partjit.recording.gantt import chosen
        >>> from partjit.recording.spans import Span
        >>> chosen([Span("wait", "load", 0.0, 1.0, "caller", "step", 3)], "step", 4, "to_svg")
        Traceback (most recent call last):
            ...
        ValueError: to_svg: execution=4: nothing of it was recorded; of the program step there are the executions 3
    """
    require(asked_by, "program", program, str | None, "the name of a program, or None for all")
    wanted = None if execution is None else _wanted(execution, asked_by)
    of_program = [span for span in spans if program is None or span.program == program]
    if program is not None and not of_program:
        known = sorted({span.program for span in spans if span.program is not None})
        there = f"there are the programs {', '.join(known)}" if known else "there is no program at all"
        raise ValueError(f"{asked_by}: program={abridged(program)}: nothing of it was recorded; {there}")
    if wanted is None:
        return tuple(of_program)
    found = tuple(span for span in of_program if span.execution in wanted)
    if not found:
        there = ", ".join(map(str, sorted({span.execution for span in of_program if span.execution is not None})))
        of = "all programs" if program is None else f"the program {program}"
        known = f"of {of} there are the executions {there}" if there else "there are no executions at all"
        raise ValueError(f"{asked_by}: execution={abridged(execution)}: nothing of it was recorded; {known}")
    return found


def _wanted(execution: Any, asked_by: str) -> set[int]:
    if isinstance(execution, int | np.integer):
        return {require_integer(asked_by, "execution", execution)}
    numbers = items_of(asked_by, "execution", execution, "the number of an execution, or a collection of such numbers")
    return {require_integer(asked_by, f"execution[{i}]", number) for i, number in enumerate(numbers)}


def to_svg(
    spans: Sequence[Span],
    last: float,
    title: str,
    program: str | None = None,
    execution: int | Collection[int] | None = None,
) -> Markup:
    """The picture; see `Timeline.to_svg`.

    Args:
        spans: those of a recording.
        last: when the recording ended; spans without an end reach to there.
        title: what stands above the picture of everything.
        program: of which program executions are shown.
        execution: which of them.

    Raises:
        ValueError: there are no such executions.

    Example:
        >>> from partjit.recording.gantt import to_svg
        >>> from partjit.recording.spans import Span
        >>> "load" in to_svg([Span("call", "load", 0.0, 0.25, "stream io", "step", 0)], 0.25, "a call")
        True
    """
    shown = chosen(spans, program, execution, "to_svg")
    is_shown = {*map(id, shown)}
    start = min((span.start for span in shown), default=0.0)
    end = max((_end(span, last) for span in shown), default=0.0)
    critical = [_bar(span, last, is_faint=False) for span in critical_path(shown)]
    if (program, execution) != (None, None):
        title = _which(shown)
    bars = [_bar(span, last, is_faint=id(span) not in is_shown) for span in spans]
    return draw(
        bars, title=title, lanes=in_order({span.lane for span in spans}), critical=critical, window=(start, end)
    )


def _which(spans: Sequence[Span]) -> str:
    """Which executions spans are of."""
    executions: dict[str, list[int]] = {}
    for span in spans:
        if span.program is not None and span.execution is not None:
            executions.setdefault(span.program, []).append(span.execution)
    ranges = []
    for program, numbers in sorted(executions.items()):
        first, last = min(numbers), max(numbers)
        ranges.append(f"{program} {first}" if first == last else f"{program} {first} to {last}")
    return ", ".join(ranges)


def _bar(span: Span, last: float, *, is_faint: bool) -> Bar:
    title = f"{span.name} {span.execution}" if span.kind == "program" else span.name
    whose = "" if span.program is None or span.kind == "program" else f" of {span.program} {span.execution}"
    took = "has not ended" if span.end is None else shown_duration(span.seconds)
    tooltip = f"{span.kind} {title}{whose}: {took}"
    return Bar(span.start, _end(span, last), span.lane, span.kind, title, tooltip, span.end is None, is_faint)


def _end(span: Span, last: float) -> float:
    return max(last, span.start) if span.end is None else span.end
