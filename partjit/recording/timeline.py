"""Recording: what programs and colocated calls did in a block, as spans on lanes, as text, a chart or a trace file.

While a program runs, its events are only appended to a list; everything is computed on request.
"""

import collections
import contextlib
import json
import math
import os
import pathlib
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence

from partjit import events
from partjit.checks import items_of, require, require_flag, require_path
from partjit.events import Event
from partjit.recording.clocks import ClockOffset, own_clock
from partjit.recording.completion import completing
from partjit.recording.critical_path import critical_path
from partjit.recording.gantt import chosen, to_svg
from partjit.recording.perfetto import trace_events
from partjit.recording.spans import Reading, Span
from partjit.recording.stored import Recording, packed
from partjit.render.html import code, fragment
from partjit.render.markup import Markup
from partjit.render.numbers import counted, shown_duration

__all__ = ["Timeline", "record"]

_NOUNS = {"program": "execution", "fragment": "run", "call": "call", "transfer": "transfer", "wait": "wait"}


class Timeline:
    """Recorded events, and their spans and sums.

    The recording ends with the block of `record`; until then a timeline grows, and may be read.

    The *host time* is the duration of the calls that ended; a call made by another call and run in its thread is part
    of that one. It is *hidden* while the caller is not *blocked*. The caller of a call is the thread that called its
    program, or that made the call if it has none; inside of a call it is the caller of that call. It is blocked while
    it waits for a result that a fragment needs (`WaitStarted` to `WaitFinished` in its thread), and while it runs a
    call itself and the devices run no fragment. If the caller is unknown, because the call was made before the
    recording began, the call is hidden while no caller is blocked.

    Example:
        >>> from partjit import events
        >>> from partjit.recording.timeline import Timeline
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
        self._recorded = [*items_of("Timeline", "recorded", recorded, "a collection of events")]
        for i, event in enumerate(self._recorded):
            require("Timeline", f"recorded[{i}]", event, Event, "an event, as in partjit.events")
        self._recorder = threading.get_ident()
        self._latest: Reading | None = None

    @property
    def _reading(self) -> Reading:
        latest = self._latest
        if latest is None or len(latest.events) != len(self._recorded):
            self._latest = latest = Reading([*self._recorded], self._recorder)
        return latest

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything that was recorded."""
        return self._reading.events

    @property
    def spans(self) -> tuple[Span, ...]:
        """Everything that began in the recording, in the order of the starts.

        The devices run fragments in order, so a fragment starts when it is dispatched or, if that is later, when the
        last fragment ends that was dispatched before it and does not outlast it.
        """
        return self._reading.spans

    @property
    def unfinished(self) -> tuple[Span, ...]:
        """The spans without an end, which the sums leave out."""
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
        """A few lines of text.

        Example:
            >>> from partjit import events
            >>> from partjit.recording.timeline import record
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
            each = f", {shown_duration(total / count)} each" if count > 1 else ""
            size = f", {counted(moved[title], 'byte')}" if kind == "transfer" else ""
            lines.append(f"{kind} {title}: {counted(count, _NOUNS[kind])}{size}, {shown_duration(total)}{each}")
        lines.append(self._host_time())
        not_ended = collections.Counter(f"{span.kind} {_title(span)}" for span in self.unfinished)
        not_started = collections.Counter(f"call {call.name}" for call in reading.queued.values())
        troubles = (("failed", _failures(reading.events)), ("not ended", not_ended), ("not started", not_started))
        for what, names in troubles:
            lines += [f"{what}: {name}{f', {count} times' if count > 1 else ''}" for name, count in names.items()]
        return "\n".join(lines)

    def critical_path(
        self, program: str | None = None, execution: int | Collection[int] | None = None
    ) -> tuple[Span, ...]:
        """The chain of spans that determined how long the recorded run took: what to speed up to speed up the run.

        It ends with the fragment, call or transfer that ended last. Each of its spans is preceded by the one that ended
        last before it began, the longest if several ended at once: as far as times show, the span would have begun
        earlier if that one had been shorter. So nothing ended in the gaps between the spans, in which the host prepared
        what came next, and spans and gaps together are the time from the start of the first to the end of the last.
        Since one thread may see an end a little later than another, an overlap of up to a quarter of the shorter of two
        spans is ignored. Programs and waits are left out, because they last as long as what they contain or wait for;
        so is what took no time or has not ended.

        Args:
            program: only executions of the program of this name.
            execution: only this execution, or these.

        Raises:
            ValueError: nothing was recorded of these executions.

        Example:
            >>> from partjit import events
            >>> from partjit.recording.timeline import Timeline
            >>> timeline = Timeline([
            ...     events.CallStarted(0, "load", "io", time=1.0, thread=2),
            ...     events.CallFinished(0, "load", "io", time=4.0, thread=2),
            ...     events.FragmentDispatched("step", 3, "fragment_0", time=4.5),
            ...     events.FragmentReady("step", 3, "fragment_0", time=6.0),
            ... ])
            >>> [(span.name, span.seconds) for span in timeline.critical_path()]
            [('load', 3.0), ('fragment_0', 1.5)]
        """
        return critical_path(chosen(self.spans, program, execution, "critical_path"))

    def to_svg(self, program: str | None = None, execution: int | Collection[int] | None = None) -> str:
        """The recording as a Gantt chart: a lane for the caller, the devices, transfers, and each stream and thread.

        Waits are hatched, the critical path is outlined and joined in red, a span that has not ended has an arrow at
        its end, and every span has a tooltip. Time zero is the start of what is shown. The size of the chart does not
        grow with the recording: spans narrower than half a pixel are drawn together, and their number is shown; select
        executions for a closer look.

        Args:
            program: show the executions of the program of this name, from the start of the first to the end of the
                last; other spans of that time are faint.
            execution: the same for this execution, or these.

        Returns:
            An SVG for a file or a page, which follows the theme of the reader.

        Raises:
            ValueError: nothing was recorded of these executions.

        Example:
            >>> from partjit import events
            >>> from partjit.recording.timeline import Timeline
            >>> Timeline([events.CallStarted(0, "load", "io", time=1.0)]).to_svg()[:4]
            '<svg'
        """
        return str(self._picture(program, execution))

    def _picture(self, program: str | None = None, execution: int | Collection[int] | None = None) -> Markup:
        reading = self._reading
        last = reading.events[-1].time if reading.events else 0.0
        return to_svg(reading.spans, last, self._title(), program, execution)

    def _repr_html_(self) -> str:
        return str(fragment(self._picture(), code(self.summary())))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file for https://ui.perfetto.dev and chrome://tracing, with a track for every lane.

        Overlapping spans of one lane are spread over several tracks; a span that has not ended extends to the last
        event. Arrows go from programs to the fragments they dispatch and the calls they make, and from calls to the
        waits for them. The file is written completely or not at all; it has the recording as well, for
        `merge_timelines`.

        Raises:
            OSError: it cannot be written.
            TypeError: `path` is no path.

        Example:
            >>> import json, pathlib, tempfile
            >>> from partjit.recording.timeline import record
            >>> with record() as timeline:
            ...     pass  # call programs
            >>> path = pathlib.Path(tempfile.mkdtemp(), "trace.json")
            >>> timeline.save(path)
            >>> [*json.loads(path.read_text(encoding="utf-8"))]
            ['traceEvents', 'displayTimeUnit', 'partjit']
        """
        target = pathlib.Path(require_path("Timeline.save", "path", path))
        beside = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            beside.write_text(json.dumps(self._document()), encoding="utf-8")
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)

    def _document(self) -> dict[str, object]:
        recordings, _ = self._own_recordings()
        return trace_events(self._reading) | {"partjit": packed(recordings)}

    def _own_recordings(self) -> tuple[Sequence[Recording], Sequence[ClockOffset]]:
        """What each process recorded, with the offsets of their clocks if these are merged."""
        return [Recording(self.events, self._recorder, own_clock())], ()

    def _host_time(self) -> str:
        if not self.host_seconds:
            return "no host time"
        return f"{shown_duration(self.host_seconds)} of host time, {self.hidden_fraction:.0%} hidden"

    def _title(self) -> str:
        kinds = collections.Counter(span.kind for span in self.spans)
        return f"{counted(kinds['program'], 'execution')}, {counted(kinds['call'], 'call')}, {self._host_time()}"

    def __repr__(self) -> str:
        return f"Timeline({self._title()})"


@contextlib.contextmanager
def record(*, wait: bool = True) -> Iterator[Timeline]:
    """Records programs and colocated calls during the `with` block, in all threads.

    Its end waits for the calls made in the block, and for the programs run in it, so that the recording is complete.

    Args:
        wait: False ends the recording at once: what still runs then has no end in it. A call that waits for something
            its caller does after the block needs this.

    Raises:
        TypeError: `wait` is no flag.

    Example:
        >>> from partjit import events
        >>> from partjit.recording.timeline import record
        >>> with record() as timeline:
        ...     events.emit(events.CallStarted(0, "load", "io", time=1.0))
        ...     events.emit(events.CallFinished(0, "load", "io", time=1.5))
        >>> [span.name for span in timeline.spans], timeline.host_seconds
        (['load'], 0.5)
    """
    require_flag("record", "wait", wait)
    timeline = Timeline()
    with events.subscribe(timeline._recorded.append), completing(wait):
        yield timeline


def _title(span: Span) -> str:
    """The name of a span, with that of its program if it is not unique without."""
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
