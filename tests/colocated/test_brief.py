"""Calls of programs that were brief so far: whoever waits for one runs it, once and in its turn, or who makes it."""

import asyncio
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import colocated, pjit
from partjit.colocated import cheapness, colocated_python, colocated_python_class, readiness
from partjit.colocated.runtime import brief, scheduler, soon
from partjit.plan import pipeline
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

scalar = jax.ShapeDtypeStruct((), np.float32)


@pytest.fixture(autouse=True)
def are_left(request, monkeypatch):
    """Brief calls are left to whoever waits for them, though what is before them takes little; not with `at_once`."""
    monkeypatch.setattr(cheapness, "_CHEAP_SECONDS", 2e-2)  # on a machine that does much else, too
    if "at_once" not in request.fixturenames:
        monkeypatch.setattr(pipeline, "makes_brief_calls", lambda nodes: False)


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


def test_the_wait_for_arguments_does_not_make_it_long(monkeypatch):
    """Whoever waits for such a call runs it; outside of programs its caller, who need not wait, does not."""
    started = []
    monkeypatch.setattr(brief, "start_soon", lambda call, start: started.append(call))  # nobody else runs it
    rendezvous.clear()

    def told(x):
        rendezvous.logs["threads"].append(threading.get_ident())
        return np.float32(x)

    call = colocated_python(told, arrays="numpy", out_specs=scalar)
    count, seconds = 50, 0.0
    while seconds < 0.04:  # twice what is cheap
        count *= 2
        slow = jax.jit(lambda x, n=count: jax.lax.fori_loop(0, n, lambda _, x: jnp.sin(x @ x), x).sum())
        slow(jnp.ones((128, 128))).block_until_ready()
        began = time.perf_counter()
        slow(jnp.ones((128, 128))).block_until_ready()
        seconds = time.perf_counter() - began
    x = jnp.ones((128, 128))
    program = pjit(lambda x: (x + 1, call(x)))
    for _ in range(100):  # fewer than 30, unless the machine does much else
        jax.block_until_ready(program(slow(x)))
        if len(started) == 15:
            break
    rendezvous.logs["threads"].clear()
    started.clear()
    for _ in range(10):
        jax.block_until_ready(program(slow(x))[1])
    assert rendezvous.logs["threads"] == [threading.get_ident()] * len(started)
    assert len(started) == 10
    eager = colocated_python(told, arrays="numpy", out_specs=scalar)
    for _ in range(15):
        jax.block_until_ready(eager(slow(x)))
    rendezvous.logs["threads"].clear()
    for _ in range(5):
        jax.block_until_ready(eager(slow(x)))
    assert threading.get_ident() not in rendezvous.logs["threads"]


# Where what comes before takes little


@pytest.fixture
def at_once():
    """Brief calls are made at once, as in programs that take so little."""


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("made", [of_object, of_function])
def test_after_little_the_caller_makes_it_at_once(made):
    call = made()
    program = shown(pjit(lambda x: (x + 1, call(x))))
    assert program.plan(jnp.float32(1)).makes_brief_calls
    found = [program(jnp.float32(i))[1] for i in range(20)]
    assert {*rendezvous.logs["threads"]} == {threading.get_ident()}
    assert len(rendezvous.logs["threads"]) == 20, "before anybody waits"
    values = [float(value) for value in found]
    assert values == [values[0] + i for i in range(20)]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("made", [of_object, of_function])
def test_what_it_raises_is_raised_where_its_result_is_used(made):
    """As for one on a thread: the other results are there, and it is reported if nobody uses the result."""
    call = made()
    program = shown(pjit(lambda x: (x + 1, call(x)), donate_argnums=0))
    total, failed = program(jnp.float32(-2))
    assert float(total) == -1
    for _ in range(2):
        with pytest.raises(ValueError, match="negative") as caught:
            float(failed)
    assert any("This happened in the colocated call of" in note for note in caught.value.__notes__)
    with pytest.raises(ValueError, match="negative"):  # given to the next step
        pjit(lambda x: x + 1)(failed)
    total, failed = program(jnp.float32(-3))
    del failed
    with pytest.raises(ValueError, match="negative"):
        colocated.wait()
    assert float(program(jnp.float32(1))[0]) == 2


