"""Recording: what programs and host calls did in a block, as spans on lanes, for people and for trace viewers.

While a program runs, its events are put in a list and nothing else; everything is computed when somebody asks.
"""

import collections
import contextlib
import json
import math
import os
import pathlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from partjit import events
from partjit.events import Event
from partjit.spans import Reading, Span

__all__ = ["Span", "Timeline", "record"]

_FIRST_LANES = ("caller", "devices", "transfers")
_NOUNS = {"program": "execution", "fragment": "run", "call": "call", "transfer": "transfer", "wait": "wait"}


class Timeline:
    """Events in the order of their times, and what they say.

    Recording stops with the block of `record`; until then a timeline grows, and may be looked at.

    The *host time* is that of the calls that ended; a call that another one makes and runs in its own thread is part of
    the other. It is *hidden* where the caller is not *blocked*. The caller of a call is the thread that called its
    program, or that made the call if it has none; of what happens inside of a call it is the caller of that call. It is
    blocked while it waits for a result that a fragment needs (`WaitStarted` to `WaitFinished` in its thread), and while
    it runs a call itself and the devices run no fragment. If the caller is not known, because the call was made before
    the recording began, it is hidden where no caller is blocked.

    Example:
        >>> from partjit import events
        >>> from partjit.timeline import Timeline
        >>> timeline = Timeline([
        ...     events.CallQueued(0, "load", "io", "step", 3, "load", time=1.0, thread=1),
        ...     events.CallStarted(0, "load", "io", time=1.0, thread=2),
        ...     events.WaitStarted("step", 3, "load", time=4.0, thread=1),
        ...     events.CallFinished(0, "load", "io", time=5.0, thread=2),
        ...     events.WaitFinished("step", 3, "load", time=5.0, thread=1),
        ... ])
        >>> timeline
        Timeline(0 executions, 1 call, 4.00 s of host time, 75% hidden)
    """

    def __init__(self, recorded: Iterable[Event] = ()) -> None:
        self._recorded = [*recorded]
        self._home = threading.get_ident()
        self._latest: Reading | None = None

    @property
    def _reading(self) -> Reading:
        latest = self._latest
        if latest is None or len(latest.events) != len(self._recorded):
            self._latest = latest = Reading([*self._recorded], self._home)
        return latest

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything that was recorded."""
        return self._reading.events

    @property
    def spans(self) -> tuple[Span, ...]:
        """Everything that began in the recording, in the order of the starts.

        The devices run fragments in order. So a fragment starts when it is dispatched, or when the last of those ended
        that were dispatched before it and did not outlast it.
        """
        return self._reading.spans

    @property
    def unfinished(self) -> tuple[Span, ...]:
        """The spans without an end, which no sum contains."""
        return tuple(span for span in self.spans if span.end is None)

    @property
    def host_seconds(self) -> float:
        """The host time."""
        return self._reading.host_seconds

    @property
    def hidden_seconds(self) -> float:
        """The hidden part of the host time."""
        return self._reading.hidden_seconds

    @property
    def hidden_fraction(self) -> float:
        """The hidden part of the host time, from 0 to 1; 1 if there was no host time."""
        reading = self._reading
        return reading.hidden_seconds / reading.host_seconds if reading.host_seconds else 1.0

    def summary(self) -> str:
        """A few lines for people.

        Example:
            >>> from partjit import events
            >>> from partjit.timeline import record
            >>> with record() as timeline:
            ...     events.emit(events.ProgramStarted("step", 0, time=1.0))
            ...     events.emit(events.FragmentDispatched("step", 0, "fragment_0", time=1.25))
            ...     events.emit(events.FragmentReady("step", 0, "fragment_0", time=1.75))
            ...     events.emit(events.ProgramFinished("step", 0, time=2.0))
            >>> print(timeline.summary())
            program step: 1 execution, 1.00 s
            fragment fragment_0 of step: 1 run, 500.00 ms
            no host time
        """
        reading = self._reading
        groups: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
        for span in reading.spans:
            if span.end is not None:
                groups[span.kind, _title(span)].append(span.seconds)
        moved = collections.Counter[str]()
        for event in reading.events:
            if isinstance(event, events.TransferStarted):
                moved[f"{event.node} of {event.program}"] += event.nbytes
        lines = []
        for (kind, title), durations in sorted(groups.items(), key=lambda group: [*_NOUNS].index(group[0][0])):
            total, count = math.fsum(durations), len(durations)
            each = f", {_duration(total / count)} each" if count > 1 else ""
            size = f", {_count(moved[title], 'byte')}" if kind == "transfer" else ""
            lines.append(f"{kind} {title}: {_count(count, _NOUNS[kind])}{size}, {_duration(total)}{each}")
        lines.append(self._host_time())
        not_ended = collections.Counter(f"{span.kind} {_title(span)}" for span in self.unfinished)
        not_started = collections.Counter(f"call {call.name}" for call in reading.queued.values())
        troubles = (("failed", _failures(reading.events)), ("not ended", not_ended), ("not started", not_started))
        for what, names in troubles:
            lines += [f"{what}: {name}{f', {count} times' if count > 1 else ''}" for name, count in names.items()]
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file that https://ui.perfetto.dev and chrome://tracing show, with a track for every lane.

        What overlaps on one lane is spread over several tracks; what has not ended reaches to the last event. The file
        is there whole or not at all.

        Raises:
            OSError: it cannot be written.

        Example:
            >>> import json, pathlib, tempfile
            >>> from partjit.timeline import record
            >>> with record() as timeline:
            ...     pass  # call programs
            >>> path = pathlib.Path(tempfile.mkdtemp(), "trace.json")
            >>> timeline.save(path)
            >>> [*json.loads(path.read_text(encoding="utf-8"))]
            ['traceEvents', 'displayTimeUnit']
        """
        target = pathlib.Path(path)
        beside = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            beside.write_text(json.dumps(_trace(self._reading)), encoding="utf-8")
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)

    def _host_time(self) -> str:
        if not self.host_seconds:
            return "no host time"
        return f"{_duration(self.host_seconds)} of host time, {self.hidden_fraction:.0%} hidden"

    def __repr__(self) -> str:
        kinds = collections.Counter(span.kind for span in self.spans)
        counts = f"{_count(kinds['program'], 'execution')}, {_count(kinds['call'], 'call')}"
        return f"Timeline({counts}, {self._host_time()})"


