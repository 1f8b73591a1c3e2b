"""What `colocated.journal` costs a call.

Rows: a call in a program, and by itself, that returns nothing, a number, or an array of a megabyte; without a journal,
with one, and with one that keeps results. Ways take turns. `us per call` is what the journal adds to the median.
A commit of a state of that many bytes is waited for until it is on the disk.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import partjit
import report
from partjit import colocated, pjit
from partjit.colocated import colocated_python

MOST_US = 20.0
CALLS = 10


def nothing(x: Any) -> None:
    return None


def same(x: Any) -> Any:
    return x


def kinds() -> dict[str, tuple[Any, Any]]:
    """What is called, by a function of as many calls, and with what."""
    scalar, large = jnp.float32(1), jnp.zeros(2**18, jnp.float32)
    silent = colocated_python(nothing, out_specs_fn=nothing, mode="inline")
    inline = colocated_python(same, out_specs_fn=same, mode="inline")
    threaded = colocated_python(same, out_specs_fn=same, mode="stream")

    def calling(f: Any) -> Callable[[Any], Any]:
        def program(x: Any) -> Any:
            for _ in range(CALLS):
                y = f(x)
                x = x if y is None else y
            return x

        return program

    return {
        "in a program, inline, no result": (pjit(calling(silent)), scalar),
        "in a program, inline, a number": (pjit(calling(inline)), scalar),
        "in a program, on a thread, a number": (pjit(calling(threaded)), scalar),
        "eager, inline, no result": (calling(silent), scalar),
        "eager, inline, a number": (calling(inline), scalar),
        "in a program, inline, 1 MB": (pjit(calling(inline)), large),
    }


def seconds(run: Callable[[Any], Any], x: Any, repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run(x))
        colocated.wait()
        found.append(time.perf_counter() - started)
    return found


def costs(name: str, run: Callable[[Any], Any], x: Any, repeats: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"without": [], "with": [], "with results": []}
    with tempfile.TemporaryDirectory() as path:
        for _ in range(5):
            times["without"] += seconds(run, x, repeats)[2:]
            for way, keeps in [("with", False), ("with results", True)]:
                with tempfile.TemporaryDirectory(dir=path) as own, colocated.journal(own, results=keeps):
                    times[way] += seconds(run, x, repeats)[2:]
    median = {way: statistics.median(found) / CALLS * 1e6 for way, found in times.items()}
    added = median["with"] - median["without"]
    return {
        "call": name,
        **{f"{way} us": value for way, value in median.items()},
        "us per call": added,
        "verdict": report.verdict(added, MOST_US) if "MB" not in name else "",
    }


def commits(devices: Any) -> list[dict[str, Any]]:
    rows = []
    sharding = jax.NamedSharding(partjit.Mesh(np.array(devices), "x"), partjit.P("x"))
    for megabytes in (0, 1, 64):
        state = {"x": jax.device_put(np.zeros(max(megabytes * 2**18, 8), np.float32), sharding)}
        with tempfile.TemporaryDirectory() as path, colocated.journal(path) as journal:
            times = []
            for _ in range(7):
                started = time.perf_counter()
                journal.commit(state)
                times.append(time.perf_counter() - started)
        rows.append({"state": f"{megabytes} MB", "commit ms": statistics.median(times) * 1e3})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    devices = report.set_up_devices(8)
    tables = {
        "a call with and without a journal": [costs(name, *kind, args.repeats) for name, kind in kinds().items()],
        "a commit": commits(devices),
    }
    report.report(tables, as_json=args.json)


if __name__ == "__main__":
    main()
