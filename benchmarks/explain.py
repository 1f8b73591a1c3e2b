"""Reading a partitioned program: what `partjit.inspect.explain` takes, as a ratio to what it spares.

The program is the training step of a transformer, that of `cold.py`, on a mesh of 4x2 devices.

* annotation and collectives: the propagation of the lowered step, every value with its spec, and the collectives that
  follow, against compiling the same step. What both need, the trace, is there already.
* report: `explain` of a traced step, against lowering and compiling it, and from the function on, against tracing it
  as well: the trace is jax's own, and takes as long for both. Then what is computed when it is first read: memory
  and FLOPs, the text with the findings whose suggestions are tried out, and the page.
* growth: the same per equation for several depths, which must not grow with the depth.
* devices: the report of one step, and its page, on abstract meshes of 8 and of 4,096 devices, and the memory that
  Python takes for the report.
* why: the first question to a report, which follows every value to where it comes from, and later ones.

Each measurement has a function object of its own and follows `jax.clear_caches()`. Contestants take turns, and medians
are compared. The control is the compilation a second time.
"""

import argparse
import itertools
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

import cold
import report
from partjit import Mesh
from partjit.inspect.explain import explain
from partjit.inspect.predicted import predict
from partjit.inspect.propagation import partition
from partjit.inspect.tracing import trace_function

ANNOTATION_BOUND = 0.30
EXPLAIN_BOUND = 0.15
GROWTH_BOUND = 1.30
DEVICES_BOUND = 1.10

Clock = Callable[[], float]


class Effort(NamedTuple):
    """How much is measured.

    Attributes:
        depth: the layers of the step that is compiled.
        depths: those of the reports whose growth is looked at.
        turns: of each contestant.
    """

    depth: int
    depths: tuple[int, ...]
    turns: int


FULL = Effort(24, (6, 12, 24), 5)
QUICK = Effort(6, (3, 6), 2)


class Subject(NamedTuple):
    """A step and what it is called with."""

    step: Any
    state: Any
    tokens: Any


def fresh(depth: int, mesh: Mesh, counter: cold.Counter) -> Subject:
    """A step that nothing is known of, and its arguments as structs: nothing has to be placed."""
    cold.forget_everything()
    problem = cold.make_problem(depth)
    step = cold.fresh_step(cold.make_contestants(mesh)["pjit"], problem, counter)
    return Subject(step, problem.state, problem.tokens)


def timed(clock: Clock, fun: Callable[[], Any]) -> tuple[Any, float]:
    start = clock()
    result = fun()
    return result, clock() - start


def annotate(subject: Subject, mesh: Mesh, clock: Clock) -> dict[str, float]:
    """Seconds for the annotation of a step that is traced, and for its collectives."""
    traced = trace_function(subject.step, (subject.state, subject.tokens), {}, mesh)
    partitioned, annotation = timed(clock, lambda: partition(traced.whole, keep_text=True))
    _, collectives = timed(clock, lambda: predict(partitioned))
    return {"annotation": annotation, "collectives": collectives, "both": annotation + collectives}


def compile_step(subject: Subject, mesh: Mesh, clock: Clock) -> dict[str, float]:
    with mesh:
        marks = [clock()]
        traced = subject.step.trace(subject.state, subject.tokens)
        marks.append(clock())
        lowered = traced.lower()
        marks.append(clock())
        lowered.compile()
        marks.append(clock())
    times = dict(zip(cold.STAGES, (b - a for a, b in itertools.pairwise(marks)), strict=True))
    return times | {"lower and compile": marks[-1] - marks[1], "the three stages": marks[-1] - marks[0]}


