"""Calls without results that the executables of other wrappers make: in order, exactly once, whatever happens."""

import contextlib
import functools
import gc
import random
import signal
import threading
import time
import weakref

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import NamedSharding

from partjit import P, colocated, pjit
from partjit.colocated import colocated_python, colocated_python_class
from partjit.colocated.runtime import arrivals
from partjit.colocated.under_jit import CallUnderJit
from tests.colocated import rendezvous
from tests.colocated.runtime.test_errors import run
from tests.effort import sample

lax = jax.lax

pytestmark = pytest.mark.usefixtures("meeting")


def nothing(*_):
    return None


def note(*values):
    rendezvous.logs["calls"].append(tuple(np.asarray(value).tolist() for value in values))


def logger(function=note, **options):
    return colocated_python(function, out_specs_fn=nothing, **options)


def calls():
    colocated.wait()
    return rendezvous.logs["calls"]


def alive():
    """What executables call, by its id."""
    gc.collect()
    return {id(found): found for found in gc.get_objects() if type(found) is CallUnderJit}


def over_8_devices():
    return NamedSharding(jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)), P("x"))


WRAPPERS = {
    "jax.jit": jax.jit,
    "jit of a jit": lambda f: jax.jit(lambda *xs: jax.jit(f)(*xs)),
    "a program in a jit": lambda f: jax.jit(pjit(f)),
    "eqx.filter_jit": lambda f: pytest.importorskip("equinox").filter_jit(f),
    "nnx.jit": lambda f: pytest.importorskip("flax.nnx").jit(f),
    "lower and compile": lambda f: lambda *xs: jax.jit(f).lower(*xs).compile()(*xs),
    "jax.lax.scan": lambda f: (
        lambda *xs: jax.tree.map(lambda ys: ys[0], lax.scan(lambda c, _: (c, f(*xs)), 0, None, length=1)[1])
    ),
    "jax.lax.cond": lambda f: lambda *xs: lax.cond(jnp.sum(xs[0]) > -1, f, lambda *_: _[0], *xs),
    "jax.lax.fori_loop": lambda f: lambda x: lax.fori_loop(0, 1, lambda _, x: f(x), x),
    "jax.lax.while_loop": lambda f: lambda x: lax.while_loop(lambda c: c[0], lambda c: (False, f(c[1])), (True, x))[1],
}


# Random programs


class Counter:
    def __init__(self, name):
        self.name, self.number = name, 0

    def count(self, k, x):
        self.number += 1
        rendezvous.logs[self.name].append((self.number, int(k), np.asarray(x).tolist()))


def random_block(rng, depth):
    """Steps on an array: a kind, a number, and blocks."""
    steps = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice(["log", "log", "add"] if depth == 0 else ["log", "log", "add", *LOOPS, "cond", *AROUND])
        blocks = [random_block(rng, depth - 1) for _ in range(2 if kind == "cond" else kind not in ("log", "add"))]
        steps.append((kind, rng.randrange(5), blocks))
    return steps


LOOPS = {
    "scan": lambda n, body, x: lax.scan(lambda x, _: (body(x), None), x, None, length=n)[0],
    "fori": lambda n, body, x: lax.fori_loop(0, n, lambda _, x: body(x), x),
    "while": lambda n, body, x: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, body(c[1])), (0, x))[1],
}
AROUND = {"jit": jax.jit, "checkpoint": jax.checkpoint, "inlined": lambda f: jax.jit(f, inline=True)}


def run_by_hand(steps, x, log):
    for kind, k, blocks in steps:
        if kind == "log":
            log(k, x)
        elif kind == "add":
            x = x + k
        elif kind == "cond":
            x = run_by_hand(blocks[int(x.sum()) % 2], x, log)
        else:
            for _ in range(k if kind in LOOPS else 1):
                x = run_by_hand(blocks[0], x, log)
    return x


