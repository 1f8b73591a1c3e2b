"""Groups of processes that run a program with calls over and over, until one of them ends or stalls.

    python deaths.py SEED TRIALS COUNT

For each trial it prints a line of JSON: how the victim ended, and what the others saw how many seconds later. The
processes of a trial are forked from this one, which has imported everything and used no device.
"""

import contextlib
import gc
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import partjit
from partjit import P, pjit
from partjit.colocated import colocated_python

STALL_SECONDS = 3.0
BEGIN_SECONDS = 120.0
"""Within which a group has begun: a machine that does something else as well takes its time to compile."""
LIMIT_SECONDS = 40.0
"""Within which the others have ended once the victim has; what takes longer hangs."""
GROUPS = 4
"""How many are started for a trial, if none of them begins."""
KINDS = ("exit", "kill", "stop", "terminate", "interrupt")

calls = 0
on_call: Callable[[], object] | None = None


class NotBegunError(Exception):
    """A group did not come as far as its victim; a busy machine may let a process come late to the first program."""


def host(x: jax.Array) -> jax.Array:
    main = sys.modules["__main__"]
    main.calls += 1
    if main.on_call is not None:
        main.on_call()
    return x


inline = colocated_python(host, out_specs_fn=lambda x: x, mode="inline")
stream = colocated_python(host, out_specs_fn=lambda x: x, stream="s", mode="stream")


def straight(x):
    y = inline(x + jnp.sum(x))
    return inline(y * 0.5) + jnp.sum(y)


def in_a_loop(x):
    return jax.lax.fori_loop(0, 5, lambda _, v: inline(v + jnp.sum(v) * 0.01), x)


def until_large(x):
    return jax.lax.while_loop(lambda v: jnp.sum(v) < 1e5, lambda v: inline(v * 2 + jnp.sum(v)), x)


def on_a_stream(x):
    first, y = stream(x + 1), jnp.sum(x * x)
    return first + y + stream(x + 2)


def run(
    number: int, count: int, address: str, function: Callable, ends: Callable[[], object], say: Callable, end: Callable
) -> None:
    """What a process of a trial does."""
    global on_call
    os.environ["PARTJIT_AGREEMENT_TIMEOUT"] = str(STALL_SECONDS)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a suite in the background ignores
    gc.callbacks.clear()  # those of jax: an interrupt that arrives in one is lost
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, number)
    mesh = partjit.Mesh(np.array(jax.devices()), "x")
    sharding = jax.NamedSharding(mesh, P("x"))
    x = jax.make_array_from_callback((16,), sharding, lambda index: np.arange(16, dtype=np.float32)[index])
    with mesh:
        program = pjit(function, in_shardings=P("x"), out_shardings=P("x"))
        try:
            program(x)
        except BaseException as error:
            say(f"has not begun: {type(error).__name__}: {error}")
            os._exit(9)
        ends()
        try:
            while True:
                program(x)
        except BaseException as error:
            say(f"{type(error).__name__}: {error}")
    end()
    os._exit(0)


def ending(kind: str, delay: float, at: int, say: Callable[[str], object]) -> Callable[[], object]:
    """What lets a process end, some time or calls later."""
    numbers = {"kill": "SIGKILL", "stop": "SIGSTOP", "terminate": "SIGTERM", "interrupt": "SIGINT"}

    def end() -> None:
        say("ends")
        os.kill(os.getpid(), getattr(signal, numbers[kind]))

    def begin() -> None:
        global on_call
        if kind == "exit":
            last = calls + at
            on_call = lambda: calls < last or (say("ends"), os._exit(7))  # noqa: E731
        else:
            threading.Timer(delay, end).start()

    return begin


def trial(draw: random.Random, kind: str, count: int) -> dict[str, object]:
    """One group of processes, of which one ends: what the others saw how many seconds later, and when it had ended."""
    victim = draw.randrange(count)
    function = draw.choice([straight, in_a_loop, until_large, on_a_stream])
    delay, at = draw.uniform(0.0, 0.2), draw.randrange(1, 12)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    reading, writing = os.pipe()
    held, holding = os.pipe()
    processes = {}
    for number in range(count):
        process = os.fork()
        if not process:

            def say(text: str, number: int = number) -> None:
                os.write(writing, json.dumps([number, time.time(), text[:300]]).encode() + b"\n")

            def end(number: int = number) -> None:
                if number == 0:  # with its service JAX would end those that have not raised anything yet
                    os.read(held, 1)

            os.close(holding)
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                ends = ending(kind, delay, at, say) if number == victim else (lambda: None)
                run(number, count, address, function, ends, say, end)
            finally:
                os._exit(9)
        processes[process] = number
    os.close(writing)
    awaited = {*range(count)} - ({victim} if kind == "stop" else set())
    ended, said = ends_of(processes, awaited, victim, reading, lambda: os.write(holding, b"!"))
    for descriptor in (reading, held, holding):
        os.close(descriptor)
    for process, number in processes.items():
        if number not in ended:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    begun = next((at for number, at, what in said if number == victim and what == "ends"), None)
    if begun is None:
        raise NotBegunError(f"process {victim} of {count} was not to end within {BEGIN_SECONDS:g} s: {said}, {ended}")
    seen, own = [], []
    for number in awaited:
        at, what = next(((at, what) for n, at, what in said if n == number and what != "ends"), (0.0, ""))
        if not what:
            at, what = (ended[number][0], f"exit code {ended[number][1]}") if number in ended else (begun, "hangs")
        (own if number == victim else seen).append((what, at - begun))
    return {"kind": kind, "victim": victim, "program": function.__name__, "seen": seen, "own": own}


def ends_of(
    processes: dict[int, int], awaited: set[int], victim: int, reading: int, let_go: Callable[[], object]
) -> tuple[dict[int, tuple[float, int]], list[tuple[int, float, str]]]:
    """When processes have ended, and their exit codes, and what they said; those that hang are left out.

    Process 0 is let go when all others have ended.
    """
    ended: dict[int, tuple[float, int]] = {}
    said, begun, is_held = b"", False, True
    deadline = time.time() + BEGIN_SECONDS
    os.set_blocking(reading, False)
    while awaited - ended.keys() and time.time() < deadline:
        with contextlib.suppress(BlockingIOError):
            said += os.read(reading, 2**16)
        if not begun and any(number == victim and what == "ends" for number, _, what in _lines(said)):
            begun = True
            deadline = time.time() + LIMIT_SECONDS
        if is_held and not awaited - {0} - ended.keys():
            let_go()
            is_held = False
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            ended[processes[process]] = time.time(), os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.01)
    with contextlib.suppress(BlockingIOError):
        said += os.read(reading, 2**16)
    return ended, _lines(said)


def _lines(said: bytes) -> list[tuple[int, float, str]]:
    return [json.loads(line) for line in said.splitlines(keepends=True) if line.endswith(b"\n")]


def main() -> None:
    draw = random.Random(int(sys.argv[1]))
    for i in range(int(sys.argv[2])):
        for left in reversed(range(GROUPS)):
            try:
                found = trial(draw, KINDS[i % len(KINDS)], int(sys.argv[3]))
                break
            except NotBegunError as error:
                if not left:
                    raise
                print(error, file=sys.stderr, flush=True)
        print(json.dumps(found), flush=True)


main()
