"""Questions to a program: what an answer takes, in this process and in the one that is asked, beside `explain`.

The programs are training steps of a transformer, that of `cold.py`, of two and of nine layers on a mesh of 4x2 devices.

* a question: the median over specs of arguments and results and constraints of activations, once what is known of the
  program has been read. In this process it is the time of this thread, which other programs disturb less than the time
  that passes. `explain` of the traced step with its collectives, memory and FLOPs answers the same; the propagation
  alone is what the partitioner's own passes take of it.
* a batch: the time that passes per question, of 64 questions to one process and to two.
* ready: from the function on until the first answer, which waits for the process to import jax.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import cold
import report
from partjit import Mesh, P
from partjit.inspect.explain import explain
from partjit.inspect.propagation import lower_unit
from partjit.inspect.tracing import trace_function
from partjit.inspect.what_if import Question, WhatIf
from partjit.shardy import propagate
from partjit.xla_rewrites import open_captured

BOUNDS = {2: 31.0, 9: 110.0}
"""Milliseconds of a question in this process, on a core that nothing else uses: by the number of layers."""


def timed(clock: Callable[[], float], fun: Callable[[], Any]) -> float:
    start = clock()
    fun()
    return 1e3 * (clock() - start)


def questions_to(engine: WhatIf, count: int) -> list[Question]:
    """Different ones: an argument with its result, or an activation, over either axis."""
    results = {leaf.name.removeprefix("result[0]"): leaf.name for leaf in engine.results}
    leaves = [leaf for leaf in engine.arguments if len(leaf.shape) == 2]
    activations = [one for one in engine.activations if len(one.shape) == 3 and one.shape[0] == cold.BATCH]
    found = []
    for k in range(count):
        spec = (P("data"), P("model"), P(None, "model"), P(None, "data"))[k % 4]
        if k % 3:
            leaf = leaves[k % len(leaves)]
            name = results.get(leaf.name[leaf.name.index("]") + 1 :] if leaf.name.startswith("args") else leaf.name)
            found.append(Question({leaf.name: spec}, {} if name is None else {name: spec}))
        else:
            found.append(Question(constraints={activations[k % len(activations)].number: P("data")}))
    return found


def rows(layers: int, mesh: Mesh, count: int, turns: int) -> list[report.Row]:
    counter, problem = cold.Counter(), cold.make_problem(layers)
    step = cold.fresh_step(cold.make_contestants(mesh)["pjit"], problem, counter)
    args = problem.state, problem.tokens
    start = time.perf_counter()
    engine = WhatIf(step, *args, mesh=mesh)
    questions = questions_to(engine, count)
    engine.ask(questions[0])
    ready = time.perf_counter() - start
    here = WhatIf(step, *args, mesh=mesh, isolated=False)
    with mesh:
        traced = step.trace(*args)
    _, module = lower_unit(trace_function(step, args, {}, mesh).whole)
    assert module is not None

    def pass_alone() -> float:
        copy: Any = module.operation.clone()
        open_captured(copy)
        return timed(time.thread_time, lambda: propagate(copy))

    def reported() -> None:
        told = explain(traced, mesh=mesh)
        assert told.flops is not None
        assert told.memory

    here.ask_many(questions[:4], workers=1)
    own = [timed(time.thread_time, lambda q=q: here.ask(q)) for q in questions[: 8 * turns]]
    wall = [timed(time.perf_counter, lambda q=q: here.ask(q)) for q in questions[: 8 * turns]]
    other = [timed(time.perf_counter, lambda q=q: engine.ask(q)) for q in questions[: 8 * turns]]
    passes = [pass_alone() for _ in range(4 * turns)]
    explained = [timed(time.thread_time, reported) for _ in range(2 * turns)]
    batches = {}
    for workers in (1, 2):
        engine.ask_many(questions[:8], workers=workers)
        batches[workers] = timed(time.perf_counter, lambda n=workers: engine.ask_many(questions, workers=n)) / count
    engine.close()
    question = statistics.median(own)
    return [
        {
            "equations": len(engine._inlined.equations),
            "question ms": question,
            "of it the propagation": statistics.median(passes),
            "explain ms": statistics.median(explained),
            "here, wall ms": statistics.median(wall),
            "asked process, wall ms": statistics.median(other),
            "batch of 1": batches[1],
            "batch of 2": batches[2],
            "ready s": ready,
            "bound": BOUNDS[layers],
            "verdict": report.verdict(question, BOUNDS[layers]),
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--quick", action="store_true", help="fewer questions to the smaller step alone")
    options = parser.parse_args()
    mesh = Mesh(np.array(report.set_up_devices(8)).reshape(4, 2), ("data", "model"))
    layers: Sequence[int] = (2,) if options.quick else (2, 9)
    found = [row for each in layers for row in rows(each, mesh, 16 if options.quick else 64, 1 if options.quick else 3)]
    report.report({"questions": found}, as_json=options.json)


if __name__ == "__main__":
    main()
