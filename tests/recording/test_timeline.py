"""Recordings: pairs of events as spans, what is hidden, and what is written for viewers."""

import collections
import contextlib
import itertools
import json
import os
import re
import threading
import time
import xml.etree.ElementTree as ET
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partjit import colocated, events, pjit
from partjit.colocated import colocated_python
from partjit.recording import Span, Timeline, record
from tests.census import sees
from tests.colocated import rendezvous
from tests.effort import examples

HOME = threading.get_ident()
WORKER = HOME + 1


def at(time, event, *values, thread=HOME):
    return getattr(events, event)(*values, time=float(time), thread=thread)


def program(start, end, number=0, thread=HOME):
    return [
        at(start, "ProgramStarted", "step", number, thread=thread),
        at(end, "ProgramFinished", "step", number, thread=thread),
    ]


def fragment(start, end, name="fragment_0"):
    return [at(start, "FragmentDispatched", "step", 0, name), at(end, "FragmentReady", "step", 0, name, thread=WORKER)]


def call(start, end, number=0, *, thread=WORKER, caller=HOME, name="load", queued=None, owner=("step", 0, "load")):
    return [
        at(start if queued is None else queued, "CallQueued", number, name, "io", *owner, thread=caller),
        at(start, "CallStarted", number, name, "io", thread=thread),
        at(end, "CallFinished", number, name, "io", thread=thread),
    ]


def wait(start, end, thread=HOME):
    return [
        at(start, "WaitStarted", "step", 0, "load", thread=thread),
        at(end, "WaitFinished", "step", 0, "load", thread=thread),
    ]


def recorded(*groups):
    return Timeline([event for group in groups for event in group])


# Recording


def test_a_recording_is_of_its_block():
    before, during, after = (events.CallStarted(number, "load", "io") for number in range(3))
    events.emit(before)
    with record() as timeline:
        events.emit(during)
        assert timeline.events == (during,)
        assert timeline.unfinished
    events.emit(after)
    assert timeline.events == (during,)
    assert events.listeners == ()


def test_a_recording_grows_while_it_is_looked_at():
    with record() as timeline:
        assert timeline.spans == ()
        for event in call(1, 2):
            events.emit(event)
            assert timeline.events[-1] == event
        assert timeline.host_seconds == 1


def test_a_block_that_raises_leaves_its_recording():
    kept = []

    def block():
        with record() as timeline:
            kept.append(timeline)
            events.emit(events.ProgramStarted("step", 0))
            raise KeyError

    with pytest.raises(KeyError):
        block()
    assert len(kept[0].events) == 1
    assert events.listeners == ()


@pytest.mark.parametrize("calls_again", [False, True])
def test_the_end_of_a_recording_waits_for_what_was_started_in_it(meeting, calls_again):
    def slow(x):
        if calls_again and x:
            inner(x - 1)
        time.sleep(0.05)

    def endless(x):
        rendezvous.say("begun")
        rendezvous.hear("go")

    inner = colocated_python(slow, out_specs_fn=lambda x: None, mode="stream")
    before = colocated_python(endless, out_specs_fn=lambda x: None, mode="stream", stream="before")
    step = pjit(lambda x: (inner(x), jnp.cos(jnp.ones(100_000) * x).sum())[1])
    step(1)
    colocated.wait()
    before(1)
    rendezvous.hear("begun")  # and is not waited for
    with record() as timeline:
        for _ in range(3):
            step(1)
    assert [span.kind for span in timeline.spans].count("call") == 3 + 3 * calls_again
    assert not timeline.unfinished
    rendezvous.say("go")


def test_a_recording_whose_block_raises_or_that_shall_not_wait_waits_for_nothing(meeting):
    call = colocated_python(lambda x: rendezvous.hear("go"), out_specs_fn=lambda x: None, mode="stream")
    with record(wait=False) as timeline:
        call(1)
    with contextlib.suppress(KeyError), record() as other:
        call(1)
        raise KeyError
    rendezvous.say("go")
    assert [span.end for span in timeline.spans if span.kind == "call"] in ([], [None])
    assert other.events
    wrong: Any
    for wrong in ("no", 2, None):
        with pytest.raises(TypeError, match="record: wait must be True or False"), record(wait=wrong):
            pass


