"""Spans of OpenTelemetry: the spans of a recording, with parents, in the contexts in which things run."""

import collections
import concurrent.futures
import contextlib
import functools
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from partjit import colocated, events, export_spans, pjit, record
from partjit.colocated import colocated_python
from tests.census import saw, sees
from tests.colocated import rendezvous
from tests.effort import examples
from tests.recording.test_timeline import at

NAMES = {"transfer": "transfer for ", "wait": "wait for "}


class Traced:
    """A provider whose spans are kept."""

    def __init__(self):
        self.memory = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.memory))
        self.tracer = self.provider.get_tracer("user")

    @property
    def spans(self):
        return self.memory.get_finished_spans()

    def of_kind(self, kind):
        return [span for span in self.spans if (span.attributes or {}).get("partjit.kind") == kind]

    def named(self, name):
        (span,) = (span for span in self.spans if span.name == name)
        return span


@pytest.fixture
def traced():
    return Traced()


def is_child(span, parent):
    return span.parent is not None and span.parent.span_id == parent.context.span_id


# Programs

current = Traced()  # the functions of the programs below begin spans in it


def spanning(function):
    """A host function that begins a span of its own."""

    @functools.wraps(function)
    def within(*args):
        with current.tracer.start_as_current_span(f"user {function.__name__}"):
            return function(*args)

    return within


@spanning
def load(x):
    return x + 1


@spanning
def log(x):
    time.sleep(0.001)


@spanning
def fail(x):
    raise ValueError("the disk is full")


@spanning
def outer(x):
    eager(x)
    return simple(x)


eager = colocated_python(load, out_specs_fn=lambda x: x)
inline = colocated_python(load, out_specs_fn=lambda x: x, mode="inline")
on_thread = colocated_python(load, out_specs_fn=lambda x: x, mode="stream", stream="io")
note = colocated_python(log, out_specs_fn=lambda x: None)
failing = colocated_python(fail, out_specs_fn=lambda x: x)
around = colocated_python(outer, out_specs_fn=lambda x: x)


@pjit
def simple(x):
    return inline(x * 2) + 1


@pjit
def streamed(x):
    y = on_thread(x * 2)
    note(y)
    return jnp.cos(x) + y


@pjit
def looped(x):
    return jax.lax.fori_loop(0, 3, lambda i, y: (note(y), y + 1)[1], x)


@pjit
def nested(x):
    return around(x) * 2


@pjit
def broken(x):
    return failing(x * 2) + 1


PROGRAMS = {each.__name__: each for each in (simple, streamed, looped, nested, broken)} | {"eager": eager}


def parents(recorded):
    """For each program and call that began, what was running in the thread that made it; by a walk over events."""
    running, found, where = collections.defaultdict(list), {}, {}
    for event in recorded:
        match event:
            case events.ProgramStarted(execution=execution):
                found["program", execution] = (running[event.thread] or [None])[-1]
                running[event.thread].append(("program", execution))
            case events.CallQueued(number, execution=execution):
                is_known = ("program", execution) in found
                found["call", number] = ("program", execution) if is_known else (running[event.thread] or [None])[-1]
            case events.CallStarted(number):
                where["call", number] = event.thread
                running[event.thread].append(("call", number))
            case events.ProgramFinished() | events.ProgramFailed():
                running[event.thread].pop()
            case events.CallFinished(number) | events.CallFailed(number) if ("call", number) in where:
                running[event.thread].remove(("call", number))
    return found


def key(attributes):
    kind, program = attributes["partjit.kind"], attributes.get("partjit.program", "")
    return kind, program, attributes.get("partjit.execution", 0)


def key_of(span):
    attributes = span.attributes
    kind = attributes["partjit.kind"]
    return (kind, attributes["partjit.call"]) if kind == "call" else ("program", attributes["partjit.execution"])


def run(name, number):
    with current.tracer.start_as_current_span(f"request {number}"):
        fails = name == "broken"
        with pytest.raises(ValueError, match="the disk is full") if fails else contextlib.nullcontext():
            PROGRAMS[name](jnp.full(8, 1.0))