def run_by_jax(steps, x, log):
    for kind, k, blocks in steps:
        bodies = [functools.partial(run_by_jax, block, log=log) for block in blocks]
        if kind == "log":
            log(k, x)
        elif kind == "add":
            x = x + k
        elif kind == "cond":
            x = lax.cond(jnp.sum(x) % 2 == 1, bodies[1], bodies[0], x)
        elif kind in LOOPS:
            x = LOOPS[kind](k, bodies[0], x)
        else:
            x = AROUND[kind](bodies[0])(x)
    return x


@pytest.mark.soak
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("seed", sample(range(20), 20))
def test_random_programs_make_the_calls_of_the_same_program_by_hand(wrapper, devices, seed):
    """Of three functions: on no stream, on a named one, and of an object whose calls are on two streams."""
    rng = random.Random(f"{wrapper} {devices} {seed}")
    steps = [("log", 4, []), *random_block(rng, 2), ("log", 3, [])]
    plain = logger(lambda k, x: rendezvous.logs["plain"].append((int(k), np.asarray(x).tolist())))
    named = logger(lambda k, x: rendezvous.logs["named"].append((int(k), np.asarray(x).tolist())), stream="named")
    kind = colocated_python_class(Counter)("of object")
    methods = [kind.count.specialize(out_specs_fn=nothing, stream=stream) for stream in ("one", "two")]

    def log(k, x):
        plain(k, x)
        named(k, x)
        methods[int(k) % 2](k, x)

    x = np.arange(8)
    given = jax.device_put(x, over_8_devices() if devices == 8 else jax.devices()[-1])
    program = WRAPPERS[wrapper](functools.partial(run_by_jax, steps, log=log))
    expected = []
    for _ in range(2):
        y = run_by_hand(steps, x, lambda k, x: expected.append((k, x.tolist())))
        assert program(given).tolist() == y.tolist()
    colocated.wait()
    assert rendezvous.logs["plain"] == rendezvous.logs["named"] == expected
    assert rendezvous.logs["of object"] == [(i + 1, *call) for i, call in enumerate(expected)]


# Transformations


def noted(log):
    def f(x):
        log(x)
        return jnp.sin(x) * x

    return f


def value(x):
    return np.sin(x) * x


def slope(x):
    return np.sin(x) + np.cos(x) * x


TRANSFORMATIONS = {  # with what they are given, and what they compute
    "grad": (jax.grad, 1.0, slope),
    "value_and_grad": (jax.value_and_grad, 1.0, lambda x: (value(x), slope(x))),
    "grad of grad": (lambda f: jax.grad(jax.grad(f)), 1.0, lambda x: 2 * np.cos(x) - np.sin(x) * x),
    "grad of checkpoint": (lambda f: jax.grad(jax.checkpoint(f)), 1.0, slope),
    "grad of scan": (
        lambda f: jax.grad(lambda x: lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=3)[0]),
        1.0,
        lambda x: 3 * slope(x),
    ),
    "jvp": (lambda f: lambda x: jax.jvp(f, (x,), (x,)), 1.0, lambda x: (value(x), slope(x) * x)),
    "linearize": (lambda f: lambda x: jax.linearize(f, x)[0], 1.0, value),
    "vmap": (jax.vmap, [1.0, 2.0, 3.0], value),
    "vmap of grad": (lambda f: jax.vmap(jax.grad(f)), [1.0, 2.0], slope),
    "grad of vmap": (lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()), [1.0, 2.0], slope),
    "vmap of vmap": (lambda f: jax.vmap(jax.vmap(f)), [[1.0, 2.0], [3.0, 4.0]], value),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations_make_the_calls_of_the_function_for_each_example(name):
    """`grad(jit(f))` and `jit(grad(f))`, as programs of pjit do; what is computed is as without a call."""
    transform, x, result = TRANSFORMATIONS[name]
    x = np.asarray(x, np.float32)
    for program in (jax.jit(transform(noted(logger()))), transform(jax.jit(noted(logger())))):
        for _ in range(2):
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), program(x), result(x))
            assert calls() == [(each,) for each in x.ravel().tolist()] * (3 if name == "grad of scan" else 1)
            rendezvous.logs.clear()