@contextlib.contextmanager
def record() -> Iterator[Timeline]:
    """Records what programs and host calls do in the `with` block, in all threads; its end waits for none of them.

    Example:
        >>> from partjit import events
        >>> from partjit.timeline import record
        >>> with record() as timeline:
        ...     events.emit(events.CallStarted(0, "load", "io", time=1.0))
        ...     events.emit(events.CallFinished(0, "load", "io", time=1.5))
        >>> [span.name for span in timeline.spans], timeline.host_seconds
        (['load'], 0.5)
    """
    timeline = Timeline()
    with events.subscribe(timeline._recorded.append):
        yield timeline


def _title(span: Span) -> str:
    """The name of a span, with that of its program if it means nothing without."""
    return span.name if span.kind in ("program", "call") else f"{span.name} of {span.program}"


def _failures(recorded: Iterable[Event]) -> collections.Counter[str]:
    failures = collections.Counter[str]()
    for event in recorded:
        match event:
            case events.ProgramFailed(program=name, error=error):
                failures[f"program {name}: {error}"] += 1
            case events.CallFailed(name=name, error=error):
                failures[f"call {name}: {error}"] += 1
    return failures


def _trace(reading: Reading) -> dict[str, Any]:
    """Chrome's trace event format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU."""
    origin, last = (reading.events[0].time, reading.events[-1].time) if reading.events else (0.0, 0.0)

    def microseconds(time: float) -> float:
        return round(1e6 * (time - origin), 3)

    entries: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "partjit"}}]
    for tid, track in enumerate(_tracks(reading.spans, last), start=1):
        entries.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": track.name}})
        entries.append({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": tid, "args": {"sort_index": tid}})
        for span in track.spans:
            start = microseconds(span.start)
            duration = round(microseconds(_end(span, last)) - start, 3)
            args = {"program": span.program, "execution": span.execution, "has_ended": span.end is not None}
            common = {"name": span.name, "cat": span.kind, "pid": 1, "tid": tid, "args": args}
            entries.append({"ph": "X", "ts": start, "dur": duration, **common})
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


class _Track:
    """Spans that lie beside or inside of each other, which is all that viewers draw in one row."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spans: list[Span] = []
        self._around: list[float] = []  # the ends of the spans that are around the next one

    def take(self, span: Span, end: float) -> bool:
        """Whether a span, which starts no earlier than those before it, has its place here."""
        while self._around and self._around[-1] <= span.start:
            self._around.pop()
        if self._around and self._around[-1] < end:
            return False
        self.spans.append(span)
        self._around.append(end)
        return True


def _tracks(spans: Iterable[Span], last: float) -> Sequence[_Track]:
    """The lanes, each as one track or several."""
    lanes: dict[str, list[Span]] = collections.defaultdict(list)
    for span in spans:
        lanes[span.lane].append(span)
    tracks: list[_Track] = []
    for lane in sorted(lanes, key=lambda lane: (lane not in _FIRST_LANES, lane)):
        of_lane: list[_Track] = []
        for span in sorted(lanes[lane], key=lambda span: (span.start, -_end(span, last))):
            if not any(track.take(span, _end(span, last)) for track in of_lane):
                of_lane.append(_Track(f"{lane} ({len(of_lane) + 1})" if of_lane else lane))
                of_lane[-1].take(span, _end(span, last))
        tracks += of_lane
    return tracks


def _end(span: Span, last: float) -> float:
    return last if span.end is None else span.end


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us"