def read(subject: Subject, mesh: Mesh, clock: Clock) -> dict[str, float]:
    """What a reader waits for, from a function to a page and to answers."""
    with mesh:
        traced, trace = timed(clock, lambda: subject.step.trace(subject.state, subject.tokens))
    told, seconds = timed(clock, lambda: explain(traced, mesh=mesh))
    _, costs = timed(clock, lambda: (told.estimates, told.flops))
    _, text = timed(clock, told.to_text)
    page, page_seconds = timed(clock, told.to_html)
    values = [value for value in told.values if value.is_array]
    _, first = timed(clock, lambda: told.why(values[0]))
    asked = values[:: max(1, len(values) // 50)]
    _, later = timed(clock, lambda: [told.why(value) for value in asked])
    return {
        "after the trace": seconds,
        "explain": trace + seconds,
        "costs": costs,
        "text": text,
        "page": page_seconds,
        "first why": first,
        "later why": later / len(asked),
        "bytes": len(page.encode()),
        "equations": len(told.equations),
    }


def on_abstract_mesh(shape: tuple[int, int], depth: int, counter: cold.Counter, clock: Clock) -> dict[str, float]:
    """What a report of a step costs on a mesh of these sizes, which has no devices."""
    mesh = AbstractMesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    cold.forget_everything()
    problem = cold.make_problem(depth)
    step = cold.fresh_step(cold.make_contestants(mesh)["pjit"], problem, counter)
    tokens = jax.ShapeDtypeStruct((4096, cold.LENGTH), jnp.int32)  # which all of these meshes divide

    def everything() -> None:
        _ = told.estimates, told.flops, told.to_text()

    told, seconds = timed(clock, lambda: explain(step, problem.state, tokens, mesh=mesh))
    _, costs = timed(clock, everything)
    _, page = timed(clock, told.to_html)
    cold.forget_everything()
    tracemalloc.start()
    told = explain(step, problem.state, tokens, mesh=mesh)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"explain": seconds, "costs and text": costs, "page": page, "memory": peak / 1e6}


def of_devices(taken: "Taken") -> Iterator[report.Row]:
    few, many = taken.values()
    for key in few:
        ratio = many[key] / few[key]
        yield {
            "what": key,
            "unit": "MB" if key == "memory" else "s",
            "8 devices": few[key],
            "4,096 devices": many[key],
            "ratio": ratio,
            "bound": DEVICES_BOUND if key in ("explain", "memory") else "",
            "verdict": report.verdict(ratio, DEVICES_BOUND) if key in ("explain", "memory") else "",
        }


Taken = dict[str, dict[str, float]]


def rounds(contestants: dict[str, Callable[[], dict[str, float]]], turns: int) -> Taken:
    """The medians of what each contestant measures; the first round warms up and does not count."""
    taken: dict[str, dict[str, list[float]]] = {name: {} for name in contestants}
    order = list(contestants)
    for turn in range(turns + 1):
        for name in order:
            for key, value in contestants[name]().items():
                if turn:
                    taken[name].setdefault(key, []).append(value)
        order = [*order[1:], order[0]]
    return {name: {key: statistics.median(values) for key, values in ours.items()} for name, ours in taken.items()}


def against_compilation(taken: Taken) -> Iterator[report.Row]:
    compilation, control, annotated, reading = (taken[name] for name in ("compile", "control", "annotate", "read"))
    parts = [
        ("annotation", annotated["annotation"], "compile", None),
        ("predicted collectives", annotated["collectives"], "compile", None),
        ("both", annotated["both"], "compile", ANNOTATION_BOUND),
        ("explain, after the trace", reading["after the trace"], "lower and compile", EXPLAIN_BOUND),
        ("explain, from the function on", reading["explain"], "the three stages", None),
        ("memory and FLOPs, when first read", reading["costs"], "the three stages", None),
        ("text, with findings tried out", reading["text"], "the three stages", None),
        ("page", reading["page"], "the three stages", None),
    ]
    for what, seconds, stage, bound in parts:
        ratio = seconds / compilation[stage]
        yield {
            "what": what,
            "seconds": seconds,
            "against": stage,
            "its seconds": compilation[stage],
            "control ratio": control[stage] / compilation[stage],
            "ratio": ratio,
            "bound": "" if bound is None else bound,
            "verdict": "" if bound is None else report.verdict(ratio, bound),
        }


def growth(by_depth: dict[int, dict[str, float]]) -> Iterator[report.Row]:
    """What an equation costs at each depth; the ratio is the most by which it costs more in a deeper step."""
    units = {
        "explain": ("ms per equation", 1e3),
        "page": ("ms per equation", 1e3),
        "bytes": ("bytes per equation", 1.0),
    }
    for key, (unit, scale) in units.items():
        each = {depth: scale * measured[key] / measured["equations"] for depth, measured in by_depth.items()}
        ratio = max(deep / shallow for shallow, deep in itertools.combinations(each.values(), 2))
        row: dict[str, Any] = {"what": "size of the page" if key == "bytes" else key, "unit": unit}
        row |= {f"{depth} layers": value for depth, value in each.items()}
        yield row | {"ratio": ratio, "bound": GROWTH_BOUND, "verdict": report.verdict(ratio, GROWTH_BOUND)}


def sizes(by_depth: dict[int, dict[str, float]]) -> Sequence[report.Row]:
    return [
        {
            "layers": depth,
            "equations": int(measured["equations"]),
            "explain s": measured["explain"],
            "page s": measured["page"],
            "page kB": measured["bytes"] / 1e3,
            "first why s": measured["first why"],
            "later why ms": 1e3 * measured["later why"],
        }
        for depth, measured in by_depth.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--quick", action="store_true", help="fewer turns of a smaller step; the bounds are for 24 layers"
    )
    parser.add_argument("--turns", type=int, help="measurements of each contestant")
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="what to measure: the time that passes, or that of all threads, which a busy machine disturbs less",
    )
    options = parser.parse_args()
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    effort = QUICK if options.quick else FULL
    turns = options.turns or effort.turns

    mesh = Mesh(np.array(report.set_up_devices(8)).reshape(4, 2), ("data", "model"))
    counter = cold.Counter()

    def on(depth: int, measure: Callable[[Subject, Mesh, Clock], dict[str, float]]) -> Callable[[], dict[str, float]]:
        return lambda: measure(fresh(depth, mesh, counter), mesh, clock)

    contestants = {
        "compile": on(effort.depth, compile_step),
        "control": on(effort.depth, compile_step),
        "annotate": on(effort.depth, annotate),
        "read": on(effort.depth, read),
    }
    taken = rounds(contestants, turns)
    others = {str(depth): on(depth, read) for depth in effort.depths if depth != effort.depth}
    shallower = rounds(others, turns)
    by_depth = {depth: taken["read"] if depth == effort.depth else shallower[str(depth)] for depth in effort.depths}
    shapes = {"8": (4, 2), "4096": (2048, 2)}
    abstract = {
        name: lambda shape=shape: on_abstract_mesh(shape, effort.depths[0], counter, clock)
        for name, shape in shapes.items()
    }
    tables = {
        f"a step of {effort.depth} layers": [*against_compilation(taken)],
        "growth": [*growth(by_depth)],
        "devices": [*of_devices(rounds(abstract, turns))],
        "reports": sizes(by_depth),
    }
    report.report(tables, as_json=options.json)


if __name__ == "__main__":
    main()