def test_a_batch_can_be_one_call():
    log = logger(vmap_method="expand_dims")
    jax.jit(jax.vmap(log))(jnp.arange(3))
    assert calls() == [([0, 1, 2],)]


def test_a_pure_call_without_results_is_left_out():
    jax.jit(noted(logger(pure=True)))(1.0)
    assert calls() == []


# Several devices


@pytest.mark.parametrize("wrapper", ["jit", "pmap"])
def test_in_a_shard_map_there_is_a_call_for_each_shard_which_knows_where_it_is(mesh, wrapper):
    def whole(i, shard):
        rendezvous.logs["shards"].append((*colocated.mesh_coordinates().values(), int(i), np.ravel(shard).tolist()))

    log = logger(whole)

    def body(x):
        lax.scan(lambda c, i: (c + 1, log(i, c)), x, jnp.arange(3))
        return x

    if wrapper == "pmap":
        jax.pmap(body)(np.arange(8))
        expected = [(d, i, [d + i]) for i in range(3) for d in range(8)]
    else:
        over = jax.shard_map(body, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"))
        jax.jit(over)(np.arange(8).reshape(4, 2))
        expected = [(x, y, i, [2 * x + y + i]) for i in range(3) for x in range(4) for y in range(2)]
    colocated.wait()
    made = rendezvous.logs["shards"]
    assert sorted(made) == sorted(expected)
    for where in {call[:-2] for call in expected}:  # the order of each device
        assert [call for call in made if call[:-2] == where] == [call for call in expected if call[:-2] == where]


def test_per_shard_calls_get_the_shards_that_in_specs_say():
    sharding = over_8_devices()
    log = logger(
        lambda shard: note(shard.device.id, shard.data),
        layout="per_shard",
        in_specs=((jax.ShapeDtypeStruct((8,), jnp.int32, sharding=sharding),), {}),
    )
    jax.jit(lambda x: log(x + 1))(jax.device_put(jnp.arange(8), sharding))
    assert calls() == [(d, [d + 1]) for d in range(8)]


def test_arguments_are_arrays_on_the_host_or_as_in_specs_say():
    sharding = over_8_devices()
    spec = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)

    def look(x):
        rendezvous.logs["seen"].append((type(x), getattr(x, "sharding", None), getattr(x, "committed", None)))

    x = jnp.ones(8, jnp.float32)
    for options in ({}, {"in_specs": ((spec,), {})}, {"arrays": "numpy"}):
        jax.jit(logger(look, **options))(x)
        colocated.wait()
    plain, as_specs, as_numpy = rendezvous.logs["seen"]
    assert plain[1:] == (jax.sharding.SingleDeviceSharding(jax.devices()[0]), False)
    assert as_specs[1:] == (sharding, True)
    assert as_numpy[0] is np.ndarray


def test_what_the_function_keeps_stays_as_it_is():
    log = logger(lambda x: rendezvous.logs["kept"].append(x), arrays="numpy")
    jax.jit(lambda x: lax.scan(lambda c, _: (c + 1, log(c)), x, None, length=20))(jnp.zeros(1000, jnp.int32))
    colocated.wait()
    assert [int(x[-1]) for x in rendezvous.logs["kept"]] == [*range(20)]
    assert not any(x.flags.writeable for x in rendezvous.logs["kept"])


def test_what_the_function_keeps_is_no_memory_of_xla():
    """jaxlib copies arguments before it calls Python; it need not."""
    before = alive()
    compiled = jax.jit(logger(lambda x: rendezvous.logs["kept"].append(x), arrays="numpy")).lower(1).compile()
    (own,) = [found for number, found in alive().items() if number not in before]
    memory = np.ones((), np.int32)
    own(memory.view())
    memory[...] = 2
    colocated.wait()
    assert rendezvous.logs["kept"] == [1]
    del compiled


# Failures, waiting, streams


