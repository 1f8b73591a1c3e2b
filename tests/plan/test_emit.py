"""Loops and branches whose executables make their calls: same calls and values, in order, once, whatever happens."""

import collections
import itertools
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import partjit
from partjit import P, colocated, pjit
from partjit.colocated import colocated_python, colocated_python_class
from partjit.colocated.runtime import emission, host_values
from partjit.inspect import explain
from partjit.plan.ir.nodes import Branch, Fragment, Loop
from partjit.plan.passes import choose_emitted, emit, gather
from tests.colocated import rendezvous
from tests.effort import sample

lax = jax.lax

pytestmark = pytest.mark.usefixtures("meeting")


def nothing(*_):
    return None


def note(*values):
    shown = [np.asarray(value).tolist() for value in values]
    rendezvous.logs["calls"].append(tuple(shown))


def fail_at_three(i):
    note(i)
    if i == 3:
        raise ValueError("three")


def logger(function=note, **options):
    return colocated_python(function, out_specs_fn=nothing, **options)


@pytest.fixture(autouse=True)
def each_alone(monkeypatch):
    """Each iteration hands over the arguments of its calls; what it costs less is for `test_gather`."""
    monkeypatch.setattr(gather, "MOST_ITERATIONS", 1)


def emits(plan):
    """Whether executables make all calls of a plan."""
    return bool(plan.calls) and all(isinstance(node, Fragment) for node in plan.nodes)


def loop(log, n=5):
    def iteration(x, i):
        x = x * 0.5 + jnp.float32(i)
        log(i)
        return x, None

    return lambda x: lax.scan(iteration, x, jnp.arange(n))[0]


def calls():
    colocated.wait(timeout=60)
    return rendezvous.logs["calls"]


def over(iteration):
    return lambda x, y: lax.fori_loop(0, 3, lambda i, y: iteration(i, x, y), y)


SPECS = [P(), P("x"), P("y"), P(("x", "y")), P(("y", "x")), P("x", "y"), P("y", "x"), P(None, "x"), P(None, ("x", "y"))]
DTYPES = [np.float32, np.int8, np.bool_, jnp.bfloat16, np.uint32, np.complex64]


@pytest.mark.soak
def test_what_is_handed_over_is_the_argument(mesh):
    """Whatever its spec, dtype and donation, as an array of jax or of NumPy; two arguments of different specs, and one
    that no spec is about."""
    seen = collections.Counter()
    cases = itertools.product(SPECS, SPECS, DTYPES, (0, 1), ("jax", "numpy"))
    for first, second, dtype, donates, arrays in sample([*cases], 53):
        rendezvous.clear()

        def look(i, x, y):
            rendezvous.logs["types"].append((type(x) is np.ndarray, getattr(x, "sharding", None)))
            note(i, np.asarray(x).astype(np.complex64).real, y)

        log = logger(look, arrays=arrays)
        x = np.arange(64).reshape(8, 8).astype(dtype)
        y = np.arange(64, dtype=np.float32).reshape(8, 8)

        def iteration(i, x, y, log=log):
            log(i, x, y)
            return y + 1

        specs = NamedSharding(mesh, first), NamedSharding(mesh, second)
        given = jax.device_put(x, specs[0]), jax.device_put(y, specs[1])
        program = pjit(over(iteration), in_shardings=specs, donate_argnums=(1,) if donates else ())
        assert emits(program.plan(*given))
        result = program(*given)
        expected = [(i, x.astype(np.complex64).real.tolist(), (y + np.float32(i)).tolist()) for i in range(3)]
        assert calls() == expected
        np.testing.assert_allclose(result, y + 3)
        assert given[1].is_deleted() == bool(donates)
        for is_numpy, sharding in rendezvous.logs["types"]:
            assert is_numpy == (arrays == "numpy")
            assert arrays == "numpy" or sharding.is_equivalent_to(specs[0], 2)
        seen["partitioned"] += first != P()
        seen["donated"] += donates
        seen[arrays] += 1
    assert min(seen.values()) > 3


