"""Situations of users that call Python beside jax, each with every way of today: ours beside the best of the others.

The ways are a careful loop by hand (pieces of `jax.jit`, NumPy, threads), jax's callbacks in one `jax.jit`, and
`jax.experimental.colocated_python`, which runs eagerly and blocks its caller. Ours is written as the documentation
writes it; where it knows several spellings, each has a row of its own, and the first one is called "partjit".

All ways of a situation run in one process, on one device and then on eight, if there are so many. Before anything is
timed each has to give the same numbers, and to have called the host functions as often. Then they take turns, each of
which is one run with all that it has started; a ratio is the median of those within each turn, to the way of the
others whose median is the smallest, and its interval is that which contains the true median with 95 %. `cpu ratio`
compares the time that all threads of the process were running: other programs on the same processors disturb it less.
A way that hangs or aborts ends its process: it is named, and the situation is measured again without it.

    python benchmarks/everyday.py --only clock --only log
    JAX_PLATFORMS=cuda,cpu python benchmarks/everyday.py --quick

A ratio above 1.00 means that somebody is slower with us than with what there is today. At the end these are counted.
"""

import argparse
import faulthandler
import functools
import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import report
from programs import elapsed
from situations import (
    controls,
    epochs,
    evaluation,
    examples,
    feedback,
    fixed_costs,
    gradients,
    host,
    in_loops,
    in_steps,
    layers,
    training,
)
from situations.ways import OURS, Place, Run, Situation

Row = dict[str, Any]
BOUND = 1.0
SECONDS_A_RUN = 20
"""After so long a run, which takes less than a second or two, counts as hanging."""
SECONDS_A_PROCESS = 240
FAR_BEHIND = 6.0
"""Ways so many times slower than the fastest are timed in the first few turns only."""
FEWEST = 5


class Entry(NamedTuple):
    """A situation to be measured.

    Attributes:
        make: makes it for devices and a number, in most of them that of iterations.
        quick, full: that number.
        counts: those of the devices.
    """

    make: Callable[[Place, Any], Situation]
    quick: float
    full: float
    counts: tuple[int, ...] = (1, 8)


def sized(make: Callable[..., Situation], **what: int) -> Callable[[Place, Any], Situation]:
    return functools.partial(make, **what)


SITUATIONS: Mapping[str, Entry] = {
    "correction every 100th iteration": Entry(in_loops.rare_call, 3, 10),
    "log every 100th iteration": Entry(in_loops.rare_log, 3, 10),
    "a log and a checkpoint, now and then": Entry(epochs.two_loggers, 2, 5),
    "predicate": Entry(in_loops.predicate, 100, 200),
    "early stopping": Entry(in_loops.early_stopping, 0.998, 0.999),
    "progress": Entry(in_loops.progress, 100, 200),
    "loader": Entry(in_loops.loader, 100, 200),
    "clock": Entry(in_loops.clock, 100, 200),
    "generation": Entry(controls.generation, 60, 100),
    "filter": Entry(controls.filtered, 50, 100),
    "filter and log": Entry(sized(controls.filtered, is_logged=True), 50, 100),
    "environment": Entry(in_steps.environment, 50, 100),
    "schedule": Entry(controls.schedule, 50, 200),
    "loss scale": Entry(feedback.loss_scale, 50, 200),
    "agent": Entry(feedback.agent, 100, 200),
    "embedding": Entry(in_steps.embedding, 20, 50),
    "round trip of 4 kB": Entry(sized(in_steps.round_trip, size=1024), 20, 50),
    "round trip of 128 kB": Entry(sized(in_steps.round_trip, size=32 * 1024), 20, 50),
    "round trip of 8 MB": Entry(sized(in_steps.round_trip, size=2 * 1024**2), 2, 4),
    "scipy": Entry(in_steps.from_scipy, 20, 50),
    "a number": Entry(in_steps.small_call, 50, 100),
    "a number, by a method": Entry(in_steps.small_method, 50, 100),
    "vmap": Entry(examples.batch_of_examples, 10, 20),
    "per shard": Entry(in_steps.per_shard, 10, 20),
    "log": Entry(training.log, 50, 200),
    "log by a method": Entry(training.log_by_method, 50, 200),
    "log(step, loss)": Entry(training.log_with_step, 50, 200),
    "log every 10th step": Entry(training.log_now_and_then, 100, 200),
    "log every 10th step, counted in the state": Entry(training.log_as_counted, 100, 200),
    "log(text, loss)": Entry(training.log_text, 50, 200),
    "log for batches of many lengths": Entry(feedback.lengths, 80, 200),
    "log of 40 metrics": Entry(training.log_metrics, 50, 100),
    "metrics of an evaluation": Entry(evaluation.metrics_of_batches, 50, 200),
    "log of each layer": Entry(layers.log_of_layers, 20, 50),
    "slow loader": Entry(training.slow_loader, 20, 50),
    "augmentation": Entry(training.augmentation, 50, 100),
    "checkpoints": Entry(training.checkpoints, 20, 50),
    "loader of microbatches": Entry(gradients.microbatches, 10, 20),
    "derivative of NumPy": Entry(gradients.derivative, 20, 50),
    "eager grad": Entry(fixed_costs.eager_grad, 5, 10),
    "asynchronous calls": Entry(fixed_costs.asynchronous_call, 50, 100),
    "asynchronous result": Entry(fixed_costs.asynchronous_result, 50, 100),
    "OpSharding, 8 devices": Entry(sized(fixed_costs.list_of_shardings, devices=8), 20, 20, (1,)),
    "OpSharding, 4096 devices": Entry(sized(fixed_costs.list_of_shardings, devices=4096), 5, 5, (1,)),
}


