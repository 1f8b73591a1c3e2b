"""Calls in every k-th iteration of a loop, over k, iterations and sizes of the state: is there a cliff?

Each case is a loop with a call in a `cond`: a controller whose result corrects the state, or a log of its mean. All
ways of today are compared, as in `everyday.py`, and our own ways among each other: what the planner chooses, and what
it can be forced to. `choice` is the time of what it chooses to that of the best of its own ways, once for functions
that promise `uses_jax=False` and once for those that do not.

    python benchmarks/sweep.py --quick --only "corrects, every 10 of 100, 4 kB"
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import report
from everyday import Entry, Row, rows_of_all
from situations import in_loops
from situations.ways import OURS

BOUND = 1.1
"""Of our time to that of the cheapest way there is."""
CHOICE = 1.2
"""Of the time of what the planner chooses to that of the best of its own ways."""

KINDS: Mapping[str, Any] = {"corrects": in_loops.rare_call, "logs": in_loops.rare_log}
SIZES = {"4 kB": 1024, "1 MB": 256 * 1024}

PROMISED: in_loops.Spellings = {
    "uses_jax=False, mode='inline'": {"uses_jax": False, "mode": "inline"},
    "uses_jax=False, mode='stream'": {"uses_jax": False, "mode": "stream"},
}
PLAIN: in_loops.Spellings = {
    "arrays='numpy'": {"arrays": "numpy"},
    "arrays='numpy', mode='inline'": {"arrays": "numpy", "mode": "inline"},
    "arrays='numpy', mode='stream'": {"arrays": "numpy", "mode": "stream"},
}
FAMILIES = ((OURS, *(f"{OURS}, {name}" for name in PROMISED)), tuple(f"{OURS}, {name}" for name in PLAIN))
"""Spellings that promise the same; what the planner chooses comes first."""


def cases() -> Iterator[tuple[str, Entry]]:
    """Each case with its name."""
    for kind, make in KINDS.items():
        for iterations in (10, 100, 1_000, 10_000):
            for every in (1, 10, 100, 1_000):
                for size, floats in SIZES.items():
                    if every > iterations or (floats > 1024 and iterations > 1_000):
                        continue  # seconds for each run
                    case = functools.partial(make, every=every, size=floats, spellings={**PROMISED, **PLAIN})
                    rounds = iterations // every
                    yield f"{kind}, every {every} of {iterations}, {size}", Entry(case, rounds, rounds)


def chosen(rows: Sequence[Row]) -> Iterator[Row]:
    """What the planner chooses beside the best of our own ways, for each case and promise."""
    for family in FAMILIES:
        for case in dict.fromkeys((row["situation"], row["devices"]) for row in rows):
            own = [row for row in rows if (row["situation"], row["devices"]) == case and row["spelling"] in family]
            times = {row["spelling"]: row["us"] for row in own if row["us"] != ""}
            if family[0] not in times:
                continue
            best = min(times, key=lambda spelling: times[spelling])
            ratio = times[family[0]] / times[best]
            yield {
                "case": case[0],
                "devices": case[1],
                "chosen": family[0],
                "best": best,
                "choice": ratio,
                "verdict": report.verdict(ratio, CHOICE),
            }


def main() -> None:
    rows, as_json = rows_of_all(__doc__, dict(cases()), __file__)
    first = [{**row, "verdict": _verdict(row)} for row in rows if row["spelling"] == OURS]
    choices = [*chosen(rows)]
    report.report({"ours and the best other": first, "the planner's choice": choices}, as_json=as_json)
    if not as_json:
        for what, own in ("the cheapest way", first), ("the best of its own", choices):
            print(f"{sum(row['verdict'] != 'ok' for row in own)} of {len(own)} rows are above the bound to {what}")


def _verdict(row: Row) -> str:
    ratio = row["ratio"]
    return row["verdict"] if ratio == "" or math.isnan(ratio) else report.verdict(ratio, BOUND)


if __name__ == "__main__":
    main()
