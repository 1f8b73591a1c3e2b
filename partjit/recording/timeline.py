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
from collections.abc import Collection, Iterable, Iterator

from partjit import events
from partjit.checks import items_of, require, require_path
from partjit.events import Event
from partjit.recording.critical_path import critical_path
from partjit.recording.gantt import chosen, to_svg
from partjit.recording.perfetto import trace_events
from partjit.recording.spans import Reading, Span
from partjit.render.html import code, fragment
from partjit.render.markup import Markup
from partjit.render.numbers import counted, shown_duration

__all__ = ["Timeline", "record"]

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
        """The chain of work that the recorded run took as long as: what to make quicker for the run to be quicker.

        It ends with the fragment, call or transfer that ended last. Before each of its spans comes the one that ended
        last of those that had ended when it began, the longer one if several ended at once: what began could have begun
        earlier if that had been quicker, as far as times tell. So nothing ended in the gaps between the spans, in which
        the host prepared what came next, and spans and gaps together are the time from the beginning of the first to
        the end of the last. Since one thread may see a little later than another that something has ended, an overlap
        of up to a quarter of the shorter of two spans is none. Programs and waits are no work: they last as long as
        what happens meanwhile; what took no time or has not ended is left out.

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
        """The recording as a picture: a lane for the caller, the devices, transfers, and each stream and thread.

        Waits are hatched, the critical path is outlined and joined in red, what has not ended has an arrow at its end,
        and everything says more where it is pointed at. Times begin with what is shown. The size of the picture does
        not grow with the recording: spans narrower than half a pixel are drawn together, and the picture says how
        many; it is for a closer look that executions can be picked.

        Args:
            program: the executions of the program of this name are shown, from the beginning of the first to the end of
                the last; what else happened meanwhile is faint.
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
        """Writes a file that https://ui.perfetto.dev and chrome://tracing show, with a track for every lane.

        What overlaps on one lane is spread over several tracks; what has not ended reaches to the last event. Arrows go
        from programs to the fragments they dispatch and the calls they make, and from calls to the waits for them. The
        file is there whole or not at all.

        Raises:
            OSError: it cannot be written.
            TypeError: `path` is none.

        Example:
            >>> import json, pathlib, tempfile
            >>> from partjit.recording.timeline import record
            >>> with record() as timeline:
            ...     pass  # call programs
            >>> path = pathlib.Path(tempfile.mkdtemp(), "trace.json")
            >>> timeline.save(path)
            >>> [*json.loads(path.read_text(encoding="utf-8"))]
            ['traceEvents', 'displayTimeUnit']
        """
        target = pathlib.Path(require_path("Timeline.save", "path", path))
        beside = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            beside.write_text(json.dumps(trace_events(self._reading)), encoding="utf-8")
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)

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
def record() -> Iterator[Timeline]:
    """Records what programs and host calls do in the `with` block, in all threads; its end waits for none of them.

    Example:
        >>> from partjit import events
        >>> from partjit.recording.timeline import record
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
