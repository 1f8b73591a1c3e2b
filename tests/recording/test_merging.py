"""Merged timelines: the spans of all processes on one scale, who waited for whom, and what is drawn and written."""

import collections
import dataclasses
import json
import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partjit import events, gather_timelines, merge_timelines, record
from partjit.recording import Timeline
from partjit.recording.clocks import Clock, align, bounds_of_offset, own_clock
from partjit.recording.merging import merged
from partjit.recording.stored import Recording, packed, unpacked
from tests.census import sees
from tests.effort import examples
from tests.recording.test_timeline import HOME, at, call, fragment, histories, program
from tests.test_events import EXAMPLES

BOTH = (0, 1)


def recording(process, *groups, origin=None, epoch=0.0):
    clock = Clock(process, f"node{process}", origin, epoch)
    return Recording([event for group in groups for event in group], HOME, clock)


def shared(start, end, name="fragment_0", number=0):
    return [
        at(start, "FragmentDispatched", "step", number, name, BOTH),
        at(end, "FragmentReady", "step", number, name, thread=HOME + 1),
    ]


def of_two(first, second, ahead=0.0, uncertainty=0.0):
    """The merged timeline of two processes, of which the clock of the first is ahead."""
    bounds = {1: (ahead - uncertainty, ahead + uncertainty)}
    return merged([recording(0, *first), recording(1, *second)], bounds)


def shape(span):
    return span.kind, span.name, span.lane, span.program, span.execution


# Clocks


delays = st.floats(0, 1, allow_subnormal=False)


@sees("different examples", "several elements")
@examples(100)
@given(
    st.floats(-1e6, 1e6), st.lists(st.tuples(delays, delays, delays, delays), min_size=1, max_size=8), st.floats(0, 1e6)
)
def test_the_offset_of_a_clock_is_within_what_is_said_and_no_worse_than_the_shortest_round_trip(ahead, rounds, now):
    exchanges = []
    for there, answer, back, pause in rounds:
        received = now + there
        answered = received + answer
        exchanges.append((now, received - ahead, answered - ahead, answered + back))
        now = answered + back + pause
    least, most = bounds_of_offset(exchanges)
    rounding = 1e-8
    assert least - rounding <= ahead <= most + rounding
    assert most - least <= min(there + back for there, _, back, _ in rounds) + rounding
    _, offset = align([Clock(0, "a", "a", 0.0), Clock(1, "b", "b", 0.0)], {1: (least, most)})
    assert abs(offset.seconds - ahead) <= offset.uncertainty + rounding


def test_a_clock_that_drifts_while_it_is_compared_has_bounds_in_order():
    assert bounds_of_offset([(10.0, 2.0, 2.0, 10.0), (20.0, 11.0, 11.0, 20.0)]) == (8, 9)


def test_processes_with_one_clock_share_what_was_measured_and_need_nothing_if_it_is_that_of_the_lowest():
    clocks = [Clock(process, "a", origin, 0.0) for process, origin in enumerate(["x", "y", "x", "y", None])]
    measured = {1: (0.0, 3.0), 2: (5.0, 6.0), 3: (1.0, 5.0), 4: (1.0, 2.0)}
    offsets = align(clocks[::-1], measured)
    assert [(each.process, each.seconds, each.uncertainty) for each in offsets] == [
        (0, 0, 0),
        (1, 2, 1),
        (2, 0, 0),
        (3, 2, 1),
        (4, 1.5, 0.5),
    ]


def test_wall_clocks_have_to_do_where_nothing_was_measured():
    assert own_clock().epoch > 0
    clocks = [Clock(3, "a", "x", 100.0), Clock(4, "b", "y", 98.0), Clock(5, "b", None, 97.0)]
    assert [(each.seconds, each.uncertainty) for each in align(clocks, {})] == [(0, 0), (-2, None), (-3, None)]


# Union


@sees("different examples", "several elements")
@examples(40)
@given(st.lists(st.tuples(histories(), st.integers(-100, 100)), min_size=1, max_size=3))
def test_a_merged_timeline_is_the_union_of_spans_shifted_by_the_offsets(drawn):
    recordings = [recording(process, history) for process, (history, _) in enumerate(drawn)]
    ahead = [0, *(seconds for _, seconds in drawn[1:])]
    timeline = merged(recordings, {process: (seconds, seconds) for process, seconds in enumerate(ahead)})
    expected = []
    for process, seconds in enumerate(ahead):
        alone = Timeline(recordings[process].events)
        alone._recorder = HOME
        for span in alone.spans:
            end = None if span.end is None else span.end + seconds
            expected.append(dataclasses.replace(span, start=span.start + seconds, end=end, process=process))
        own = timeline.timelines[process]
        assert [event.time for event in own.events] == [event.time + seconds for event in alone.events]
        assert [shape(span) for span in timeline.spans if span.process == process] == [shape(s) for s in alone.spans]
    assert collections.Counter(timeline.spans) == collections.Counter(expected)
    assert [span.start for span in timeline.spans] == sorted(span.start for span in timeline.spans)
    assert timeline.host_seconds == pytest.approx(math.fsum(own.host_seconds for own in timeline.timelines.values()))
    assert timeline.hidden_seconds == pytest.approx(
        math.fsum(own.hidden_seconds for own in timeline.timelines.values())
    )
    assert timeline.summary()
    assert ET.fromstring(timeline.to_svg()).tag.endswith("svg")