class Effort(NamedTuple):
    """How much is measured.

    Attributes:
        is_full: which number of a situation is taken.
        seconds: how long the ways of a situation take turns, at least `FEWEST` of them.
    """

    is_full: bool
    seconds: float


FULL = Effort(True, 8.0)
QUICK = Effort(False, 1.2)


# One situation, in a process of its own


def agreeing(
    ways: Mapping[str, Run], without: Mapping[str, str], begins: Callable[[str], None]
) -> Iterator[tuple[str, Run | None, str]]:
    """Runs each way once: its name, and its run if that gave what the first one gave, or why it is left out.

    `begins` is called with the name of each way that is run.
    """
    expected: Any = None
    for way, run in ways.items():
        if way in without:
            yield way, None, without[way]
            continue
        begins(way)
        host.seen()  # what one that failed has left
        try:
            found = run()
            if expected is None:
                expected = found
            same(found, expected)
        except AssertionError:
            yield way, None, "other numbers"
        except Exception as error:
            yield way, None, type(error).__name__
        else:
            yield way, run, ""


def same(found: Any, expected: Any) -> None:
    """Raises AssertionError unless two trees have equal numbers."""
    ours, theirs = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(ours) == len(theirs), f"{len(ours)} values are not {len(theirs)}"
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, str):
            assert one == other, f"{one} is not {other}"
        else:
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-3, atol=1e-4)


def watch(way: str) -> None:
    """Names what runs now, for whoever finds this process dead, and ends the process if it never does."""
    print(json.dumps({"runs": way}), flush=True)
    faulthandler.dump_traceback_later(SECONDS_A_RUN, exit=True)


class Times(NamedTuple):
    """The seconds of each turn of a way.

    Attributes:
        wall: until it has ended.
        processor: in which threads of this process were running.
    """

    wall: list[float]
    processor: list[float]


def take_turns(runs: Mapping[str, Run], seconds: float) -> dict[str, Times]:
    """The times of each run. Their order is drawn: what runs next finds in the caches what the last one has left."""
    for way, run in runs.items():  # until caches are warm, and ours knows which calls are cheap
        watch(way)
        run()
    times = {way: Times([], []) for way in runs}
    order, draw, begun = [*runs], random.Random(0), time.perf_counter()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        while len(times[OURS].wall) < FEWEST or time.perf_counter() - begun < seconds:
            draw.shuffle(order)
            fastest = min(typical(own.wall) for own in times.values())
            for way in order:
                wall, processor = times[way]
                if way.startswith(OURS) or len(wall) < FEWEST or typical(wall) < FAR_BEHIND * fastest:
                    watch(way)
                    before = time.process_time()
                    wall.append(elapsed(runs[way]))
                    processor.append(time.process_time() - before)
                    gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
        faulthandler.cancel_dump_traceback_later()
    return times


def typical(times: Sequence[float]) -> float:
    return statistics.median(times) if times else math.inf


def measure(entry: Entry, count: int, effort: Effort, without: Mapping[str, str]) -> None:
    """Prints the seconds per iteration of each way, and why others have none."""
    iterations, ways = entry.make(Place(count), entry.full if effort.is_full else entry.quick)
    left_out, runs = {}, {}
    for way, run, why in agreeing(ways, without, watch):
        if run is None:
            left_out[way] = why
        else:
            runs[way] = run
    times = take_turns(runs, effort.seconds) if OURS in runs and len(runs) > 1 else {}
    per_iteration = {way: [[turn / iterations for turn in kind] for kind in own] for way, own in times.items()}
    print(json.dumps({"devices": count, "times": per_iteration, "left_out": left_out}), flush=True)


# All of them