@pytest.mark.parametrize("by", ["devices", "host"])
def test_on_a_mesh_with_explicit_axes_functions_get_arrays_of_that_mesh(by, monkeypatch):
    monkeypatch.setattr(choose_emitted, "MOST_BYTES_WAITING", 2**26 if by == "devices" else -1)
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=explicit)
    x = jax.device_put(np.arange(32, dtype=np.float32).reshape(8, 4), NamedSharding(mesh, P("x", "y")))
    log = logger(lambda i, x: rendezvous.logs["types"].append(jax.typeof(x)) or note(i, jnp.sum(x)))
    with jax.set_mesh(mesh):
        program = pjit(lambda x: lax.fori_loop(0, 3, lambda i, x: (log(i, x), x * 2)[1], x))
        assert emits(program.plan(x)) == (by == "devices")
        result = program(x)
        made = calls()
    assert jax.typeof(result) == jax.typeof(x)
    assert made == [(i, 496.0 * 2**i) for i in range(3)]
    assert rendezvous.logs["types"] == [jax.typeof(x)] * 3


def test_nothing_is_added_to_what_the_devices_do(mesh):
    """No collective for the sake of a call: each device hands over what it has."""
    x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P("x", "y")))
    log = logger(lambda x: None)
    program = pjit(lambda x: lax.fori_loop(0, 3, lambda _, x: (log(x), x * 2)[1], x))
    assert emits(program.plan(x))
    text = program.lower(x).compile().as_text()
    assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


def test_calls_around_a_loop_keep_their_order(mesh):
    """On the caller's stream, on a named one that two threads use, and of an object."""

    class Counter:
        def __init__(self):
            self.seen = 0

        def add(self, i):
            self.seen += 1
            note(i, self.seen)

    counter = colocated_python_class(Counter)()
    add = counter.add.specialize(out_specs_fn=nothing)

    def program(log, first):
        def fun(x):
            log(jnp.int32(first))
            x = lax.fori_loop(first + 1, first + 4, lambda i, x: (log(i), x + 1)[1], x)
            lax.cond(x[0] > 0, lambda: log(jnp.int32(first + 4)), lambda: None)
            log(jnp.int32(first + 5))
            return x

        return pjit(fun)

    x = jnp.ones(8)
    for log in (logger(), logger(stream="kept"), logger(mode="stream")):
        fun = program(log, 0)
        rendezvous.clear()
        for _ in range(5):
            fun(x)
            log(jnp.int32(9))
        assert [i for (i,) in calls()] == [0, 1, 2, 3, 4, 5, 9] * 5
    method = program(add, 0)
    rendezvous.clear()
    assert any(node.calls for node in method.plan(x).fragments)
    for _ in range(3):
        method(x)
        add(jnp.int32(9))
    assert calls() == [(i, k + 1) for k, i in enumerate([0, 1, 2, 3, 4, 5, 9] * 3)]


