"""Drawings of what happened when: round times, rows without overlaps, limited size, and nothing left out."""

import itertools
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partjit.render.gantt import KINDS, Bar, draw, merge, stack, ticks
from tests.census import sees

SVG = "{http://www.w3.org/2000/svg}"
times = st.integers(0, 40)
bars = st.builds(
    lambda ends, lane, kind, title, is_open: Bar(min(ends), max(ends), lane, kind, title, is_open=is_open),
    st.tuples(times, times),
    st.sampled_from(["caller", "devices", "stream <io>"]),
    st.sampled_from([*KINDS]),
    st.text(max_size=12),
    st.booleans(),
)
many = st.lists(bars, max_size=15)


@sees("different examples")
@given(st.floats(-1e3, 1e3), st.floats(1e-6, 1e4), st.integers(2, 12))
def test_ticks_are_round_evenly_spaced_and_not_too_many(start, length, most):
    found = ticks(start, start + length, most)
    assert len(found) <= most
    assert all(start - length * 1e-6 <= tick <= start + length * (1 + 1e-6) for tick in found)
    steps = [b - a for a, b in itertools.pairwise(found)]
    if steps:
        assert max(steps) == pytest.approx(min(steps), rel=1e-6)
        assert re.match(r"^(1|2|5)\.?0*e", f"{steps[0]:.3e}"), steps
    assert len(found) >= most // 3, "an axis without enough ticks cannot be read"


@sees("different examples", "several elements")
@given(many)
def test_rows_hold_all_bars_and_none_overlap(drawn):
    rows = stack(drawn)
    assert sorted(map(repr, itertools.chain(*rows))) == sorted(map(repr, drawn))
    for row in rows:
        assert all(before.end <= after.start for before, after in itertools.pairwise(row))


@sees("different examples", "several elements")
@given(many)
def test_what_lies_within_another_stands_below_it(drawn):
    rows = stack(drawn)
    for (i, upper), (j, lower) in itertools.product(enumerate(rows), repeat=2):
        for outer, inner in itertools.product(upper, lower):
            if outer.start < inner.start and inner.end < outer.end:
                assert i < j


@sees("different examples", "several elements")
@given(many, st.sampled_from([0.5, 1.5, 5.0]))
def test_what_can_be_seen_stays_and_what_cannot_is_counted(drawn, narrow):
    for row in stack(drawn):
        merged = merge(row, narrow)
        assert sum(bar.count for bar in merged) == len(row)
        assert all(bar in row for bar in merged if bar.count == 1)
        assert [bar for bar in merged if bar.count == 1 and bar.end - bar.start >= narrow] == [
            bar for bar in row if bar.end - bar.start >= narrow
        ]
        assert all(before.end <= after.start for before, after in itertools.pairwise(merged))
        for before, after in itertools.pairwise(merged):
            are_narrow = all(bar.count > 1 or bar.end - bar.start < narrow for bar in (before, after))
            assert not are_narrow or after.start - before.end >= narrow


def test_bars_together_say_how_many_and_how_long_and_look_like_most_of_the_time():
    row = [Bar(k, k + 0.1, "a", "wait", "w") for k in range(3)] + [Bar(3, 3.9, "a", "call", "c")]
    (bar,) = merge(row, 1)
    assert (bar.kind, bar.count, bar.title) == ("call", 4, "")
    assert bar.tooltip == "4 that are too short to be visible, 1.20 s together"


@sees("different examples", "several elements")
@given(many)
def test_a_picture_is_well_formed_deterministic_and_has_every_bar(drawn):
    shown = draw(drawn, title="a & b")
    assert shown == draw(drawn, title="a & b")
    root = ET.fromstring(shown)
    assert " id=" not in shown
    titled = [group for group in root.iter(f"{SVG}g") if len(group) and group[0].tag == f"{SVG}title"]
    assert 0 < len(titled) <= len(drawn) or not drawn
    if drawn and all(bar.end > bar.start for bar in drawn):
        assert len(titled) == len(drawn)
    lanes = {"".join(text.itertext()) for text in root.iter(f"{SVG}text")}
    assert {bar.lane for bar in drawn} <= lanes


def test_lanes_stand_in_the_order_that_is_asked_for():
    drawn = [Bar(0, 1, lane, "call", "") for lane in ("b", "c", "a")]
    found = re.findall(r">([abcd])</text>", draw(drawn, title="t", lanes=("d", "c", "a")))
    assert found == ["c", "a", "b"]


def test_a_picture_of_many_bars_is_no_larger_and_says_what_it_does():
    def picture(count):
        return draw([Bar(k, k + 0.5, "devices", "fragment", f"fragment_{k}") for k in range(count)], title="t")

    assert len(picture(50_000)) < len(picture(500)) < 400_000
    assert "50,000 spans narrower than half a pixel are merged" in picture(50_000)
    assert "half a pixel" not in picture(50)


def test_a_window_cuts_what_reaches_beyond_it():
    drawn = [Bar(0, 10, "a", "fragment", "f"), Bar(20, 30, "b", "call", "later")]
    shown = draw(drawn, title="t", window=(5, 8))
    assert "later" not in shown
    assert "0 s" in shown
    ends = [sum(map(float, found)) for found in re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', shown)]
    assert ends
    assert all(end <= 960 for end in ends)


def test_the_critical_path_stands_out():
    before, after, beside = Bar(0, 1, "a", "call", "x"), Bar(2, 3, "b", "call", "y"), Bar(0, 3, "c", "call", "z")
    shown = draw([before, after, beside], title="t", critical=[before, after])
    assert len(re.findall(r'<rect [^>]*class="pj-orange-tint pj-s-red"', shown)) == 2
    assert "critical path" in shown
    assert "critical path" not in draw([before], title="t")


def test_waits_are_hatched_and_what_has_not_ended_has_an_arrow():
    plain = draw([Bar(0, 1, "a", "call", "x")], title="t").count("<path")
    assert draw([Bar(0, 1, "a", "wait", "x")], title="t").count("<path") == plain + 2  # one of them in the legend
    assert draw([Bar(0, 1, "a", "call", "x", is_open=True)], title="t").count("<path") == plain + 1


def test_what_is_there_for_comparison_is_faint():
    assert 'opacity="0.35"' in draw([Bar(0, 1, "a", "call", "x", is_faint=True)], title="t")


def test_nothing_can_be_drawn():
    ET.fromstring(draw([], title="nothing"))
