"""What a step takes with the specs that a search found, beside ways to partition that have names, and specs by hand.

The models are those of `truth_models.larger`, three of them as their libraries ship them, on 4 x 2 virtual CPU devices.
They share the cores, and send by copying memory; `measure_machine` measures that, and the search is for the machine
that it returns, without a limit of memory. What was found is the fastest of `--measure` candidates, which the search
itself times; with `--measure 0` it is that with the least estimate. Measured here, after the search, are what was
found, the specs by hand, data parallelism, ZeRO-3, Megatron and both together: of each the variant with the least
estimate. A way that is the program that was found is not measured against it.

Steps are taken in turn, and the columns are medians. `ratio` is what was found by the best of the others; the bound is
meant for five of the six models. `by estimate` is the program with the least estimate by the best of all. With `--ways`
all ways are printed, with their estimates.
"""

import argparse
import statistics
from collections.abc import Iterable, Mapping

import report
from partjit.inspect.tracing import trace_function
from partjit.search import Machine, measure_machine
from partjit.search.compiled import Compiler, TimedStep
from partjit.search.find import OWN, Ranking, Tried, find
from partjit.search.program import SearchedProgram
from partjit.search.space import Space
from partjit.search.starts import kind_of
from partjit.search.timed import fastest
from truth_models.larger import MADE
from truth_models.training import Model, two_axes

BOUND = 1.05
KINDS = ("by hand", "data parallel", "ZeRO-3", "Megatron", "Megatron with ZeRO-3")


def ways_of(model: Model, machine: Machine, questions: int, measure: int) -> tuple[Ranking, dict[str, TimedStep]]:
    """What was found, with its step and those of the specs by hand and the ways with names; equal ones are the same."""
    program = SearchedProgram(trace_function(model.step, model.args, {}, model.mesh), machine, 0.0)
    ranking = find(program, Space(program, {}, {}), machine.memory, questions, None)
    compiled, steps = Compiler(program), dict[object, TimedStep]()

    def step_of(tried: Tried) -> TimedStep:
        key = tried.question.key
        if key not in steps:
            steps[key] = compiled(tried)
        return steps[key]

    ways = {"estimated": step_of(ranking.candidates[0])}
    if measure:
        ranking = fastest(program, ranking, measure, compiled=step_of)
    ways["found"] = steps[ranking.question.key]
    for tried in ranking.candidates:  # of each way the least estimate
        kind = "by hand" if tried.scored.origin == OWN else kind_of(tried.scored.origin)
        if kind in KINDS and kind not in ways:
            ways[kind] = step_of(tried)
    return ranking, ways


def seconds_of(ways: Mapping[str, TimedStep], rounds: int) -> dict[str, float]:
    """The medians of steps that are taken in turn, after the search has taken its own."""
    steps = {id(step): step for step in ways.values()}
    times: dict[int, list[float]] = {key: [] for key in steps}
    for turn in range(rounds + 1):
        for key, step in steps.items():
            seconds = step.run()
            if turn:
                times[key].append(seconds)
    return {name: statistics.median(times[id(step)]) for name, step in ways.items()}


def measured(name: str, machine: Machine, questions: int, measure: int, rounds: int, is_long: bool) -> report.Row:
    ranking, ways = ways_of(MADE[name](), machine, questions, measure)
    seconds = seconds_of(ways, rounds)
    if is_long:
        for way, each in sorted(seconds.items(), key=lambda item: item[1]):
            print(
                f"  {way:22} {1e3 * each:8.1f} ms {1e3 * ways[way].tried.scored.score.seconds:8.1f} ms estimated",
                flush=True,
            )
    others = {way: each for way, each in seconds.items() if way in KINDS and ways[way] is not ways["found"]}
    best = min(others, key=lambda way: others[way])
    ratio = seconds["found"] / others[best]
    return {
        "model": name,
        "found": f"{ranking.best.origin}, {ranking.method}",
        "is also": ", ".join(way for way in KINDS if way in ways and ways[way] is ways["found"]) or "-",
        "found ms": 1e3 * seconds["found"],
        "best other": best,
        "its ms": 1e3 * others[best],
        "by hand ms": 1e3 * seconds["by hand"],
        "by estimate": seconds["estimated"] / min(others[best], seconds["found"]),
        "ratio": ratio,
        "verdict": report.verdict(ratio, BOUND),
    }


def measure(names: Iterable[str], questions: int, candidates: int, rounds: int, is_long: bool) -> None:
    report.set_up_devices(8)
    machine = measure_machine(two_axes())
    print(machine, flush=True)
    rows = []
    for name in names:
        rows.append(measured(name, machine, questions, candidates, rounds, is_long))
        print(dict(rows[-1]), flush=True)
    report.report({"measured steps": rows}, as_json=False)
    print(f"ratio <= {BOUND} in {sum(row['ratio'] <= BOUND for row in rows)} of {len(rows)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=80, help="how many each search may ask")
    parser.add_argument("--measure", type=int, default=8, help="how many candidates the search times; 0 for none")
    parser.add_argument("--rounds", type=int, default=21, help="how often each step is taken")
    parser.add_argument("--only", nargs="+", choices=[*MADE], help="these models only")
    parser.add_argument("--ways", action="store_true", help="print all that was measured")
    args = parser.parse_args()
    measure(args.only or [*MADE], args.questions, args.measure, args.rounds, args.ways)


if __name__ == "__main__":
    main()
