"""Programs whose executables run in the calling thread: nobody sees a difference, whatever happens meanwhile."""

import gc
import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import partjit
from partjit import P, colocated, pjit, results_so_far
from partjit._jax.host_thread import NOT_ENTERED
from partjit.colocated import colocated_python, colocated_python_class
from partjit.plan.passes import cost
from partjit.plan.run import host_thread
from tests.colocated import rendezvous

lax = jax.lax

pytestmark = pytest.mark.usefixtures("meeting")

X = np.linspace(0, 1, 576, dtype=np.float32).reshape(24, 24)


def halved(x):
    return np.asarray(x) * np.float32(0.5)


def of_jax(function=halved, **options):
    """A function that may use jax, so that no executable waits for it."""
    return colocated_python(function, **{"out_specs_fn": lambda x: x, **options})


def step(call):
    return lambda x: jnp.tanh(call(x @ x / 32)) + x / 2


def loop(call, count=5):
    return lambda x: lax.fori_loop(0, count, lambda _, x: step(call)(x), x)


def by_hand(x, count=1):
    for _ in range(count):
        x = np.tanh(x @ x / 32 * np.float32(0.5)) + x / 2
    return x


class Counter:
    def __init__(self):
        self.count = 0

    def few(self, x):
        self.count += 1
        return np.bool_(self.count % 4 != 0)

    def seen(self, x):
        self.count += 1
        return np.float32(self.count)


def in_while(few):
    def fun(x):
        def body(state):
            x = step(lambda x: x * 0.5)(state[1])
            return few(x), x

        return lax.while_loop(lambda state: state[0], body, (jnp.bool_(True), x))[1]

    return fun


def chosen(x):
    """The host reads from the devices which branch is chosen."""
    x = jnp.tanh(x @ x / 32)
    note = colocated_python(lambda x: rendezvous.say("noted"), out_specs_fn=lambda x: None, stream="notes")
    return lax.cond(x.sum() > 0, lambda x: (note(x), x * 2)[1], lambda x: x, x)


@pytest.mark.parametrize("donated", [(), 0])
def test_the_results_are_those_by_hand(donated):
    few = colocated_python_class(Counter)().few.specialize(out_specs=jax.ShapeDtypeStruct((), bool))
    cases = [(step(of_jax()), by_hand(X)), (loop(of_jax()), by_hand(X, 5)), (in_while(few), by_hand(X, 4))]
    for fun, expected in cases:
        program = pjit(fun, donate_argnums=donated)
        assert program.plan(jnp.asarray(X)).in_host_thread
        for _ in range(3):
            given = jnp.array(X)
            np.testing.assert_allclose(program(given), expected, rtol=1e-5, atol=1e-6)
            assert given.is_deleted() == (donated == 0)
            given = jnp.array(X)
            np.testing.assert_allclose(program.lower(given).compile()(given), expected, rtol=1e-5, atol=1e-6)
    assert pjit(chosen).plan(X).in_host_thread
    for _ in range(3):
        np.testing.assert_allclose(pjit(chosen)(X), 2 * np.tanh(X @ X / 32), rtol=1e-5)


def test_it_is_for_small_work_on_one_cpu_that_the_host_waits_for(mesh):
    x = jnp.asarray(X)
    assert pjit(step(of_jax())).plan(x).in_host_thread
    assert not pjit(step(of_jax(uses_jax=False))).plan(x).in_host_thread, "its executable waits"
    assert not pjit(lambda x: x @ x + of_jax(mode="stream")(x)).plan(x).in_host_thread, "nothing to wait for"
    assert not pjit(step(of_jax())).plan(x[:4, :4]).in_host_thread, "XLA runs that at once"
    large = jax.ShapeDtypeStruct((2048, 2048), np.float32)
    assert not pjit(step(of_jax())).trace(large).plan.in_host_thread
    with mesh:
        assert not pjit(step(of_jax()), in_shardings=P("x")).plan(x).in_host_thread


def test_a_product_of_a_small_layer_is_small_work():
    """65 536 operations take some microseconds, and to hand them over takes tens of these."""
    x = jnp.ones((32, 32))
    assert pjit(step(of_jax())).plan(x).in_host_thread
    assert pjit(lambda x: of_jax()(x @ x)).plan(x).makes_brief_calls
    large = jax.ShapeDtypeStruct((512, 512), np.float32)
    assert not pjit(lambda x: of_jax()(x @ x)).trace(large).plan.makes_brief_calls


def test_every_executable_and_call_is_in_the_calling_thread():
    where = of_jax(lambda x: (rendezvous.logs["threads"].append(threading.get_ident()), halved(x))[1])
    program = pjit(loop(where))
    program(X)
    program(X)
    assert rendezvous.logs["threads"] == [threading.get_ident()] * 10


def test_a_busy_device_changes_nothing():
    """What is under way on it may take long: the program does not wait for it."""
    started, ended = threading.Event(), threading.Event()

    def slow(x):
        started.set()
        ended.wait(30)
        return x

    other = jax.jit(lambda x: jax.pure_callback(slow, jax.ShapeDtypeStruct((24, 24), np.float32), x @ x) @ x)
    program = pjit(loop(of_jax()))
    program(X)
    thread = threading.Thread(target=lambda: other(jnp.asarray(X)).block_until_ready())
    thread.start()
    assert started.wait(30)
    for _ in range(3):
        np.testing.assert_allclose(program(X), by_hand(X, 5), rtol=1e-5)
    assert thread.is_alive()
    ended.set()
    thread.join(30)


