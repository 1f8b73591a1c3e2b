"""How true a report is: what `partjit.inspect.explain` says of models of many libraries, beside what XLA compiles.

Each model is explained, and then compiled by jax. The compiled text is read by a parser of this benchmark's own, in
`truth_hlo.py`, and compared by kind and axes: how many arrays are moved, how often, and the bytes that a device sends.

* predicted: `equal`; or `said`, where more is moved than predicted, and not more than the report itself says may be; or
  WRONG.
* read: the same for what `explain(..., compiled=True)` reads from the compiled text; nothing can be `said` there.
* bytes: those predicted, as a ratio to the compiled ones.
* memory: the estimate, as a ratio to XLA's own figure; from, to: what the report says it is between, as ratios.
* lines: the percentage of predicted collectives whose line is not one of an installed package.
* time: `explain`, from the function on, as a ratio to tracing, lowering and compiling.
* after trace: `explain` of a traced function, as a ratio to lowering and compiling it. Memory, FLOPs and findings
  are computed when they are first read, and are not in it; `explain.py` measures them. The trace is jax's own, is made
  once for both, and takes more than the bound by itself for some models.

Tracing and explaining are the median of three, of which only the first imports and warms what it needs: one run of
half a second says little on a machine that others use. Compiling takes ten times as long, and is done once.

Single operations on sharded dimensions, of `truth_operations.py`, are looked at in the same way. Models of libraries
that are not installed are listed as skipped. Nothing is executed.
"""

import argparse
import collections
import dataclasses
import functools
import importlib
import json
import math
import pathlib
import re
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

import report
import truth_hlo
from partjit import pjit
from partjit.inspect.collectives import Collective
from partjit.inspect.explain import explain
from partjit.inspect.hlo.optimized import read_collectives
from partjit.inspect.report import Report
from truth_models import FASTER, MODELS
from truth_models.training import Model
from truth_operations import OPERATIONS, Operation, make_mesh

TIME_BOUND = 0.2
REPEATS = 3
BYTES_BOUND = 0.05
MEMORY_BOUND = 0.15
LIBRARIES_BOUND = 8

WITHOUT_LIBRARY = {"algorithms", "own", "plain"}

OPERATION = "operation:"
"""What stands for the library of a single operation."""

QUICK = ("stencil", "attention mask, bf16", "loop of unknown length", "shard_map over one axis")

Key = tuple[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Tally:
    """Collectives of one kind over the same axes.

    Attributes:
        arrays: how many they move.
        executions: the same, those in loops once per iteration.
        nbytes: that a device sends in a step.
    """

    arrays: int = 0
    executions: int = 0
    nbytes: float = 0.0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.arrays + other.arrays, self.executions + other.executions, self.nbytes + other.nbytes)

    def is_near(self, other: "Tally") -> bool:
        """Whether counts are equal, and bytes within the bound."""
        same = (self.arrays, self.executions) == (other.arrays, other.executions)
        return same and math.isclose(self.nbytes, other.nbytes, rel_tol=BYTES_BOUND, abs_tol=1)

    def __str__(self) -> str:
        if not self.arrays:
            return "-"
        often = "" if self.arrays == self.executions else f" ({self.executions} in loops)"
        return f"{self.arrays}{often}, {self.nbytes:,.0f} B"


Tallies = dict[Key, Tally]


def tallied(entries: Iterable[tuple[Key, int, int, float]]) -> Tallies:
    tallies: Tallies = collections.defaultdict(Tally)
    for key, arrays, times, sent in entries:
        tallies[key] += Tally(arrays, arrays * times, sent * times)
    return dict(tallies)


def of_report(collectives: Iterable[Collective]) -> Tallies:
    return tallied(((c.kind, c.axes or ("?",)), c.combined, c.executions, c.bytes_moved) for c in collectives)