def fail_at_three(i):
    note(i)
    if i == 3:
        raise ValueError("three")


@pytest.mark.parametrize("wrapper", ["jax.jit", "jax.lax.scan"])
@pytest.mark.parametrize("stream", [None, "own", "entered"])
def test_a_failure_is_raised_by_wait_and_names_the_call(wrapper, stream):
    log = logger(fail_at_three, stream="own" if stream == "own" else None)

    def f(x):
        with colocated.stream("entered"):
            lax.scan(lambda c, i: (c, log(i)), 0, jnp.arange(6))
        return x

    WRAPPERS[wrapper](f)(jnp.ones(1))
    with pytest.raises(ValueError, match="three") as caught:
        colocated.wait(stream)
    line = f.__code__.co_firstlineno + 2
    assert f"'fail_at_three' made at {__file__}:{line} in " in caught.value.__notes__[0]
    assert calls() == [(i,) for i in range(6)]  # the others are made, and wait raises nothing more


def test_waiting_waits_for_programs_that_still_run():
    slow = jax.jit(lambda x: lax.fori_loop(0, 100, lambda _, x: jnp.tanh(x @ x), x))
    log = logger(stream="of program")
    program = jax.jit(lambda x: log(x[0, 0] * 0))
    x = jnp.ones((300, 300))
    errors, started = [], 0
    while started < 20:
        program(slow(x))
        started += 1
        try:
            colocated.wait(timeout=0.001)
        except TimeoutError as error:
            errors.append(str(error))
            break
    assert errors == ["colocated.wait: after 0.001 s programs still run that make calls"]
    assert calls() == [(0,)] * started
    calls().clear()
    with contextlib.suppress(KeyError), colocated.stream("of program"):
        program(slow(x))
        raise KeyError
    assert rendezvous.logs["calls"] == [(0,)]
    with colocated.stream("of program"):
        program(slow(x))
    assert rendezvous.logs["calls"] == [(0,)] * 2


class Records:
    def __init__(self):
        self.values = []

    def add(self, value):
        self.values.append(float(value))

    def close(self):
        rendezvous.logs["closed with"].append(self.values)


@pytest.mark.parametrize("raises", [False, True])
def test_closing_an_object_waits_for_the_programs_that_call_it(raises):
    slow = jax.jit(lambda x: lax.fori_loop(0, 100, lambda _, x: jnp.tanh(x @ x), x))
    x = jnp.ones((300, 300))
    with contextlib.suppress(KeyError), colocated_python_class(Records)() as records:
        add = records.add.specialize(out_specs_fn=nothing)
        program = jax.jit(lambda x: lax.fori_loop(0, 5, lambda i, x: (add(i + 0 * x[0, 0]), x)[1], x))
        program(slow(x))
        if raises:
            raise KeyError
    assert rendezvous.logs["closed with"] == [[0, 1, 2, 3, 4]]
    colocated.wait()


def test_a_caller_does_not_wait_for_the_programs_before():
    slow = jax.jit(lambda x: lax.fori_loop(0, 100, lambda _, x: jnp.tanh(x @ x), x))
    program = jax.jit(logger(lambda k, x: note(k)))
    x = jnp.ones((300, 300))
    program(0, slow(x))
    calls().clear()
    for k in range(5):
        program(k, slow(x))
    assert len(rendezvous.logs["calls"]) < 3
    assert calls() == [(k,) for k in range(5)]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_program_that_fails_does_not_fail_others(is_late):
    log = logger()
    program = jax.jit(lambda k: (log(k), k + 1)[1])
    slow = jax.jit(lambda k: lax.fori_loop(0, 100, lambda _, x: jnp.tanh(x @ x), jnp.zeros((300, 300)))[0, 0] + k)

    def fail(_):
        raise ValueError("of a callback")

    rendezvous.programs["fail"] = fail

    @jax.jit
    def failing(k):
        jax.debug.callback(rendezvous.programs["fail"], k)
        log(-1)
        return k + 1

    for k in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError, match="of a callback"):
            failing(slow(k) if is_late else k).block_until_ready()
        assert program(k) == k + 1
    with contextlib.suppress(jax.errors.JaxRuntimeError, ExceptionGroup):
        jax.effects_barrier()
    assert [call for call in calls() if call != (-1,)] == [(0,), (1,), (2,)]