@pytest.mark.usefixtures("at_once")
def test_one_that_has_become_slow_is_run_by_a_thread_again():
    rendezvous.clear()

    def nap(x):
        rendezvous.logs["threads"].append(threading.get_ident())
        time.sleep(0.03 * len(rendezvous.logs["slow"]))
        return np.float32(x)

    call = colocated_python(nap, arrays="numpy", out_specs=scalar)
    program = shown(pjit(lambda x: (x + 1, call(x))))
    program(jnp.float32(1))
    assert rendezvous.logs["threads"] == [threading.get_ident()]
    rendezvous.logs["slow"].append(1)
    for _ in range(3):
        jax.block_until_ready(program(jnp.float32(1)))
    assert rendezvous.logs["threads"][1] == threading.get_ident(), "nobody knows before"
    assert threading.get_ident() not in rendezvous.logs["threads"][2:]


@pytest.mark.usefixtures("at_once")
def test_it_waits_for_its_turn():
    """In a stream that has calls, and behind those of its object."""
    call = of_object()
    program = shown(pjit(lambda x: (x + 1, call(x))))

    def waiting(x):
        rendezvous.hear("go")
        return x

    gate = colocated_python(waiting, mode="stream", out_specs_fn=lambda x: x)
    first = gate(jnp.float32(1))
    value = program(jnp.float32(1))[1]
    assert not value.is_ready()
    assert not rendezvous.logs["threads"]
    rendezvous.say("go")
    assert float(value) == 21
    assert float(first) == 1
    assert float(program(jnp.float32(1))[1]) == 22


@pytest.mark.usefixtures("at_once")
def test_only_after_little_and_on_one_cpu(mesh):
    call = of_function()
    large = jnp.ones((256, 256))
    assert not pjit(lambda x: call((x @ x).sum())).plan(large).makes_brief_calls
    looped = pjit(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: call(x + 1), x))
    assert not looped.plan(jnp.float32(1)).makes_brief_calls
    with mesh:
        sharded = pjit(lambda x: call(x.sum()), in_shardings=jax.sharding.PartitionSpec("x"))
        assert not sharded.plan(jnp.ones(8)).makes_brief_calls


# Without results


class Log:
    """Notes the threads in which it is called, and with what."""

    def note(self, x):
        rendezvous.logs["threads"].append(threading.get_ident())
        rendezvous.logs["values"].append(float(np.asarray(x).ravel()[0]))
        if rendezvous.logs["values"][-1] < 0:
            raise rendezvous.error("negative")


def log_of_object(**options):
    return colocated_python_class(Log)().note.specialize(out_specs_fn=lambda x: None, **options)


def log_of_function(**options):
    log = Log()
    return colocated_python(lambda x: log.note(x), out_specs_fn=lambda x: None, **options)


def shown_alone(program, *args):
    """The program, whose calls were brief often enough."""
    for _ in range(20):
        jax.block_until_ready(program(*args))
        colocated.wait()
    for log in rendezvous.logs.values():
        log.clear()
    return program


@pytest.mark.parametrize("made", [log_of_object, log_of_function])
@pytest.mark.parametrize("count", [1, 8])
def test_one_without_results_is_made_by_its_caller_if_its_arguments_are_there(made, count, mesh):
    call = made()

    def step(x, i):
        call(i)
        return x @ x

    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")) if count > 1 else jax.devices()[0]
    x = jax.device_put(jnp.ones((8, 8)), spec)
    program = shown_alone(pjit(step), x, 0)
    for i in range(20):
        x = program(x, i)
        assert rendezvous.logs["values"] == [*range(i + 1)]
    assert {*rendezvous.logs["threads"]} == {threading.get_ident()}


