"""Events as spans of OpenTelemetry, which is optional and imported when spans are exported.

The spans of programs and calls are current while these run, in the thread that runs them, so that the spans that
functions of the user begin are their children.
"""

import collections
import contextlib
import importlib
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from importlib.metadata import version
from types import ModuleType
from typing import Any, NamedTuple

from partjit import events
from partjit._jax.processes import own_process
from partjit.checks import require, require_flag
from partjit.events import Event
from partjit.recording.completion import completing

__all__ = ["export_spans"]

_MOST_READY = 16
_is_exporting = threading.Lock()


def export_spans(tracer_provider: Any = None, *, wait: bool = True) -> contextlib.AbstractContextManager[None]:
    """Gives programs and colocated calls of the `with` block, in all threads, to OpenTelemetry as spans.

    The spans are those of `record()`. A program's span is a child of the span that is current where the program is
    called; its fragments, calls, transfers and waits are its children. The spans of programs and calls are current
    while these run, in the thread that runs them. A call has an event "queued" with the time when it was made. What
    fails has the status ERROR and the exception.

    Attributes are `partjit.kind` ("program", "fragment", "call", "transfer" or "wait"), `partjit.process`, and of what
    has them `partjit.program`, `partjit.execution`, `partjit.call`, `partjit.stream`, `partjit.node` and
    `partjit.nbytes`. Times are moved to the wall clock once, at the beginning of the block.

    Args:
        tracer_provider: an `opentelemetry.trace.TracerProvider`; the global one by default.
        wait: whether the end of the block waits for the calls and programs that were started in it. With False, what
            is still running is exported when it ends.

    Raises:
        ImportError: opentelemetry is missing.
        TypeError: `tracer_provider` is no provider, or `wait` no flag.
        RuntimeError: when the block is entered: another block exports spans; a provider may have several processors.

    Example:
        >>> from opentelemetry.sdk.trace import TracerProvider
        >>> from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        >>> from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        >>> from partjit import events, export_spans
        >>> provider, memory = TracerProvider(), InMemorySpanExporter()
        >>> provider.add_span_processor(SimpleSpanProcessor(memory))
        >>> with export_spans(provider), events.span(events.ProgramStarted("step", 0)):
        ...     pass  # call programs
        >>> [span.name for span in memory.get_finished_spans()]
        ['step']
    """
    require_flag("export_spans", "wait", wait)
    try:
        api = importlib.import_module("opentelemetry.trace")
        context = importlib.import_module("opentelemetry.context")
    except ImportError as error:
        raise ImportError(
            'export_spans needs opentelemetry, which is missing; run: pip install "partjit[otel]"'
        ) from error
    expected = "an opentelemetry.trace.TracerProvider, or None for the global one"
    provider = require("export_spans", "tracer_provider", tracer_provider, api.TracerProvider | None, expected)
    return _exporting(_Exporter(api, context, api.get_tracer("partjit", version("partjit"), provider)), wait)


@contextlib.contextmanager
def _exporting(exporter: "_Exporter", wait: bool) -> Iterator[None]:
    # Spans of a second exporter would cease to be current in another order than they became it.
    if not _is_exporting.acquire(blocking=False):
        raise RuntimeError("export_spans: another block exports spans; a tracer provider may have several processors")
    try:
        subscription = events.subscribe(exporter)
        try:
            with completing(wait):
                yield
        finally:
            exporter.end(subscription)
    finally:
        _is_exporting.release()


class _Open(NamedTuple):
    """A span that has not ended, and the token with which it ceases to be current; None if it is not."""

    span: Any
    token: Any


class _Dispatched(NamedTuple):
    """A fragment that is not ready: when it was dispatched, and the context of its program."""

    time: float
    parent: Any


_BEGINS = (
    events.ProgramStarted,
    events.FragmentDispatched,
    events.CallStarted,
    events.TransferStarted,
    events.WaitStarted,
)