def of_text(text: str, mesh: truth_hlo.Axes) -> Tallies:
    moved = truth_hlo.read_program(text, mesh)
    # A collective that moves nothing, between groups of one device, is none.
    return tallied(((m.kind, m.axes), m.arrays, m.executions, m.sent) for m in moved if m.axes)


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Time that passes, and that of all threads, which a busy machine disturbs less."""

    wall: float
    cpu: float


@dataclasses.dataclass(frozen=True)
class Truth:
    """A model as XLA compiles it: the text of the program, its memory, and what lowering and compiling it took."""

    text: str
    memory: float
    seconds: Seconds


def timed(fun: Callable[[], Any]) -> tuple[Any, Seconds]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = fun()
    return result, Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def median(of: Sequence[Seconds]) -> Seconds:
    return Seconds(*(statistics.median(getattr(one, clock) for one in of) for clock in ("wall", "cpu")))


def compile_traced(traced: Any) -> Truth:
    compiled, seconds = timed(lambda: traced.lower().compile())
    stats = compiled.memory_analysis()
    memory = (
        stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    )
    return Truth(compiled.as_text(), memory, seconds)


@dataclasses.dataclass(frozen=True)
class Found:
    """What is known of one model.

    Attributes:
        name: of the model.
        library: the file that it is made in.
        truth: as XLA compiles it.
        told: the report.
        trace, explain: what the trace takes, and the report on it.
        mesh: the sizes of the axes.
    """

    name: str
    library: str
    truth: Truth
    told: Report
    trace: Seconds
    explain: Seconds
    mesh: truth_hlo.Axes

    @property
    def actual(self) -> Tallies:
        return of_text(self.truth.text, self.mesh)

    @property
    def predicted(self) -> Tallies:
        return of_report(self.told.predicted)

    @property
    def read(self) -> Tallies:
        return of_report(read_collectives(self.truth.text, self.told.mesh))


def is_said(found: Found, one: Tally, other: Tally) -> bool:
    """Whether the report says that more may be moved than it predicts, and as much as is moved."""
    told = found.told.predicted
    is_more = (one.arrays, one.executions) <= (other.arrays, other.executions) and one.nbytes <= other.nbytes + 1
    most = told.bytes_per_step_at_most * (1 + BYTES_BOUND)
    return bool(told.unknown) and is_more and truth_hlo.sent_in_a_step(found.truth.text, found.mesh) <= most


def differences(found: Found) -> Iterator[report.Row]:
    """Where the prediction is not what is compiled, for each kind and axes."""
    actual, predicted = found.actual, found.predicted
    for kind, axes in sorted({*actual, *predicted}):
        one, other = predicted.get((kind, axes), Tally()), actual.get((kind, axes), Tally())
        if not one.is_near(other):
            yield {
                "of": found.name,
                "kind": kind,
                "axes": ", ".join(axes),
                "predicted": str(one),
                "compiled": str(other),
                "verdict": "said" if is_said(found, one, other) else "WRONG",
            }


def verdict_of(found: Found) -> str:
    verdicts = {row["verdict"] for row in differences(found)}
    return "WRONG" if "WRONG" in verdicts else "said" if verdicts else "equal"


def is_read_rightly(found: Found) -> bool:
    actual, read = found.actual, found.read
    return actual.keys() == read.keys() and all(actual[key].is_near(read[key]) for key in actual)


def of_user(collectives: Iterable[Collective]) -> float:
    """The share of the collectives whose line is known and not one of an installed package."""
    files = ["" if c.site is None else c.site[0] for c in collectives]
    own = [file for file in files if file and "site-packages" not in file and "dist-packages" not in file]
    return len(own) / len(files) if files else 1.0


def ratio(one: float, other: float) -> float:
    return one / other if other else 1.0 if not one else math.inf


def row_of(found: Found, clock: str) -> report.Row:
    actual = truth_hlo.sent_in_a_step(found.truth.text, found.mesh)
    (estimate,) = found.told.estimates
    trace, explained, compiled = (getattr(x, clock) for x in (found.trace, found.explain, found.truth.seconds))
    return {
        "model": found.name,
        "library": found.library,
        "predicted": verdict_of(found),
        "read": "equal" if is_read_rightly(found) else "WRONG",
        "bytes": ratio(found.told.predicted.bytes_per_step, actual),
        "memory": ratio(estimate.peak, found.truth.memory),
        "from": ratio(estimate.at_least, found.truth.memory),
        "to": math.inf if estimate.at_most is None else ratio(estimate.at_most, found.truth.memory),
        "lines": 100 * of_user(found.told.predicted),
        "trace s": trace,
        "explain s": explained,
        "compile s": compiled,
        "time": (trace + explained) / (trace + compiled),
        "after trace": explained / compiled,
    }


Check = tuple[str, list[tuple[str, float]], float]
"""What is bounded, its value for each name, and the bound."""


def checks_of_models(rows: list[report.Row]) -> Iterator[Check]:
    def each(value: Callable[[report.Row], float]) -> list[tuple[str, float]]:
        return [(row["model"], value(row)) for row in rows]

    yield "predicted collectives are equal, or said", each(lambda row: row["predicted"] == "WRONG"), 0.0
    yield (
        "bytes within 5 %, or said",
        each(lambda row: row["predicted"] != "said" and abs(row["bytes"] - 1)),
        BYTES_BOUND,
    )
    yield "collectives read from compiled text are equal", each(lambda row: row["read"] == "WRONG"), 0.0
    yield "memory within 15 %", each(lambda row: abs(row["memory"] - 1)), MEMORY_BOUND
    beyond = each(lambda row: max(row["from"] - 1, 1 - row["to"]))
    yield "memory within 15 % of what is said", beyond, MEMORY_BOUND
    yield "all lines are the user's", each(lambda row: 100 - row["lines"]), 0.0
    for key, what in (("time", "time"), ("after trace", "time after the trace")):
        late = each(lambda row, key=key: row[key] - FASTER.get(row["model"], TIME_BOUND))
        yield f"{what} at most 0.2, of 24 layers 0.15", late, 0.0


def checks_of_operations(founds: list[Found]) -> Iterator[Check]:
    wrong = [(found.name, float(verdict_of(found) == "WRONG")) for found in founds]
    yield "single operations are equal, or said", wrong, 0.0
    misread = [(found.name, float(not is_read_rightly(found))) for found in founds]
    yield "single operations are read from compiled text as they are", misread, 0.0


def bounds(checks: Iterable[Check]) -> Iterator[report.Row]:
    """Each bound, how many are within it, and the worst of those that are not."""
    for what, values, bound in checks:
        within = sum(value <= bound for _, value in values)
        worst, most = max(values, key=lambda named: named[1])
        yield {
            "bound": what,
            "within": f"{within} of {len(values)}",
            "worst": worst if most > bound else "",
            "verdict": "ok" if within == len(values) else "ABOVE",
        }


def kept(folder: pathlib.Path | None, name: str, make: Callable[[], Truth]) -> Truth:
    """What `make` returns, or what it returned in an earlier run that had the same folder."""
    if folder is None:
        return make()
    file = folder / "{}-{}.json".format(re.sub(r"\W+", "-", name), jax.__version__)
    if file.exists():
        fields = json.loads(file.read_text())
        return Truth(fields["text"], fields["memory"], Seconds(**fields["seconds"]))
    truth = make()
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(dataclasses.asdict(truth)))
    return truth


def explained(make: Callable[[], Model]) -> tuple[Model, Any, Report, tuple[Seconds, Seconds]]:
    """A model, its trace and its report, and what these two took."""
    jax.clear_caches()
    model = make()
    with model.mesh:
        traced, tracing = timed(lambda: model.step.trace(*model.args))
    told, explaining = timed(lambda: explain(traced, mesh=model.mesh))
    return model, traced, told, (tracing, explaining)


def look_at(name: str, library: str, make: Callable[[], Model], folder: pathlib.Path | None) -> Found:
    runs = [explained(make) for _ in range(1 if library == OPERATION else REPEATS)]
    model, traced, told, *_ = runs[0]
    traces, explanations = zip(*(seconds for *_, seconds in runs), strict=True)
    truth = kept(folder, name, lambda: compile_traced(traced))
    axes = {str(axis): int(size) for axis, size in model.mesh.shape.items()}
    return Found(name, library, truth, told, median(traces), median(explanations), axes)


def make_model(name: str) -> Model:
    module, _, maker = MODELS[name].partition(":")
    return getattr(importlib.import_module(f"truth_models.{module}"), maker)()


def make_operation(operation: Operation) -> Model:
    made = pjit(operation.function, in_shardings=operation.specs)
    return Model(made, tuple(operation.structs), make_mesh())


Tables = dict[str, list[report.Row]]


def tables_of(
    names: Sequence[str], operations: Sequence[Operation], folder: pathlib.Path | None, clock: str = "wall"
) -> Tables:
    """The tables, without the empty ones; what a model raises is an entry among those skipped."""
    looks = [
        *((name, MODELS[name].partition(":")[0], functools.partial(make_model, name)) for name in names),
        *((f"{OPERATION} {one.name}", OPERATION, functools.partial(make_operation, one)) for one in operations),
    ]
    founds, skipped = [], []
    for name, library, make in looks:
        try:
            founds.append(look_at(name, library, make, folder))
        except ModuleNotFoundError as error:
            skipped.append({"of": name, "why": f"{error.name} is not installed"})
        except Exception as error:
            traceback.print_exc()
            skipped.append({"of": name, "why": f"{type(error).__name__}: {' '.join(str(error).split())}"[:100]})
    models = [found for found in founds if found.library != OPERATION]
    rows, others = [row_of(found, clock) for found in models], [found for found in founds if found.library == OPERATION]
    checks = [*(checks_of_models(rows) if rows else ()), *(checks_of_operations(others) if others else ())]
    if names == [*MODELS]:
        missing = LIBRARIES_BOUND - len({found.library for found in models} - WITHOUT_LIBRARY)
        checks.append(("models of at least eight libraries", [("libraries", missing)], 0))
    tables = {
        "models": rows,
        "differences": [row for found in founds for row in differences(found)],
        "skipped": skipped,
        "bounds": [*bounds(checks)],
    }
    return {title: table for title, table in tables.items() if table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--quick", action="store_true", help="a few small models that need no library")
    parser.add_argument("--only", default="", help="those whose name contains one of these, separated by commas")
    parser.add_argument("--models", action="store_true", help="without the single operations")
    parser.add_argument(
        "--keep",
        type=pathlib.Path,
        help="a folder for what is compiled, to be read by later runs: compile once, look at the reports many times",
    )
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="what to measure, as for explain.py")
    options = parser.parse_args()
    report.set_up_devices(8)
    words = options.only.split(",")
    names = [name for name in (QUICK if options.quick else MODELS) if any(word in name for word in words)]
    chosen = [] if options.quick or options.models else OPERATIONS
    operations = [one for one in chosen if any(word in one.name for word in words)]
    # What is imported and set up once counts for none, as SciPy, which jaxlib imports to lower the first factorization.
    jax.jit(jax.numpy.linalg.inv).lower(jax.numpy.eye(2))
    tables_of([QUICK[0]], [], options.keep)
    report.report(tables_of(names, operations, options.keep, options.clock), as_json=options.json)


if __name__ == "__main__":
    main()
