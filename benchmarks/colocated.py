"""Calling Python on hosts: partjit.colocated beside jax.experimental.colocated_python and beside callbacks of jax.

* overhead: a function that returns its argument, called inline. jax's and partjit's take turns within one process; the
  ratio is that of their fastest turns. The second turn of jax's shows what a ratio of 1 looks like on this machine.
* asynchrony: how long the caller of a function that sleeps for 1 s is away; how long two streams take that sleep 0.5 s
  each; jax's own do not come back before, so their times are given for comparison.
* data: a result of 100 MB, against one of 4 bytes; and what it costs a caller that its argument is kept intact.
* soak: 100 000 calls, and what is left of them.
"""

import argparse
import functools
import gc
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import colocated_python as jax_colocated
from jax.sharding import NamedSharding, SingleDeviceSharding

import report
from partjit import Mesh, P, colocated

Row = dict[str, Any]


def seconds(function: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def elapsed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def identity(x: Any) -> Any:
    return x


def overhead(repeats: int) -> list[Row]:
    rows = []
    for devices in sorted({1, len(jax.devices())}):
        used = jax.devices()[:devices]
        sharding = SingleDeviceSharding(used[0]) if devices == 1 else NamedSharding(Mesh(used, "x"), P("x"))
        x = jax.device_put(np.zeros(8 * devices, np.float32), sharding)
        tree = {str(i): x for i in range(20)}
        for what, argument in (("1 array", x), ("20 arrays", tree)):
            specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), argument)
            items: Any = {"in_specs": ((specs,), {}), "out_specs_fn": identity, "devices": used}
            for name, said in (("fully specialized", items), ("not specialized", {})):
                theirs: Any = jax_colocated.colocated_python(identity)
                ours = colocated.colocated_python(identity, mode="inline")
                if said:
                    theirs, ours = (f.specialize(**said) for f in (theirs, ours))
                contestants = [theirs, theirs, ours]
                for _ in range(30):
                    for f in contestants:
                        jax.block_until_ready(f(argument))
                turns = [[seconds(functools.partial(f, argument), 300) for f in contestants] for _ in range(repeats)]
                jax_time, control, own = (min(turn) for turn in zip(*turns, strict=True))
                rows.append(
                    {
                        "call": name,
                        "argument": what,
                        "devices": devices,
                        "jax us": jax_time * 1e6,
                        "inline us": own * 1e6,
                        "control ratio": control / jax_time,
                        "ratio": own / jax_time,
                        "verdict": report.verdict(own / jax_time, 1.0),
                    }
                )
    return rows


def asynchrony(repeats: int) -> list[Row]:
    x = jax.block_until_ready(jnp.zeros(8, jnp.float32))

    def sleep(time_: float) -> Callable[[Any], Any]:
        return lambda x: time.sleep(time_) or x

    second, half = sleep(1.0), sleep(0.5)
    ours = colocated.colocated_python(second, out_specs_fn=identity)
    a, b = (colocated.colocated_python(half, out_specs_fn=identity, stream=name) for name in "ab")
    theirs, their_half = (
        cast(Any, jax_colocated.colocated_python(f)).specialize(out_specs_fn=identity) for f in (second, half)
    )

    def two(f: Any, g: Any) -> None:
        jax.block_until_ready([f(x), g(x)])

    away = []
    for _ in range(repeats):
        away.append(elapsed(lambda: ours(x)))
        colocated.wait()
    two(a, b)
    streams = min(elapsed(lambda: two(a, b)) for _ in range(3))
    return [
        {
            "what": "caller away, function of 1 s",
            "partjit ms": sorted(away)[len(away) // 2] * 1e3,
            "bound ms": "1",
            "jax ms": elapsed(lambda: theirs(x)) * 1e3,
            "verdict": report.verdict(sorted(away)[len(away) // 2] * 1e3, 1.0),
        },
        {
            "what": "two streams of 0.5 s",
            "partjit ms": streams * 1e3,
            "bound ms": "550",
            "jax ms": elapsed(lambda: two(their_half, their_half)) * 1e3,
            "verdict": report.verdict(streams * 1e3, 550.0),
        },
    ]


def data(repeats: int) -> list[Row]:
    def row(x: Any, mode: Any) -> Row:
        f = colocated.colocated_python(identity, mode=mode, out_specs_fn=identity)
        result = jax.block_until_ready(f(x))
        return {
            "bytes": x.nbytes,
            "mode": mode,
            "call and result us": min(seconds(lambda: f(x).block_until_ready(), 50) for _ in range(repeats)) * 1e6,
            "same memory": str(result.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()),
        }

    arrays = jax.block_until_ready([jnp.zeros(25_000_000, jnp.float32), jnp.zeros((), jnp.float32)])
    return [row(x, mode) for x in arrays for mode in ("inline", "stream")]


def soak(calls: int) -> list[Row]:
    x = jnp.float32(1)
    f = colocated.colocated_python(lambda x: x, mode="stream", out_specs_fn=identity)

    def state() -> tuple[int, int, int]:
        colocated.wait()
        gc.collect()
        return sys.getallocatedblocks(), threading.active_count(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    for _ in range(1000):
        f(x)
    before = state()

    def call_and_wait() -> None:
        for _ in range(calls):
            f(x)
        colocated.wait()

    spent = elapsed(call_and_wait)
    after = state()
    return [
        {
            "calls": calls,
            "us per call": spent / calls * 1e6,
            "objects more": after[0] - before[0],
            "threads before": before[1],
            "threads after": after[1],
            "peak kB more": after[2] - before[2],
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, help="virtual CPU devices (default 8)")
    parser.add_argument("--repeats", type=int, default=40, help="turns of each contestant (default 40)")
    parser.add_argument("--calls", type=int, default=100_000, help="calls of the soak (default 100 000)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    os.environ.setdefault("NPROC", "32")
    report.set_up_devices(options.devices)
    report.report(
        {
            "overhead of a call": overhead(options.repeats),
            "asynchrony": asynchrony(5),
            "data": data(5),
            "soak": soak(options.calls),
        },
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