class _Exporter:
    """The listener.

    Args:
        api, context: modules of opentelemetry.
        tracer: makes the spans.
    """

    def __init__(self, api: ModuleType, context: ModuleType, tracer: Any) -> None:
        self._api, self._context, self._tracer = api, context, tracer
        self._epoch = _epoch()
        self._process = own_process()
        # Each key is of one thread at a time, so spans are made, and given to processors of the user, without a lock.
        self._open: dict[tuple[object, ...], _Open] = {}
        self._queued: dict[int, events.CallQueued] = {}
        self._lock = threading.RLock()  # a finalizer that emits may come in between
        self._dispatched: dict[object, list[_Dispatched]] = collections.defaultdict(list)
        # When the last fragments were dispatched and ready. Of a fragment that is not ready the end comes later.
        self._ready: collections.deque[tuple[float, float]] = collections.deque(maxlen=_MOST_READY)
        self._begun = 0  # and not ended
        self._ending: events.Subscription | None = None

    def __call__(self, event: Event) -> None:
        """Begins or ends a span."""
        if isinstance(event, _BEGINS):
            with self._lock:
                if self._ending is not None:
                    return
                self._begun += 1
            self._begin(event)
        elif isinstance(event, events.CallQueued):
            self._queued[event.call] = event
        elif self._has_ended(event):
            with self._lock:
                self._begun -= 1
                self._end_if_complete()

    def end(self, subscription: events.Subscription) -> None:
        """Begins no spans any more, and ends the subscription when those have ended that are open."""
        with self._lock:
            self._ending = subscription
            self._end_if_complete()

    def _end_if_complete(self) -> None:
        if self._ending is not None and not self._begun:
            self._ending.close()

    def _begin(self, event: Event) -> None:
        match event:
            case events.ProgramStarted(program, execution):
                span = self._span("program", program, event.time, program=program, execution=execution)
                self._make_current(("program", program, execution), span)
            case events.FragmentDispatched(program, execution, name):
                dispatched = _Dispatched(event.time, self._context.get_current())
                with self._lock:
                    self._dispatched[program, execution, name].append(dispatched)
            case events.CallStarted(number):
                self._make_current(("call", number), self._call_span(event))
            case events.TransferStarted(program, execution, node, nbytes):
                more = {"program": program, "execution": execution, "node": node, "nbytes": nbytes}
                span = self._span("transfer", f"transfer for {node}", event.time, **more)
                self._open["transfer", event.thread, program, execution, node] = _Open(span, None)
            case events.WaitStarted(program, execution, node):
                more = {"program": program, "execution": execution, "node": node}
                span = self._span("wait", f"wait for {node}", event.time, **more)
                self._open["wait", event.thread, program, execution, node] = _Open(span, None)

    def _has_ended(self, event: Event) -> bool:
        """Ends a span, if it is known."""
        match event:
            case events.ProgramFinished(program, execution) | events.ProgramFailed(program, execution):
                return self._close(event, "program", program, execution)
            case events.FragmentReady(program, execution, name):
                return self._fragment(event, program, execution, name)
            case events.FragmentFailed(program, execution, name):
                return self._taken((program, execution, name), -1) is not None  # those before may be running
            case events.CallFinished(number) | events.CallFailed(number):
                self._queued.pop(number, None)  # it may have failed before it started
                return self._close(event, "call", number)
            case events.TransferFinished(program, execution, node):
                return self._close(event, "transfer", event.thread, program, execution, node)
            case events.WaitFinished(program, execution, node):
                return self._close(event, "wait", event.thread, program, execution, node)
        return False

    def _span(self, kind: str, name: str, start: float, parent: Any = None, **attributes: str | int | None) -> Any:
        """A span whose parent is the one of a context; by default of the current one."""
        known = {f"partjit.{key}": value for key, value in attributes.items() if value is not None}
        known |= {"partjit.kind": kind, "partjit.process": self._process}
        return self._tracer.start_span(name, context=parent, attributes=known, start_time=self._nanoseconds(start))

    def _call_span(self, event: events.CallStarted) -> Any:
        queued = self._queued.pop(event.call, None)
        more: dict[str, str | int | None] = {"call": event.call, "stream": event.stream}
        if queued is not None:
            more |= {"program": queued.program, "execution": queued.execution, "node": queued.node}
        span = self._span("call", event.name, event.time, **more)
        if queued is not None:
            span.add_event("queued", timestamp=self._nanoseconds(queued.time))
        return span

    def _make_current(self, key: tuple[object, ...], span: Any) -> None:
        """Makes a span current in this thread."""
        self._open[key] = _Open(span, self._context.attach(self._api.set_span_in_context(span)))

    def _fragment(self, event: Event, program: str, execution: int, name: str) -> bool:
        with self._lock:
            first = self._taken((program, execution, name), 0)
            if first is None:  # it began before the block
                return False
            # The devices run fragments in order, as in `record()`; those of other devices may outlast them.
            dispatched, end = first.time, event.time
            start = max([dispatched, *(e for d, e in self._ready if d <= dispatched and e <= end)])
            self._ready.append((dispatched, end))
        span = self._span("fragment", name, start, first.parent, program=program, execution=execution)
        span.end(end_time=self._nanoseconds(event.time))
        return True

    def _taken(self, key: tuple[object, ...], index: int) -> _Dispatched | None:
        """One of the fragments of a name that are not ready, which is no longer among them."""
        with self._lock:
            same = self._dispatched.pop(key, [])
            found = same.pop(index) if same else None
            if same:
                self._dispatched[key] = same
        return found

    def _close(self, event: Event, *key: object) -> bool:
        found = self._open.pop(key, None)
        if found is None:  # it began before the block
            return False
        span, token = found
        match event:
            case events.ProgramFailed(error=error) | events.CallFailed(error=error):
                self._fail(span, error, event.time)
        span.end(end_time=self._nanoseconds(event.time))
        if token is not None:
            self._context.detach(token)
        return True

    def _fail(self, span: Any, error: str, time: float) -> None:
        raised = sys.exception()  # the event is emitted where it is handled
        when = self._nanoseconds(time)
        if raised is not None and traceback.format_exception_only(raised)[0].strip() == error:
            span.record_exception(raised, timestamp=when)
        else:
            kind, _, message = error.partition(": ")
            span.add_event("exception", {"exception.type": kind, "exception.message": message}, timestamp=when)
        span.set_status(self._api.Status(self._api.StatusCode.ERROR, error))

    def _nanoseconds(self, time: float) -> int:
        return self._epoch + round(1e9 * time)


def _epoch() -> int:
    """When `time.perf_counter()` was 0, in nanoseconds since 1970."""
    readings = [(time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()) for _ in range(5)]
    before, wall, after = min(readings, key=lambda reading: reading[2] - reading[0])  # a pause may be in between
    return wall - (before + after) // 2