@sees("several threads", *PROGRAMS)
@settings(examples(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from([*PROGRAMS]), st.booleans()), min_size=1, max_size=6))
def test_the_spans_are_those_of_a_recording_and_their_parents_what_was_running(drawn):
    current.memory.clear()
    assert trace.get_current_span() is trace.INVALID_SPAN
    with record() as timeline, export_spans(current.provider), concurrent.futures.ThreadPoolExecutor(2) as pool:
        pending = []
        for number, (name, in_thread) in enumerate(drawn):
            saw(name)
            saw("several threads", when=in_thread)
            if in_thread:
                pending.append(pool.submit(run, name, number))
            else:
                run(name, number)
        for each in pending:
            each.result()
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert not timeline.unfinished
    by_id = {span.context.span_id: span for span in current.spans}
    exported = [span for span in current.spans if "partjit.kind" in (span.attributes or {})]

    of = [(key(span.attributes), span.name, span.start_time, span.end_time) for span in exported]
    recorded = [
        (
            (span.kind, span.program or "", span.execution or 0),
            NAMES.get(span.kind, "") + span.name,
            round(span.start * 1e9),
            round(span.end * 1e9),
        )
        for span in timeline.spans
    ]
    epoch = min(start for *_, start, _ in of) - min(start for *_, start, _ in recorded)
    for (*exported_what, start, end), (*what, start_of_record, end_of_record) in zip(
        sorted(of), sorted(recorded), strict=True
    ):
        assert exported_what == what
        assert abs(start - start_of_record - epoch) < 10
        assert abs(end - end_of_record - epoch) < 10
    assert abs(max(end for *_, end in of) / 1e9 - time.time()) < 600
    meant = parents(timeline.events)
    for span in exported:
        parent = by_id[span.parent.span_id]
        while parent.name.startswith("user"):  # which a function began
            parent = by_id[parent.parent.span_id]
        kind, execution = span.attributes["partjit.kind"], span.attributes.get("partjit.execution")
        expected = meant[key_of(span)] if kind in ("program", "call") else ("program", execution)
        assert parent.name.startswith("request") if expected is None else key_of(parent) == expected
    for span in current.spans:
        if span.name.startswith("user"):
            parent = by_id[span.parent.span_id]
            assert (parent.attributes["partjit.kind"], f"user {parent.name}") == ("call", span.name)


# One at a time


def test_attributes_say_what_a_span_is_of(traced):
    with export_spans(traced.provider):
        for event in (
            at(1, "ProgramStarted", "step", 3),
            at(2, "TransferStarted", "step", 3, "load", 64),
            at(3, "TransferFinished", "step", 3, "load"),
            at(3, "CallQueued", 7, "read", "io", "step", 3, "load"),
            at(4, "CallStarted", 7, "read", "io"),
            at(5, "CallFinished", 7, "read", "io"),
            at(6, "ProgramFinished", "step", 3),
        ):
            events.emit(event)
    common = {"partjit.process": 0, "partjit.program": "step", "partjit.execution": 3}
    assert {span.name: dict(span.attributes) for span in traced.spans} == {
        "step": common | {"partjit.kind": "program"},
        "transfer for load": common | {"partjit.kind": "transfer", "partjit.node": "load", "partjit.nbytes": 64},
        "read": common | {"partjit.kind": "call", "partjit.node": "load", "partjit.call": 7, "partjit.stream": "io"},
    }
    read = traced.named("read")
    assert [(event.name, read.start_time - event.timestamp) for event in read.events] == [("queued", 10**9)]
    assert read.instrumentation_scope.name == "partjit"


def test_what_fails_has_a_status_and_the_exception(traced):
    with export_spans(traced.provider), pytest.raises(ValueError, match="the disk is full"):
        broken(jnp.ones(8))
    for span, is_call in ((traced.of_kind("call")[0], True), (traced.of_kind("program")[0], False)):
        assert span.status.status_code is trace.StatusCode.ERROR
        assert "ValueError: the disk is full" in span.status.description
        (event,) = (event for event in span.events if event.name == "exception")
        assert event.attributes["exception.type"] == "ValueError"
        assert "the disk is full" in event.attributes["exception.message"]
        assert "in fail" in event.attributes["exception.stacktrace"] or not is_call


