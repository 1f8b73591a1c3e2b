"""A recording as a Gantt chart: the spans it shows, their labels and the window of time."""

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from partjit.checks import abridged, items_of, require, require_integer
from partjit.recording.critical_path import critical_path
from partjit.recording.process_waits import ProcessWait
from partjit.recording.spans import Span
from partjit.render.gantt import Bar, draw
from partjit.render.markup import Markup
from partjit.render.numbers import shown_duration

__all__ = ["chosen", "end_of", "in_order", "to_svg"]

_FIRST = ("caller", "devices", "transfers")


def in_order(lanes: Collection[str]) -> list[str]:
    """The lanes in the order of the chart: the caller, the devices, transfers, and then the others by name.

    Example:
        >>> in_order({"stream io", "devices", "caller"})
        ['caller', 'devices', 'stream io']
    """
    return sorted(lanes, key=lambda lane: (_FIRST.index(lane) if lane in _FIRST else len(_FIRST), lane))


def chosen(
    spans: Sequence[Span], program: str | None, execution: int | Collection[int] | None, where: str
) -> tuple[Span, ...]:
    """The spans of some executions, of all by default, for the method `where` of `Timeline`.

    Raises:
        ValueError: none of them was recorded.
        TypeError: `program` is no name, or `execution` no number.

    Example:
        >>> chosen([Span("wait", "load", 0.0, 1.0, "caller", "step", 3)], "step", 4, "to_svg")
        Traceback (most recent call last):
            ...
        ValueError: to_svg: execution=4 was not recorded; the executions of step are 3
    """
    require(where, "program", program, str | None, "the name of a program, or None for all")
    wanted = None if execution is None else _wanted(execution, where)
    of_program = [span for span in spans if program is None or span.program == program]
    if program is not None and not of_program:
        known = sorted({span.program for span in spans if span.program is not None})
        there = f"the programs are {', '.join(known)}" if known else "there is no program"
        raise ValueError(f"{where}: program={abridged(program)} was not recorded; {there}")
    if wanted is None:
        return tuple(of_program)
    found = tuple(span for span in of_program if span.execution in wanted)
    if not found:
        there = ", ".join(map(str, sorted({span.execution for span in of_program if span.execution is not None})))
        of = "all programs" if program is None else program
        known = f"the executions of {of} are {there}" if there else "there are no executions"
        raise ValueError(f"{where}: execution={abridged(execution)} was not recorded; {known}")
    return found


def _wanted(execution: int | Collection[int], where: str) -> set[int]:
    if isinstance(execution, int | np.integer):
        return {require_integer(where, "execution", execution)}
    numbers = items_of(where, "execution", execution, "the number of an execution, or a collection of such numbers")
    return {require_integer(where, f"execution[{i}]", number) for i, number in enumerate(numbers)}


def to_svg(
    spans: Sequence[Span],
    last: float,
    title: str,
    program: str | None = None,
    execution: int | Collection[int] | None = None,
    *,
    path: Callable[[Collection[Span]], Collection[Span]] = critical_path,
    process_waits: Iterable[ProcessWait] = (),
    caption: str = "",
) -> Markup:
    """The chart of a recording that ended at `last`, with a title if it shows everything; see `Timeline.to_svg`.

    Args:
        spans: in the order of their starts.
        last: when the recording ended.
        title: the title, if it shows everything.
        program, execution: what it shows; all by default.
        path: finds the critical path.
        process_waits: the waits of processes for each other.
        caption: a line below the title.
    """
    shown = chosen(spans, program, execution, "to_svg")
    is_shown = {*map(id, shown)}
    start = min((span.start for span in shown), default=0.0)
    end = max((end_of(span, last) for span in shown), default=0.0)
    critical = [_bar(span, last, is_faint=False) for span in path(shown)]
    if (program, execution) != (None, None):
        title = _which(shown)
    bars = [_bar(span, last, is_faint=id(span) not in is_shown) for span in spans]
    bars += [_bar_of_wait(wait, is_faint=id(wait.fragment) not in is_shown) for wait in process_waits]
    return draw(
        bars,
        title=title,
        lanes=in_order({span.lane for span in spans}),
        critical=critical,
        window=(start, end),
        groups=[_group(process) for process in sorted({span.process for span in spans if span.process is not None})],
        caption=caption,
    )


def _which(spans: Sequence[Span]) -> str:
    """The executions of spans: "step 0 to 3"."""
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
    group = _group(span.process)
    return Bar(
        span.start, end_of(span, last), span.lane, span.kind, title, tooltip, span.end is None, is_faint, group=group
    )


def _bar_of_wait(wait: ProcessWait, *, is_faint: bool) -> Bar:
    span, title = wait.fragment, f"wait for process {wait.waits_for}"
    tooltip = f"{title} in {span.name} of {span.program} {span.execution}: {shown_duration(wait.seconds)}"
    group = _group(span.process)
    return Bar(wait.start, wait.end, span.lane, "process wait", title, tooltip, is_faint=is_faint, group=group)


def _group(process: int | None) -> str:
    return "" if process is None else f"process {process}"


def end_of(span: Span, last: float) -> float:
    """When a span ended, or else the recording."""
    return max(last, span.start) if span.end is None else span.end
