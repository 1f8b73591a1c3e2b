"""Hot dispatch: how long a call takes whose compilation is already there, as a ratio to `jax.jit`.

Three contestants take turns within one process: `jax.jit`, a second `jax.jit` of the same function, and `pjit`. A turn
is a short batch of calls, and a repeat is one turn of each. The second `jax.jit` shows what a ratio of 1 looks like on
this machine: a difference smaller than its distance from 1 means nothing.

On one device the work is done by the calling thread, where noise can only add, and the ratio is that of the fastest
turns. On several it is done by a pool of threads, and how fast a turn is depends on what happens to be queued; there
the ratio is taken within each repeat, and its median over the repeats is reported.
"""

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import report
from partjit import Mesh, P, pjit

BOUND = 1.05
LEAVES = 100
SPEC = P("x")


class Case(NamedTuple):
    """A call, as `jax.jit` and as `pjit` make it: each builds the thunk to be timed."""

    with_jit: Callable[[], Callable[[], Any]]
    with_pjit: Callable[[], Callable[[], Any]]


class Model:
    """A holder of methods, for the cases that call one."""

    def bound(self, x: jax.Array) -> jax.Array:
        return x + 1


def increment(x: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf + 1, x)


def make_cases(mesh: Mesh) -> dict[str, Case]:
    sharding = NamedSharding(mesh, SPEC)
    # The arguments lie where the call wants them: moving data would be timed otherwise.
    x = jax.device_put(jnp.arange(8.0), sharding)
    tree = {f"leaf{i}": jax.device_put(jnp.arange(8.0) + i, sharding) for i in range(LEAVES)}

    def jitted(fun: Callable[..., Any]) -> Callable[..., Any]:
        # A function object of its own, so that no two contestants share a cache entry.
        return jax.jit(lambda *args: fun(*args), in_shardings=sharding, out_shardings=sharding)

    def pjitted(fun: Callable[..., Any]) -> Callable[..., Any]:
        return pjit(lambda *args: fun(*args), in_axis_resources=SPEC, out_axis_resources=SPEC)

    def call(wrap: Callable[..., Any], argument: Any) -> Callable[[], Any]:
        f = wrap(increment)
        return lambda: f(argument)

    def call_keyword_jit() -> Callable[[], Any]:
        f = jax.jit(lambda *, x: x + 1, out_shardings=sharding)
        return lambda: f(x=x)

    def call_keyword_pjit() -> Callable[[], Any]:
        f = pjit(lambda *, x: x + 1, out_axis_resources=SPEC)
        return lambda: f(x=x)

    def call_bound_jit() -> Callable[[], Any]:
        f = jax.jit(Model().bound, in_shardings=sharding, out_shardings=sharding)
        return lambda: f(x)

    def call_bound_pjit() -> Callable[[], Any]:
        f = pjit(Model().bound, in_axis_resources=SPEC, out_axis_resources=SPEC)
        return lambda: f(x)

    def call_decorated_jit() -> Callable[[], Any]:
        class Decorated:
            method = jax.jit(lambda self, x: x + 1, static_argnums=0, in_shardings=sharding, out_shardings=sharding)

        model = Decorated()
        return lambda: model.method(x)

    def call_decorated_pjit() -> Callable[[], Any]:
        class Decorated:
            method = pjit(lambda self, x: x + 1, in_axis_resources=SPEC, out_axis_resources=SPEC, static_argnums=0)

        model = Decorated()
        return lambda: model.method(x)

    return {
        "1 argument": Case(lambda: call(jitted, x), lambda: call(pjitted, x)),
        "1 keyword argument": Case(call_keyword_jit, call_keyword_pjit),
        f"{LEAVES} leaves": Case(lambda: call(jitted, tree), lambda: call(pjitted, tree)),
        "bound method": Case(call_bound_jit, call_bound_pjit),
        "decorated method": Case(call_decorated_jit, call_decorated_pjit),
    }


class Contestant(NamedTuple):
    """A thunk, and the context its user calls it in, which is entered outside the clock."""

    thunk: Callable[[], Any]
    context: Callable[[], contextlib.AbstractContextManager[Any]]

    def seconds(self, calls: int) -> float:
        thunk = self.thunk
        with self.context():
            start = time.perf_counter()
            for _ in range(calls - 1):
                thunk()
            result = thunk()
            # What is still in flight belongs to this batch, not to the next contestant's.
            jax.block_until_ready(result)
            return time.perf_counter() - start


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(case: Case, mesh: Mesh, *, repeats: int, batch_seconds: float) -> dict[str, float]:
    contestants = {
        "jit": Contestant(case.with_jit(), contextlib.nullcontext),
        "control": Contestant(case.with_jit(), contextlib.nullcontext),
        "pjit": Contestant(case.with_pjit(), lambda: mesh),
    }
    for contestant in contestants.values():
        contestant.seconds(20)
    calls = max(3, round(20 * batch_seconds / contestants["jit"].seconds(20)))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    with no_garbage_collection():
        for _ in range(repeats):
            for name in order:
                times[name].append(contestants[name].seconds(calls) / calls)
            # Each goes first, second and last equally often.
            order = [*order[1:], order[0]]

    one_device = mesh.devices.size == 1
    typical = min if one_device else statistics.median

    def ratio(name: str) -> float:
        if one_device:
            return min(times[name]) / min(times["jit"])
        return statistics.median(a / b for a, b in zip(times[name], times["jit"], strict=True))

    return {
        "jit us": 1e6 * typical(times["jit"]),
        "pjit us": 1e6 * typical(times["pjit"]),
        "control ratio": ratio("control"),
        "pjit ratio": ratio("pjit"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--repeats", type=int, default=600, help="turns of each contestant")
    parser.add_argument("--batch-ms", type=float, default=2.0, help="about how long a turn is")
    options = parser.parse_args()

    devices = report.set_up_devices(8)
    rows: list[dict[str, Any]] = []
    for count in (1, 8):
        mesh = Mesh(devices[:count], ("x",))
        for name, case in make_cases(mesh).items():
            times = measure(case, mesh, repeats=options.repeats, batch_seconds=options.batch_ms / 1000)
            verdict = report.verdict(times["pjit ratio"], BOUND)
            rows.append({"call": name, "devices": count, **times, "bound": BOUND, "verdict": verdict})
    report.report({"hot call": rows}, as_json=options.json)


if __name__ == "__main__":
    main()