def test_calls_and_executions_of_the_same_number_are_of_different_processes():
    timeline = of_two([program(0, 9), call(1, 3)], [program(1, 8), call(2, 6)])
    assert [(span.process, span.kind, span.seconds) for span in timeline.spans] == [
        (0, "program", 9),
        (0, "call", 2),
        (1, "program", 7),
        (1, "call", 4),
    ]
    assert timeline.host_seconds == 6


# Who waits for whom


def test_a_fragment_of_two_processes_waits_for_the_one_that_dispatches_it_last():
    timeline = of_two([shared(1, 6)], [shared(14, 16)], ahead=-10, uncertainty=0.5)
    (wait,) = timeline.process_waits
    assert (wait.fragment.process, wait.waits_for, wait.start, wait.end, wait.seconds) == (0, 1, 1, 4, 3)
    assert "process 0 waited for process 1 in 1 fragment, 3.00 s" in timeline.summary()
    assert "clock of process 1 (node1): -10.000000 s, +- 500.00 ms" in timeline.summary()


def test_a_wait_no_longer_than_the_clocks_are_uncertain_is_none():
    assert of_two([shared(1, 6)], [shared(2, 6)], uncertainty=1).process_waits == ()
    assert of_two([shared(1, 6)], [shared(2, 6)], uncertainty=0.9).process_waits
    by_wall_clocks = merged([recording(0, shared(1, 6)), recording(1, shared(5, 6), epoch=1.0)])
    assert by_wall_clocks.process_waits == ()


def test_fragments_of_one_process_wait_for_nobody():
    assert of_two([fragment(1, 6)], [fragment(4, 6)]).process_waits == ()


def test_executions_are_matched_in_their_order_and_not_if_one_process_recorded_more():
    own = [shared(0, 2, number=3), shared(4, 5, number=7)]
    other = [shared(1, 2, number=1), shared(4.5, 5, number=2)]
    assert [wait.seconds for wait in of_two(own, other).process_waits] == [1, 0.5]
    assert of_two(own, other[1:]).process_waits == ()


def test_the_same_fragment_in_a_loop_is_matched_in_its_order():
    waits = of_two([shared(0, 2), shared(4, 6)], [shared(1, 2), shared(3, 6)]).process_waits
    assert [(wait.fragment.process, wait.seconds) for wait in waits] == [(0, 1), (1, 1)]


def test_the_critical_path_goes_on_in_the_process_that_came_last():
    first, second = [call(0, 2, name="quick"), shared(3, 9.5)], [call(0.5, 6, name="slow"), shared(6.5, 9)]
    timeline = of_two(first, second)
    assert [(span.process, span.name) for span in timeline.critical_path()] == [(1, "slow"), (1, "fragment_0")]
    assert timeline.critical_path(program="step") == timeline.critical_path()
    timeline = of_two([*first, call(9.5, 12, number=1, name="log")], second)
    assert [(span.process, span.name) for span in timeline.critical_path()] == [
        (1, "slow"),
        (1, "fragment_0"),
        (0, "log"),
    ]


def test_without_waits_the_critical_path_stays_in_its_process():
    timeline = of_two([call(0, 5, name="other")], [call(0, 4, name="load"), fragment(5, 9)])
    assert [(span.process, span.name) for span in timeline.critical_path()] == [(1, "load"), (1, "fragment_0")]
    assert of_two([], []).critical_path() == ()


# Pictures and files


def test_the_chart_has_a_group_of_rows_per_process_and_says_how_exact_it_is():
    timeline = of_two([program(0, 9), shared(1, 8)], [program(0, 9), shared(4, 8)], uncertainty=1e-3)
    svg = timeline.to_svg()
    texts = [element.text for element in ET.fromstring(svg).iter() if element.tag.endswith("text")]
    assert [text for text in texts if text in ("process 0", "process 1", "caller", "devices")] == [
        "process 0",
        "caller",
        "devices",
        "process 1",
        "caller",
        "devices",
    ]
    assert "clock offset between two processes: +- 1.00 ms at most" in texts
    assert "wait for process 1 in fragment_0 of step 0: 3.00 s" in svg
    assert "wait for another process" in texts
    assert "clock" not in of_two([program(0, 9)], []).to_svg()
    assert "as their wall clocks, not measured" in merged([recording(0), recording(1)]).to_svg()


