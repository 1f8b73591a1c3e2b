"""Loops with colocated calls, against what a user would write without: each number beside its bound.

* scan: a `lax.scan` of 100 turns that makes a call in each and stacks its carries. Against the best loop written by
  hand, which fuses the end of a turn with the begin of the next one in one piece of `jax.jit`, and donates its carry
  and the stack, which it writes in place.
* callbacks: the same scan with a callback in one `jax.jit`. Every callback runs in a process of its own, together with
  the program: it may hang or abort.
* long: what 10 000 turns take of memory, and how large the plan is.
* others: a `while_loop`, and the gradient of a scan, for information.

Contestants take turns; a ratio is the median of those within each turn, and `control` that of a contestant against
itself.
"""

import argparse
import concurrent.futures
import functools
import gc
import itertools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

import report
from partjit import colocated, pjit
from programs import PURE, SIZES, elapsed, everywhere, ms, place, ratio, turns, verdict

Row = dict[str, Any]
TURNS = 100
SECONDS = 90
"""How long a process with a callback may take."""
MOST_GROWTH = 8.0
"""The megabytes of memory by which a loop may grow: what allocators keep, but no array for each of 10 000 turns."""
IO = "io_callback"


class Effort(NamedTuple):
    """How often things are done.

    Attributes:
        repeats: of each contestant.
        turns: of the long loop.
        counts: of devices.
    """

    repeats: int
    turns: int
    counts: tuple[int, ...]


FULL = Effort(21, 10_000, (1, 8))
QUICK = Effort(7, 1_000, (1, 8))


# The bodies: device work, a call, device work


def head(carry: Any) -> Any:
    return jnp.sin(carry) * 2 + 1


def tail(result: Any, carry: Any) -> Any:
    return jnp.cos(result) - carry / 2


def identity(x: Any) -> Any:
    return x


def read(size: int) -> Any:
    return np.full(size, 0.5, np.float32)


def log(x: Any) -> None:
    float(x)


def begin(count: int, size: int) -> Any:
    return jax.device_put(np.linspace(0, 1, size, dtype=np.float32), place(count)[1])


def scanned(body: Callable[[Any], Any], length: int = TURNS) -> Callable[[Any], Any]:
    """A scan whose carries are stacked."""

    def step(carry: Any, _: Any) -> Any:
        carry = body(carry)
        return carry, carry

    return lambda x: lax.scan(step, x, None, length)


def bodies(count: int, size: int) -> dict[str, Callable[[Any], Any]]:
    """What is in the programs: a call between device work, a logger that nobody waits for, a loader."""
    sharding = place(count)[1]
    spec = jax.ShapeDtypeStruct((size,), np.float32, sharding=sharding if count > 1 else None)
    call = colocated.colocated_python(identity, out_specs_fn=lambda x: spec)
    logging = colocated.colocated_python(log, out_specs_fn=lambda x: None, stream="log of a loop")
    loading = colocated.colocated_python(
        lambda: jax.device_put(read(size), sharding),
        out_specs=spec,
        devices=[*jax.devices()[:count]],
        mode="inline",
    )

    def logged(carry: Any) -> Any:
        carry = tail(head(carry), carry)
        logging(jnp.sum(carry))
        return carry

    return {
        "device work, a call, device work": lambda carry: tail(call(head(carry)), carry),
        "a logger in each turn": logged,
        "a call without arguments": lambda carry: tail(head(carry) + loading(), carry),
    }


BETWEEN, LOGGER, LOADER = "device work, a call, device work", "a logger in each turn", "a call without arguments"


def program(what: str, count: int, size: int) -> Callable[[], Any]:
    x, called = begin(count, size), pjit(scanned(bodies(count, size)[what]))

    def run() -> Any:
        results = called(x)
        colocated.wait()
        return results

    return run


# The same by hand


def stack(ys: Any, carry: Any, i: Any) -> Any:
    return lax.dynamic_update_index_in_dim(ys, carry, i, 0)


def empty_stack(count: int, size: int) -> Callable[[], tuple[Any, Any]]:
    """The stack that is written, and the number of the turn: both on the devices."""
    sharding = begin(count, size).sharding
    if count > 1:
        sharding = sharding.update(spec=(None, *sharding.spec))
    return jax.jit(
        lambda: (jnp.zeros((TURNS, size), jnp.float32), jnp.int32(0)), out_shardings=(sharding, everywhere(count))
    )


def between_by_hand(count: int, size: int) -> Callable[[], Any]:
    x, begin_stack = begin(count, size), empty_stack(count, size)
    first = jax.jit(lambda carry: head(carry))

    @functools.partial(jax.jit, donate_argnums=(1, 2, 3))
    def middle(result: Any, carry: Any, ys: Any, i: Any) -> Any:
        carry = tail(result, carry)
        return head(carry), carry, stack(ys, carry, i), i + 1

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def last(result: Any, carry: Any, ys: Any, i: Any) -> Any:
        carry = tail(result, carry)
        return carry, stack(ys, carry, i)

    def run() -> Any:
        ys, i = begin_stack()
        carry, given = jnp.copy(x), first(x)  # what the caller has is not given away
        for _ in range(TURNS - 1):
            given, carry, ys, i = middle(identity(given), carry, ys, i)
        return last(identity(given), carry, ys, i)

    return run


