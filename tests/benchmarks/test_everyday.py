"""The ways that `benchmarks/everyday.py` compares do the same; it reports those that do not, or end their process."""

import json
import subprocess
import types

import numpy as np
import pytest

import everyday
import report
import sweep
from situations.ways import CALLBACKS, OURS, Place
from tests.effort import sample

OTHERWISE = f"{OURS}, otherwise"
TINY = {int: 2, float: 0.5}
CASES = [(name, count) for name, entry in everyday.SITUATIONS.items() for count in entry.counts]


@pytest.mark.soak
@pytest.mark.parametrize(("name", "count"), sample(CASES, 5))
def test_all_ways_of_a_situation_do_the_same(name, count):
    entry = everyday.SITUATIONS[name]
    _, ways = entry.make(Place(count), TINY[type(entry.quick)])
    # On several devices a callback may hang.
    found = [*everyday.agreeing(ways, dict.fromkeys(CALLBACKS, "may hang"), lambda way: None)]
    assert {way: why for way, run, why in found if run is None and way not in CALLBACKS} == {}
    assert any(way == OURS for way, _, _ in found)


def test_a_way_that_gives_other_numbers_or_raises_is_left_out():
    ways = {"by hand": lambda: np.ones(2), "wrong": lambda: np.zeros(2), "short": lambda: (), "broken": lambda: 1 / 0}
    begun = []
    found = {way: why for way, _, why in everyday.agreeing(ways, {}, begun.append)}
    assert found == {"by hand": "", "wrong": "other numbers", "short": "other numbers", "broken": "ZeroDivisionError"}
    assert begun == [*ways]


def test_a_row_compares_each_spelling_with_the_best_of_the_others():
    walls = {"by hand": [2e-6] * 9, "io_callback": [1e-6] * 9, OURS: [2e-6] * 8 + [3e-6], OTHERWISE: [1e-6] * 9}
    times = {way: (wall, [1e-6] * 9) for way, wall in walls.items()}
    rows = [*everyday.rows_of("clock", 8, times, {"pure_callback": "hangs"})]
    assert [(row["spelling"], row["ratio"], row["verdict"]) for row in rows] == [
        (OURS, pytest.approx(2), "ABOVE"),
        (OTHERWISE, pytest.approx(1), "ok"),
    ]
    assert {row["best other"] for row in rows} == {"io_callback"}
    assert rows[0]["cpu ratio"] == 1
    assert rows[0]["others"] == "by hand 2, io_callback 1, pure_callback: hangs"
    assert everyday.counted(rows) == (
        "1 of 1 rows of the first spelling are above 1.00, 1 of 2 with all spellings, 1 of them with their interval"
    )


def test_ours_that_fails_is_above():
    (row,) = everyday.rows_of("clock", 8, {}, {OURS: "ValueError"})
    assert row["verdict"] == "ValueError"
    assert row["ratio"] == ""
    assert everyday.counted([row]).startswith("1 of 1 rows")


def test_the_interval_of_a_median_contains_more_than_the_median():
    assert report.median_with_interval([3, 1, 2]) == (1, 2, 3)
    assert report.median_with_interval(range(101)) == (40, 50, 60)


def test_a_situation_is_measured_again_without_a_way_that_hangs(monkeypatch):
    requests = []

    def run(command, **_):
        _, counts, _, without = request = json.loads(command[-1])
        requests.append(request)
        lines, stderr = [], ""
        for count in counts:
            lines.append({"runs": "io_callback"})
            if "io_callback" not in without:
                stderr = "Timeout (0:00:20)!"
                break
            lines.append({"devices": count, "times": {"by hand": [[1], [1]], OURS: [[1], [1]]}, "left_out": without})
            without = {}
        return types.SimpleNamespace(stdout="\n".join(map(json.dumps, lines)), stderr=stderr, returncode=1)

    monkeypatch.setattr(subprocess, "run", run)
    rows = [*everyday.measured("clock", everyday.SITUATIONS["clock"], everyday.QUICK, "a script")]
    assert [(row["devices"], row["others"]) for row in rows] == [
        (1, "by hand 1,000,000, io_callback: hangs"),
        (8, "by hand 1,000,000, io_callback: hangs"),
    ]
    assert [without for _, _, _, without in requests] == [{}, {"io_callback": "hangs"}, {"io_callback": "hangs"}]


def test_a_situation_in_which_ours_ends_the_process_is_reported(monkeypatch):
    dead = types.SimpleNamespace(stdout=json.dumps({"runs": OURS}), stderr="", returncode=-6)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: dead)
    rows = [*everyday.measured("clock", everyday.SITUATIONS["clock"], everyday.QUICK, "a script")]
    assert [(row["devices"], row["verdict"]) for row in rows] == [
        (1, "the process ends (code -6)"),
        (8, "the process ends (code -6)"),
    ]


def test_the_sweep_compares_what_the_planner_chooses_with_the_best_of_our_own_ways():
    names = [name for name, _ in sweep.cases()]
    assert len(names) == len({*names}) > 40
    chosen, forced = sweep.FAMILIES[0][0], sweep.FAMILIES[0][1]
    rows = [
        {"situation": names[0], "devices": count, "spelling": spelling, "us": us}
        for count, ours, other in ((1, 3.0, 2.0), (8, 1.0, 2.0))
        for spelling, us in ((chosen, ours), (forced, other), ("another", 0.5))
    ]
    found = [(row["devices"], row["best"], row["choice"], row["verdict"]) for row in sweep.chosen(rows)]
    assert found == [(1, forced, 1.5, "ABOVE"), (8, chosen, 1.0, "ok")]
