"""Many calls leave nothing behind: no threads, no memory, no arrays.

The soak profile (`PARTJIT_PROFILE=soak`) makes 100 000 of them.
"""

import gc
import os
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

from partjit import colocated
from partjit.colocated import colocated_python, colocated_python_class
from partjit.colocated.runtime import lanes

pytestmark = [pytest.mark.usefixtures("new_garbage"), pytest.mark.soak]

CALLS = 100_000 if os.environ.get("PARTJIT_PROFILE") == "soak" else 200
one = jnp.float32(1)


@colocated_python_class
class Total:
    def __init__(self):
        self.total = 0.0

    def add(self, x):
        self.total += float(x)
        return jnp.float32(self.total)


def streams():
    f = colocated_python(lambda x: x + 1, mode="stream", out_specs_fn=lambda x: x)
    g = colocated_python(lambda x: x + 1, stream="soak", out_specs_fn=lambda x: x)
    return lambda: g(f(one))


def fire_and_forget():
    f = colocated_python(lambda x: None, mode="stream", out_specs_fn=lambda x: None)
    return lambda: f(one)


def nested():
    inner = colocated_python(lambda x: x + 1, mode="stream", out_specs_fn=lambda x: x)
    outer = colocated_python(lambda x: inner(x), mode="stream", out_specs_fn=lambda x: x)
    return lambda: outer(one)


def failures():
    f = colocated_python(lambda x: {}[0], mode="stream", out_specs_fn=lambda x: x)

    def call():
        y = f(one)
        with pytest.raises(KeyError):
            y.block_until_ready()

    return call


def objects():
    def call():
        total = Total()
        total.add(one)
        total.add(one)

    return call


def threads():
    f = colocated_python(lambda x: x + 1, out_specs_fn=lambda x: x)

    def call():
        thread = threading.Thread(target=lambda: f(one).block_until_ready())
        thread.start()
        thread.join()

    return call


def anonymous_streams():
    f = colocated_python(lambda x: x + 1, out_specs_fn=lambda x: x)

    def call():
        with colocated.stream():
            f(one)

    return call


def settle():
    colocated.wait(timeout=60)
    for _ in range(3):
        gc.collect()


@pytest.mark.parametrize(
    "make",
    [streams, fire_and_forget, nested, failures, objects, threads, anonymous_streams],
    ids=lambda make: make.__name__,
)
def test_calls_leave_nothing_behind(make):
    call = make()
    count = CALLS if make in (streams, fire_and_forget) else CALLS // 10
    for _ in range(300):  # until streams were full, and Python has as much in reserve as it keeps
        call()
    settle()
    blocks, arrays, thread_count = sys.getallocatedblocks(), len(jax.live_arrays()), threading.active_count()
    most_threads = 0
    for _ in range(count):
        call()
        most_threads = max(most_threads, threading.active_count())
    settle()
    assert not lanes.unfinished()
    assert most_threads <= thread_count + 8
    assert len(jax.live_arrays()) <= arrays + 2
    assert sys.getallocatedblocks() - blocks < 300 + count // 10
