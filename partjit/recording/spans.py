"""From events to spans: pairs of events, each on a lane, and how much host time was hidden."""

import bisect
import collections
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from partjit import events
from partjit.events import Event

__all__ = ["Flow", "Reading", "Span"]

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Attributes:
        kind: "program": a call of a program, as its caller sees it. "fragment": the devices run it. "call": the
            function of a colocated call runs. "transfer": values move. "wait": a program's caller waits for the result
            of a colocated call.
        name: of the program, the fragment, the called function, or the node that a transfer or wait is for.
        start: in seconds of `time.perf_counter()`.
        end: the same, or None if it ended after the recording.
        lane: what it occupied: "devices", "transfers", "stream io", "caller" (the thread that recorded), "thread 123".
        program: the program it belongs to, if any.
        execution: the number of its execution.
        process: in a merged timeline, the process it was recorded in.

    Example:
        >>> from partjit.recording import Span
        >>> Span("call", "load", 0.5, 0.75, "stream io", "step", 3).seconds
        0.25
    """

    kind: Literal["program", "fragment", "call", "transfer", "wait"]
    name: str
    start: float
    end: float | None
    lane: str
    program: str | None
    execution: int | None
    process: int | None = None

    @property
    def seconds(self) -> float:
        """How long it took; 0 if it has not ended."""
        return 0.0 if self.end is None else self.end - self.start


@dataclass(frozen=True, slots=True)
class Flow:
    """One span that began, or a wait that ended, because of another.

    Attributes:
        before: a program that dispatched a fragment or made a call, or a call that was waited for.
        left: when it did, or when the call ended.
        after: the fragment, the call, or the wait.
        arrived: when that began; when a wait ended.
    """

    before: Span
    left: float
    after: Span
    arrived: float


@dataclass(slots=True, eq=False)
class _Call:
    """A colocated call that was queued, or that started without a record of its queueing."""

    caller: int | None
    program: str | None = None
    execution: int | None = None
    thread: int = 0
    node: str | None = None
    queued: float | None = None
    lane: str = ""
    is_part_of_another: bool = False
    span: int = -1


class Reading:
    """One pass over events. `Timeline` defines when host time is hidden.

    Attributes:
        events: in the order of their times.
        recorder: the thread that recorded.
        spans: in the order of their starts.
        queued: the calls that were queued and did not start, by number.
        flows: the causes of spans, as far as events record them.
        host_seconds: the duration of all calls.
        hidden_seconds: the hidden part of it.

    Example:
        >>> from partjit import events
        >>> from partjit.recording.spans import Reading
        >>> started = events.TransferStarted("step", 0, "log", 64, time=1.0, thread=1)
        >>> finished = events.TransferFinished("step", 0, "log", time=3.0, thread=1)
        >>> [(span.kind, span.seconds) for span in Reading([finished, started], recorder=1).spans]
        [('transfer', 2.0)]
    """

    def __init__(self, recorded: Iterable[Event], recorder: int, process: int | None = None) -> None:
        # An event gets its time before listeners are called, so events of several threads may arrive out of order.
        self.events = tuple(sorted(recorded, key=lambda event: event.time))
        self.queued: dict[int, events.CallQueued] = {}
        self.recorder = recorder
        self._process = process
        self._begun: list[Span] = []
        self._open: dict[tuple[object, ...], collections.deque[int]] = collections.defaultdict(collections.deque)
        self._waits: list[tuple[int, int]] = []  # thread, span
        self._calls: list[_Call] = []
        self._started: dict[int, _Call] = {}
        self._made: dict[int, _Call] = {}
        self._running: dict[int, list[_Call]] = collections.defaultdict(list)  # by thread, the innermost last
        self._callers: dict[tuple[str | None, int | None], int | None] = {}  # of executions
        self._dispatched: list[tuple[int, events.FragmentDispatched]] = []
        self._left_out: set[int] = set()  # spans of fragments that failed: no device ran them to their end
        for event in self.events:
            self._read(event)
        self._dispatched = [each for each in self._dispatched if each[0] not in self._left_out]
        self._order_fragments()
        self.host_seconds, self.hidden_seconds = self._sums()
        begun = (span for index, span in enumerate(self._begun) if index not in self._left_out)
        self.spans = tuple(sorted(begun, key=lambda span: span.start))
        self.flows = tuple(self._flows())

    @property
    def dispatched(self) -> list[tuple[events.FragmentDispatched, Span]]:
        """The fragments, in the order in which they were dispatched."""
        return [(event, self._begun[index]) for index, event in self._dispatched]

    def _read(self, event: Event) -> None:
        match event:
            case events.ProgramStarted(program, execution):
                self._callers[program, execution] = self._caller_of(event.thread)
                self._begin(Span("program", program, event.time, None, self._lane_of(event.thread), program, execution))
            case events.ProgramFinished(program, execution) | events.ProgramFailed(program, execution):
                self._end(event, "program", program, program, execution)
            case events.FragmentDispatched(program, execution, name) as dispatched:
                span = Span("fragment", name, event.time, None, "devices", program, execution)
                self._dispatched.append((self._begin(span), dispatched))
            case events.FragmentReady(program, execution, name):
                self._end(event, "fragment", name, program, execution)
            case events.FragmentFailed(program, execution, name):
                if same := self._open["fragment", name, program, execution]:
                    self._left_out.add(same.pop())  # the last one; of a loop, those before may be running
            case events.TransferStarted(program, execution, node):
                self._begin(Span("transfer", node, event.time, None, "transfers", program, execution))
            case events.TransferFinished(program, execution, node):
                self._end(event, "transfer", node, program, execution)
            case events.WaitStarted(program, execution, node):
                span = Span("wait", node, event.time, None, self._lane_of(event.thread), program, execution)
                self._waits.append((event.thread, self._begin(span)))
            case events.WaitFinished(program, execution, node):
                self._end(event, "wait", node, program, execution)
            case events.CallQueued():
                self._queue_call(event)
            case events.CallStarted():
                self._start_call(event)
            case events.CallFinished(number) | events.CallFailed(number):
                self._end_call(event, number)

    def _begin(self, span: Span) -> int:
        self._begun.append(span if self._process is None else replace(span, process=self._process))
        if span.kind != "call":
            self._open[span.kind, span.name, span.program, span.execution].append(len(self._begun) - 1)
        return len(self._begun) - 1

    def _end(self, event: Event, *key: object) -> None:
        if same := self._open[key]:  # otherwise it began before the recording
            self._end_span(same.popleft(), event)

    def _end_span(self, index: int, event: Event) -> None:
        self._begun[index] = replace(self._begun[index], end=event.time)

    def _queue_call(self, event: events.CallQueued) -> None:
        execution = event.program, event.execution
        caller = self._callers[execution] if execution in self._callers else self._caller_of(event.thread)
        self.queued[event.call] = event
        self._made[event.call] = _Call(caller, *execution, node=event.node, queued=event.time)

    def _start_call(self, event: events.CallStarted) -> None:
        self.queued.pop(event.call, None)
        call = self._made.pop(event.call, None) or _Call(None)
        running = self._running[event.thread]
        call.thread = event.thread
        call.is_part_of_another = len(running) > 0
        is_in_its_lane = call.is_part_of_another or call.caller == call.thread
        call.lane = self._lane_of(event.thread) if is_in_its_lane else f"stream {event.stream}"
        call.span = self._begin(Span("call", event.name, event.time, None, call.lane, call.program, call.execution))
        running.append(call)
        self._calls.append(call)
        self._started[event.call] = call

    def _end_call(self, event: Event, number: int) -> None:
        self.queued.pop(number, None)  # it may have failed before it started
        call = self._started.pop(number, None)
        if call is not None:
            self._running[call.thread].remove(call)
            self._end_span(call.span, event)

    def _caller_of(self, thread: int) -> int | None:
        """The caller of what a thread calls now."""
        running = self._running[thread]
        return running[-1].caller if running else thread

    def _lane_of(self, thread: int) -> str:
        """The lane that a thread occupies now."""
        running = self._running[thread]
        if running:
            return running[-1].lane
        return "caller" if thread == self.recorder else f"thread {thread}"

    def _order_fragments(self) -> None:
        ends: list[float] = []  # of those dispatched so far
        for index, span in enumerate(self._begun):
            if span.kind != "fragment":
                continue
            # Fragments of other devices may outlast those dispatched after them.
            before = bisect.bisect_right(ends, math.inf if span.end is None else span.end)
            if before:
                self._begun[index] = replace(span, start=max(span.start, ends[before - 1]))
            if span.end is not None:
                bisect.insort(ends, span.end)

    def _flows(self) -> Iterator[Flow]:
        executions = {(s.program, s.execution): s for s in self._begun if s.kind == "program"}
        for event, fragment in self.dispatched:
            program = executions.get((fragment.program, fragment.execution))
            if program is not None:
                yield Flow(program, event.time, fragment, fragment.start)
        ended: dict[tuple[object, ...], list[Span]] = collections.defaultdict(list)
        for call in self._calls:
            span = self._begun[call.span]
            program = executions.get((call.program, call.execution))
            if program is not None and call.queued is not None and call.lane != program.lane:
                yield Flow(program, call.queued, span, span.start)
            if span.end is not None:
                ended[call.program, call.execution, call.node].append(span)
        for _, index in self._waits:
            wait = self._begun[index]
            calls = ended[wait.program, wait.execution, wait.name]
            # In a loop, a node is a call in each iteration: the wait was for the last call that had ended with it.
            end = wait.end
            before = [call for call in calls if call.end is not None and end is not None and call.end <= end]
            if before and end is not None:
                call = max(before, key=lambda call: call.start + call.seconds)
                yield Flow(call, call.start + call.seconds, wait, end)

    def _sums(self) -> tuple[float, float]:
        calls = [call for call in self._calls if not call.is_part_of_another and self._begun[call.span].end is not None]
        blocked = self._blocked(calls)
        all_blocked = _union(interval for intervals in blocked.values() for interval in intervals)
        host, hidden = [], []
        for call in calls:
            span = self._begun[call.span]
            in_sight = _overlap(span, all_blocked if call.caller is None else blocked.get(call.caller, ()))
            host.append(span.seconds)
            hidden.append(max(0.0, span.seconds - in_sight))
        return math.fsum(host), math.fsum(hidden)

    def _blocked(self, calls: Sequence[_Call]) -> dict[int, Sequence[Interval]]:
        """When callers waited for calls, or ran one themselves while the devices were idle; by thread."""
        on_devices = _union(_intervals(span for span in self._begun if span.kind == "fragment"))
        waits, inline = collections.defaultdict(list), collections.defaultdict(list)
        for thread, index in self._waits:
            waits[thread] += _intervals([self._begun[index]])
        for call in calls:
            if call.caller == call.thread:
                inline[call.thread] += _intervals([self._begun[call.span]])
        return {
            thread: _union([*waits[thread], *_minus(_union(inline[thread]), on_devices)])
            for thread in {*waits, *inline}
        }


def _intervals(spans: Iterable[Span]) -> Iterator[Interval]:
    """The times of the spans that have ended."""
    return ((span.start, span.end) for span in spans if span.end is not None)


def _union(intervals: Iterable[Interval]) -> Sequence[Interval]:
    """The union of intervals, as disjoint ones in order."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def _meeting(start: float, end: float, union: Sequence[Interval]) -> Iterator[Interval]:
    """The intervals of a union that overlap an interval."""
    index = bisect.bisect_right(union, start, key=lambda interval: interval[1])
    while index < len(union) and union[index][0] < end:
        yield union[index]
        index += 1


def _minus(intervals: Iterable[Interval], union: Sequence[Interval]) -> Iterator[Interval]:
    """Intervals minus a union."""
    for start, end in intervals:
        for left, right in _meeting(start, end, union):
            if start < left:
                yield start, left
            start = right
        if start < end:
            yield start, end


def _overlap(span: Span, union: Sequence[Interval]) -> float:
    """For how long a span overlaps a union."""
    end = span.start + span.seconds
    return math.fsum(min(end, right) - max(span.start, left) for left, right in _meeting(span.start, end, union))