def test_effects_of_jax_keep_their_own_order():
    log = logger()
    logs = rendezvous.logs

    def iteration(c, i):
        log(i)
        io_callback(lambda i: logs["io"].append(int(i)), None, i, ordered=True)
        even = functools.partial(jax.debug.callback, lambda i: logs["even"].append(int(i)), i, ordered=True)
        lax.cond(i % 2 == 0, even, lambda: log(i + 100))
        return c, None

    program = jax.jit(lambda x: lax.scan(iteration, x, jnp.arange(4))[0])
    for _ in range(2):
        program(0)
    assert calls() == [(0,), (1,), (101,), (2,), (3,), (103,)] * 2
    jax.effects_barrier()
    assert (logs["io"], logs["even"]) == ([0, 1, 2, 3] * 2, [0, 2] * 2)


def test_programs_on_other_devices_take_turns():
    log = logger()
    program = jax.jit(lambda k: log(jnp.max(k)))
    places = [*jax.devices()[:3], over_8_devices()]
    for k in range(20):
        program(jax.device_put(np.full(8, k), places[k % 4]))
    assert calls() == [(k,) for k in range(20)]


def test_devices_do_not_wait_for_calls_even_if_their_stream_is_full():
    log = logger(lambda i: rendezvous.hear("the end") or note(i), stream="small")
    other = logger(lambda: rendezvous.logs["other"].append(1), stream="other")
    with colocated.stream("small", size=1):
        pass
    program = jax.jit(lambda x: lax.scan(lambda c, i: (c + 1, log(i)), x, jnp.arange(300))[0])
    log(-1)
    assert program(0) == 300
    jax.jit(other)()
    colocated.wait("other")
    assert rendezvous.logs["other"] == [1]
    assert not rendezvous.logs["calls"]
    rendezvous.say("the end")
    assert calls() == [(i,) for i in range(-1, 300)]


def test_calls_on_different_streams_overlap():
    first = logger(lambda: rendezvous.meet("both", 2), stream="first")
    second = logger(lambda: rendezvous.meet("both", 2), stream="second")
    jax.jit(lambda: (first(), second(), None)[2])()
    colocated.wait()


def test_a_call_between_two_programs_runs_between_theirs():
    log = logger(lambda i: rendezvous.hear("the start") or note(i), stream="shared")
    program = jax.jit(lambda x: lax.scan(lambda c, i: (c, log(c + i)), x, jnp.arange(3))[0])
    for k in (0, 10, 20):
        program(k)
        arrivals.settle(None)
        log(k + 5)
    rendezvous.say("the start")
    assert calls() == [(k + i,) for k in (0, 10, 20) for i in (0, 1, 2, 5)]


def test_devices_wait_for_calls_that_end_while_too_much_waits_for_them(monkeypatch):
    monkeypatch.setattr(arrivals, "MOST_BYTES_WAITING", 100)
    seen = []

    def slow(i):
        time.sleep(0.002)
        note(i)

    def watch(i):  # called in a thread of the devices
        seen.append(int(i) - len(rendezvous.logs["calls"]))

    log = logger(slow, arrays="numpy")

    def iteration(c, i):
        log(i)
        jax.debug.callback(watch, i)
        return c, None

    jax.jit(lambda x: lax.scan(iteration, x, jnp.arange(200))[0])(0)
    assert calls() == [(i,) for i in range(200)]
    assert len(seen) == 200
    assert max(seen) < 100 / 4 + 10  # ahead of the calls


