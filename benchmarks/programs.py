"""Programs with colocated calls, against what a user would write without: each number beside its bound.

* split: `post(host(pre(x)))` with a host function that returns its argument, and a training step between a loader and a
  logger; against pieces of `jax.jit` with the host function called between them, and against callbacks in one
  `jax.jit`. Every callback runs in a process of its own, together with the program: it may hang or abort.
* overlap: what runs at the same time: two calls, a call beside the devices, a logger, a loader that works ahead. Host
  functions sleep, so that they leave the processors to the devices.
* structure: collectives of the fragments against those of the program without the call, and transfers.
* planning: how long it takes to plan a program of many equations that is traced already.
* events: what it costs that somebody could listen to events; and to record them, and to export them as spans.

Contestants take turns; a ratio is the median of those within each turn, and `control` that of a contestant against
itself.
"""

import argparse
import collections
import contextlib
import gc
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding, SingleDeviceSharding

import partjit
import report
from partjit import Mesh, P, colocated, events, pjit
from partjit.testing import collectives

Row = dict[str, Any]
SIZES = {"4 kB": 1024, "1 MB": 262_144}
SECONDS = 60
"""How long a process with a callback may take."""


class Effort(NamedTuple):
    """How often things are done.

    Attributes:
        turns: of each contestant with short calls.
        rounds: of each contestant with calls of 0.1 s and more.
        steps: of a loop in one turn.
        sizes: equations of the programs that are planned.
        widths: of the MLPs that are trained.
        callbacks: those that are tried, with the number of devices.
        shapes: of the programs that are planned, besides "mixed".
    """

    turns: int
    rounds: int
    steps: int
    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    callbacks: tuple[tuple[str, int], ...]
    shapes: tuple[str, ...]


PURE, ON_SHARDS = "pure_callback", "shard_map + pure_callback"
FULL = Effort(
    60,
    5,
    8,
    (1_000, 3_000, 10_000, 30_000),
    (128, 1024),
    (("io_callback", 1), (PURE, 1), ("io_callback", 8), (PURE, 8), (ON_SHARDS, 8)),
    ("wide", "aside"),
)
QUICK = Effort(20, 3, 4, (1_000, 10_000), (128,), ((PURE, 1), (PURE, 8), (ON_SHARDS, 8)), ())


# Places and clocks


def place(count: int) -> tuple[Mesh, Any]:
    """A mesh over the first devices, and the sharding of arrays that are divided over it."""
    mesh = Mesh(jax.devices()[:count], "x")
    return mesh, SingleDeviceSharding(jax.devices()[0]) if count == 1 else NamedSharding(mesh, P("x"))


def everywhere(count: int) -> Any:
    mesh, sharding = place(count)
    return sharding if count == 1 else NamedSharding(mesh, P())


def elapsed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def batches(function: Callable[[], Any], batch_seconds: float) -> Callable[[], float]:
    """Gives the seconds per call, each waited for, of a batch that takes about so long."""
    for _ in range(20):
        jax.block_until_ready(function())
    calls = max(1, round(batch_seconds / min(elapsed(function) for _ in range(5))))

    def turn() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            jax.block_until_ready(function())
        return (time.perf_counter() - start) / calls

    return turn


def turns(contestants: Mapping[str, Callable[[], float]], count: int) -> dict[str, list[float]]:
    """The seconds of each contestant in each turn; each goes first, second and last equally often."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order = [*contestants]
    gc.collect()
    gc.disable()
    try:
        for _ in range(count):
            for name in order:
                times[name].append(contestants[name]())
            order = [*order[1:], order[0]]
    finally:
        gc.enable()
    return times


def ratio(times: Mapping[str, list[float]], name: str, to: str) -> float:
    return statistics.median(a / b for a, b in zip(times[name], times[to], strict=True))


def ms(times: Mapping[str, list[float]], name: str) -> float:
    return statistics.median(times[name]) * 1e3


def verdict(measured: float, bound: float) -> str:
    return "OK" if measured <= bound else "MISSED"


def identity(x: Any) -> Any:
    return x


def pre(x: Any) -> Any:
    return jnp.sin(x) * 2 + 1


def post(x: Any) -> Any:
    return jnp.cos(x) - 1


# The host function between two pieces


def split_contestants(count: int, size: int, *, are_stated: bool = True) -> dict[str, Callable[[], Any]]:
    """The program, and what it is compared with; whether it is said where the call's result lies."""
    _, sharding = place(count)
    x = jax.device_put(np.linspace(0, 1, size, dtype=np.float32), sharding)
    host = returning(sharding if count > 1 and are_stated else None)
    called = pjit(lambda x: post(host(pre(x))))

    def by_hand() -> Callable[[], Any]:
        first, second = jax.jit(lambda x: pre(x)), jax.jit(lambda x: post(x))
        return lambda: second(identity(first(x)))

    return {"program": lambda: called(x), "by hand": by_hand(), "control": by_hand()}


