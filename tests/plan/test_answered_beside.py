"""Executables that wait for calls of one stream and make calls of others besides: all as by hand, whatever happens."""

import collections
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import partjit
from partjit import P, colocated, pjit
from partjit.colocated import colocated_python, colocated_python_class
from partjit.colocated.runtime import answering
from partjit.plan.ir.nodes import Fragment, Loop
from partjit.plan.passes import choose_emitted
from tests.colocated import rendezvous
from tests.effort import sample
from tests.plan.interrupted import Interrupt, interrupting, run_for_a_while

lax = jax.lax

pytestmark = pytest.mark.usefixtures("meeting")

NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
SPECS = [P(), P("x"), P("y"), P(("x", "y")), P(("y", "x"))]


def note(log, *values):
    rendezvous.logs[log].append(tuple(np.asarray(value).tolist() for value in values))


def noted(*names):
    colocated.wait(timeout=60)
    return [rendezvous.logs[name] for name in names]


def is_one_executable(plan):
    return [type(node) for node in plan.nodes] == [Fragment]


def kinds(plan):
    return [call.is_answered for call in plan.calls]


@colocated_python
def log(i, x) -> None:
    assert isinstance(x, jax.Array)
    note("log", i, x)


LOG = log.specialize(stream="beside")


@colocated_python(uses_jax=False, out_specs_fn=lambda i, x: x)
def measure(i, x):
    note("measure", i)
    return x + np.float32(1)


def fori(step, x, n):
    return lax.fori_loop(0, n, step, x)


def while_(step, x, n):
    return lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, step(s[0], s[1])), (jnp.int32(0), x))[1]


def scan(step, x, n):
    return lax.scan(lambda x, i: (step(i, x), None), x, jnp.arange(n))[0]


def branches(step, x, n):
    """As a loop whose calls are in a branch that is always chosen."""
    return lax.fori_loop(0, n, lambda i, x: lax.cond(i >= 0, step, lambda _, x: x, i, x), x)


def nested(step, x, n):
    return lax.fori_loop(0, n, lambda i, x: lax.fori_loop(i, i + 1, step, x), x)


@pytest.mark.soak
def test_values_and_calls_are_those_by_hand(mesh):
    """Whatever the loop, where the logger is in it, how arrays are sharded; a second logger is on a third stream."""
    seen = collections.Counter()
    loops = (fori, while_, scan, branches, nested)
    cases = itertools.product(loops, SPECS, (8, 1), ("before", "after"), (1, 2), (0, 4))
    for loop, spec, devices, where, loggers, n in sample([*cases], 17):
        on = mesh if devices == 8 else partjit.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("x", "y"))
        logs = [LOG, log.specialize(stream="third")][:loggers]

        def step(i, x, logs=logs, where=where):
            after = measure(i, x * 2)
            for own in logs:
                own(i, x if where == "before" else after)
            return after

        x = np.arange(16, dtype=np.float32).reshape(8, 2)
        given = jax.device_put(x, NamedSharding(on, spec))
        program = pjit(lambda x, step=step, loop=loop, n=n: loop(step, x, n), in_shardings=given.sharding)
        plan = program.plan(given)
        assert is_one_executable(plan) or not n, plan
        rendezvous.clear()
        result = program(given)
        expected = []
        for i in range(n):
            after = x * 2 + 1
            expected.append((i, (x if where == "before" else after).tolist()))
            x = after
        np.testing.assert_array_equal(result, x)
        made, measured = noted("log", "measure")
        assert measured == [(i,) for i in range(n)]
        if loggers == 1:
            assert made == expected
        else:  # on two streams, which overlap
            assert sorted(made) == sorted(expected * 2)
        seen[loop.__name__] += n > 0
        seen["sharded"] += devices == 8 and spec != P()
        seen["one"] += devices == 1
        seen["two loggers"] += loggers == 2
    assert min(seen.values()) > 1
    assert len(seen) == 8


@pytest.mark.parametrize("spec", [P(), P("x")])
def test_only_devices_that_have_something_hand_it_over(mesh, spec, monkeypatch):
    positions = []
    hand_over = answering.Answering.hand_over

    def counted(self, which, numbers, position, shards):
        positions.append(position)
        return hand_over(self, which, numbers, position, shards)

    monkeypatch.setattr(answering.Answering, "hand_over", counted)
    sharding = NamedSharding(mesh, spec)
    program = pjit(lambda x: fori(lambda i, x: LOG(i, x) or measure(i, x), x, 3), in_shardings=sharding)
    program(jnp.zeros(8))
    colocated.wait()
    holders = {0} if spec == P() else {device for device in range(8) if device % mesh.shape["y"] == 0}
    assert collections.Counter(positions) == dict.fromkeys(holders, 3)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_call_that_fails_ends_the_program_after_the_calls_before_it(mesh, devices):
    @colocated_python(uses_jax=False, out_specs_fn=lambda i, x: x)
    def fail_at_three(i, x):
        if i == 3:
            raise ValueError("three")
        return x

    def step(i, x):
        LOG(i, x)
        return fail_at_three(i, x) + 1

    specs = {"in_shardings": (NamedSharding(mesh, P("x")), None)} if devices == 8 else {}
    program = pjit(lambda x, n: lax.fori_loop(0, n, step, x), donate_argnums=0, **specs)
    for _ in range(2):
        rendezvous.clear()
        x = jnp.zeros(8) if devices == 1 else jax.device_put(jnp.zeros(8), NamedSharding(mesh, P("x")))
        assert is_one_executable(program.plan(x, jnp.int32(6)))
        with pytest.raises(ValueError, match="three"):
            program(x, jnp.int32(6))
        (made,) = noted("log")
        assert [i for i, _ in made] == [0, 1, 2, 3]
        assert not np.asarray(x).any(), "though it was donated"
        np.testing.assert_array_equal(program(x, jnp.int32(3)), np.full(8, 3))
        noted()