def test_devices_do_not_wait_for_a_call_that_waits_for_them(monkeypatch):
    monkeypatch.setattr(arrivals, "MOST_BYTES_WAITING", 0)
    monkeypatch.setattr(arrivals, "_PATIENCE", 0.1)
    log = logger(lambda i: rendezvous.hear("the end") or note(i))
    program = jax.jit(lambda x: lax.scan(lambda c, i: (c + 1, log(i)), x, jnp.arange(3))[0])
    assert program(0) == 3
    rendezvous.say("the end")
    assert calls() == [(i,) for i in range(3)]


def test_calls_take_turns_with_others_of_their_stream():
    log = logger(stream="shared")
    program = jax.jit(lambda x: lax.scan(lambda c, i: (c + 1, log(i)), x, jnp.arange(3))[0])
    expected = []
    for k in range(20):
        program(0).block_until_ready()
        colocated.wait()
        log(100 + k)
        expected += [(0,), (1,), (2,), (100 + k,)]
    assert calls() == expected


def test_many_threads_run_one_compiled_function():
    log = logger()
    program = jax.jit(lambda x: lax.scan(lambda c, i: (c, log(c, i)), x, jnp.arange(10))[0])
    program(-1)
    calls().clear()

    def work(k):
        for _ in range(5):
            program(k)
        colocated.wait()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made = calls()
    for k in range(8):
        assert [call for call in made if call[0] == k] == [(k, i) for i in range(10)] * 5
    assert len(made) == 8 * 50


def test_a_function_may_run_the_program_that_calls_it():
    def again(x):
        note(x)
        if x > 0:
            rendezvous.programs["f"](x - 1)

    rendezvous.programs["f"] = jax.jit(logger(again))
    rendezvous.programs["f"](jnp.int32(3))
    deadline = time.monotonic() + 20
    while len(calls()) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert calls() == [(3,), (2,), (1,), (0,)]


class Interrupt(Exception):
    """What a signal handler raises."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may come in a finalizer of jax
@pytest.mark.parametrize("kind", [Interrupt, KeyboardInterrupt])
def test_an_interrupt_loses_and_repeats_no_call(kind):
    """It ends the program, as it does with jax's callbacks; what the devices have made until then is made once."""
    log = logger()
    program = jax.jit(lambda x: lax.scan(lambda c, i: (c + 1, log(i)), x, jnp.arange(3000))[0])
    program(0)
    colocated.wait()

    def interrupt(*_):
        raise kind

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(10):
            rendezvous.clear()
            with contextlib.suppress(kind, jax.errors.JaxRuntimeError):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.003)
                    program(0).block_until_ready()
                    time.sleep(0.1)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            made = calls()
            assert made == [(i,) for i in range(len(made))]
    finally:
        signal.signal(signal.SIGALRM, before)
    rendezvous.clear()
    program(0)
    assert calls() == [(i,) for i in range(3000)]


def test_a_call_has_the_settings_of_its_program_and_no_context():
    log = logger(lambda x: note(x.dtype.itemsize, jnp.asarray(1.0).dtype.itemsize))
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        jax.jit(log)(jnp.ones((), jnp.float64))
    assert calls() == [(8, 8)]


# Lifetime


def test_nothing_keeps_a_program_and_its_functions_alive():
    jax.clear_caches()
    before = alive().keys()
    program = jax.jit(noted(logger()))
    for size in range(3):
        program(jnp.ones(size))
    program(jnp.ones(2))
    colocated.wait()
    assert len(alive().keys() - before) == 3  # one for each program that was compiled
    colocated.wait()
    del program
    jax.clear_caches()
    assert alive().keys() <= before


@pytest.mark.system
def test_calls_of_programs_in_flight_at_exit_are_made_and_failures_reported():
    code, out, err = run(
        """
        def work(i):
            if i == 2:
                raise ValueError("two")
            print("ran", i, flush=True)
        f = colocated.colocated_python(work, out_specs_fn=lambda x: None)
        slow = jax.jit(lambda x: jax.lax.fori_loop(0, 2000, lambda _, x: jnp.tanh(x @ x), x))
        program = jax.jit(lambda x: jax.lax.scan(lambda c, i: (c, f(i + (x[0, 0] > 2))), 0, jnp.arange(4))[0])
        program(slow(jnp.ones((300, 300))))
        print("end", flush=True)
        """
    )
    assert (code, out.split("\n")) == (0, ["end", "ran 0", "ran 1", "ran 3", ""])
    assert "nobody looked at the failure" in err
    assert "two" in err