def measured(name: str, entry: Entry, effort: Effort, script: str) -> Iterator[Row]:
    """The rows of a situation, from processes of a script that may hang or abort."""
    without: dict[str, str] = {}
    remaining = [count for count in entry.counts if count <= len(jax.devices())]
    while remaining:
        request = json.dumps([name, remaining, effort, without])
        command = [sys.executable, script, "--situation", request]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_A_PROCESS, check=False)
            out, why = ran.stdout, "hangs" if "Timeout (" in ran.stderr else f"the process ends (code {ran.returncode})"
        except subprocess.TimeoutExpired as error:
            out = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            why = "hangs"
        last = ""
        for line in map(json.loads, filter(None, out.splitlines())):
            if "runs" in line:
                last = line["runs"]
                continue
            remaining.remove(line["devices"])
            without, last = {}, ""
            yield from rows_of(name, **line)
        if remaining:
            if not last or last in without or last == OURS:
                yield {**EMPTY, "situation": name, "devices": remaining.pop(0), "spelling": last, "verdict": why}
                without = {}
            else:
                without[last] = why


EMPTY: Row = {  # all keys that a table has, of which a row may lack the numbers
    "situation": "",
    "spelling": "",
    "devices": 0,
    "us": "",
    "best other": "",
    "its us": "",
    "ratio": "",
    "at least": "",
    "at most": "",
    "cpu ratio": "",
    "verdict": "",
    "others": "",
}


def rows_of(
    name: str, devices: int, times: Mapping[str, Sequence[Sequence[float]]], left_out: Mapping[str, str]
) -> Iterator[Row]:
    """A row for each spelling of ours; `times` has the `Times` of each way, per iteration."""
    walls = {way: wall for way, (wall, _) in times.items()}
    others = {way: wall for way, wall in walls.items() if not way.startswith(OURS)}
    shown = [f"{way} {typical(own) * 1e6:,.0f}" for way, own in others.items()]
    shown += [f"{way}: {why}" for way, why in left_out.items() if not way.startswith(OURS)]
    best = min(others, key=lambda way: typical(others[way]), default="")
    for way in [way for way in {**times, **left_out} if way.startswith(OURS)]:
        row = {**EMPTY, "situation": name, "spelling": way, "devices": devices, "others": ", ".join(shown)}
        if way in left_out or not best:
            yield {**row, "verdict": left_out.get(way, "nothing to compare with")}
            continue
        low, middle, high = report.median_with_interval(ratios(walls[way], others[best]))
        yield {
            **row,
            "us": typical(walls[way]) * 1e6,
            "best other": best,
            "its us": typical(others[best]) * 1e6,
            "ratio": middle,
            "at least": low,
            "at most": high,
            "cpu ratio": statistics.median(ratios(times[way][1], times[best][1])),
            "verdict": report.verdict(middle, BOUND),
        }


def ratios(times: Sequence[float], others: Sequence[float]) -> list[float]:
    """The ratio of each turn in which both took part."""
    return [one / other for one, other in zip(times, others, strict=False)]


def counted(rows: Sequence[Row]) -> str:
    """How many rows are above the bound."""
    above = [row for row in rows if row["verdict"] != "ok"]
    surely = [row for row in above if row["at least"] == "" or row["at least"] > BOUND]
    first = [row for row in rows if row["spelling"] == OURS]
    above_first = [row for row in first if row["verdict"] != "ok"]
    return (
        f"{len(above_first)} of {len(first)} rows of the first spelling are above {BOUND:.2f}, {len(above)} of "
        f"{len(rows)} with all spellings, {len(surely)} of them with their interval"
    )


def rows_of_all(description: str | None, situations: Mapping[str, Entry], script: str) -> tuple[list[Row], bool]:
    """The rows of those situations that the command line names, and whether they are to be printed as JSON.

    Args:
        description: what `--help` says.
        situations: all of them, by name.
        script: the path of the script whose command line it is, which runs itself for each of them.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns and iterations, in a few minutes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        choices=[*situations],
        help="only this one; may be given several times",
    )
    parser.add_argument("--situation", help=argparse.SUPPRESS)
    options = parser.parse_args()
    report.set_up_devices(8, at_least=1)
    if options.situation:
        name, counts, effort, without = json.loads(options.situation)
        for i, count in enumerate(counts):
            measure(situations[name], count, Effort(*effort), {} if i else without)
        os._exit(0)  # what counts is what calls do, not what is left of them at exit
    rows = []
    for name in options.only or situations:
        for row in measured(name, situations[name], QUICK if options.quick else FULL, script):
            rows.append(row)
            if not options.json:
                cells = (report.show(row[key]) for key in ("situation", "devices", "spelling", "ratio", "verdict"))
                print(*cells, sep="  ", file=sys.stderr, flush=True)
    return rows, options.json


def main() -> None:
    rows, as_json = rows_of_all(__doc__, SITUATIONS, __file__)
    if as_json:
        report.report({"everyday": rows}, as_json=True)
        return
    ways = [{key: row[key] for key in ("situation", "devices", "others")} for row in rows if row["spelling"] == OURS]
    rows = [{key: value for key, value in row.items() if key != "others"} for row in rows]
    report.report({"ours and the best other": rows, "the others, us per iteration": ways}, as_json=False)
    print(f"\n{counted(rows)}")


if __name__ == "__main__":
    main()
