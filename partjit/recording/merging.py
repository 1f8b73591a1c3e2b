"""The recordings of several processes as one timeline, on one scale of time."""

import collections
import dataclasses
import json
import math
import os
import pathlib
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from partjit.checks import items_of, require_path, wrong_type
from partjit.events import Event
from partjit.recording.clocks import ClockOffset, align
from partjit.recording.gantt import chosen, to_svg
from partjit.recording.perfetto import trace_events
from partjit.recording.process_waits import ProcessWait, critical_path_across, starts_across, waits_between
from partjit.recording.spans import Reading, Span
from partjit.recording.stored import Recording, packed, unpacked
from partjit.recording.timeline import Timeline
from partjit.render.markup import Markup
from partjit.render.numbers import counted, shown_duration

__all__ = ["MergedTimeline", "merge_timelines", "merged"]


class _MergedReading:
    """The readings of several processes as that of one.

    Attributes:
        of: the reading of each process.
        events, spans, queued, flows, host_seconds, hidden_seconds: as in a `Reading`.
    """

    def __init__(self, of: Mapping[int, Reading]) -> None:
        self.of = of
        self.events = tuple(
            sorted((e for reading in of.values() for e in reading.events), key=lambda event: event.time)
        )
        self.spans = tuple(sorted((s for reading in of.values() for s in reading.spans), key=lambda span: span.start))
        self.queued = {(p, number): call for p, reading in of.items() for number, call in reading.queued.items()}
        self.flows = tuple(flow for reading in of.values() for flow in reading.flows)
        self.host_seconds = math.fsum(reading.host_seconds for reading in of.values())
        self.hidden_seconds = math.fsum(reading.hidden_seconds for reading in of.values())


class MergedTimeline(Timeline):
    """The recordings of several processes: a `Timeline` whose spans say their process, with a row group for each.

    `merge_timelines` and `gather_timelines` make it. Its times are those of its lowest process; `save` writes a file
    with a process for each. A fragment over several processes begins when the last of them dispatches it: until then
    the devices of the others wait for it (`process_waits`), as far as clocks show, and the critical path goes on in
    that process.

    Attributes:
        offsets: what was added to the times of each process.

    Example:
        >>> from partjit import events
        >>> from partjit.recording import merge_timelines, record
        >>> with record() as timeline:
        ...     events.emit(events.ProgramStarted("step", 0, time=1.0))
        ...     events.emit(events.ProgramFinished("step", 0, time=2.0))
        >>> merge_timelines([timeline])
        MergedTimeline(1 process, 1 execution, 0 calls, no host time)
    """

    def __init__(self, recordings: Sequence[Recording], offsets: Sequence[ClockOffset]) -> None:
        super().__init__()
        self.offsets = tuple(offsets)
        self._recordings = tuple(recordings)
        seconds = {offset.process: offset.seconds for offset in offsets}
        self._of = {
            each.clock.process: Reading(
                _later(each.events, seconds[each.clock.process]), each.recorder, each.clock.process
            )
            for each in sorted(recordings, key=lambda each: each.clock.process)
        }
        self._together: Any = _MergedReading(self._of)
        self._last = starts_across(self._of)

    @property
    def _reading(self) -> Any:
        return self._together

    @property
    def timelines(self) -> Mapping[int, Timeline]:
        """The timeline of each process, on the common scale."""
        found = {}
        for process, reading in self._of.items():
            found[process] = timeline = Timeline(reading.events)
            timeline._recorder = reading.recorder
        return found

    @property
    def process_waits(self) -> tuple[ProcessWait, ...]:
        """Where the devices of a process waited for another process, for longer than both clocks are uncertain."""
        return waits_between(self._last, self.offsets)

    def summary(self) -> str:
        """The lines of all processes together, and what differs between them.

        Example:
            >>> from partjit import events
            >>> from partjit.recording import Timeline, merge_timelines
            >>> print(merge_timelines([Timeline([events.WaitStarted("step", 3, "load", time=1.0)])]).summary())
            no host time
            not ended: wait load of step
        """
        lines = [super().summary()]
        several = len(self._of) > 1
        for process, reading in self._of.items() if several else ():
            hidden = f", {reading.hidden_seconds / reading.host_seconds:.0%} hidden" if reading.host_seconds else ""
            lines.append(f"process {process}: {shown_duration(reading.host_seconds)} of host time{hidden}")
        waits: dict[tuple[int | None, int | None], list[float]] = collections.defaultdict(list)
        for wait in self.process_waits:
            waits[wait.fragment.process, wait.waits_for].append(wait.seconds)
        for (process, other), each in sorted(waits.items()):
            how = f"in {counted(len(each), 'fragment')}, {shown_duration(math.fsum(each))}"
            lines.append(f"process {process} waited for process {other} {how}")
        return "\n".join([*lines, *(f"clock of {offset}" for offset in self.offsets[1:])])

    def critical_path(
        self, program: str | None = None, execution: int | Collection[int] | None = None
    ) -> tuple[Span, ...]:
        """The chain of spans that determined how long the run took; see `Timeline.critical_path`.

        It stays in a process until it comes to a fragment that waited for another process, and goes on there.

        Args:
            program: only executions of the program of this name.
            execution: only this execution, or these, by their numbers in each process.

        Raises:
            ValueError: nothing was recorded of these executions.

        Example:
            >>> from partjit import events
            >>> from partjit.recording import Timeline, merge_timelines
            >>> transfer = [
            ...     events.TransferStarted("step", 3, "load", 64, time=1.0, thread=1),
            ...     events.TransferFinished("step", 3, "load", time=2.0, thread=1),
            ... ]
            >>> [(span.process, span.name) for span in merge_timelines([Timeline(transfer)]).critical_path()]
            [(0, 'load')]
        """
        return self._path(chosen(self.spans, program, execution, "critical_path"))

    def _path(self, spans: Collection[Span]) -> tuple[Span, ...]:
        return critical_path_across(spans, self.process_waits)

    def _picture(self, program: str | None = None, execution: int | Collection[int] | None = None) -> Markup:
        reading = self._reading
        last = reading.events[-1].time if reading.events else 0.0
        return to_svg(
            reading.spans,
            last,
            self._title(),
            program,
            execution,
            path=self._path,
            process_waits=self.process_waits,
            caption=self._caption(),
        )

    def _caption(self) -> str:
        """How exactly times of different processes compare."""
        known = [offset.uncertainty for offset in self.offsets if offset.uncertainty is not None]
        if len(known) < len(self.offsets):
            return "clock offset between machines: as their wall clocks, not measured"
        most = math.fsum(sorted(known)[-2:])
        return f"clock offset between two processes: +- {shown_duration(most)} at most" if most else ""

    def _title(self) -> str:
        return f"{counted_processes(len(self._of))}, {super()._title()}"

    def _document(self) -> dict[str, object]:
        names = {
            offset.process: f"process {offset.process} on {offset.host} (clock: {offset.accuracy})"
            if offset.seconds or offset.uncertainty != 0
            else f"process {offset.process} on {offset.host}"
            for offset in self.offsets
        }
        return trace_events(self._reading, names, self.process_waits) | {
            "partjit": packed(self._recordings, self.offsets)
        }

    def _own_recordings(self) -> tuple[Sequence[Recording], Sequence[ClockOffset]]:
        return self._recordings, self.offsets

    def __repr__(self) -> str:
        return f"MergedTimeline({self._title()})"