def test_a_logger_that_fails_does_not_end_the_program():
    @colocated_python(stream="beside")
    def fail_at_one(i) -> None:
        note("log", i)
        if i == 1:
            raise ValueError("one")

    program = pjit(lambda x: fori(lambda i, x: fail_at_one(i) or measure(i, x), x, 4))
    assert is_one_executable(program.plan(jnp.zeros(8)))
    np.testing.assert_array_equal(program(jnp.zeros(8)), np.full(8, 4))
    with pytest.raises(ValueError, match="one"):
        colocated.wait(timeout=60)
    assert rendezvous.logs["log"] == [(i,) for i in range(4)]


class Filter:
    """An object whose state calls of the program and of its logger change."""

    def __init__(self):
        self.state = 0.0

    def update(self, x):
        self.state += 1
        return np.float32(x + 1)

    def read(self):
        return np.float32(self.state)


FILTER = colocated_python_class(Filter, uses_jax=False, devices=jax.devices()[0])
FILTER.update = FILTER.update.specialize(out_specs=NUMBER)
FILTER.read = FILTER.read.specialize(out_specs=NUMBER)


@pytest.mark.parametrize("size", [1, 2, 128])
def test_a_logger_may_call_the_object_that_the_program_calls_also_where_its_stream_is_full(size):
    """The program has the place of its calls of the object meanwhile, and never waits for the logger in it."""
    with colocated.stream("full", size=size):
        pass
    filter_ = FILTER()

    @colocated_python(stream="full")
    def look(i) -> None:
        note("log", i, filter_.read() >= 0)

    def program(x):
        return lax.fori_loop(0, 5, lambda i, x: look(i) or filter_.update(x), x)

    program = pjit(program)
    assert is_one_executable(program.plan(jnp.float32(0)))
    colocated.wait(timeout=60)
    found = []
    threads = [threading.Thread(target=lambda: found.extend(float(program(0.0)) for _ in range(4))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [5.0] * 12
    (made,) = noted("log")
    assert sorted(made) == sorted((i, True) for i in range(5) for _ in range(12))


def test_a_call_may_wait_for_one_on_the_stream_of_the_logger():
    """Which is behind the calls of the program there, whose end the program waits for."""
    other = colocated_python(lambda i: note("log", "other") or 1.0, out_specs_fn=lambda i: NUMBER, stream="beside")

    @colocated_python(uses_jax=False, out_specs_fn=lambda i, x: x)
    def asking(i, x):
        thread = threading.Thread(target=lambda: note("other", float(other(np.int32(i)))))
        if i == 1:
            thread.start()
            thread.join(30)
            assert not thread.is_alive(), "the logger's stream is blocked"
        return x + np.float32(1)

    program = pjit(lambda x: fori(lambda i, x: LOG(i, x[0]) or asking(i, x), x, 3))
    assert is_one_executable(program.plan(jnp.zeros(8)))
    np.testing.assert_array_equal(program(jnp.zeros(8)), np.full(8, 3))
    made, others = noted("log", "other")
    assert made == [(0, 0.0), (1, 1.0), ("other",), (2, 2.0)]
    assert others == [(1.0,)]


def test_another_thread_ends_a_loop_on_the_stream_of_the_logger():
    going = colocated_python(
        lambda i: np.bool_(not rendezvous.has_happened("stop")), uses_jax=False, out_specs_fn=lambda i: np.bool_(True)
    )

    @colocated_python(stream="beside")
    def look(i) -> None:
        rendezvous.say("running")

    def program(n):
        return lax.while_loop(lambda i: going(i) & (i < 300_000), lambda i: look(i) or i + 1, n * 0)

    program = pjit(program)
    assert any(kinds(program.plan(jnp.int32(0))))

    def stop():
        rendezvous.hear("running")
        with colocated.stream("beside"):
            colocated_python(lambda i: rendezvous.say("stop"), out_specs_fn=lambda i: None)(jnp.int32(0))

    thread = threading.Thread(target=stop)
    thread.start()
    assert int(program(jnp.int32(0))) < 300_000, "until it was stopped"
    thread.join(30)


@pytest.mark.usefixtures("silent_collector")
@pytest.mark.parametrize("kind", [Interrupt, KeyboardInterrupt])
def test_an_interrupt_reaches_the_caller_and_leaves_the_streams_as_they_are(kind):
    program = pjit(lambda x, n: lax.fori_loop(0, n, lambda i, x: LOG(i, x[0]) or measure(i, x), x))
    x, once, often = jnp.zeros(8), jnp.int32(1), jnp.int32(100_000)
    assert is_one_executable(program.plan(x, once))
    program(x, once)

    with interrupting(kind):
        for _ in range(5):
            colocated.wait(timeout=60)
            rendezvous.clear()
            with pytest.raises((kind, jax.errors.JaxRuntimeError)):
                run_for_a_while(program, x, often)
            made, measured = noted("log", "measure")
            assert [i for i, _ in made] == [*range(len(made))]
            assert measured == [(i,) for i in range(len(measured))]
            assert len(measured) - 1 <= len(made) <= len(measured) + 1


@pytest.mark.parametrize("devices", [1, 8])
def test_calls_before_and_after_it_on_the_stream_of_the_logger_keep_their_order(mesh, devices):
    specs = {"in_shardings": NamedSharding(mesh, P())} if devices == 8 else {}
    program = pjit(lambda x: fori(lambda i, x: LOG(i, x[0]) or measure(i, x), x, 3), **specs)
    x = jnp.zeros(8) if devices == 1 else jax.device_put(jnp.zeros(8), NamedSharding(mesh, P()))
    assert is_one_executable(program.plan(x))
    for _ in range(5):
        LOG(-1, jnp.float32(-1))
        x = program(x)
        LOG(3, jnp.float32(3))
    (made,) = noted("log")
    assert [i for i, _ in made] == [-1, 0, 1, 2, 3] * 5


def test_a_program_in_a_call_on_the_stream_of_the_logger_makes_its_calls_there():
    program = pjit(lambda x: fori(lambda i, x: LOG(i, x[0]) or measure(i, x), x, 2))
    assert is_one_executable(program.plan(jnp.zeros(8)))

    @colocated_python(stream="beside", out_specs_fn=lambda x: x)
    def outer(x):
        note("log", "begins")
        x = program(x)
        note("log", "ends")
        return x

    for _ in range(3):
        rendezvous.clear()
        np.testing.assert_array_equal(outer(jnp.zeros(8)), np.full(8, 2))
        (made,) = noted("log")
        assert made == [("begins",), (0, 0.0), (1, 1.0), ("ends",)]


def test_on_the_stream_of_the_logger_all_calls_keep_their_order():
    """Then there is one stream only, and the logger may use jax: the host makes all calls."""
    program = pjit(lambda x: fori(lambda i, x: LOG(i, x[0]) or measure(i, x), x, 2))
    for stream in (None, "beside", "other"):
        with colocated.stream(stream):
            assert is_one_executable(program.plan(jnp.zeros(8))) == (stream != "beside")
            np.testing.assert_array_equal(program(jnp.zeros(8)), np.full(8, 2))
    made, measured = noted("log", "measure")
    assert made == [(0, 0.0), (1, 1.0)] * 3
    assert measured == [(0,), (1,)] * 3


@pytest.mark.parametrize("why", ["one stream", "two streams", "one object", "too many bytes"])
def test_what_is_left_to_the_host(why, monkeypatch):
    if why == "too many bytes":
        monkeypatch.setattr(choose_emitted, "MOST_BYTES_WAITING", 3 * 36 - 1)
    filter_ = FILTER()
    stream = None if why == "one stream" else "a"
    look = colocated_python(lambda i, x: None, out_specs_fn=lambda i, x: None, stream=stream)
    other = measure.specialize(stream="b")

    def step(i, x):
        look(i, x)
        x = measure(i, x)
        if why == "two streams":
            return other(i, x)
        if why == "one object":
            with colocated.stream("a"):
                filter_.update(x[0])
            return x + filter_.update(x[0])
        return x

    plan = pjit(lambda x: fori(step, x, 3)).plan(jnp.zeros(8))
    assert any(isinstance(node, Loop) for node in plan.nodes)
    assert not any(kinds(plan))
    if why == "too many bytes":
        monkeypatch.setattr(choose_emitted, "MOST_BYTES_WAITING", 3 * 36)
        assert is_one_executable(pjit(lambda x: fori(step, x, 3)).plan(jnp.zeros(8)))


def test_a_recording_has_all_calls():
    program = pjit(lambda x: fori(lambda i, x: LOG(i, x[0]) or measure(i, x), x, 3))
    program(jnp.zeros(8))
    colocated.wait(timeout=60)
    with partjit.record() as recorded:
        program(jnp.zeros(8))
    names = collections.Counter(span.name for span in recorded.spans if span.name in {"log", "measure"})
    assert names == {"log": 3, "measure": 3}