def logger_by_hand(count: int, size: int) -> Callable[[], Any]:
    x, begin_stack = begin(count, size), empty_stack(count, size)
    pool = concurrent.futures.ThreadPoolExecutor(1)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def turn(carry: Any, ys: Any, i: Any) -> Any:
        carry = tail(head(carry), carry)
        return carry, stack(ys, carry, i), i + 1, jnp.sum(carry)

    def run() -> Any:
        ys, i = begin_stack()
        carry, logs = jnp.copy(x), []
        for _ in range(TURNS):
            carry, ys, i, total = turn(carry, ys, i)
            logs.append(pool.submit(log, total))
        concurrent.futures.wait(logs)
        return carry, ys

    return run


def loader_by_hand(count: int, size: int) -> Callable[[], Any]:
    x, begin_stack = begin(count, size), empty_stack(count, size)

    @functools.partial(jax.jit, donate_argnums=(1, 2, 3))
    def turn(batch: Any, carry: Any, ys: Any, i: Any) -> Any:
        carry = tail(head(carry) + batch, carry)
        return carry, stack(ys, carry, i), i + 1

    def run() -> Any:
        ys, i = begin_stack()
        carry = jnp.copy(x)
        for _ in range(TURNS):
            carry, ys, i = turn(jax.device_put(read(size), x.sharding), carry, ys, i)
        return carry, ys

    return run


BY_HAND = {BETWEEN: between_by_hand, LOGGER: logger_by_hand, LOADER: loader_by_hand}


def same(a: Any, b: Any) -> None:
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-4)


def scan(effort: Effort) -> list[Row]:
    rows = []
    for what, by_hand in BY_HAND.items():
        for count in effort.counts:
            for name, size in SIZES.items():
                thunks = {
                    "program": program(what, count, size),
                    "by hand": by_hand(count, size),
                    "control": by_hand(count, size),
                }
                same(thunks["program"](), thunks["by hand"]())
                contestants = {key: functools.partial(elapsed, thunk) for key, thunk in thunks.items()}
                turns(contestants, 2)
                times = turns(contestants, effort.repeats)
                measured = ratio(times, "program", "by hand")
                rows.append(
                    {
                        "body": what,
                        "state": name,
                        "devices": count,
                        "by hand us/turn": ms(times, "by hand") * 1e3 / TURNS,
                        "program us/turn": ms(times, "program") * 1e3 / TURNS,
                        "control": ratio(times, "control", "by hand"),
                        "ratio": measured,
                        "bound": 1.15,
                        "verdict": verdict(measured, 1.15),
                    }
                )
    return rows


# Callbacks


def with_callback(what: str, way: str, count: int, size: int) -> Callable[[], Any]:
    x = begin(count, size)
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def call(fun: Callable[..., Any], result: Any, *args: Any) -> Any:
        callback: Any = io_callback if way == IO else jax.pure_callback
        return callback(fun, result, *args)

    def logged(carry: Any) -> Any:
        carry = tail(head(carry), carry)
        call(log, None, jnp.sum(carry))
        return carry

    body = {
        BETWEEN: lambda carry: tail(call(identity, struct, head(carry)), carry),
        LOGGER: logged,
        LOADER: lambda carry: tail(head(carry) + call(lambda: read(size), struct), carry),
    }[what]
    called = jax.jit(scanned(body))

    def run() -> Any:
        results = called(x)
        jax.block_until_ready(results)
        jax.effects_barrier()
        return results

    return run


def callback_cell(what: str, way: str, count: int, repeats: int) -> None:
    """In a process of its own: prints the seconds of the program and of the callback, for each size."""
    for name, size in SIZES.items():
        thunks = {"program": program(what, count, size), "callback": with_callback(what, way, count, size)}
        contestants = {key: functools.partial(elapsed, thunk) for key, thunk in thunks.items()}
        turns(contestants, 2)
        times = turns(contestants, repeats)
        cell = [name, ms(times, "program"), ms(times, "callback"), ratio(times, "program", "callback")]
        print(json.dumps(cell), flush=True)


