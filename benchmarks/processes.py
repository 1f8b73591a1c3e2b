"""Programs with calls over two processes of four devices each: what it costs that both go on or none does.

Rows: a step with a call in the middle, for several times that the devices take. Ways, in turns:

* by hand: the two halves as `jax.jit`s, and the function called in between with this process's shards. The processes
  agree on nothing.
* partjit: one pjit with a colocated call, at each of whose two fragments the processes agree.
* free: the same with `agree=False`, which does what is done by hand.
* flags: as by hand, with a flag of each device that each half reduces beside its data. That is what processes would pay
  if they agreed by their data, before anything is made of the flag.

Then a step in which the devices compute for about 10 ms, with one call and with three: as it is, with
`agree="ahead"`, and with `agree=False`. `us per fragment` is by how much the medians of the first and the last differ,
by the number of agreements. One of the first two is to be within the bound.

`free` says whether a plan without agreement is within the bound of what is done by hand, which is without one as well,
`verdict` whether a plan with agreement is.

A ratio is the median of the ratios to what was measured in the same turn, by hand or with `agree=False`, between two
that contain the true median with 95 %. `agreement us` is the median of an agreement by itself.

All of that is measured step by step, each waited for before the next is called (`in a row` is 1), and as steps are in
training: each gets what the one before returns, and only the last is waited for.
"""

import argparse
import itertools
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import partjit
import report
from partjit import P, pjit
from partjit.colocated import colocated_python
from partjit.colocated.agreement.setup import agreement_of

MOST_RATIO = 1.05
MOST_AGREEMENT_US = 1200.0
SIZES = (64, 512, 1024)
STEP_SECONDS = 0.01
STEP_SIZE = 256
CALLS = (1, 3)
IN_A_ROW = (1, 5)
COUNT = 2