def test_threads_have_their_own_executions():
    log = logger(lambda i, who: rendezvous.logs[int(who)].append(int(i)))

    @pjit
    def program(x, who):
        return lax.fori_loop(0, 20, lambda i, x: (log(i, who), x + 1)[1], x)

    def run(who):
        for _ in range(5):
            assert float(program(jnp.zeros(8), jnp.int32(who))[0]) == 20.0
        colocated.wait(timeout=60)

    threads = [threading.Thread(target=run, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [rendezvous.logs[who] for who in range(4)] == [[*range(20)] * 5] * 4


@pytest.mark.parametrize("stream", [None, "shared"])
def test_a_program_in_a_call_makes_its_calls_there(stream):
    """On the stream inside of that of the call; if they share a named one, before the program returns."""
    log = logger(stream=stream)
    inner = pjit(loop(log))

    def outer(x):
        inner(x)
        if stream is None:
            colocated.wait()
        note(-1)
        return x

    colocated_python(outer, out_specs_fn=lambda x: x, stream=stream)(jnp.ones(8)).block_until_ready()
    assert [i for (i,) in calls()] == [0, 1, 2, 3, 4, -1]


def test_a_call_that_fails_leaves_the_rest_alone_and_is_raised_by_wait():
    log = logger(fail_at_three)
    program = pjit(loop(log, 6))
    assert emits(program.plan(jnp.ones(8)))
    for _ in range(2):
        rendezvous.clear()
        result = program(jnp.ones(8))
        np.testing.assert_allclose(result, loop(nothing, 6)(np.ones(8)), rtol=1e-6)
        with pytest.raises(ValueError, match="three") as failure:
            colocated.wait(timeout=60)
        assert any("test_emit.py" in text and "'fail_at_three'" in text for text in failure.value.__notes__)
        assert calls() == [(i,) for i in range(6)], "each once"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_executable_that_fails_ends_its_calls():
    log = logger()

    def explode(i):
        if i == 2:
            raise RuntimeError("the devices fail")
        return np.float32(0)

    def iteration(x, i):
        log(i)
        return x + jax.pure_callback(explode, jax.ShapeDtypeStruct((), np.float32), i), None

    program = pjit(lambda x: lax.scan(iteration, x, jnp.arange(4))[0])
    assert emits(program.plan(jnp.float32(0)))
    with pytest.raises(Exception, match="the devices fail"):
        program(jnp.float32(0)).block_until_ready()
    made = calls()
    assert made == [(i,) for i in range(len(made))]
    assert 2 <= len(made) <= 3
    log(jnp.int32(7))
    assert calls()[-1] == (7,), "the stream goes on"


def test_what_cannot_be_handed_over_is_an_error_of_the_program(monkeypatch):
    def fail(_):
        raise MemoryError("no room for a copy")

    program = pjit(loop(logger()))
    program(jnp.ones(8)).block_until_ready()
    assert calls() == [(i,) for i in range(5)]
    monkeypatch.setattr(emission, "owned", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no room for a copy"):
        program(jnp.ones(8)).block_until_ready()
    assert len(calls()) == 5


class Interrupt(Exception):
    """What a signal handler raises."""


@pytest.mark.usefixtures("silent_collector")
@pytest.mark.parametrize("kind", [Interrupt, KeyboardInterrupt])
def test_an_interrupt_reaches_the_caller_and_calls_are_made_in_order(kind):
    log = logger()
    program = pjit(loop(log, 3000))
    x = jnp.ones(8)  # made once: an interrupt of an operation of jax may leave this thread without a trace
    program(x)
    colocated.wait()

    def interrupt(*_):
        raise kind

    # XLA:CPU calls Python in this thread, and what is raised there comes out as an error of its own that quotes it.
    expected = (Interrupt, jax.errors.JaxRuntimeError) if kind is Interrupt else KeyboardInterrupt
    interrupted = 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(10):
            rendezvous.clear()
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.003)
                    program(x)
                    time.sleep(0.1)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except expected as error:
                interrupted += kind.__name__ in f"{type(error).__name__} {error}"
            made = calls()
            assert made == [(i,) for i in range(len(made))]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted


def test_a_fast_loop_goes_ahead_of_its_slow_calls():
    """The devices never wait for Python: the loop has ended when its first call has not."""
    log = logger(lambda i: rendezvous.hear("the end") or note(i))
    program = pjit(loop(log))
    program(jnp.ones(8)).block_until_ready()
    rendezvous.say("the end")
    assert calls() == [(i,) for i in range(5)]


def test_a_recording_has_every_call_and_where_it_comes_from(mesh):
    log = logger()
    program = pjit(loop(log))
    program(jnp.ones(8))
    colocated.wait()
    with partjit.record() as timeline:
        program(jnp.ones(8))
    named = [span for span in timeline.spans if span.name == "note"]
    assert len(named) == 5
    assert all(span.end is not None for span in named)
    seen = []
    with partjit.events.subscribe(seen.append):
        program(jnp.ones(8))
        colocated.wait()
    queued = [event for event in seen if isinstance(event, partjit.events.CallQueued)]
    assert [(event.program, event.node, event.stream) for event in queued] == [
        (program.plan(jnp.ones(8)).name, "note", "caller")
    ] * 5


def test_what_is_around_is_compiled_with_it_and_explained(mesh):
    log = logger()
    program = pjit(lambda x: loop(log)(x @ x).sum(), in_shardings=NamedSharding(mesh, P("x", "y")))
    x = np.eye(8, dtype=np.float32)
    plan = program.plan(x)
    assert [type(node) for node in plan.nodes] == [Fragment]
    assert [call.callee.name for call in plan.calls] == ["note"]
    assert "calls note as it runs" in plan.source
    assert "calls note as it runs" in plan.to_mermaid()
    assert "as its executable runs" in plan._repr_html_()
    report = explain(program, x)
    assert report.plan is not None
    assert report.to_text()
    assert report.to_html()
    np.testing.assert_allclose(program(x), loop(nothing)(x @ x).sum(), rtol=1e-6)
    assert calls() == [(i,) for i in range(5)]


def test_an_executable_gets_no_constants_but_its_own(monkeypatch):
    log = logger(stream="log")
    double = colocated_python(lambda x: 2 * x, uses_jax=False, out_specs_fn=lambda x: x)

    def steps(x):
        for i in range(6):  # each with an executable of its own, as the calls are on two streams
            log(i, x)
            x = double(x) * lax.cond(x > 1, lambda: 0.5, lambda: 1.0)
        return x

    program, put = pjit(steps), []
    program.trace(1.0)
    as_array = jnp.asarray
    monkeypatch.setattr(emit.jnp, "asarray", lambda *args: put.append(args) or as_array(*args))
    plan = program.plan(1.0)
    assert sum(isinstance(node, Fragment) for node in plan.nodes) == 6
    assert not put  # what calls of the host read, no executable does
    assert float(program(1.0)) == 2
    assert [i for i, _ in calls()] == [*range(6)]


def test_per_shard_calls_get_their_shards(mesh):
    def look(x):
        rendezvous.logs["shapes"].append(x.data.shape)

    log = logger(look, layout="per_shard")
    x = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P(("x", "y"))))
    program = pjit(lambda x: lax.fori_loop(0, 2, lambda _, x: (log(x), x + 1)[1], x))
    program(x)
    colocated.wait(timeout=60)
    assert rendezvous.logs["shapes"] == [(1,)] * 16


