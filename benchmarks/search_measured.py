"""What a step takes with the specs that a search found, beside ways to partition that have names, and specs by hand.

The models are those of `truth_models.larger`, three of them as their libraries ship them, on 4 x 2 virtual CPU devices.
They share the cores, and send by copying memory; `measure_machine` measures that, and the search is for the machine
that it returns, without a limit of memory. What was found is the fastest of `--measure` candidates, which the search
itself times; with `--measure 0` it is that with the least estimate. Measured here are, besides what was found and the
specs by hand, data parallelism, ZeRO-3, Megatron and both together: of each the variant with the least estimate. A way
that has the specs and constraints of what was found is the same program, and is not measured again.

Steps are taken in turn, and the columns are medians. `ratio` is what was found by the best of the others; the bound is
meant for five of the six models. With `--ways` all ways are printed, with their estimates.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import report
from partjit.inspect.changes import Change
from partjit.inspect.tracing import trace_function
from partjit.search import FoundSpecs, Machine, measure_machine
from partjit.search.find import OWN, find
from partjit.search.improve import Scored
from partjit.search.program import SearchedProgram
from partjit.search.space import Space
from partjit.search.specs import _found
from partjit.search.starts import kind_of
from partjit.search.timed import fastest
from truth_models.larger import MADE
from truth_models.training import Model, two_axes

BOUND = 1.05
KINDS = ("data parallel", "ZeRO-3", "Megatron", "Megatron with ZeRO-3")


def way_of(start: str) -> str | None:
    """Which of the ways with names a start is a variant of."""
    kind = kind_of(start)
    return kind if kind in KINDS else None


def ways_of(model: Model, machine: Machine, questions: int, measure: int) -> tuple[dict[str, FoundSpecs], bool]:
    """What was found, and each way with a name that is another program; and whether it is the one by hand."""
    program = SearchedProgram(trace_function(model.step, model.args, {}, model.mesh), machine, 0.0)
    space = Space(program, {}, {})
    ranking = find(program, space, machine.memory, questions, None)
    if measure:
        ranking = fastest(program, ranking, measure)

    def made(one: Scored) -> FoundSpecs:
        question = space.question(one.choice)
        answer = program.submit(Change(question.arguments, question.results, question.values)).result()
        chosen = dataclasses.replace(ranking, best=one, question=question, answer=answer)
        return _found(model.step, program, space, chosen, model.mesh, machine, machine.memory, 0.0)

    ways = {"found": _found(model.step, program, space, ranking, model.mesh, machine, machine.memory, 0.0)}
    for start in ranking.starts:  # the least estimate first
        kind = way_of(start.origin)
        if kind is not None and kind not in ways:
            ways[kind] = made(start)
    said = said_by(ways["found"])
    others = {name: way for name, way in ways.items() if name == "found" or said_by(way) != said}
    return others, ranking.best.origin == OWN


def said_by(way: FoundSpecs) -> object:
    constraints = sorted((one.numbers, str(one.spec)) for one in way.constraints)
    return [*map(str, jax.tree.leaves((way.in_specs, way.out_specs)))], constraints


def arguments_of(step: Any, model: Model) -> Any:
    """Arguments of a step, where it wants them."""
    rng = np.random.default_rng(0)

    def filled(one: Any, sharding: Any) -> jax.Array:
        is_float = jnp.issubdtype(one.dtype, jnp.floating)
        value = rng.normal(scale=0.02, size=one.shape) if is_float else rng.integers(0, 8, size=one.shape)
        return jax.device_put(value.astype(one.dtype), sharding)

    return jax.tree.map(filled, tuple(model.args), step.lower(*model.args).compile().input_shardings[0])


def seconds_of(steps: Mapping[str, Any], model: Model, rounds: int) -> dict[str, float]:
    """The medians of steps that are taken in turn, each on the state that its last one returned."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    with model.mesh:
        state = {name: arguments_of(step, model) for name, step in steps.items()}
        for turn in range(rounds + 2):
            for name, step in steps.items():
                start = time.perf_counter()
                out = jax.block_until_ready(step(*state[name]))
                if turn > 1:
                    times[name].append(time.perf_counter() - start)
                state[name] = (*out[:2], state[name][2])
    return {name: statistics.median(each) for name, each in times.items()}


def measured(name: str, machine: Machine, questions: int, measure: int, rounds: int, is_long: bool) -> report.Row:
    model = MADE[name]()
    ways, is_by_hand = ways_of(model, machine, questions, measure)
    steps = {way: found.pjit(donate_argnums=(0, 1)) for way, found in ways.items()}
    steps |= {} if is_by_hand else {"by hand": model.step}
    seconds = seconds_of(steps, model, rounds)
    if is_long:
        for way, each in sorted(seconds.items(), key=lambda item: item[1]):
            estimate = f"{1e3 * ways[way].seconds:8.1f} ms estimated" if way in ways else ""
            print(f"  {way:22} {1e3 * each:8.1f} ms {estimate}", flush=True)
    others = {way: each for way, each in seconds.items() if way != "found"}
    best = min(others, key=lambda way: others[way])
    ratio = seconds["found"] / others[best]
    same = [kind for kind in KINDS if kind not in ways] + ["by hand"] * is_by_hand
    return {
        "model": name,
        "found": f"{ways['found'].origin}, {ways['found'].method}",
        "is also": ", ".join(same) or "-",
        "found ms": 1e3 * seconds["found"],
        "best other": best,
        "its ms": 1e3 * others[best],
        "by hand ms": 1e3 * seconds.get("by hand", seconds["found"]),
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
