"""`python -m mutation`: samples mutants, runs the tests on each, and reports; fails where too many survive."""

import argparse
import collections
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mutation.mutants import mutants, places, sample
from mutation.operators import check_operators
from mutation.run import Copy, Outcome, Verdict, judged
from mutation.targets import Equivalent, modules, read_equivalents, read_targets

ROOT = Path(__file__).parent.parent
WANTED = 0.95


def main(arguments: Sequence[str]) -> int:
    """Samples, runs and reports; the exit status is 1 below 95 % or with a stale judgement."""
    parser = argparse.ArgumentParser(prog="python -m mutation", description=__doc__)
    parser.add_argument("--sample", type=int, default=4, help="mutants of each module (default: %(default)s)")
    parser.add_argument("--seed", default="0", help="which ones: the same for the same seed (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=60, help="no mutant is begun later (default: %(default)s)")
    parser.add_argument("--only", default="*", help="a pattern of modules: 'partjit/opsharding/*' (default: all)")
    parser.add_argument("--list", action="store_true", help="print the sample, and run nothing")
    options = parser.parse_args(arguments)
    until = time.monotonic() + 60 * options.minutes

    check_operators()
    targets, equivalents = read_targets(ROOT), read_equivalents()
    paths = modules(ROOT, options.only)
    stale = [equivalent for equivalent in equivalents if equivalent.path in paths and not _is_found(equivalent)]
    sampled = [mutant for path in paths for mutant in sample(ROOT, path, options.sample, options.seed)]
    if options.list:
        print(*sampled, sep="\n")
        return 0

    verdicts: list[Verdict] = []
    copy = Copy(ROOT)
    try:
        for verdict in judged(copy, sampled, targets, equivalents, until):
            verdicts.append(verdict)
            print(f"{verdict.outcome.value}, {verdict.seconds:.0f} s: {verdict.mutant}", flush=True)
    finally:
        copy.close()
    print(_report(verdicts, len(sampled)))
    for equivalent in stale:
        print(f"stale: no mutant of {equivalent.path} is {equivalent.before!r} -> {equivalent.after!r} any more")
    return int(bool(stale) or _score(verdicts) < WANTED)


def _is_found(equivalent: Equivalent) -> bool:
    around = [place for place in places(ROOT, equivalent.path) if place.function == equivalent.function]
    return any(equivalent.is_of(mutant) for place in around for mutant in mutants(ROOT, place))


def _report(verdicts: Sequence[Verdict], sampled: int) -> str:
    survivors = [f"survived: {verdict.mutant}" for verdict in verdicts if verdict.outcome is Outcome.SURVIVED]
    heads = ["module", "sampled", *(outcome.value for outcome in Outcome), "score"]
    paths = dict.fromkeys(verdict.mutant.path for verdict in verdicts)
    rows = [_row(path, [verdict for verdict in verdicts if verdict.mutant.path == path]) for path in paths]
    rows.append(_row("all", verdicts))
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [heads, *rows]]
    not_tried = [f"{sampled - len(verdicts)} of {sampled} were not tried in time"] if len(verdicts) < sampled else []
    return "\n".join([*survivors, "", *lines, *not_tried])


def _row(name: str, verdicts: Sequence[Verdict]) -> list[str]:
    counts = collections.Counter(verdict.outcome for verdict in verdicts)
    return [name, str(len(verdicts)), *(str(counts[outcome]) for outcome in Outcome), f"{_score(verdicts):.0%}"]


def _score(verdicts: Sequence[Verdict]) -> float:
    counts = collections.Counter(verdict.outcome for verdict in verdicts)
    killed, survived = counts[Outcome.KILLED] + counts[Outcome.TIMED_OUT], counts[Outcome.SURVIVED]
    return killed / (killed + survived) if killed + survived else 1.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