def fori(iteration, n=3):
    return lambda x: lax.fori_loop(0, n, iteration, x)


REASONS = {
    "its result is used": ({"out_specs_fn": lambda x: x}, lambda log: fori(lambda _, x: log(x))),
    "it is inline": ({"mode": "inline"}, lambda log: fori(lambda _, x: (log(x), x)[1])),
    "keys": ({}, lambda log: fori(lambda i, x: (log(jax.random.key(i)), x)[1])),
    "effects": ({}, lambda log: fori(lambda i, x: (jax.debug.print("{}", i), log(x), x)[2])),
    "too many bytes": ({}, lambda log: fori(lambda _, x: (log(x), x)[1], 2**23)),
}


@pytest.mark.parametrize("why", REASONS)
def test_what_cannot_be_emitted_is_driven_by_the_host(why):
    options, fun = REASONS[why]
    plan = pjit(fun(colocated_python(lambda x: x, **{"out_specs_fn": nothing, **options}))).plan(jnp.ones(8))
    assert not any(fragment.calls for fragment in plan.fragments)
    assert any(isinstance(node, Loop | Branch) for node in plan.nodes)


def test_the_bound_of_what_may_wait_counts_iterations():
    log = logger()

    def plan(n):
        return pjit(lambda x: lax.fori_loop(0, n, lambda i, x: (log(x), x)[1], x)).plan(jnp.ones(1024))

    most = choose_emitted.MOST_BYTES_WAITING // 4096
    assert emits(plan(most))
    assert not emits(plan(most + 1))


@pytest.mark.parametrize("spec", [None, P()])
def test_numbers_are_put_on_devices_when_a_function_uses_more_than_the_number(mesh, spec, monkeypatch):
    put = host_values.Destination.put
    monkeypatch.setattr(
        host_values.Destination, "put", lambda self, value: (rendezvous.logs["put"].append(1), put(self, value))[1]
    )

    def look(i, scale):
        rendezvous.logs["calls"].append((int(i), float(scale), i.item(), bool(scale), isinstance(i, jax.Array)))

    def keep(i, scale):
        rendezvous.logs["kept"].append((i, scale))

    def counting(log):
        return pjit(lambda x: lax.fori_loop(0, 3, lambda i, x: (log(i, x), x + 1)[1], x))

    x = jnp.float32(3.5) if spec is None else jax.device_put(jnp.float32(3.5), NamedSharding(mesh, spec))
    for fun, count in ((look, 0), (keep, 6)):
        rendezvous.clear()
        program = counting(logger(fun))
        assert emits(program.plan(x))
        assert float(program(x)) == 6.5
        colocated.wait(timeout=60)
        for k, (i, scale) in enumerate(rendezvous.logs["kept"]):  # after the execution
            assert (i + 1).dtype == np.int32
            np.testing.assert_array_equal(jnp.stack([i, scale * 2]), [k, 2 * (3.5 + k)])
            assert scale.sharding.is_equivalent_to(x.sharding, 0)
        assert len(rendezvous.logs["put"]) == count
        assert rendezvous.logs["calls"] == [(k, 3.5 + k, k, True, True) for k in range(3) if not count]