def double(x: Any) -> Any:
    """What runs on the hosts: each process computes with its own shards."""
    shards = [jax.device_put(2 * np.asarray(shard.data), shard.device) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def timed(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The median seconds of each way; the ways take turns."""
    return {name: statistics.median(found) for name, found in all_times(ways, repeats).items()}


def all_times(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """The seconds of each way, time after time; the ways take turns, and each comes after each other one."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    orders = [*itertools.permutations(ways.items())]
    for i in range(repeats + 3):
        for name, run in orders[i % len(orders)]:
            started = time.perf_counter()
            jax.block_until_ready(run())
            if i >= 3:
                times[name].append(time.perf_counter() - started)
    return times


def in_a_row(step: Callable[[Any], Any], x: Any, steps: int) -> Callable[[], Any]:
    """Steps of which each gets what the one before returns."""

    def run() -> Any:
        y = x
        for _ in range(steps):
            y = step(y)
        return y

    return run


def step_of(size: int, steps: int, repeats: int, mesh: Any) -> dict[str, Any]:
    sharding, replicated = jax.NamedSharding(mesh, P("x")), jax.NamedSharding(mesh, P())
    x = jax.make_array_from_callback((size, size), sharding, lambda i: np.full((size, size), 1e-3, np.float32)[i])

    def before(x: Any) -> Any:
        return jnp.tanh(x @ x.T @ x) + jnp.sum(x)

    def after(y: Any) -> Any:
        return jnp.tanh(y @ y.T @ y) + jnp.sum(y)

    first = jax.jit(before, out_shardings=sharding)
    second = jax.jit(after, out_shardings=sharding)
    call = colocated_python(double, out_specs_fn=lambda x: x, mode="inline")
    ours, free = (
        pjit(lambda x: after(call(before(x))), in_shardings=P("x"), out_shardings=P("x"), agree=agree)
        for agree in (True, False)
    )
    flags = jax.make_array_from_callback((8,), sharding, lambda i: np.ones(8, np.int32)[i])
    first_flagged, second_flagged = (
        jax.jit(lambda x, flags, half=half: (half(x), jnp.min(flags)), out_shardings=(sharding, replicated))
        for half in (before, after)
    )

    def by_flags(x: Any) -> Any:
        y, _ = first_flagged(x, flags)
        z, _ = second_flagged(double(y), flags)
        return z

    ways = {
        "by hand": in_a_row(lambda x: second(double(first(x))), x, steps),
        "partjit": in_a_row(ours, x, steps),
        "free": in_a_row(free, x, steps),
        "flags": in_a_row(by_flags, x, steps),
    }
    by_hand, *others = (np.asarray(run().addressable_data(0)) for run in ways.values())
    for other in others:
        np.testing.assert_array_equal(by_hand, other)
    taken = all_times(ways, repeats // steps)
    ratios = ratios_to(taken, "by hand")
    return {
        "array": f"{size} x {size}",
        "in a row": steps,
        **{f"{name} us": statistics.median(found) * 1e6 / steps for name, found in taken.items()},
        "ratio flags": ratios["flags"][1],
        "ratio free": ratios["free"][1],
        "free": report.verdict(ratios["free"][1], MOST_RATIO),
        **named(ratios["partjit"]),
        "verdict": report.verdict(ratios["partjit"][1], MOST_RATIO),
    }


def step_of_10_ms(calls: int, steps: int, repeats: int, mesh: Any) -> dict[str, Any]:
    """A step of about 10 ms with and without agreement."""
    sharding = jax.NamedSharding(mesh, P("x"))
    shape = (STEP_SIZE, STEP_SIZE)
    x = jax.make_array_from_callback(shape, sharding, lambda i: np.full(shape, 1e-3, np.float32)[i])

    def work(x: Any, times: int) -> Any:
        return jax.lax.fori_loop(0, times, lambda _, x: jnp.tanh(x @ x.T @ x), x)

    seconds = timed({"": lambda: jax.jit(work, static_argnums=1, out_shardings=sharding)(x, 20)}, 20)[""] / 20
    times = max(1, int(multihost_utils.broadcast_one_to_all(np.float32(STEP_SECONDS / seconds / (calls + 1)))))
    call = colocated_python(double, out_specs_fn=lambda x: x, mode="inline")

    def step(x: Any) -> Any:
        for _ in range(calls):
            x = call(work(x, times))
        return work(x, times)

    specs: dict[str, Any] = {"in_shardings": P("x"), "out_shardings": P("x")}
    agreed, ahead, free = (pjit(step, agree=agree, **specs) for agree in (True, "ahead", False))
    ways = {"agreed": agreed, "ahead": ahead, "agree=False": free}
    taken = all_times({name: in_a_row(way, x, steps) for name, way in ways.items()}, repeats // steps)
    medians = {name: statistics.median(found) / steps for name, found in taken.items()}
    ratios = ratios_to(taken, "agree=False")
    added = (medians["agreed"] - medians["agree=False"]) * 1e6 / (calls + 1)
    least = min(ratio for _, ratio, _ in ratios.values())
    return {
        "calls": calls,
        "in a row": steps,
        **{f"{name} us": seconds * 1e6 for name, seconds in medians.items()},
        "us per fragment": added,
        "ratio ahead": ratios["ahead"][1],
        **named(ratios["agreed"]),
        "verdict": report.verdict(max(least / MOST_RATIO, added / MOST_AGREEMENT_US), 1.0),
    }


def ratios_to(taken: dict[str, list[float]], other: str) -> dict[str, tuple[float, float, float]]:
    """The median of the ratios of each turn to another way, in its interval, of each way."""
    return {
        name: report.median_with_interval([a / b for a, b in zip(found, taken[other], strict=True)])
        for name, found in taken.items()
        if name != other
    }


def named(ratio: tuple[float, float, float]) -> dict[str, float]:
    """Columns of a ratio in its interval."""
    low, middle, high = ratio
    return {"ratio": middle, "at least": low, "at most": high}


def agreement_us(repeats: int) -> float:
    agreement = agreement_of(jax.devices(), "nothing", lambda: "nothing", None)
    assert agreement is not None
    return timed({"": lambda: agreement.run(lambda: 0, ())}, 10 * repeats)[""] * 1e6


def measure(number: int, address: str, repeats: int) -> None:
    os.environ.setdefault("NPROC", "32")  # see `report.set_up_devices`
    jax.config.update("jax_num_cpu_devices", 8 // COUNT)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, COUNT, number)
    mesh = partjit.Mesh(np.array(jax.devices()), "x")
    with mesh:
        rows = [step_of(size, steps, repeats, mesh) for size in SIZES for steps in IN_A_ROW]
        steps = [step_of_10_ms(calls, steps, repeats, mesh) for calls in CALLS for steps in IN_A_ROW]
    agreed = agreement_us(repeats)
    if number:
        return
    tables = {
        "a step with a call, two processes": rows,
        "a step of about 10 ms, with agreement and without": steps,
        "an agreement": [{"agreement us": agreed, "verdict": report.verdict(agreed, MOST_AGREEMENT_US)}],
    }
    report.report(tables, as_json=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process is not None:
        measure(args.process, args.address, args.repeats)
        return
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, __file__, "--repeats", str(args.repeats), "--address", address]
    processes = [
        subprocess.Popen(
            [*command, "--process", str(k)], env={**os.environ, "JAX_PLATFORMS": "cpu"}, stderr=subprocess.DEVNULL
        )
        for k in range(COUNT)
    ]
    sys.exit(max(process.wait() for process in processes))


if __name__ == "__main__":
    main()
