"""Which process the others waited for: a fragment over several processes begins when the last of them dispatches it."""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from partjit.recording.clocks import ClockOffset
from partjit.recording.critical_path import ended_before, has_duration
from partjit.recording.spans import Reading, Span

__all__ = ["ProcessWait", "critical_path_across", "starts_across", "waits_between"]


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessWait:
    """The devices of a process wait in a fragment until another process dispatches it as well.

    Attributes:
        fragment: the fragment, in the process that waits.
        last: the same fragment in the process that dispatched it last.
        start, end: in seconds of the merged timeline.

    Example:
        >>> from partjit.recording import ProcessWait, Span
        >>> here = Span("fragment", "fragment_0", 1.0, 2.0, "devices", "step", 3, process=0)
        >>> there = Span("fragment", "fragment_0", 1.75, 2.0, "devices", "step", 3, process=1)
        >>> wait = ProcessWait(here, there, start=1.0, end=1.75)
        >>> wait.seconds, wait.waits_for
        (0.75, 1)
    """

    fragment: Span
    last: Span
    start: float
    end: float

    @property
    def waits_for(self) -> int | None:
        """The process that dispatched it last."""
        return self.last.process

    @property
    def seconds(self) -> float:
        """How long it waits."""
        return self.end - self.start


def starts_across(readings: Mapping[int, Reading]) -> dict[Span, Span]:
    """For each fragment over several processes: the same fragment in the process where it started last.

    The executions of a program are the same in all processes, in their order, if all of them recorded equally many.

    Args:
        readings: of each process, on one scale of time.
    """
    executions: dict[int, dict[str, list[int]]] = {}
    dispatched: dict[tuple[object, ...], Span] = {}
    for process, reading in readings.items():
        numbers = executions[process] = _executions(reading)
        order = {(name, number): k for name, of in numbers.items() for k, number in enumerate(of)}
        seen: collections.Counter[object] = collections.Counter()
        for event, span in reading.dispatched:
            which = event.program, event.processes, event.fragment, order[event.program, event.execution]
            dispatched[process, seen[which], *which] = span
            seen[which] += 1
    last: dict[Span, Span] = {}
    for (process, *which), span in dispatched.items():
        _, program, processes, *_ = which
        assert isinstance(program, str)
        assert isinstance(processes, tuple)
        counts = {len(executions.get(other, {}).get(program, ())) for other in processes}
        together = [dispatched.get((other, *which)) for other in processes]
        spans = [other for other in together if other is not None]
        if process in processes and len(processes) > 1 and len(counts) == 1 and len(spans) == len(processes):
            last[span] = max(spans, key=lambda other: other.start)
    return last


def _executions(reading: Reading) -> dict[str, list[int]]:
    """The executions of each program, in their order."""
    found: dict[str, dict[int, None]] = collections.defaultdict(dict)
    for event, _ in reading.dispatched:
        found[event.program][event.execution] = None
    for span in reading.spans:
        if span.kind == "program" and span.program is not None and span.execution is not None:
            found[span.program][span.execution] = None
    return {program: sorted(numbers) for program, numbers in found.items()}


def waits_between(last: Mapping[Span, Span], offsets: Iterable[ClockOffset]) -> tuple[ProcessWait, ...]:
    """The waits that are longer than the uncertainty of both clocks, in the order of their starts.

    Args:
        last: see `starts_across`.
        offsets: of all processes.
    """
    uncertainty = {offset.process: offset.uncertainty for offset in offsets}
    waits = []
    for span, other in last.items():
        assert span.process is not None
        assert other.process is not None
        here, there = uncertainty[span.process], uncertainty[other.process]
        if here is None or there is None or other.start - span.start <= here + there:
            continue
        end = other.start if span.end is None else min(other.start, span.end)
        waits.append(ProcessWait(span, other, span.start, end))
    return tuple(sorted(waits, key=lambda wait: wait.start))


def critical_path_across(spans: Collection[Span], waits: Sequence[ProcessWait]) -> tuple[Span, ...]:
    """The chain of spans over several processes; see `Timeline.critical_path`.

    It stays in a process until it comes to a fragment that waited for another process: that fragment is then the one in
    the other process, which did not wait, and the chain goes on there.
    """
    given = {*spans}
    hops = {wait.fragment: wait.last for wait in waits if wait.last in given}
    by_end: dict[int | None, list[Span]] = collections.defaultdict(list)
    for span in sorted(filter(has_duration, spans), key=lambda span: (span.start + span.seconds, -span.start)):
        by_end[span.process].append(span)
    if not by_end:
        return ()
    last_to_end = max((of_process[-1] for of_process in by_end.values()), key=lambda span: span.start + span.seconds)
    chain = [hops.get(last_to_end, last_to_end)]
    # A span that ends too late for one span ends too late for those before it, in its process or another.
    while by_end[chain[-1].process]:
        span = by_end[chain[-1].process].pop()
        if ended_before(span, chain[-1]):
            chain.append(hops.get(span, span))
    return tuple(reversed(chain))
