"""Calls of programs that were brief so far: whoever waits for one runs it, once, in its turn."""

import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import colocated, pjit
from partjit.colocated import colocated_python, colocated_python_class
from partjit.colocated.runtime import brief, scheduler
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

scalar = jax.ShapeDtypeStruct((), np.float32)


class Scale:
    """Has a state, so that order and number of its calls show."""

    def __init__(self):
        self.calls = 0

    def next(self, x):
        self.calls += 1
        rendezvous.logs["threads"].append(threading.get_ident())
        if float(x) < 0:
            raise ValueError("negative")
        return np.float32(self.calls)


def of_object():
    return colocated_python_class(Scale)().next.specialize(out_specs=scalar)


def of_function():
    scale = Scale()
    return colocated_python(lambda x: np.float32(len(rendezvous.logs["threads"]) + 0 * scale.next(x)), out_specs=scalar)


def shown(program):
    """The program, whose calls were brief often enough; its next one is the 21st."""
    for _ in range(20):
        jax.block_until_ready(program(jnp.float32(1)))
    rendezvous.logs["threads"].clear()
    return program


@pytest.mark.parametrize("made", [of_object, of_function])
def test_whoever_waits_runs_it(made):
    call = made()
    program = shown(pjit(lambda x: (x + 1, call(x))))
    found = []
    for _ in range(50):
        found.append(float(program(jnp.float32(1))[1]))
        time.sleep(0)
    assert found == sorted(found)
    assert len({*found}) == 50, "each call was made once"
    assert threading.get_ident() in rendezvous.logs["threads"], "nobody else was quicker each time"


@pytest.mark.parametrize("made", [of_object, of_function])
def test_those_that_nobody_waits_for_are_made_soon(made):
    call = made()
    program = shown(pjit(lambda x: (x + 1, call(x))))
    kept = [program(jnp.float32(1)) for _ in range(30)]
    deadline = time.monotonic() + 30
    while len(rendezvous.logs["threads"]) < 30 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(rendezvous.logs["threads"]) == 30
    assert threading.get_ident() not in rendezvous.logs["threads"]
    values = [float(value) for _, value in kept]
    assert values == sorted(values)


def test_each_has_a_whole_moment_in_which_its_caller_may_run_it(monkeypatch):
    """The thread that looks now and then starts none that has come since it looked, nor one that somebody runs."""

    class Waiting:
        claimant = None

    made = [Waiting() for _ in range(6)]
    sleeps, started = [], {}

    def sleep(seconds):
        sleeps.append(len(sleeps))
        for call in made[2 * len(sleeps) : 2 * len(sleeps) + 2]:
            brief.start_soon(call, start)
        if len(sleeps) == 1:
            made[3].claimant = object()

    def start(call):
        started[made.index(call)] = len(sleeps)

    monkeypatch.setattr(brief, "time", types.SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(brief, "threads", types.SimpleNamespace(start=lambda job: None))
    for call in made[:2]:
        brief.start_soon(call, start)
    brief._watch()
    assert started == {0: 2, 1: 2, 2: 2, 4: 3, 5: 3}, "3 was run by its caller"
    assert not brief._waiting
    assert not brief._watching


def test_several_threads_that_wait_run_it_once():
    call = of_object()
    program = shown(pjit(lambda x: (x + 1, call(x))))
    for _ in range(30):
        value, found = program(jnp.float32(1))[1], []
        threads = [threading.Thread(target=lambda v=value, f=found: f.append(float(v))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(found) == 4
        assert len({*found}) == 1
    assert len(rendezvous.logs["threads"]) == 30


def test_it_fails_as_elsewhere_and_the_next_one_does_not():
    call = of_object()
    program = shown(pjit(lambda x: (x + 1, call(x))))
    for _ in range(10):
        failed, good = program(jnp.float32(-1))[1], program(jnp.float32(1))[1]
        with pytest.raises(ValueError, match="negative") as info:
            float(failed)
        assert "This happened in the colocated call of 'Scale.next'" in info.value.__notes__[0]
        assert float(good) > 0
    colocated.wait(timeout=60)


def test_what_comes_before_it_is_waited_for():
    """The last of several is not first in its stream: those before it run before, wherever."""
    call = of_object()
    program = shown(pjit(lambda x: (x + 1, call(x))))
    for _ in range(20):
        values = [program(jnp.float32(1))[1] for _ in range(5)]
        last = float(values[-1])
        assert [float(value) for value in values] == [last - 4, last - 3, last - 2, last - 1, last]


def test_a_limited_wait_runs_nothing():
    call = of_object()
    program = shown(pjit(lambda x: (x + 1, call(x))))
    for _ in range(10):
        value = program(jnp.float32(1))[1]
        value.ends_within(10.0)
        assert value.is_ready()
    assert threading.get_ident() not in rendezvous.logs["threads"]


def test_nothing_is_left_to_look_for():
    call = of_object()
    program = shown(pjit(lambda x: (x + 1, call(x))))
    for _ in range(5):
        float(program(jnp.float32(1))[1])
    deadline = time.monotonic() + 30
    while brief._watching and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not brief._waiting
    assert not brief._watching
    assert not [call for call in scheduler.lanes.unfinished() if call.is_brief]


def test_calls_from_numbers_to_numbers_come_before_all_of_the_devices_work(mesh):
    """Unless the devices have much to do: a schedule takes less than it takes to go on without it."""
    rate = colocated_python(lambda step: np.float32(0.1 / (1 + int(step))), out_specs=scalar)
    batch = colocated_python(lambda step: np.ones(8, np.float32), out_specs=jax.ShapeDtypeStruct((8,), np.float32))

    def update(call):
        return lambda w, i: w - jnp.mean(call(i)) * jnp.tanh(w @ w)

    small, large = (jax.ShapeDtypeStruct((n, n), np.float32) for n in (128, 1024))
    step = jax.ShapeDtypeStruct((), np.int32)
    fragments = [len(pjit(update(rate)).trace(w, step).plan.fragments) for w in (small, large)]
    assert fragments == [1, 2]
    assert len(pjit(update(batch)).trace(small, step).plan.fragments) == 2
    inline = colocated_python(lambda step: np.float32(step), out_specs=scalar, mode="inline")
    assert len(pjit(update(inline)).trace(large, step).plan.fragments) == 1
    w = np.eye(128, dtype=np.float32)
    with mesh:
        np.testing.assert_allclose(pjit(update(rate))(w, 1), w - 0.05 * np.tanh(w), rtol=1e-6)
