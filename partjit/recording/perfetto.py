"""A recording as a file for trace viewers: https://ui.perfetto.dev and chrome://tracing."""

import collections
import types
from collections.abc import Iterable, Mapping, Sequence

from partjit.recording.gantt import end_of, in_order
from partjit.recording.process_waits import ProcessWait
from partjit.recording.spans import Reading, Span

__all__ = ["trace_events"]


def trace_events(
    reading: Reading,
    names: Mapping[int, str] = types.MappingProxyType({}),
    process_waits: Sequence[ProcessWait] = (),
) -> dict[str, object]:
    """The contents of the file, in Chrome's trace event format, with a process for each that spans are of.

    Args:
        reading: the recording.
        names: the names of its processes.
        process_waits: the waits of processes for each other: each is inside of its fragment, with an arrow from the
            fragment in the other process.

    Source: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.

    Example:
        >>> [entry["name"] for entry in trace_events(Reading([], recorder=1))["traceEvents"]]
        ['process_name']
    """
    origin, last = (reading.events[0].time, reading.events[-1].time) if reading.events else (0.0, 0.0)

    def microseconds(time: float) -> float:
        return round(1e6 * (time - origin), 3)

    slices: dict[int, tuple[int, float, float]] = {}  # of each span: its track, start and end
    entries: list[dict[str, object]] = []
    by_process: dict[int | None, list[Span]] = {process: [] for process in names}
    by_process = by_process or {None: []}
    for span in reading.spans:
        by_process[span.process].append(span)
    for process, spans in by_process.items():
        pid, name = _pid(process), "partjit" if process is None else names[process]
        entries.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        for tid, track in enumerate(_tracks(spans, last), start=1):
            entries.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track.name}})
            order = {"sort_index": tid}
            entries.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": order})
            for span in track.spans:
                start = microseconds(span.start)
                duration = round(microseconds(end_of(span, last)) - start, 3)
                args = {"program": span.program, "execution": span.execution, "has_ended": span.end is not None}
                common = {"name": span.name, "cat": span.kind, "pid": pid, "tid": tid, "args": args}
                entries.append({"ph": "X", "ts": start, "dur": duration, **common})
                slices[id(span)] = tid, start, start + duration
    for number, flow in enumerate(reading.flows):
        pid = _pid(flow.before.process)
        common = {"name": f"{flow.before.kind} to {flow.after.kind}", "cat": "flow", "id": number, "pid": pid}
        begins = _within(slices[id(flow.before)], microseconds(flow.left))
        ends = _within(slices[id(flow.after)], microseconds(flow.arrived))
        entries.append({"ph": "s", **begins, **common})
        entries.append({"ph": "f", "bp": "e", **ends, **common})
    for number, wait in enumerate(process_waits, start=len(reading.flows)):
        start, end = microseconds(wait.start), microseconds(wait.end)
        track, after = slices[id(wait.fragment)], slices[id(wait.last)]
        title = f"wait for process {wait.waits_for}"
        waiting = {"name": title, "cat": "process wait", "pid": _pid(wait.fragment.process), "tid": track[0]}
        entries.append({"ph": "X", "ts": start, "dur": round(end - start, 3), "args": {}, **waiting})
        common = {"name": "process to process", "cat": "flow", "id": number}
        entries.append({"ph": "s", "pid": _pid(wait.last.process), **_within(after, after[1]), **common})
        ends = _within((track[0], start, end), end)
        entries.append({"ph": "f", "bp": "e", "pid": _pid(wait.fragment.process), **ends, **common})
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _pid(process: int | None) -> int:
    return 1 if process is None else process + 1  # viewers take 0 for the idle process


def _within(track: tuple[int, float, float], time: float) -> dict[str, float]:
    """The end of an arrow: a viewer attaches it to the slice that contains its time, so that must precede the end."""
    tid, start, end = track
    return {"tid": tid, "ts": round(max(start, min(time, end - 0.001)), 3)}


class _Track:
    """Spans that are disjoint or nested, which is all that viewers draw in one row."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spans: list[Span] = []
        self._around: list[float] = []  # the ends of the spans that enclose the next one

    def add(self, span: Span, end: float) -> bool:
        """Adds a span, which starts no earlier than those before it, if it is disjoint or nested; whether it is."""
        while self._around and self._around[-1] <= span.start:
            self._around.pop()
        if self._around and self._around[-1] < end:
            return False
        self.spans.append(span)
        self._around.append(end)
        return True


def _tracks(spans: Iterable[Span], last: float) -> Sequence[_Track]:
    """The tracks of all lanes, one or several for each."""
    lanes: dict[str, list[Span]] = collections.defaultdict(list)
    for span in spans:
        lanes[span.lane].append(span)
    tracks: list[_Track] = []
    for lane in in_order(lanes):
        of_lane: list[_Track] = []
        for span in sorted(lanes[lane], key=lambda span: (span.start, -end_of(span, last))):
            if not any(track.add(span, end_of(span, last)) for track in of_lane):
                of_lane.append(_Track(f"{lane} ({len(of_lane) + 1})" if of_lane else lane))
                of_lane[-1].add(span, end_of(span, last))
        tracks += of_lane
    return tracks