def test_events_that_others_emit_are_not_waited_for():
    with record() as timeline:
        for event in call(1, 2)[:2]:
            events.emit(event)
    assert [(span.kind, span.name, span.end) for span in timeline.unfinished] == [("call", "load", None)]
    assert timeline.host_seconds == 0
    assert timeline.hidden_fraction == 1


def test_threads_record_together():
    def emit(first):
        for number in range(first, first + 100):
            events.emit(events.CallStarted(number, "load", "io"))
            events.emit(events.CallFinished(number, "load", "io"))

    with record() as timeline:
        threads = [threading.Thread(target=emit, args=(1000 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(timeline.events) == 800
    assert len(timeline.spans) == 400
    assert timeline.unfinished == ()
    assert [event.time for event in timeline.events] == sorted(event.time for event in timeline.events)


# Spans


def test_what_begins_and_ends_is_a_span():
    timeline = recorded(
        program(0, 10),
        fragment(1, 3),
        call(2, 5, queued=1),
        [at(3, "TransferStarted", "step", 0, "load", 64), at(4, "TransferFinished", "step", 0, "load")],
        wait(4, 5),
    )
    assert timeline.spans == (
        Span("program", "step", 0, 10, "caller", "step", 0),
        Span("fragment", "fragment_0", 1, 3, "devices", "step", 0),
        Span("call", "load", 2, 5, "stream io", "step", 0),
        Span("transfer", "load", 3, 4, "transfers", "step", 0),
        Span("wait", "load", 4, 5, "caller", "step", 0),
    )
    assert timeline.unfinished == ()


def test_a_failure_ends_what_failed():
    timeline = recorded(
        call(1, 9)[:2],
        [at(2, "CallFailed", 0, "load", "io", "OSError: disk full", thread=WORKER)],
        program(0, 9)[:1],
        [at(3, "ProgramFailed", "step", 0, "OSError: disk full")],
    )
    assert [(span.kind, span.end) for span in timeline.spans] == [("program", 3), ("call", 2)]
    assert "failed: call load: OSError: disk full" in timeline.summary()
    assert "failed: program step: OSError: disk full" in timeline.summary()


def test_what_began_before_the_recording_is_not_in_it():
    ends = [program(0, 1), fragment(0, 1), wait(0, 1), call(0, 1)]
    timeline = recorded(*[group[-1:] for group in ends])
    assert timeline.spans == ()
    assert timeline.host_seconds == 0


def test_a_call_that_failed_without_having_run_is_no_span():
    timeline = recorded(call(0, 1)[:1], [at(1, "CallFailed", 0, "load", "io", "RuntimeError: given up")])
    assert timeline.spans == ()
    assert "not started" not in timeline.summary()


def test_another_thread_has_a_lane_of_its_own():
    timeline = recorded(program(0, 1, thread=77))
    assert [span.lane for span in timeline.spans] == ["thread 77"]


def test_a_call_lies_in_the_lane_of_who_runs_it():
    inline, in_thread = call(0, 1, 0, thread=HOME), call(0, 1, 1, thread=77, caller=77, owner=())
    nested = call(2.2, 2.8, 3, thread=WORKER, caller=WORKER, owner=())
    timeline = recorded(inline, in_thread, call(2, 3, 2, thread=WORKER), nested)
    assert [span.lane for span in timeline.spans] == ["caller", "thread 77", "stream io", "stream io"]


def test_devices_run_fragments_in_order():
    timeline = recorded(fragment(0, 4, "a"), fragment(1, 6, "b"), fragment(9, 10, "c"))
    assert [(span.name, span.start, span.end) for span in timeline.spans] == [("a", 0, 4), ("b", 4, 6), ("c", 9, 10)]


def test_a_fragment_that_is_not_ready_starts_after_those_that_are():
    timeline = recorded(fragment(0, 4, "a"), fragment(1, 9, "b")[:1])
    assert [(span.name, span.start, span.end) for span in timeline.spans] == [("a", 0, 4), ("b", 4, None)]


def test_repeated_fragments_of_an_execution_are_told_apart_by_their_order():
    timeline = recorded(fragment(0, 2), fragment(1, 5))
    assert [(span.start, span.end) for span in timeline.spans] == [(0, 2), (2, 5)]


times = st.integers(0, 20)
intervals = st.tuples(times, times).map(sorted)


@sees("different examples", "several elements")
@examples(40)
@given(st.lists(intervals, max_size=8))
def test_fragments_lie_beside_or_inside_of_each_other_and_never_begin_before_they_are_dispatched(drawn):
    timeline = recorded(*[fragment(*interval, name=f"{i}") for i, interval in enumerate(drawn)])
    assert timeline.unfinished == ()
    spans = [(span.start, span.start + span.seconds) for span in timeline.spans]
    for i, (start, end) in enumerate(spans):
        assert start <= end
        for other_start, other_end in spans[:i]:
            assert (
                end <= other_start
                or other_end <= start
                or (other_start <= start and end <= other_end)
                or (start <= other_start and other_end <= end)
            )
    dispatched = {f"{i}": start for i, (start, _) in enumerate(drawn)}
    assert all(span.start >= dispatched[span.name] for span in timeline.spans)


# Hidden time


def test_a_call_that_nobody_waits_for_is_hidden():
    assert recorded(call(0, 4)).hidden_fraction == 1


def test_the_part_of_a_call_that_its_caller_waits_for_is_not_hidden():
    timeline = recorded(call(0, 4), wait(3, 5))
    assert (timeline.host_seconds, timeline.hidden_seconds, timeline.hidden_fraction) == (4, 3, 0.75)


def test_waiting_for_another_call_counts_too():
    timeline = recorded(call(0, 4, 0), call(0, 2, 1, name="log", thread=WORKER + 1), wait(3, 4), wait(1, 2))
    assert (timeline.host_seconds, timeline.hidden_seconds) == (6, 3)


def test_what_others_wait_for_does_not_count():
    timeline = recorded(program(0, 9), call(0, 4), wait(0, 4, thread=77))
    assert timeline.hidden_fraction == 1


def test_a_call_in_its_caller_is_hidden_while_the_devices_run():
    timeline = recorded(fragment(0, 2, "a"), fragment(2, 3, "b"), call(1, 5, thread=HOME))
    assert (timeline.host_seconds, timeline.hidden_seconds) == (4, 2)
    assert recorded(call(1, 5, thread=HOME)).hidden_seconds == 0


def test_a_call_elsewhere_is_not_hidden_while_its_caller_runs_one_and_the_devices_none():
    timeline = recorded(fragment(0, 2), call(0, 4, 0, thread=HOME), call(1, 5, 1))
    assert timeline.hidden_seconds == 2 + (1 + 1)


def test_a_call_made_and_run_inside_of_another_is_part_of_it():
    outer, inner = call(0, 4, 0), call(1, 2, 1, thread=WORKER, caller=WORKER, owner=())
    timeline = recorded(outer, inner, wait(3, 4))
    assert (timeline.host_seconds, timeline.hidden_seconds) == (4, 3)


def test_a_call_made_inside_of_another_for_later_has_the_same_caller():
    outer = call(0, 2, 0)
    later = call(3, 5, 1, thread=WORKER, caller=WORKER, queued=1, owner=())
    timeline = recorded(outer, later, wait(4, 5))
    assert [span.lane for span in timeline.spans if span.kind == "call"] == ["stream io"] * 2
    assert (timeline.host_seconds, timeline.hidden_seconds) == (4, 3)


def test_the_caller_of_a_call_is_that_of_its_program():
    timeline = recorded(program(0, 9), call(1, 5, caller=77), wait(4, 5))
    assert timeline.hidden_seconds == 3


def test_a_call_made_before_the_recording_is_hidden_from_everybody_or_not():
    timeline = recorded(call(1, 5)[1:], wait(0, 2, thread=76), wait(4, 6, thread=77))
    assert timeline.hidden_seconds == 2


@st.composite
def histories(draw):
    """Events of all kinds: pairs at any times in any threads, a few of them incomplete."""
    drawn = []
    for number in range(draw(st.integers(0, 8))):
        make = draw(st.sampled_from([program, fragment, call, wait]))
        items = {}
        if make in (call, wait):
            items["thread"] = draw(st.sampled_from([HOME, WORKER, 77]))
        if make is call:
            items["number"] = number
            items["caller"] = draw(st.sampled_from([HOME, WORKER, 77]))
            items["owner"] = draw(st.sampled_from([(), ("step", 0, "load"), ("step", 1, "load")]))
        group = make(*draw(intervals), **items)
        left_out = draw(st.sets(st.integers(0, 20), max_size=2))
        drawn += [event for i, event in enumerate(group) if i not in left_out]
    return draw(st.permutations(drawn))


@sees("different examples", "several elements")
@examples(40)
@given(histories())
def test_hidden_time_is_a_part_of_host_time(history):
    timeline = Timeline(history)
    assert 0 <= timeline.hidden_seconds <= timeline.host_seconds
    assert 0 <= timeline.hidden_fraction <= 1
    assert timeline.host_seconds <= sum(span.seconds for span in timeline.spans if span.kind == "call")


@sees("different examples", "several elements")
@examples(40)
@given(histories())
def test_every_beginning_is_a_span_and_every_span_has_a_beginning(history):
    timeline = Timeline(history)
    starts = {
        events.ProgramStarted: "program",
        events.FragmentDispatched: "fragment",
        events.CallStarted: "call",
        events.WaitStarted: "wait",
    }
    assert collections.Counter(span.kind for span in timeline.spans) == collections.Counter(
        starts[type(event)] for event in history if type(event) in starts
    )
    assert [span.start for span in timeline.spans] == sorted(span.start for span in timeline.spans)
    assert all(span.end is None or span.start <= span.end for span in timeline.spans)
    assert timeline.unfinished == tuple(span for span in timeline.spans if span.end is None)
    assert timeline.summary()


@sees("different examples", "several elements")
@examples(40)
@given(st.lists(intervals, max_size=6), st.lists(intervals, max_size=6))
def test_the_hidden_time_of_calls_elsewhere_is_what_no_wait_covers(calls, waits):
    timeline = recorded(
        *[call(*interval, number=i, thread=1000 + i) for i, interval in enumerate(calls)],
        *[wait(*interval) for interval in waits],
    )
    # Waits of one node end in the order they began in; together they cover the same.
    is_blocked = [any(start <= time < end for start, end in waits) for time in range(21)]
    free = sum(not is_blocked[time] for start, end in calls for time in range(start, end))
    assert timeline.hidden_seconds == pytest.approx(free)


# For people and for viewers


def test_a_summary_names_what_ran():
    timeline = recorded(
        program(0, 2),
        program(2, 4, number=1),
        fragment(0, 1),
        call(0, 1),
        call(1, 1.5, number=1),
        call(9, 9.5, number=2)[:2],
        call(9, 9.5, number=3, name="log")[:1],
        [at(3, "TransferStarted", "step", 0, "load", 64), at(3.25, "TransferFinished", "step", 0, "load")],
        wait(0.5, 1),
    )
    assert timeline.summary().splitlines() == [
        "program step: 2 executions, 4.00 s, 2.00 s each",
        "fragment fragment_0 of step: 1 run, 1.00 s",
        "call load: 2 calls, 1.50 s, 750.00 ms each",
        "transfer load of step: 1 transfer, 64 bytes, 250.00 ms",
        "wait load of step: 1 wait, 500.00 ms",
        "1.50 s of host time, 67% hidden",
        "not ended: call load",
        "not started: call log",
    ]
    assert repr(timeline) == "Timeline(2 executions, 3 calls, 1.50 s of host time, 67% hidden)"


def test_an_empty_timeline_says_so():
    assert Timeline().summary() == "no host time"
    assert repr(Timeline()) == "Timeline(0 executions, 0 calls, no host time)"


def saved(timeline, path):
    timeline.save(path)
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


@sees("different examples", "several elements")
@examples(40)
@given(history=histories())
def test_a_file_has_an_entry_for_every_span_and_its_tracks_can_be_drawn(history, tmp_path_factory):
    timeline = Timeline(history)
    entries = saved(timeline, tmp_path_factory.mktemp("traces") / "trace.json")
    complete = [entry for entry in entries if entry["ph"] == "X"]
    assert sorted((entry["cat"], entry["name"]) for entry in complete) == sorted(
        (span.kind, span.name) for span in timeline.spans
    )
    names = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
    assert set(names) == {entry["tid"] for entry in complete}
    assert len(set(names.values())) == len(names)
    assert {name.split(" (")[0] for name in names.values()} == {span.lane for span in timeline.spans}
    by_track = collections.defaultdict(list)
    for entry in complete:
        assert entry["ts"] >= 0
        assert entry["dur"] >= 0
        by_track[entry["tid"]].append((entry["ts"], entry["ts"] + entry["dur"]))
    for spans in by_track.values():
        for i, (start, end) in enumerate(spans):
            for other_start, other_end in spans[:i]:
                assert other_end <= start or end <= other_start or (other_start <= start and end <= other_end)


def test_a_file_is_in_microseconds_from_the_first_event(tmp_path):
    timeline = recorded(program(10, 13), call(11, 12)[:2])
    entries = {entry["name"]: entry for entry in saved(timeline, tmp_path / "trace.json") if entry["ph"] == "X"}
    assert (entries["step"]["ts"], entries["step"]["dur"]) == (0, 3e6)
    assert (entries["load"]["ts"], entries["load"]["dur"]) == (1e6, 2e6)
    assert entries["load"]["args"] == {"program": "step", "execution": 0, "has_ended": False}


def test_an_empty_timeline_can_be_saved(tmp_path):
    assert [entry["name"] for entry in saved(Timeline(), tmp_path / "trace.json")] == ["process_name"]


def test_a_path_may_be_a_string(tmp_path):
    recorded(call(0, 1)).save(f"{tmp_path}/trace.json")
    assert os.listdir(tmp_path) == ["trace.json"]


def test_a_file_replaces_another_or_leaves_it_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    path.write_text("before")

    def full(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(type(path), "replace", full)
        with pytest.raises(OSError, match="disk full"):
            Timeline().save(path)
    assert path.read_text() == "before"
    Timeline().save(path)
    assert path.read_text() != "before"
    assert os.listdir(tmp_path) == ["trace.json"]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        Timeline().save(tmp_path / "taken")
    with pytest.raises(FileNotFoundError):
        Timeline().save(tmp_path / "missing" / "trace.json")
    assert os.listdir(tmp_path) == ["taken"]


def test_arrows_go_from_programs_to_what_they_make_and_from_calls_to_waits_for_them(tmp_path):
    timeline = recorded(program(0, 9), fragment(1, 3, "a"), fragment(2, 5, "b"), call(4, 6, queued=2.5), wait(3, 7))
    entries = saved(timeline, tmp_path / "trace.json")
    slices = [entry for entry in entries if entry["ph"] == "X"]

    def around(end):
        """The innermost slice of the track at the time of an end of an arrow."""
        found = [s for s in slices if s["tid"] == end["tid"] and s["ts"] <= end["ts"] < s["ts"] + s["dur"]]
        return min(found, key=lambda s: s["dur"])["name"]

    starts = {entry["id"]: entry for entry in entries if entry["ph"] == "s"}
    ends = {entry["id"]: entry for entry in entries if entry["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert all(entry["bp"] == "e" for entry in ends.values())
    arrows = {(s["name"], around(s), around(ends[k])) for k, s in starts.items()}
    assert arrows == {
        ("program to fragment", "step", "a"),
        ("program to fragment", "step", "b"),
        ("program to call", "step", "load"),
        ("call to wait", "load", "load"),
    }
    assert [ends[k]["ts"] for k in sorted(ends)] == [1e6, 3e6, 4e6, 7e6 - 0.001]


@sees("different examples", "several elements")
@examples(40)
@given(history=histories())
def test_arrows_go_forward_and_end_where_something_is(history, tmp_path_factory):
    entries = saved(Timeline(history), tmp_path_factory.mktemp("traces") / "trace.json")
    slices = [(entry["tid"], entry["ts"], entry["ts"] + entry["dur"]) for entry in entries if entry["ph"] == "X"]
    for entry in entries:
        if entry["ph"] in "sf":
            assert any(tid == entry["tid"] and start <= entry["ts"] <= end for tid, start, end in slices)
    numbers = [entry["id"] for entry in entries if entry["ph"] == "s"]
    assert numbers == [entry["id"] for entry in entries if entry["ph"] == "f"]
    assert len(set(numbers)) == len(numbers)


# The critical path


def chain(timeline, **which):
    return [(span.name, span.start, span.end) for span in timeline.critical_path(**which)]


def test_the_critical_path_is_the_chain_that_ends_last():
    timeline = recorded(
        program(0, 20), call(0, 4), fragment(4, 9), call(9.5, 12, 1, name="log"), call(1, 3, 2, name="x")
    )
    assert chain(timeline) == [("load", 0, 4), ("fragment_0", 4, 9), ("log", 9.5, 12)]


def test_what_is_seen_to_end_a_little_late_had_ended():
    assert chain(recorded(fragment(0, 4.2), call(4, 8))) == [("fragment_0", 0, 4.2), ("load", 4, 8)]
    assert chain(recorded(fragment(0, 5.5), call(4, 8))) == [("load", 4, 8)]


def test_of_several_that_ended_at_once_the_longest_is_critical():
    timeline = recorded(call(2, 4), fragment(0, 4), call(3, 4, 1, thread=77, caller=77), call(4, 6, 2))
    assert chain(timeline) == [("fragment_0", 0, 4), ("load", 4, 6)]


def test_nothing_has_no_critical_path():
    assert Timeline().critical_path() == ()
    assert recorded(program(0, 3), wait(0, 1), fragment(2, 2), call(1, 9)[:2]).critical_path() == ()


@sees("different examples", "several elements")
@examples(40)
@given(histories())
def test_a_critical_path_ends_with_the_last_end_and_nothing_ended_in_its_gaps(history):
    timeline = Timeline(history)
    work = [s for s in timeline.spans if s.kind in ("fragment", "call", "transfer") and s.seconds]
    path = timeline.critical_path()
    assert bool(path) == bool(work)
    if not work:
        return
    assert path[-1].end == max(span.end for span in work)
    assert set(path) <= set(work)
    for before, after in itertools.pairwise(path):
        assert before.start < after.start
        shorter = min(before.seconds, after.seconds)
        assert before.end - after.start <= shorter / 4
        assert not any(before.end < span.end <= after.start for span in work)
    assert not any(span.end <= path[0].start for span in work)
    gaps = sum(after.start - before.end for before, after in itertools.pairwise(path))
    assert sum(span.seconds for span in path) + gaps == pytest.approx(path[-1].end - path[0].start)


def test_a_critical_path_of_one_execution():
    timeline = recorded(fragment(0, 4), call(4, 5, owner=("step", 1, "load")), program(0, 9, number=1))
    assert chain(timeline, execution=0) == [("fragment_0", 0, 4)]
    assert chain(timeline, program="step", execution=[0, 1]) == chain(timeline)


# Pictures


def test_a_picture_shows_every_lane_and_says_how_much_was_hidden():
    timeline = recorded(program(0, 9), fragment(1, 3), call(2, 5), wait(4, 5), program(6, 7, thread=77))
    drawn = timeline.to_svg()
    texts = re.findall(r"<text[^>]*>(?:<title>[^<]*</title>)?([^<]*)</text>", drawn)
    assert texts[0] == "2 executions, 1 call, 3.00 s of host time, 67% hidden"
    assert [text for text in texts if text in ("caller", "devices", "stream io", "thread 77")] == [
        "caller",
        "devices",
        "stream io",
        "thread 77",
    ]
    assert "<title>call load of step 0: 3.00 s</title>" in drawn
    assert "critical path" in texts


def test_a_picture_of_one_execution_shows_others_faintly_and_not_what_was_before_or_after():
    timeline = recorded(
        program(0, 2), program(4, 9, 1), call(5, 6, 1, name="own", owner=("step", 1, "x")), call(7, 8, 2, owner=())
    )
    drawn = timeline.to_svg(program="step", execution=1)
    assert "program step 0" not in drawn
    assert re.search(r'opacity="0.35"><title>call load', drawn)
    assert not re.search(r'opacity="0.35"><title>call own', drawn)
    assert ">step 1</text>" in drawn
    assert ">step 0 to 1</text>" in recorded(program(0, 2), program(4, 9, 1), call(9, 10)).to_svg(execution=range(2))


@pytest.mark.parametrize("name", ["to_svg", "critical_path"])
def test_executions_that_were_not_recorded_are_refused(name):
    timeline = recorded(program(0, 1), program(2, 3, 7))
    ask = getattr(timeline, name)
    with pytest.raises(ValueError, match=rf"{name}: program='stop' was not recorded; the programs are step"):
        ask(program="stop")
    message = rf"{name}: execution=3 was not recorded; the executions of step are 0, 7"
    with pytest.raises(ValueError, match=message):
        ask(program="step", execution=3)
    with pytest.raises(ValueError, match=r"the executions of all programs are 0, 7"):
        ask(execution=[1, 2])
    with pytest.raises(ValueError, match=r"program='step' was not recorded; there is no program"):
        getattr(Timeline(), name)(program="step")


@sees("different examples", "several elements")
@examples(40)
@given(histories())
def test_any_recording_can_be_drawn(history):
    timeline = Timeline(history)
    ET.fromstring(timeline.to_svg())
    page = ET.fromstring(timeline._repr_html_())
    assert page.find("pre").text == timeline.summary()


def test_a_long_recording_is_drawn_quickly_and_no_larger():
    timeline = recorded(*(fragment(k, k + 0.5, f"f{k}") for k in range(5_000)))
    assert len(timeline.spans) == 5_000
    begin = time.process_time()
    drawn = timeline.to_svg()
    assert time.process_time() - begin < 1
    assert len(drawn) < 100_000
    assert "5,000 spans narrower than half a pixel are merged" in drawn


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda timeline: timeline.critical_path(3),
            "critical_path: program must be the name of a program, .* but is 3",
        ),
        (
            lambda timeline: timeline.to_svg(execution="3"),
            "to_svg: execution must be the number of an execution, .* is '3'",
        ),
        (
            lambda timeline: timeline.to_svg(execution=[1.5]),
            r"execution\[0\] must be a whole number, but is 1.5, a float",
        ),
        (lambda timeline: timeline.save(1), "Timeline.save: path must be the path of a file, .* but is 1, an int"),
        (lambda timeline: Timeline(3), "Timeline: recorded must be a collection of events, but is 3, an int"),
        (lambda timeline: Timeline(["x"]), r"Timeline: recorded\[0\] must be an event, .*, but is 'x', a str"),
    ],
)
def test_what_is_no_event_program_or_path_is_refused_by_name(call, message):
    with pytest.raises(TypeError, match=message):
        call(Timeline([events.CallStarted(0, "load", "io", time=1.0)]))


def test_a_fragment_that_failed_is_left_out():
    failing = [
        at(2, "FragmentDispatched", "step", 0, "fragment_0"),
        at(3, "FragmentFailed", "step", 0, "fragment_0", "ValueError: no"),
        at(4, "ProgramFailed", "step", 0, "ValueError: no"),
    ]
    timeline = recorded(program(0, 4)[:1], fragment(0, 5), failing)
    assert [(span.name, span.start, span.end) for span in timeline.spans if span.kind == "fragment"] == [
        ("fragment_0", 0.0, 5.0)
    ]
    assert "not ended" not in timeline.summary()


def test_a_fragment_that_raises_as_it_is_dispatched_has_failed():
    @colocated_python(uses_jax=False, out_specs=jax.ShapeDtypeStruct((), jnp.float32))
    def fail(x):
        raise LookupError("no")

    step = pjit(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: x + fail(x), x))
    with record() as timeline, pytest.raises(LookupError):
        step(jnp.float32(0)).block_until_ready()
    (failed,) = [event for event in timeline.events if isinstance(event, events.FragmentFailed)]
    assert "LookupError: no" in failed.error
    assert [span.kind for span in timeline.spans] == ["program", "call"]
    assert "not ended" not in timeline.summary()
