"""Functions in worker processes: what `isolate="process"` leaves to the devices, and what calls and deaths cost.

* beside: how many steps of a jitted program the main thread makes while a colocated function of pure Python runs, on a
  thread and in a worker, and with none. The three take turns; the ratio is that of their medians.
* round trip: a call with an array and one like it as the result, inline, beside `concurrent.futures` with one spawned
  process, which gets NumPy arrays and whose results are put on the device. Medians; the two take turns. `cpu us` is the
  computing of our two processes: on a busy machine the rest is waiting for a processor.
* deaths: calls whose worker kills itself, and how long after it each error was raised.
"""

import argparse
import concurrent.futures
import functools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import report
from partjit import WorkerDiedError, colocated

Row = dict[str, Any]

LEAST_RATIO = 2.3
"""Steps beside a worker to steps beside a thread."""
MOST_SMALL_RATIO = 150 / 450
"""Of the round trip of 1 kB: at most 150 us on a machine where `concurrent.futures` takes 450."""
MOST_SECONDS = 1.0
"""From the death of a worker to the error of its call."""
TURN = 20
"""Calls that one way makes after another."""
SIZES = {"1 kB": 256, "128 kB": 32_768, "8 MB": 2_097_152}


def spin(seconds: float) -> Callable[[Any], Any]:
    """A function of pure Python that takes so long."""

    def run(x: Any) -> Any:
        import time

        end, count = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            count += 1
        return x

    return run


def beside(seconds: float, repeats: int) -> list[Row]:
    return [row for size in (64, 1024) for row in beside_steps_of(size, seconds, repeats)]


def beside_steps_of(size: int, seconds: float, repeats: int) -> list[Row]:
    step = jax.jit(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w))
    x, start = jnp.ones((size, size)), jnp.ones((size,))

    def steps() -> int:
        """The steps made in that time, each awaited, as by a loop that reads its loss."""
        w, count, end = start, 0, time.monotonic() + seconds
        while time.monotonic() < end:
            w = jax.block_until_ready(step(w, x))
            count += 1
        return count

    options: Any = {"out_specs_fn": lambda x: x, "mode": "stream"}
    ways: dict[str, Any] = {
        "no call": None,
        "thread": colocated.colocated_python(spin(seconds), **options),
        "process": colocated.colocated_python(spin(seconds), isolate="process", **options),
    }
    quick = colocated.colocated_python(spin(0), isolate="process", **options)
    jax.block_until_ready([quick(1.0), step(start, x)])  # the worker is there
    made: dict[str, list[int]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, call in ways.items():
            result = None if call is None else call(1.0)
            made[way].append(steps())
            jax.block_until_ready(result)
    median = {way: statistics.median(counts) for way, counts in made.items()}
    ratio = median["process"] / median["thread"]
    return [
        {
            "array": f"{size} x {size}",
            "beside": way,
            "steps": median[way],
            "of those alone": median[way] / median["no call"],
            "ratio to a thread": median[way] / median["thread"],
            "verdict": report.verdict(LEAST_RATIO, ratio) if way == "process" else "",
        }
        for way in ways
    ]


def double(x: np.ndarray) -> np.ndarray:
    return x * 2


def round_trips(repeats: int) -> list[Row]:
    context = multiprocessing.get_context("spawn")
    rows = []
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        ours = colocated.colocated_python(lambda x: x * 2, isolate="process", mode="inline", out_specs_fn=lambda x: x)

        used = colocated.colocated_python(
            lambda: (time.process_time(),), isolate="process", mode="inline", devices=jax.devices()
        )

        def computed() -> float:
            """Seconds of processors that the parent and the worker have used."""
            return time.process_time() + float(used()[0])

        def theirs(x: Any) -> Any:
            return jax.device_put(pool.submit(double, np.asarray(x)).result())

        for size, count in SIZES.items():
            x = jax.block_until_ready(jnp.ones(count, jnp.float32))
            calls = [functools.partial(ours, x), functools.partial(theirs, x)]
            times: list[list[float]] = [[], []]
            for _ in range(repeats // TURN + 1):
                for call, found in zip(calls, times, strict=True):
                    for i in range(TURN + 3):
                        start = time.perf_counter()
                        jax.block_until_ready(call())
                        if i >= 3:  # threads of the other way may still have been running
                            found.append(time.perf_counter() - start)
            before = computed()
            for _ in range(repeats):
                jax.block_until_ready(ours(x))
            cpu = (computed() - before) / repeats
            own, other = (statistics.median(found) * 1e6 for found in times)
            rows.append(
                {
                    "array": size,
                    "partjit us": own,
                    "cpu us": cpu * 1e6,
                    "ProcessPoolExecutor us": other,
                    "ratio": own / other,
                    "verdict": report.verdict(own / other, MOST_SMALL_RATIO if size == "1 kB" else 1.0),
                }
            )
    return rows


def deaths(count: int) -> list[Row]:
    def die(x: Any) -> Any:
        import os
        import signal
        import time

        with open(f"{path}", "w", encoding="utf-8") as file:
            file.write(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
        return x

    path = f"/tmp/partjit-isolation-{os.getpid()}"
    f = colocated.colocated_python(die, isolate="process", mode="inline", out_specs_fn=lambda x: x)
    g = colocated.colocated_python(lambda x: x, isolate="process", mode="inline", out_specs_fn=lambda x: x)
    x, errors, late, after = jnp.float32(1), 0, [], []
    for _ in range(count):
        try:
            jax.block_until_ready(f(x))
        except WorkerDiedError:
            errors += 1
            with open(path, encoding="utf-8") as file:
                late.append(time.time() - float(file.read()))
        start = time.perf_counter()
        assert float(g(x)) == 1
        after.append(time.perf_counter() - start)
    os.remove(path)
    return [
        {
            "workers killed": count,
            "errors": errors,
            "longest ms until the error": max(late) * 1e3,
            "median ms of the next call": statistics.median(after) * 1e3,
            "verdict": report.verdict(max(late), MOST_SECONDS) if errors == count else "LOST",
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="of the function beside the steps (default 1)")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each way beside the steps (default 7)")
    parser.add_argument("--calls", type=int, default=300, help="calls of each round trip (default 300)")
    parser.add_argument("--deaths", type=int, default=100, help="workers to kill (default 100)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    report.set_up_devices(1)
    report.report(
        {
            "steps beside a call of pure Python": beside(options.seconds, options.repeats),
            "round trip": round_trips(options.calls),
            "deaths": deaths(options.deaths),
        },
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