def test_the_file_has_a_process_for_each(tmp_path):
    timeline = of_two([program(0, 9), shared(1, 8)], [program(0, 9), shared(1, 8)])
    timeline.save(tmp_path / "merged.json")
    written = json.loads((tmp_path / "merged.json").read_text())
    entries = written["traceEvents"]
    assert {(e["pid"], e["args"]["name"]) for e in entries if e["name"] == "process_name"} == {
        (1, "process 0 on node0"),
        (2, "process 1 on node1"),
    }
    assert collections.Counter(e["pid"] for e in entries if e["ph"] == "X") == {1: 2, 2: 2}
    assert collections.Counter(e["pid"] for e in entries if e["ph"] == "s") == {1: 1, 2: 1}
    assert written["partjit"]["offsets"] == [[0, "node0", 0.0, 0.0], [1, "node1", 0.0, 0.0]]


def test_a_wait_for_another_process_is_in_the_file_with_an_arrow_from_there(tmp_path):
    timeline = of_two([program(1, 9), shared(1, 8)], [program(1, 9), shared(4, 8)], uncertainty=0.5)
    timeline.save(tmp_path / "merged.json")
    entries = json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in entries if e["name"] == "process_name"] == [
        "process 0 on node0",
        "process 1 on node1 (clock: +- 500.00 ms)",
    ]
    (wait,) = (e for e in entries if e.get("cat") == "process wait")
    (fragment_here,) = (e for e in entries if e.get("cat") == "fragment" and e["pid"] == 1)
    assert (wait["name"], wait["pid"], wait["tid"]) == ("wait for process 1", 1, fragment_here["tid"])
    assert (wait["ts"], wait["dur"]) == (0, 3e6)
    flows = [e["id"] for e in entries if e["ph"] == "s"]
    assert len(flows) == len({*flows}) == 3
    leaves, arrives = (e for e in entries if e["name"] == "process to process")
    assert (leaves["pid"], leaves["ts"], arrives["pid"], arrives["ts"]) == (2, 3e6, 1, 3e6 - 0.001)
    assert leaves["id"] == arrives["id"]


@sees("different examples", "several elements")
@examples(30)
@given(histories())
def test_what_is_saved_is_read_again(history):
    given = recording(0, history, EXAMPLES)
    stored = json.loads(json.dumps(packed([given])))
    assert unpacked(stored) == ((dataclasses.replace(given, events=(*given.events,)),), ())


def test_recordings_and_files_are_merged_alike(tmp_path):
    recordings = [recording(0, program(0, 9), origin="x"), recording(1, program(1, 8), origin="x")]
    for each in recordings:
        alone = Timeline()
        alone._own_recordings = lambda each=each: ([each], ())
        alone.save(tmp_path / f"process_{each.clock.process}.json")
    from_files = merge_timelines([tmp_path / "process_1.json", str(tmp_path / "process_0.json")])
    expected = merged(recordings)
    assert from_files.spans == expected.spans
    assert from_files.offsets == expected.offsets
    from_files.save(tmp_path / "merged.json")
    again = merge_timelines([tmp_path / "merged.json"])
    assert (again.spans, again.offsets, again.to_svg()) == (expected.spans, expected.offsets, expected.to_svg())
    assert merge_timelines([again]).spans == expected.spans
    with pytest.raises(ValueError, match=re.escape("timelines[1] is merged already")):
        merge_timelines([tmp_path / "process_0.json", again])
    with pytest.raises(ValueError, match=re.escape("timelines[1] is of process 0, as one before it")):
        merge_timelines([tmp_path / "process_0.json"] * 2)
    with pytest.raises(ValueError, match="timeline is merged already"):
        gather_timelines(again)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"partjit": 3}', '{"partjit": {"format": 99}}'])
def test_a_file_without_a_recording_is_refused_by_name(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"timelines[0], {path}, is no file that `save`")):
        merge_timelines([path])


def test_nothing_to_merge_is_refused():
    with pytest.raises(ValueError, match="timelines is empty"):
        merge_timelines([])


def test_a_single_process_gathers_its_own():
    with record() as timeline:
        events.emit(events.CallStarted(0, "load", "io", time=1.0))
        events.emit(events.CallFinished(0, "load", "io", time=2.0))
    gathered = gather_timelines(timeline)
    assert [(span.process, span.name, span.seconds) for span in gathered.spans] == [(0, "load", 1)]
    assert repr(gathered) == "MergedTimeline(1 process, 0 executions, 1 call, 1.00 s of host time, 100% hidden)"
    for wrong in (0, -1, math.inf):
        with pytest.raises(ValueError, match="gather_timelines: timeout"):
            gather_timelines(timeline, timeout=wrong)