# What is refused


def refusals():
    key, plain = jax.random.wrap_key_data(np.zeros(2, np.uint32)), lambda f: f
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharded = jax.device_put(np.arange(8), over_8_devices())
    partly = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=False
    )
    hand_over = r"cannot hand x over to Python, which is of the type "
    return {
        "results": (
            {"out_specs_fn": lambda x: x},
            plain,
            1.0,
            "cannot wait for what a call returns unless the function promises uses_jax=False",
        ),
        "inline": ({"mode": "inline"}, plain, 1.0, "cannot make a call with mode='inline' in its caller"),
        "keys": ({}, plain, key, hand_over + r"key<fry>\[\]"),
        "int4": ({}, plain, np.zeros(2, jnp.int4), hand_over + r"int4\[2\]"),
        "partly manual": (
            {},
            partly,
            np.arange(8),
            "cannot call Python in a shard_map that leaves axes of its mesh to the partitioner",
        ),
        "per shard": (
            {"layout": "per_shard"},
            plain,
            sharded,
            "does not know the shards of arguments that in_specs give no sharding, as layout='per_shard' needs",
        ),
    }


@pytest.mark.parametrize("name", ["results", "inline", "keys", "int4", "partly manual", "per shard"])
def test_what_an_executable_cannot_do_is_refused_with_both_lines(name):
    options, around, x, reason = refusals()[name]
    call = colocated_python(lambda x: x, **{"out_specs_fn": nothing, **options})

    def f(x):
        call(x)
        return x

    text = f"^the colocated function <lambda> is called in a program of jax.jit, which {reason}: wrap the outermost"
    with pytest.raises(ValueError, match=text) as caught:
        jax.jit(around(f))(x)
    assert f"is at {__file__}:{f.__code__.co_firstlineno + 1} in f, the program is called at" in str(caught.value)
    assert calls() == []


def test_calls_made_ahead_are_refused():
    call = colocated_python(lambda: None, out_specs_fn=nothing, run_ahead=2, devices=jax.devices()[0])
    with pytest.raises(ValueError, match="which cannot make calls ahead, as run_ahead=2 says: "):
        jax.jit(call)()


def test_programs_of_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    x = jax.device_put(jnp.ones(8), over_8_devices())
    text = "which is compiled for 8 devices of 2 processes, all of which would make the call: wrap the outermost"
    with pytest.raises(ValueError, match=text):
        jax.jit(noted(logger()))(x)


def test_other_platforms_are_refused():
    with pytest.raises(ValueError, match="which is compiled for tpu, where it cannot call Python: wrap the outermost"):
        jax.jit(noted(logger())).trace(1.0).lower(lowering_platforms=("tpu",))


def test_an_exported_program_has_no_calls():
    with pytest.raises(ValueError, match="cannot be part of an exported program"):
        jax.export.export(jax.jit(noted(logger())))(1.0)


def test_options_that_do_not_apply_in_a_shard_map_are_refused(mesh):
    log = logger(layout="per_shard")
    over = jax.shard_map(noted(log), mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    with pytest.raises(ValueError, match="in a shard_map it is called for each shard anyway, with arrays: leave it"):
        jax.jit(over)(jnp.ones(8))


def test_the_executable_alone_refers_to_what_it_calls():
    before = alive()
    log = logger()
    compiled = jax.jit(noted(log)).lower(1.0).compile()
    (own,) = [found for number, found in alive().items() if number not in before]
    before = None
    reference = weakref.ref(own)
    del own
    compiled(1.0)
    colocated.wait()
    assert reference() is not None
    del compiled
    jax.clear_caches()
    gc.collect()
    assert reference() is None