def counted_processes(count: int) -> str:
    """So many processes.

    Example:
        >>> counted_processes(1), counted_processes(2)
        ('1 process', '2 processes')
    """
    return "1 process" if count == 1 else f"{count} processes"


def _later(recorded: Iterable[Event], seconds: float) -> Iterable[Event]:
    return (dataclasses.replace(event, time=event.time + seconds) for event in recorded) if seconds else recorded


def merged(
    recordings: Sequence[Recording], measured: Mapping[int, tuple[float, float]] = types.MappingProxyType({})
) -> MergedTimeline:
    """The timeline of recordings of different processes; for `measured` see `align`."""
    return MergedTimeline(recordings, align([each.clock for each in recordings], measured))


def merge_timelines(timelines: Iterable[Timeline | str | os.PathLike[str]]) -> MergedTimeline:
    """One timeline of the recordings of several processes, of which most are files that `Timeline.save` wrote.

    It needs no connection between the processes. Those of one machine share its clock; those of different machines are
    compared by their wall clocks, and then nothing is said about who waited for whom. `gather_timelines` measures how
    far the clocks of machines are apart.

    Args:
        timelines: of different processes, in any order: recordings, or paths of files. One that is merged already is
            given alone.

    Raises:
        OSError: a file cannot be read.
        ValueError: two are of one process, there are none, or a file has no recording of this version of partjit.
        TypeError: one is neither a timeline nor a path.

    Example:
        >>> import pathlib, tempfile
        >>> from partjit import events
        >>> from partjit.recording import merge_timelines, record
        >>> with record() as timeline:
        ...     events.emit(events.ProgramStarted("step", 0))
        ...     events.emit(events.ProgramFinished("step", 0))
        >>> path = pathlib.Path(tempfile.mkdtemp(), "process_0.json")
        >>> timeline.save(path)
        >>> merge_timelines([path])
        MergedTimeline(1 process, 1 execution, 0 calls, no host time)
    """
    given = items_of("merge_timelines", "timelines", timelines, "a collection of timelines or of paths of files")
    if not given:
        raise ValueError("merge_timelines: timelines is empty; give the recording of each process, or its file")
    found: dict[int, Recording] = {}
    for i, each in enumerate(given):
        recordings, offsets = _recordings_of(each, f"timelines[{i}]")
        if offsets:
            if len(given) > 1:
                raise ValueError(
                    f"merge_timelines: timelines[{i}] is merged already; give the recordings of its processes instead"
                )
            return MergedTimeline(recordings, offsets)
        for recording in recordings:
            process = recording.clock.process
            if process in found:
                raise ValueError(f"merge_timelines: timelines[{i}] is of process {process}, as one before it")
            found[process] = recording
    return merged([*found.values()])


def _recordings_of(given: object, name: str) -> tuple[Sequence[Recording], Sequence[ClockOffset]]:
    if isinstance(given, Timeline):
        return given._own_recordings()
    if not isinstance(given, str | os.PathLike):
        raise wrong_type("merge_timelines", name, given, "a timeline, or the path of a file that `save` wrote")
    path = pathlib.Path(require_path("merge_timelines", name, given))
    text = path.read_text(encoding="utf-8")
    try:
        return unpacked(json.loads(text)["partjit"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"merge_timelines: {name}, {path}, is no file that `save` of a timeline wrote: {error}"
        ) from error