def callbacks(effort: Effort) -> list[Row]:
    rows: list[Row] = []
    # A pure callback without results is left out, and one without arguments is made once.
    for what, way in ((BETWEEN, IO), (BETWEEN, PURE), (LOGGER, IO), (LOADER, IO)):
        for count in effort.counts:
            command = [sys.executable, __file__, "--callback", what, way, str(count), str(max(effort.repeats // 2, 5))]
            try:
                ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
                out, end = ran.stdout, f"the process ends (code {ran.returncode})"
            except subprocess.TimeoutExpired as error:
                out = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
                end = f"hangs ({SECONDS} s)"
            cells = {cell[0]: cell[1:] for cell in map(json.loads, filter(None, out.splitlines()))}
            for name in SIZES:
                own, other, measured = cells.get(name, ("", end, 0.0))
                rows.append(
                    {
                        "body": what,
                        "state": name,
                        "devices": count,
                        "callback": way,
                        "callback us/turn": other * 1e3 / TURNS if name in cells else other,
                        "program us/turn": own * 1e3 / TURNS if name in cells else own,
                        "ratio": measured,
                        "bound": 1.0,
                        "verdict": verdict(measured, 1.0) if name in cells else "OK (the callback fails)",
                    }
                )
    return rows


# Many turns


def resident_megabytes() -> float:
    pages = int(pathlib.Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


TURN = itertools.count(1)
SEEN: list[tuple[int, float]] = []
"""The arrays that live and the memory of the process, as a call of every so many turns has seen them."""


def long(effort: Effort) -> list[Row]:
    rows = []
    size = SIZES["4 kB"]
    every = effort.turns // 10
    for count in effort.counts:
        x = begin(count, size)
        spec = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if count > 1 else None)

        def look(x: Any) -> Any:
            here: Any = sys.modules["__main__"]  # what is captured is copied, modules are not
            if next(here.TURN) % every == 0:
                here.SEEN.append((len(jax.live_arrays()), here.resident_megabytes()))
            return x

        call = colocated.colocated_python(look, out_specs_fn=lambda x, spec=spec: spec)

        def step(carry: Any, i: Any, call: Any = call) -> Any:
            carry = tail(call(head(carry)), carry)
            return carry, carry[0]

        few, many = (pjit(lambda x, n=n: lax.scan(step, x, jnp.arange(n))) for n in (10, effort.turns))
        jax.block_until_ready(many(x))
        gc.collect()
        SEEN.clear()
        spent = elapsed(lambda many=many, x=x: many(x))
        plans = [f.plan(x) for f in (few, many)]
        arrays = [count for count, _ in SEEN]
        growth = max(memory for _, memory in SEEN) - SEEN[0][1]
        is_flat = arrays[-1] <= arrays[0] and growth <= MOST_GROWTH
        lines = [len(plan.source.splitlines()) for plan in plans]
        rows.append(
            {
                "turns": effort.turns,
                "devices": count,
                "us/turn": spent * 1e6 / effort.turns,
                "arrays alive, begin": arrays[0],
                "end": arrays[-1],
                "memory grows by MB": growth,
                "bound": MOST_GROWTH,
                "lines of the plan": lines[1],
                "of 10 turns": lines[0],
                "verdict": "OK" if is_flat and lines[0] == lines[1] else "MISSED",
            }
        )
    return rows


# Others


def others(effort: Effort) -> list[Row]:
    rows = []
    size = SIZES["4 kB"]
    for count in effort.counts:
        x = begin(count, size)
        body = bodies(count, size)[BETWEEN]

        def whiled(x: Any, body: Any = body) -> Any:
            return lax.while_loop(lambda state: state[0] < TURNS, lambda s: (s[0] + 1, body(s[1])), (0, x))[1]

        spec = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if count > 1 else None)
        call = colocated.colocated_python(identity, out_specs_fn=lambda x, spec=spec: spec)
        call.defvjp(lambda x, call=call: (call(x), x), lambda x, given: (given * jnp.cos(x),))

        def loss(x: Any, call: Any = call) -> Any:
            return jnp.mean(scanned(lambda carry: tail(call(head(carry)), carry))(x)[0])

        for what, fun in (("while_loop", whiled), ("grad of a scan, defvjp on devices", jax.grad(loss))):
            called = pjit(fun)
            times = turns({"program": lambda called=called, x=x: elapsed(lambda: called(x))}, 3 + effort.repeats // 3)
            rows.append({"loop": what, "devices": count, "program us/turn": ms(times, "program") * 1e3 / TURNS})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less of everything, in about a minute")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--only", action="append", help="only this part; may be given several times")
    parser.add_argument("--callback", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    report.set_up_devices(8)
    if options.callback:
        what, way, count, repeats = options.callback
        callback_cell(what, way, int(count), int(repeats))
        sys.stdout.flush()
        os._exit(0)  # an entry is what a call does, not what is left of it at exit
    effort = QUICK if options.quick else FULL
    parts: dict[str, Callable[[], list[Row]]] = {
        "scan": lambda: scan(effort),
        "callbacks": lambda: callbacks(effort),
        "long": lambda: long(effort),
        "others": lambda: others(effort),
    }
    report.report(
        {name: part() for name, part in parts.items() if not options.only or name in options.only},
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