@pytest.mark.parametrize("made", [log_of_object, log_of_function])
def test_the_devices_are_not_waited_for(made):
    """Nor are calls made before those whose arguments are not there yet."""
    call = made()

    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 200, lambda _, x: jnp.sin(x @ x), x)

    def step(x, y):
        call(x)
        call(y)
        return x + 1

    here, x = jnp.zeros(()), jnp.ones((256, 256))
    program = shown_alone(pjit(step), x, here)
    for _ in range(5):
        program(slow(x), here)
        colocated.wait()
    assert threading.get_ident() not in rendezvous.logs["threads"]
    assert rendezvous.logs["values"][1::2] == [0.0] * 5


@pytest.mark.parametrize("made", [log_of_object, log_of_function])
def test_a_moment_is_waited_for_them_where_calls_are_wanted_one_by_one(made, monkeypatch):
    monkeypatch.setattr(readiness, "_MOMENT", 60.0)
    monkeypatch.setattr(soon, "are_one_by_one", lambda lane: rendezvous.logs["one by one"] == [True])
    call = made()

    def step(x):
        call(jnp.sum(jnp.sin(x @ x)))
        return x

    x = jnp.zeros((512, 512))
    program = shown_alone(pjit(step), x)
    rendezvous.logs["one by one"].append(True)
    for i in range(5):
        program(x)
        assert rendezvous.logs["threads"] == [threading.get_ident()] * (i + 1)


def test_where_moments_are_in_vain_few_are_waited_for(monkeypatch):
    """The second one after one call without, then after three, seven ..."""

    class Never:
        def is_ready(self):
            asked.append(1)
            return False

        def is_deleted(self):
            return False

    monkeypatch.setattr(readiness, "ArrayImpl", Never)
    monkeypatch.setattr(readiness, "_MOMENT", 1e-3)
    asked, waited, found = [], [], readiness.Readiness()
    for i in range(30):
        asked.clear()
        assert not found.of([Never()], may_wait=True)
        if len(asked) > 1:
            waited.append(i)
    assert waited == [0, 2, 6, 14]


@pytest.mark.parametrize("error", [ValueError, SystemExit, asyncio.CancelledError])
@pytest.mark.parametrize("made", [log_of_object, log_of_function])
def test_what_one_without_results_raises_is_raised_by_wait(made, error, monkeypatch):
    monkeypatch.setattr(rendezvous, "error", error, raising=False)
    call = made()

    def step(x, i):
        call(i)
        return x + 1

    program = shown_alone(pjit(step, donate_argnums=0), np.float32(1), 0)
    for _ in range(3):
        assert float(program(jnp.float32(2), -1)) == 3
        with pytest.raises(error, match="negative") as caught:
            colocated.wait()
        assert any("This happened in the colocated call of" in note for note in caught.value.__notes__)
        assert float(program(jnp.float32(3), 1)) == 4
        colocated.wait()
    assert rendezvous.logs["values"] == [-1, 1] * 3
    assert {*rendezvous.logs["threads"]} == {threading.get_ident()}


def test_one_without_results_waits_for_its_turn():
    call = log_of_object()
    program = shown_alone(pjit(lambda x: (call(x), x + 1)[1]), jnp.float32(1))

    def waiting(x):
        rendezvous.hear("go")
        return x

    gate = colocated_python(waiting, mode="stream", out_specs_fn=lambda x: x)
    gate(jnp.float32(1))
    assert float(program(jnp.float32(1))) == 2
    assert not rendezvous.logs["values"]
    rendezvous.say("go")
    colocated.wait()
    assert rendezvous.logs["values"] == [1]
    assert threading.get_ident() not in rendezvous.logs["threads"]


@pytest.mark.parametrize("options", [{"mode": "stream"}, {"stream": "named"}])
def test_one_that_asks_for_a_thread_has_it(options):
    call = log_of_object(**options)
    program = shown_alone(pjit(lambda x: (call(x), x + 1)[1]), jnp.float32(1))
    for _ in range(5):
        program(jnp.float32(1))
    colocated.wait()
    assert len(rendezvous.logs["threads"]) == 5
    assert threading.get_ident() not in rendezvous.logs["threads"]