def test_a_failure_that_is_only_reported_has_its_text(traced):
    with export_spans(traced.provider):
        events.emit(at(1, "CallStarted", 7, "read", "io"))
        events.emit(at(2, "CallFailed", 7, "read", "io", "OSError: disk: full"))
    (event,) = traced.named("read").events
    assert event.attributes == {"exception.type": "OSError", "exception.message": "disk: full"}


def test_what_began_before_the_block_or_after_it_is_not_exported(traced):
    with export_spans(traced.provider):
        for event in (
            at(1, "ProgramFinished", "step", 3),
            at(1, "FragmentReady", "step", 3, "fragment_0"),
            at(1, "CallFinished", 7, "read", "io"),
            at(1, "WaitFinished", "step", 3, "load"),
        ):
            events.emit(event)
    simple(jnp.ones(8))
    assert traced.spans == ()
    assert events.listeners == ()


def test_a_fragment_that_failed_is_not_exported_and_not_waited_for(traced):
    with export_spans(traced.provider):
        for event in (
            at(1, "FragmentDispatched", "step", 3, "a"),
            at(2, "FragmentDispatched", "step", 3, "a"),
            at(3, "FragmentFailed", "step", 3, "a", "ValueError: no"),
            at(4, "FragmentFailed", "step", 2, "a", "ValueError: no"),
        ):
            events.emit(event)
    assert len(events.listeners) == 1
    events.emit(at(9, "FragmentReady", "step", 3, "a"))
    assert [(span.name, (span.end_time - span.start_time) // 10**9) for span in traced.spans] == [("a", 8)]
    assert events.listeners == ()


def test_a_fragment_of_other_devices_may_outlast_the_next(traced):
    with export_spans(traced.provider):
        for event in (
            at(1, "FragmentDispatched", "step", 3, "a"),
            at(2, "FragmentDispatched", "step", 3, "b"),
            at(3, "FragmentDispatched", "step", 3, "b"),
            at(9, "FragmentReady", "step", 3, "a"),
            at(5, "FragmentReady", "step", 3, "b"),
            at(12, "FragmentReady", "step", 3, "b"),
        ):
            events.emit(event)
    assert [(span.name, (span.end_time - span.start_time) // 10**9) for span in traced.spans] == [
        ("a", 8),
        ("b", 3),
        ("b", 3),
    ]


def test_without_waiting_what_still_runs_is_exported_when_it_ends(traced, meeting):
    call = colocated_python(lambda x: rendezvous.hear("go"), out_specs_fn=lambda x: None, mode="stream", stream="late")
    with export_spans(traced.provider, wait=False):
        call(1)
        deadline = time.monotonic() + 60
        while not events.listeners[0]._listener._open and time.monotonic() < deadline:
            time.sleep(0.001)
    assert traced.spans == ()
    assert len(events.listeners) == 1
    simple(jnp.ones(8))  # begins after the block
    rendezvous.say("go")
    colocated.wait(timeout=60)
    assert [span.name for span in traced.spans] == ["<lambda>"]
    assert events.listeners == ()


def test_one_block_exports_at_a_time(traced):
    with export_spans(traced.provider):
        with pytest.raises(RuntimeError, match="another block exports spans"), export_spans(traced.provider):
            pass
        assert len(events.listeners) == 1
    with export_spans(traced.provider):
        pass
    assert events.listeners == ()


def test_a_block_that_raises_ends_the_export(traced):
    with pytest.raises(KeyError), export_spans(traced.provider):
        raise KeyError
    assert events.listeners == ()


def test_the_global_provider_is_the_default():
    with export_spans():
        assert simple(jnp.ones(8))[0] == 4


def test_what_is_no_provider_is_refused_by_name(traced):
    with pytest.raises(TypeError, match=r"tracer_provider must be an opentelemetry.trace.TracerProvider"):
        export_spans(traced.tracer)


def test_without_opentelemetry_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    with pytest.raises(ImportError, match=r'pip install "partjit\[otel\]"'):
        export_spans()
