"""Four ways from JAX to Python on the host, side by side: what a user meets, found by doing it.

Each cell of the table runs in a process of its own, on 8 virtual CPU devices, so that a deadlock or an abort is an
entry of the table as well.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import colocated_python as jax_colocated
from jax.experimental import io_callback
from jax.sharding import NamedSharding

import report
from partjit import Mesh, P, colocated
from partjit.testing import assert_collectives

WAYS = ["partjit.colocated", "jax colocated_python", "io_callback", "pure_callback"]
SECONDS = 90


def call(way: str, fun: Callable[[Any], Any]) -> Any:
    """`fun`, which returns an array like its argument, made callable from JAX."""
    if way == "partjit.colocated":
        return colocated.colocated_python(fun, out_specs_fn=lambda x: x)
    if way == "jax colocated_python":
        made: Any = jax_colocated.colocated_python(fun)
        return made.specialize(out_specs_fn=lambda x: x)
    callback = {"io_callback": io_callback, "pure_callback": jax.pure_callback}[way]
    return jax.jit(lambda x: callback(lambda x: np.asarray(fun(x)), jax.ShapeDtypeStruct(x.shape, x.dtype), x))


def array() -> jax.Array:
    mesh = Mesh(jax.devices(), "x")
    return jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("x")))


def on_one_device() -> jax.Array:
    return jax.device_put(np.arange(8.0, dtype=np.float32), jax.devices()[0])


def caller_away(way: str) -> str:
    f, x = call(way, lambda x: time.sleep(float(x[0])) or x), on_one_device()
    y = jax.block_until_ready(x + 1)
    jax.block_until_ready(f(x))
    start = time.perf_counter()
    result = f(y)
    away = time.perf_counter() - start
    jax.block_until_ready(result)
    return f"{away * 1e3:.1f} ms"


def two_at_once(way: str) -> str:
    x = on_one_device()
    f, g = (call(way, lambda x: time.sleep(float(x[0]) / 2) or x) for _ in range(2))
    if way == "partjit.colocated":
        f, g = f.specialize(stream="f"), g.specialize(stream="g")
    y = jax.block_until_ready(x + 1)
    jax.block_until_ready([f(x), g(x)])
    start = time.perf_counter()
    jax.block_until_ready([f(y), g(y)])
    return f"{time.perf_counter() - start:.2f} s"


def what_it_sees(way: str) -> str:
    def look(x: Any) -> Any:
        shards = len(x.addressable_shards) if isinstance(x, jax.Array) else 0
        # What is captured is copied, modules are not.
        seen = f"a jax.Array of {shards} shard{'s' * (shards > 1)}" if shards else type(x).__name__
        cast(Any, sys.modules)["seen"] = seen
        return x

    jax.block_until_ready(call(way, look)(array()))
    return str(sys.modules["seen"])


def where_the_result_is(way: str) -> str:
    result = call(way, lambda x: x)(array())
    jax.block_until_ready(result)
    if isinstance(result.sharding, NamedSharding):
        return f"`P({', '.join(map(repr, result.sharding.spec))})`"
    maximal = re.search(r"maximal device=(\d+)", str(result.sharding))  # of an array that is on one device
    return f"on device {maximal[1]}" if maximal else str(result.sharding)


def what_an_exception_becomes(way: str) -> str:
    def fail(x: Any) -> Any:
        raise FileNotFoundError("data.npy")

    try:
        jax.block_until_ready(call(way, fail)(on_one_device()))
    except Exception as error:
        return type(error).__name__
    return "nothing"


def collectives(way: str) -> str:
    if "callback" not in way:
        return "0"
    try:
        assert_collectives({}, call(way, lambda x: x), array())
    except AssertionError as error:
        text = str(error)
        return ", ".join(kind for kind in ("all-gather", "all-reduce") if kind in text) or text.splitlines()[0]
    return "0"


def state(way: str) -> str:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def add(self, x: Any) -> Any:
            self.count += 1
            return jnp.asarray(self.count)

    makers = {
        "partjit.colocated": colocated.colocated_python_class,
        "jax colocated_python": jax_colocated.colocated_python_class,
    }
    if way not in makers:
        return "global variables"
    counter: Any = makers[way](Counter)()
    x = on_one_device()
    return f"a class (counted to {[int(counter.add(x)) for _ in range(3)][-1]})"


def in_jit(way: str) -> str:
    try:
        jax.block_until_ready(jax.jit(call(way, lambda x: x))(on_one_device()))
    except Exception as error:
        return type(error).__name__
    return "works"


def many_steps(way: str) -> str:
    """A step on 8 devices and a call, 100 times, without waiting in between."""
    f, x = call(way, lambda x: x), array()
    step = jax.jit(lambda x: x - x.mean(), out_shardings=x.sharding)
    both = jax.jit(lambda x: step(f(x))) if "callback" in way else lambda x: step(f(x))
    for _ in range(100):
        x = both(x)
    jax.block_until_ready(x)
    return "works"


ROWS = {
    "a call of a 1 s function blocks its caller for": caller_away,
    "two functions of 0.5 s each take": two_at_once,
    "the function sees an array over 8 devices as": what_it_sees,
    "and its result is sharded as": where_the_result_is,
    "collectives added for it": collectives,
    "100 steps over 8 devices with a call in each": many_steps,
    "`FileNotFoundError` reaches the caller as": what_an_exception_becomes,
    "state between calls": state,
    "under `jax.jit`": in_jit,
}


def cell(row: str, way: str) -> str:
    """What a cell's process says, or how it ended."""
    command = [sys.executable, __file__, "--cell", row, way]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"hangs ({SECONDS} s)"
    if ran.returncode != 0:
        return f"the process ends (code {ran.returncode})"
    return ran.stdout.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        row, way = options.cell
        report.set_up_devices(8)
        try:
            print(ROWS[row](way), flush=True)
        except Exception as error:
            print(type(error).__name__, flush=True)
        os._exit(0)  # an entry is what a call does, not what is left of it at exit
    print(", ".join(f"{key} {value}" for key, value in report.environment().items()), end="\n\n")
    print(f"| | {' | '.join(f'`{way}`' for way in WAYS)} |")
    print("|---" * (len(WAYS) + 1) + "|")
    for row in ROWS:
        print(f"| {row} | {' | '.join(cell(row, way) for way in WAYS)} |", flush=True)


if __name__ == "__main__":
    main()