def test_where_the_device_is_not_free_the_executables_are_dispatched_as_others_are(monkeypatch):
    tried = []

    def in_vain(*_):
        tried.append(1)
        return NOT_ENTERED

    program = pjit(loop(of_jax()))
    monkeypatch.setattr(host_thread, "call_in_host_thread", in_vain)
    for _ in range(200):
        result = program(X)
    np.testing.assert_allclose(result, by_hand(X, 5), rtol=1e-5)
    assert 5 < len(tried) < 20, "less often after several times in vain"
    monkeypatch.undo()
    for _ in range(100):
        np.testing.assert_allclose(program(X), by_hand(X, 5), rtol=1e-5)


def test_calls_may_use_jax_on_one_device_and_on_all_of_them(mesh):
    """Those of several devices meet in a collective, and run in threads of their own."""
    across = jax.jit(lambda x: x - x.mean() + jnp.sort(x, axis=0).sum(), in_shardings=NamedSharding(mesh, P("x", "y")))

    def function(x):
        rows = across(np.asarray(x))
        jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), np.float32), jnp.float32(1)).block_until_ready()
        return np.asarray(rows + jnp.tanh(jnp.asarray(np.asarray(x))).mean())

    expected = pjit(step(of_jax(function)))(X)  # which is compiled as it runs
    for _ in range(3):
        np.testing.assert_allclose(pjit(step(of_jax(function)))(X), expected, rtol=1e-6)


def test_programs_in_calls_and_in_threads_are_apart():
    inner = pjit(loop(of_jax()))
    outer = pjit(step(of_jax(lambda x: inner(x))))
    assert outer.plan(X).in_host_thread
    expected = np.tanh(by_hand(X @ X / 32, 5)) + X / 2
    found = {}

    def work(i):
        found[i] = [np.asarray(outer(X)) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    for results in found.values():
        for result in results:
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_a_call_that_fails_fails_as_elsewhere(monkeypatch):
    """The exception itself, with the line of the call; and what a loop had computed."""

    def fails(x):
        rendezvous.logs["calls"].append(1)
        if len(rendezvous.logs["calls"]) % 3 == 0:
            raise KeyError("the third")
        return halved(x)

    found = []
    for limit in (np.inf, 0):
        monkeypatch.setattr(cost, "FOR_HOST_THREAD_IN_LOOPS", limit)
        program = pjit(loop(of_jax(fails)), donate_argnums=0)
        assert program.plan(jnp.asarray(X)).in_host_thread == bool(limit)
        for _ in range(2):
            with pytest.raises(KeyError, match="the third") as info:
                program(jnp.asarray(X))
            carried = results_so_far(info.value)
            found.append((info.value.__notes__[0].partition(" made at ")[0], np.asarray(carried)))
            assert any("test_host_thread.py" in note for note in info.value.__notes__)
            rendezvous.logs["calls"].clear()
    np.testing.assert_allclose(found[0][1], by_hand(X, 2), rtol=1e-5)
    assert len({note for note, _ in found}) == 1
    for _, carried in found:
        np.testing.assert_array_equal(carried, found[0][1])


@pytest.mark.parametrize("text", ["INTERNAL: of the user", "of the user\nKeyboardInterrupt: quoted"])
def test_an_exception_that_reads_like_one_of_xla_is_the_users(text):
    def fails(x):
        raise ValueError(text)

    program = pjit(step(of_jax(fails)))
    assert program.plan(X).in_host_thread
    with pytest.raises(ValueError, match="of the user") as info:
        program(X)
    assert type(info.value) is ValueError


def test_nothing_keeps_what_it_was_called_with():
    program = pjit(step(of_jax()))
    program(X)
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(3):
        program(X)
    assert len(jax.live_arrays()) == before


class Interrupt(Exception):
    """What a signal handler raises."""


@pytest.mark.usefixtures("silent_collector")
@pytest.mark.parametrize("kind", [Interrupt, KeyboardInterrupt])
def test_an_interrupt_reaches_the_caller(kind):
    def handler(*_):
        raise kind("now")

    def function(x):
        if rendezvous.logs["interrupts"]:
            rendezvous.logs["interrupts"].clear()
            os.kill(os.getpid(), signal.SIGUSR1)
            for _ in range(1000):
                pass
        return halved(x)

    program = pjit(loop(of_jax(function)))
    program(X)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for _ in range(3):
            rendezvous.logs["interrupts"].append(1)
            with pytest.raises(kind, match="now"):
                program(X)
            np.testing.assert_allclose(program(X), by_hand(X, 5), rtol=1e-5)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_listeners_journals_and_settings_see_the_same(tmp_path):
    program, x = pjit(loop(of_jax())), jnp.asarray(X)
    expected = np.asarray(program(X))
    seen = []
    with partjit.events.subscribe(seen.append):
        np.testing.assert_array_equal(np.asarray(program(X)), expected)
    kinds = [type(event).__name__ for event in seen]
    assert kinds.count("CallFinished") == 5
    assert kinds.count("FragmentDispatched") >= 5
    for _ in range(2):
        with colocated.journal(tmp_path / "journal", results=True):
            np.testing.assert_array_equal(np.asarray(program(X)), expected)
    with jax.transfer_guard("disallow"):
        np.testing.assert_array_equal(np.asarray(program(x)), expected)
    with jax.debug_nans(True):
        np.testing.assert_array_equal(np.asarray(program(X)), expected)
        with pytest.raises(FloatingPointError):
            program(X * np.nan)