def returning(sharding: Any) -> Any:
    """A host function that returns its argument, where that lies or as its specs say."""
    return colocated.colocated_python(
        lambda x: x, out_specs_fn=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    )


def with_callback(way: str, count: int, size: int) -> Callable[[], Any]:
    mesh, sharding = place(count)
    x = jax.device_put(np.linspace(0, 1, size, dtype=np.float32), sharding)

    def call(x: Any) -> Any:
        callback: Any = io_callback if way == "io_callback" else jax.pure_callback
        return callback(identity, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    host: Any = call
    if way == ON_SHARDS:
        host = jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    called = jax.jit(lambda x: post(host(pre(x))))
    return lambda: called(x)


def split(effort: Effort) -> list[Row]:
    rows = []
    for count, are_stated in ((1, True), (8, True), (8, False)):
        for what, size in SIZES.items():
            thunks = split_contestants(count, size, are_stated=are_stated)
            contestants = {name: batches(thunk, 0.005) for name, thunk in thunks.items()}
            times = turns(contestants, effort.turns)
            measured = ratio(times, "program", "by hand")
            rows.append(
                {
                    "program": f"post(host(pre(x))), {what}" + ("" if are_stated else ", out_specs_fn=lambda x: x"),
                    "devices": count,
                    "by hand us": ms(times, "by hand") * 1e3,
                    "program us": ms(times, "program") * 1e3,
                    "more us": (min(times["program"]) - min(times["by hand"])) * 1e6,
                    "control": ratio(times, "control", "by hand"),
                    "ratio": measured,
                    "bound": 1.05,
                    "verdict": verdict(measured, 1.05),
                }
            )
    return rows


def callback_cell(way: str, count: int, turn_count: int) -> None:
    """In a process of its own: prints the seconds of the program and of the callback, for each size."""
    for what, size in SIZES.items():
        thunks = split_contestants(count, size)
        contestants = {
            "program": batches(thunks["program"], 0.005),
            "callback": batches(with_callback(way, count, size), 0.005),
        }
        times = turns(contestants, turn_count)
        cell = [what, ms(times, "program") * 1e3, ms(times, "callback") * 1e3, ratio(times, "program", "callback")]
        print(json.dumps(cell), flush=True)


def callbacks(effort: Effort) -> list[Row]:
    rows: list[Row] = []
    for way, count in effort.callbacks:
        command = [sys.executable, __file__, "--callback", way, str(count), str(max(effort.turns // 2, 15))]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            out, end = ran.stdout, f"the process ends (code {ran.returncode})"
        except subprocess.TimeoutExpired as error:
            out = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            end = f"hangs ({SECONDS} s)"
        cells = {cell[0]: cell[1:] for cell in map(json.loads, filter(None, out.splitlines()))}
        for what in SIZES:
            own, other, measured = cells.get(what, ("", end, 0.0))
            rows.append(
                {
                    "program": f"post(host(pre(x))), {what}",
                    "devices": count,
                    "callback": way,
                    "callback us": other,
                    "program us": own,
                    "ratio": measured,
                    "bound": 1.0,
                    "verdict": verdict(measured, 1.0) if what in cells else "OK (the callback fails)",
                }
            )
    return rows


def load_batch() -> Any:
    return jnp.asarray(np.linspace(0, 1, 256 * 128, dtype=np.float32).reshape(256, 128))


def log_loss(loss: Any) -> None:
    float(loss)


def sgd(params: Any, batch: Any) -> Any:
    def loss_of(params: Any) -> Any:
        h = batch
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - batch) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss


def training_contestants(count: int, width: int, steps: int) -> dict[str, Callable[[], float]]:
    _, sharding = place(count)
    rng = np.random.default_rng(0)
    shapes = [(128, width), (width, width), (width, 128)]
    params = [jax.device_put(rng.normal(size=s).astype(np.float32) / 20, everywhere(count)) for s in shapes]
    spec = jax.ShapeDtypeStruct((256, 128), np.float32, sharding=sharding)
    load = colocated.colocated_python(load_batch, out_specs=spec, devices=[*jax.devices()[:count]])
    log = colocated.colocated_python(log_loss, out_specs_fn=lambda loss: None, stream="log of training")

    def step(params: Any) -> Any:
        params, loss = sgd(params, load())
        log(loss)
        return params

    called = pjit(step)

    def by_hand() -> Callable[[], float]:
        update = jax.jit(lambda params, batch: sgd(params, batch))

        def run() -> Any:
            state = params
            for _ in range(steps):
                state, loss = update(state, jax.device_put(load_batch(), sharding))
                log_loss(loss)
            return state

        return lambda: elapsed(run) / steps

    def run() -> Any:
        state = params
        for _ in range(steps):
            state = called(state)
        colocated.wait()
        return state

    return {"program": lambda: elapsed(run) / steps, "by hand": by_hand(), "control": by_hand()}


def training(effort: Effort) -> list[Row]:
    rows = []
    for count in (1, 8):
        for width in effort.widths:
            contestants = training_contestants(count, width, effort.steps if width < 1000 else effort.steps // 2)
            turns(contestants, 1)
            times = turns(contestants, max(effort.turns // 4, 9) if width < 1000 else effort.rounds)
            measured = ratio(times, "program", "by hand")
            rows.append(
                {
                    "program": f"load, training step (MLP of width {width}), log",
                    "devices": count,
                    "by hand us": ms(times, "by hand") * 1e3,
                    "program us": ms(times, "program") * 1e3,
                    "more us": (min(times["program"]) - min(times["by hand"])) * 1e6,
                    "control": ratio(times, "control", "by hand"),
                    "ratio": measured,
                    "bound": 1.05,
                    "verdict": verdict(measured, 1.05),
                }
            )
    return rows


# What runs at the same time


def sleeping(seconds: float, **said: Any) -> Any:
    """A host function that takes so long and returns its argument."""
    options: dict[str, Any] = {"out_specs_fn": identity, **said}
    return colocated.colocated_python(lambda x: time.sleep(seconds) or x, **options)


def work(x: Any, turns_: int) -> Any:
    """What keeps the devices busy, without using all processors."""
    return lax.fori_loop(0, turns_, lambda _, x: jnp.sin(x) * 1.01, x)


def calibrated(count: int, seconds: float) -> tuple[Any, int]:
    """An array over so many devices, and the turns of `work` on it that take about so long."""
    _, sharding = place(count)
    x = jax.device_put(np.linspace(0, 1, 8192, dtype=np.float32), sharding)
    f = jax.jit(work, static_argnums=1)
    n = 200
    jax.block_until_ready(f(x, n))
    per_turn = statistics.median(elapsed(lambda: f(x, n)) for _ in range(5)) / n
    n = max(1, round(0.05 / per_turn))
    jax.block_until_ready(f(x, n))
    per_turn = statistics.median(elapsed(lambda: f(x, n)) for _ in range(5)) / n
    return x, max(1, round(seconds / per_turn))


def two_streams(count: int, effort: Effort) -> Row:
    x, _ = calibrated(count, 0.01)
    a, b = (sleeping(0.1, stream=f"sleeper {name}") for name in "ab")
    f = pjit(lambda x: a(x) + b(x))
    for _ in range(2):
        jax.block_until_ready(f(x))
    times = turns({"both": lambda: elapsed(lambda: f(x))}, max(effort.rounds, 5))
    return overlap_row("two calls of 100 ms on two streams", count, 100.0, ms(times, "both"), 1.10)


def overlap_row(what: str, count: int, alone: float, measured: float, bound: float, *, found: float = 0.0) -> Row:
    found = found or measured / alone
    return {
        "what": what,
        "devices": count,
        "bound is of ms": alone,
        "measured ms": measured,
        "ratio": found,
        "bound": bound,
        "verdict": verdict(found, bound),
    }


def beside_devices(count: int, effort: Effort) -> Row:
    x, n = calibrated(count, 0.28)
    host = sleeping(0.2)
    both = pjit(lambda x: host(x) + work(x, n))
    only_host = pjit(lambda x: host(x) + 1)
    only_device = jax.jit(lambda x: work(x, n) + 1)
    for f in (both, only_host, only_device):
        jax.block_until_ready(f(x))
    times = turns(
        {
            "both": lambda: elapsed(lambda: both(x)),
            "host": lambda: elapsed(lambda: only_host(x)),
            "device": lambda: elapsed(lambda: only_device(x)),
        },
        effort.rounds,
    )
    longer = [max(pair) for pair in zip(times["host"], times["device"], strict=True)]
    found = statistics.median(a / b for a, b in zip(times["both"], longer, strict=True))
    what = f"a call of {ms(times, 'host'):.0f} ms beside device work of {ms(times, 'device'):.0f} ms"
    return overlap_row(what, count, statistics.median(longer) * 1e3, ms(times, "both"), 1.10, found=found)


def loop(f: Callable[[Any], Any], x: Any, steps: int) -> Callable[[], float]:
    """Gives the seconds per step; what is left of calls afterwards is waited for outside of the clock."""

    def turn() -> float:
        colocated.wait()
        start = time.perf_counter()
        state = x
        for _ in range(steps):
            state = f(state)
        jax.block_until_ready(state)
        spent = (time.perf_counter() - start) / steps
        colocated.wait()
        return spent

    return turn


def logging(count: int, effort: Effort) -> Row:
    x, n = calibrated(count, 0.05)
    alone = pjit(lambda x: work(x, n))
    jax.block_until_ready(alone(x))
    length = statistics.median(elapsed(lambda: alone(x)) for _ in range(7))
    log = colocated.colocated_python(lambda x: time.sleep(length), out_specs_fn=lambda x: None, stream="slow log")

    @pjit
    def logged(x: Any) -> Any:
        y = work(x, n)
        log(jnp.sum(y))
        return y

    jax.block_until_ready(logged(x))
    times = turns({"logged": loop(logged, x, effort.steps), "alone": loop(alone, x, effort.steps)}, effort.rounds)
    found = ratio(times, "logged", "alone")
    what = f"a logger of {length * 1e3:.0f} ms after each step"
    return overlap_row(what, count, ms(times, "alone"), ms(times, "logged"), 1.10, found=found)


def loading(count: int, effort: Effort) -> Row:
    x, n = calibrated(count, 0.05)
    alone = pjit(lambda x: work(x, n))
    jax.block_until_ready(alone(x))
    length = statistics.median(elapsed(lambda: alone(x)) for _ in range(7))
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    def batch() -> Any:
        time.sleep(length)
        return jnp.ones(x_shape, jnp.float32)

    x_shape = x.shape
    load = colocated.colocated_python(
        batch, out_specs=spec, devices=[*jax.devices()[:count]], run_ahead=2, stream="loader"
    )
    loaded = pjit(lambda x: work(x + load(), n))
    for _ in range(3):
        jax.block_until_ready(loaded(x))
    times = turns({"loaded": loop(loaded, x, effort.steps), "alone": loop(alone, x, effort.steps)}, effort.rounds)
    # No program is faster than its loader: where the step was measured too short, that is the length to compare with.
    longer = [max(length, alone) for alone in times["alone"]]
    found = statistics.median(a / b for a, b in zip(times["loaded"], longer, strict=True))
    what = f"a loader of {length * 1e3:.0f} ms, run_ahead=2, before each step"
    return overlap_row(what, count, statistics.median(longer) * 1e3, ms(times, "loaded"), 1.15, found=found)


def overlap(effort: Effort) -> list[Row]:
    return [row(count, effort) for row in (two_streams, beside_devices, logging, loading) for count in (1, 8)]


# What the fragments have in them

_COLLECTIVE = re.compile(rf"^.* = .*? ({'|'.join(collectives.KINDS)})(?:-start)?\(", re.M)


def collectives_of(f: Any, *args: Any) -> dict[str, int]:
    return dict(sorted(collections.Counter(_COLLECTIVE.findall(f.lower(*args).compile().as_text())).items()))


def structure_cases() -> Iterator[tuple[str, Any, Any, Callable[[Any], Callable[..., Any]], tuple[Any, ...]]]:
    """Name, mesh, where the call's result lies, what makes a program of a call, and its arguments."""
    devices = jax.devices()
    line, grid = Mesh(devices, "x"), Mesh(np.array(devices).reshape(4, 2), ("data", "model"))

    def put(mesh: Mesh, spec: Any, *shape: int) -> Any:
        return jax.device_put(np.ones(shape, np.float32) / 8, NamedSharding(mesh, spec))

    x = put(line, P("x"), 1024)
    yield "elementwise", line, P("x"), lambda call: lambda x: post(call(pre(x))), (x,)
    yield "sum after the call", line, P("x"), lambda call: lambda x: jnp.sum(call(pre(x))) * x, (x,)
    weights = (put(grid, P(None, "model"), 64, 128), put(grid, P("model", None), 128, 64))
    batch = put(grid, P("data"), 32, 64)

    def step_with(call: Any) -> Callable[..., Any]:
        def step(weights: Any, batch: Any) -> Any:
            batch = call(batch)

            def loss_of(weights: Any) -> Any:
                return jnp.mean((jnp.tanh(batch @ weights[0]) @ weights[1] - batch) ** 2)

            loss, grads = jax.value_and_grad(loss_of)(weights)
            return jax.tree.map(lambda w, g: w - g, weights, grads), loss

        return step

    def between_layers(call: Any) -> Callable[..., Any]:
        return lambda weights, batch: call(jnp.tanh(batch @ weights[0])) @ weights[1]

    yield "training step, data x model", grid, P("data"), step_with, (weights, batch)
    yield "call between the layers", grid, P("data", "model"), between_layers, (weights, batch)


def structure() -> list[Row]:
    rows = []
    for what, mesh, spec, make, args in structure_cases():
        without = pjit(make(identity))
        for said, sharding in ((spec, NamedSharding(mesh, spec)), ("nothing", None)):
            called = pjit(make(returning(sharding)))
            with mesh:
                found, expected = collectives_of(called, *args), collectives_of(without, *args)
                jax.block_until_ready(called(*args))
                try:
                    with jax.transfer_guard("disallow"):
                        jax.block_until_ready(called(*args))
                    moved = "none"
                except Exception as error:
                    moved = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")[:40]
            rows.append(
                {
                    "program": what,
                    "devices": mesh.size,
                    "out_specs": str(said).replace("PartitionSpec", "P"),
                    "without the call": shown(expected),
                    "with it": shown(found),
                    "transfers": moved,
                    "verdict": "OK" if found == expected and moved == "none" else "MISSED",
                }
            )
    return rows


def shown(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no collectives"


# Planning


def long_program(equations: int, shape: str) -> Callable[[Any], Any]:
    """A function of so many equations, every 100th of which is a call.

    mixed: every second call is waited for by the next equation, the others by nobody.
    wide: all calls are of the argument, and their results are needed at the end.
    aside: as mixed, with half of the equations independent of the calls.
    """
    awaited = colocated.colocated_python(lambda x: x, out_specs_fn=identity)
    forgotten = colocated.colocated_python(lambda x: None, out_specs_fn=lambda x: None, stream="plan log")

    def f(x: Any) -> Any:
        y = z = x
        results = []
        for i in range(1, equations + 1):
            if i % 100 == 0:
                if shape == "wide":
                    results.append(awaited(x))
                elif i % 200 == 0:
                    y = awaited(y)
                else:
                    forgotten(y)
            elif shape == "aside" and i % 2:
                z = lax.sin(z)
            else:
                y = (lax.sin(y), lax.add(y, x), lax.mul(y, x))[i % 3]
        for result in results:
            y = lax.add(y, result)
        return lax.add(y, z)

    return f


def planning(effort: Effort) -> list[Row]:
    rows = []
    for shape, sizes in (("mixed", effort.sizes), *((shape, (10_000,)) for shape in effort.shapes)):
        for count in (1, 8):
            mesh, _ = place(count)
            spec = P("x") if count > 1 else P()
            x = jax.device_put(np.ones(64, np.float32), NamedSharding(mesh, spec))
            for equations in sizes:
                traced, planned = [], []
                plan: Any = None
                for _ in range(2 if equations == 10_000 else 1):
                    f = pjit(long_program(equations, shape))
                    with mesh if count > 1 else contextlib.nullcontext():
                        start = time.perf_counter()
                        f.trace(x)
                        middle = time.perf_counter()
                        plan = f.plan(x)  # the trace is known
                        planned.append(time.perf_counter() - middle)
                        traced.append(middle - start)
                    f.clear_cache()
                bound = 1000.0 * equations / 10_000
                measured = min(planned) * 1e3
                rows.append(
                    {
                        "program": shape,
                        "devices": count,
                        "equations": equations,
                        "calls": len(plan.calls),
                        "fragments": len(plan.fragments),
                        "trace ms": min(traced) * 1e3,
                        "plan ms": measured,
                        "us per equation": measured * 1e3 / equations,
                        "bound ms": bound if equations == 10_000 else "",
                        "verdict": verdict(measured, bound) if equations == 10_000 else "",
                    }
                )
    return rows


# Events


def events_cost(effort: Effort) -> list[Row]:
    """What it costs that somebody could listen: a look at an empty tuple, as often as a program call has one."""
    _, sharding = place(1)
    x = jax.device_put(np.linspace(0, 1, 1024, dtype=np.float32), sharding)
    host = colocated.colocated_python(lambda x: x, out_specs_fn=identity)
    f = pjit(lambda x: post(host(pre(x))))
    call = batches(lambda: f(x), 0.004)
    looks_per_call = 2  # one for the program, one for its call

    def look() -> float:
        count = 100_000
        start = time.perf_counter()
        for _ in range(count):
            if events.listeners:
                raise AssertionError("nobody listens here")
        return (time.perf_counter() - start) / count

    def recorded() -> float:
        with partjit.record():
            return call()

    counted: list[events.Event] = []
    with events.subscribe(counted.append):
        jax.block_until_ready(f(x))
    contestants: dict[str, Callable[[], float]] = {"quiet": call, "recorded": recorded, "look": look}
    if importlib.util.find_spec("opentelemetry") and importlib.util.find_spec("opentelemetry.sdk"):
        provider = importlib.import_module("opentelemetry.sdk.trace").TracerProvider()  # without a processor

        def exported() -> float:
            with partjit.export_spans(provider):
                return call()

        contestants["exported"] = exported

    jax.block_until_ready(f(x))
    times = turns(contestants, effort.turns)
    quiet, looks = ms(times, "quiet"), looks_per_call * ms(times, "look")
    measured = quiet / (quiet - looks)
    return [
        {
            "program": "an inline call",
            "nobody listens us": quiet * 1e3,
            "of it the looks us": looks * 1e3,
            "recorded us": ms(times, "recorded") * 1e3,
            "exported us": ms(times, "exported") * 1e3 if "exported" in times else "no opentelemetry",
            "events": len(counted),
            "ratio": measured,
            "bound": 1.02,
            "verdict": verdict(measured, 1.02),
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less of everything, in less than a minute")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--only", action="append", help="only this part; may be given several times")
    parser.add_argument("--callback", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    report.set_up_devices(8)
    if options.callback:
        way, count, turn_count = options.callback
        callback_cell(way, int(count), int(turn_count))
        sys.stdout.flush()
        os._exit(0)  # an entry is what a call does, not what is left of it at exit
    effort = QUICK if options.quick else FULL
    parts: dict[str, Callable[[], list[Row]]] = {
        "split": lambda: [*split(effort), *training(effort)],
        "callbacks": lambda: callbacks(effort),
        "overlap": lambda: overlap(effort),
        "structure": structure,
        "planning": lambda: planning(effort),
        "events": lambda: events_cost(effort),
    }
    report.report(
        {name: part() for name, part in parts.items() if not options.only or name in options.only},
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
