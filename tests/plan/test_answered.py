"""Calls that executables wait for: same values and calls as by hand, in order, once, whatever happens."""

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
from partjit.colocated import cheapness, colocated_python, colocated_python_class
from partjit.colocated.runtime import answering
from partjit.plan.ir.nodes import ColocatedCall, Fragment, Loop
from partjit.plan.passes import choose_emitted, cost, gather
from tests.colocated import rendezvous
from tests.effort import sample
from tests.plan.interrupted import Interrupt, interrupting, run_for_a_while

lax = jax.lax

pytestmark = pytest.mark.usefixtures("meeting")

SPECS = [P(), P("x"), P("y"), P(("x", "y")), P(("y", "x")), P("x", "y"), P("y", "x"), P(None, "x"), P(None, ("x", "y"))]
DTYPES = [np.float32, np.int8, np.bool_, jnp.bfloat16, np.uint32, np.complex64]


def waits(plan):
    """Whether a plan is a single executable that waits for its calls."""
    return [type(node) for node in plan.nodes] == [Fragment] and all(call.is_answered for call in plan.calls)


def of_numpy(function, **options):
    return colocated_python(function, **{"uses_jax": False, "out_specs_fn": lambda *xs: xs[0], **options})


def note(*values):
    rendezvous.logs["calls"].append(tuple(np.asarray(value).tolist() for value in values))


def calls():
    colocated.wait(timeout=60)
    return rendezvous.logs["calls"]


def flipped(i, x, y):
    """Three results: one like each array, and a number."""
    assert type(x) is np.ndarray
    assert not x.flags.writeable
    note(i, y.sum())
    return x[::-1], y.T + np.float32(i), float(i)


@pytest.fixture
def never_at_once(monkeypatch):
    """Nothing is so cheap that the host makes its calls."""
    monkeypatch.setattr(cost, "RUN_AT_ONCE", 0)


@pytest.mark.soak
def test_the_results_are_those_by_hand(mesh, monkeypatch):
    """Whatever the specs of arguments and results, the dtype and what is donated, on eight devices and on one.

    In a loop and in a row; and on one device also where its thread goes from one executable to the next.
    """
    seen = collections.Counter()
    cases = itertools.product(SPECS, SPECS, SPECS, DTYPES, (0, 1), (8, 1), ("in a loop", "in a row"), (0, 1000))
    for first, second, result, dtype, donates, devices, how, at_once in sample([*cases], 2099):
        rendezvous.clear()
        monkeypatch.setattr(cost, "RUN_AT_ONCE", at_once)
        on = mesh if devices == 8 else partjit.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("x", "y"))
        x = np.arange(64).reshape(8, 8).astype(dtype)
        y = np.arange(64, dtype=np.float32).reshape(8, 8)

        def specs(_, x, y, on=on, result=result):
            sharding = NamedSharding(on, result)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), y, jax.ShapeDtypeStruct((), jnp.float32)

        call = of_numpy(flipped, out_specs_fn=specs)

        def iteration(i, state, call=call):
            x, y = state
            x, y, number = call(i, x, y)
            return x, y + number

        def fun(x, y, iteration=iteration, how=how):
            if how == "in a loop":
                return lax.fori_loop(0, 3, iteration, (x, y))
            return iteration(jnp.int32(1), iteration(jnp.int32(0), (x, y * 1)))

        given = [jax.device_put(v, NamedSharding(on, spec)) for v, spec in ((x, first), (y, second))]
        program = pjit(fun, in_shardings=tuple(v.sharding for v in given), donate_argnums=(1,) if donates else ())
        by_the_host = bool(at_once) and devices == 1 and how == "in a row"
        assert waits(program.plan(*given)) == (not by_the_host)
        results = program(*given)
        sums = []
        for i in range(3 if how == "in a loop" else 2):
            sums.append((i, float(y.sum())))
            x, y = x[::-1], y.T + np.float32(2 * i)
        np.testing.assert_array_equal(results[0], x)
        np.testing.assert_array_equal(results[1], y)
        assert calls() == sums
        assert given[1].is_deleted() == bool(donates)
        assert not given[0].is_deleted()
        seen["sharded"] += devices == 8 and first != P() and result != P()
        seen["donated"] += donates
        seen["one"] += devices == 1
        seen["loop"] += how == "in a loop"
        seen["row"] += how == "in a row"
        seen["by the host"] += by_the_host
    assert min(seen.values()) > 1
    assert len(seen) == 6


@pytest.mark.parametrize("spec", [P(), P("x")])
def test_calls_without_results_are_made_once_for_all_devices(mesh, spec):
    call = of_numpy(note, mode="inline", out_specs_fn=lambda *_: None)

    def step(x, i):
        call(i, x)
        return x + 1, None

    with mesh:
        program = pjit(lambda x: lax.scan(step, x, jnp.arange(3))[0], in_shardings=spec)
        assert waits(program.plan(np.zeros(8, np.float32)))
        np.testing.assert_array_equal(program(np.zeros(8, np.float32)), np.full(8, 3))
    assert calls() == [(i, [i] * 8) for i in range(3)]


NUMBERS = [True, 3, -2, 1.5, float("nan"), 2 + 1j, 2**40, np.float32(1.5), np.float64(1.5), np.int8(3), np.bool_(True)]
NUMBERS += [
    np.uint32(7),
    jnp.bfloat16(0.1),
    np.complex64(1j),
    np.array(3, np.int8),
    np.array(1.5, np.float32),
    np.ones(1),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_a_number_fits_a_spec_as_it_does_in_an_eager_call(dtype):
    number = colocated_python(
        lambda: rendezvous.logs["number"][-1],
        uses_jax=False,
        out_specs=jax.ShapeDtypeStruct((), dtype),
        devices=jax.devices()[:1],
    )
    program = pjit(lambda x: lax.fori_loop(0, 2, lambda i, x: number(), x))
    start = jnp.zeros((), dtype)
    assert waits(program.plan(start))

    def fitted(call):
        try:
            return np.asarray(call()).astype(np.complex128).tolist(), ""
        except (ValueError, OverflowError) as error:
            return type(error), str(error)

    for value in NUMBERS:
        rendezvous.logs["number"].append(value)
        with np.errstate(all="ignore"):
            eager, answered = fitted(lambda: number()), fitted(lambda: program(start))
        assert repr(answered) == repr(eager), repr(value)


def test_on_a_mesh_with_explicit_axes_types_say_how_results_are_sharded():
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=explicit)
    call = of_numpy(lambda x: x * np.float32(2))
    x = jax.device_put(np.arange(64, dtype=np.float32).reshape(8, 8), NamedSharding(mesh, P("x", "y")))
    with jax.set_mesh(mesh):
        for program, result in (
            (pjit(lambda x: call(x + 1) + 1), 2 * np.asarray(x) + 3),
            (pjit(lambda x: lax.fori_loop(0, 3, lambda _, x: call(x), x)), 8 * np.asarray(x)),
            (pjit(lambda x: lax.scan(lambda x, _: (call(x), x + 1), x, None, 3)[1][2]), 4 * np.asarray(x) + 1),
            (pjit(jax.vmap(lambda x: call(x + 1) + 1)), 2 * np.asarray(x) + 3),
        ):
            assert waits(program.plan(x))
            found = program(x)
            np.testing.assert_array_equal(np.asarray(found), result)
            assert jax.typeof(found).sharding.mesh.axis_types == explicit


@pytest.mark.usefixtures("never_at_once")
@pytest.mark.parametrize("devices", [1, 8])
def test_devices_do_not_wait_for_calls_that_come_before_their_work(mesh, devices):
    """A rate of the step's number, which stays on the host, or a batch: there is one dispatch either way."""
    on = mesh if devices == 8 else partjit.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("x", "y"))
    rate = of_numpy(
        lambda step: note(step) or np.float32(step) / 4, out_specs_fn=lambda _: jax.ShapeDtypeStruct((), jnp.float32)
    )
    batch = of_numpy(
        lambda step: np.full(8, step, np.float32), out_specs_fn=lambda _: jax.ShapeDtypeStruct((8,), jnp.float32)
    )
    judged = of_numpy(lambda x: x.max() > 3, out_specs_fn=lambda _: jax.ShapeDtypeStruct((), bool))

    def step(w, i):
        w = w + rate(i) * batch(i)
        return w, judged(w) & True

    program = pjit(step, in_shardings=(P("x"), None))
    with on:
        plan = program.plan(jnp.ones(8), 2)
        found, large = program(jnp.ones(8), 2)
    np.testing.assert_array_equal(found, 2)
    assert not large
    assert calls() == [(2,)]
    kinds = [type(node) for node in plan.nodes]
    assert kinds == [ColocatedCall, ColocatedCall, Fragment]
    assert sum(call.is_answered for call in plan.calls) == 1


@pytest.mark.usefixtures("never_at_once")
@pytest.mark.parametrize("devices", [1, 8])
def test_devices_do_not_wait_for_calls_that_begin_an_iteration_of_the_host(mesh, devices):
    """What comes before it is computed in the iteration before: there are two dispatches either way."""
    on = mesh if devices == 8 else partjit.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("x", "y"))
    first, between = (of_numpy(lambda x, y=y: note(y) or x + np.float32(y)) for y in (1, 2))
    of_host = colocated_python(lambda x: x / 2, out_specs_fn=lambda x: x)  # it may use jax

    def iteration(x, _):
        x = of_host(2 * first(jnp.sin(x)))
        return jnp.tanh(between(jnp.cos(x))), None

    program = pjit(lambda x: jax.lax.scan(iteration, x, None, 3)[0], in_shardings=P("x"))
    expected = np.zeros(8, np.float32)
    for _ in range(3):
        expected = np.tanh(np.cos(np.sin(expected) + 1) + 2)
    with on:
        plan = program.plan(jnp.zeros(8))
        np.testing.assert_allclose(program(jnp.zeros(8)), expected, rtol=1e-5)
    assert calls() == [(1,), (2,)] * 3
    (loop,) = (node for node in plan.nodes if isinstance(node, Loop))
    assert [type(node) for node in loop.block.nodes] == [ColocatedCall, Fragment, ColocatedCall, Fragment]
    assert [call.is_answered for call in plan.calls] == [False, False, True]


def test_a_call_may_keep_its_arguments_and_return_the_same_memory_again(mesh):
    """What the devices hand over is theirs, and so is what they have taken."""
    memory = np.zeros(8, np.float32)

    def fill(i, x):
        rendezvous.logs["kept"].append((int(i), x))
        memory[:] = x + np.float32(1)
        return memory

    x = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, P("x")))
    for spec in (P(), P("x"), P(("y", "x"))):
        sharding = NamedSharding(mesh, spec)
        call = of_numpy(fill, out_specs_fn=lambda i, x, s=sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s))
        program = pjit(lambda x, call=call: lax.scan(lambda x, k: (call(k, x),) * 2, x, jnp.arange(20)))
        rendezvous.clear()
        last, stacked = program(x)
        np.testing.assert_array_equal(last, np.arange(8) + 20)
        np.testing.assert_array_equal(stacked, np.arange(8) + np.arange(1, 21)[:, None])
        for i, kept in rendezvous.logs["kept"]:
            np.testing.assert_array_equal(kept, np.arange(8) + i)


def fail_at_three(i, x):
    note(i)
    if i == 3:
        raise ValueError("three")
    return x


@pytest.mark.parametrize("spec", [None, P(), P("x")])
def test_a_call_that_fails_ends_the_program_and_leaves_its_arguments(mesh, spec):
    call = of_numpy(fail_at_three, out_specs_fn=lambda i, x: x)
    program = pjit(lambda x, n: lax.fori_loop(0, n, lambda i, x: call(i, x) + 1, x), donate_argnums=0)
    for _ in range(2):
        x = jnp.zeros(8) if spec is None else jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, spec))
        assert waits(program.plan(x, jnp.int32(6)))
        rendezvous.clear()
        with pytest.raises(ValueError, match="three") as failure:
            program(x, jnp.int32(6))
        assert any("test_answered.py" in text and "'fail_at_three'" in text for text in failure.value.__notes__)
        assert calls() == [(i,) for i in range(4)], "none after it"
        assert not np.asarray(x).any(), "though it was donated"
        np.testing.assert_array_equal(program(x, jnp.int32(3)), np.full(8, 3))
        assert x.is_deleted()
    jax.effects_barrier()  # which does not raise it again


@pytest.mark.usefixtures("never_at_once")
def test_what_was_not_said_to_be_returned_is_an_error_that_names_it():
    call = of_numpy(lambda x: x[:4])
    program = pjit(lambda x: call(x + 1) * 2)
    assert waits(program.plan(jnp.ones(8)))
    with pytest.raises(ValueError, match=r"result is float32\[4\], but its spec says float32\[8\]"):
        program(jnp.ones(8))


@pytest.mark.usefixtures("silent_collector")
@pytest.mark.parametrize("kind", [Interrupt, KeyboardInterrupt])
def test_an_interrupt_reaches_the_caller(kind):
    call = of_numpy(lambda i, x: (note(i), x)[1], out_specs_fn=lambda i, x: x)
    program = pjit(lambda x, n: lax.fori_loop(0, n, call, x))
    # Made once: an interrupt of an operation of jax may leave this thread without a trace.
    x, once, often = jnp.ones(8), jnp.int32(1), jnp.int32(100_000)
    assert waits(program.plan(x, once))
    program(x, once)

    with interrupting(kind):
        for _ in range(5):
            rendezvous.clear()
            # XLA:CPU calls Python in this thread; between two calls the handler runs in the next one.
            with pytest.raises((kind, jax.errors.JaxRuntimeError)):
                run_for_a_while(program, x, often)
            made = calls()
            assert made == [(i,) for i in range(len(made))]


@pytest.mark.parametrize("spec", [None, P("x")])
def test_threads_have_their_own_executions(mesh, spec):
    """On streams of their own, on a shared one, and on that of one object."""

    class Object:
        def add(self, i, who, x):
            rendezvous.logs[int(who)].append(int(i))
            return x + np.float32(1)

    def add(i, who, x):
        return Object().add(i, who, x)

    like = {"out_specs_fn": lambda i, who, x: x}
    methods = colocated_python_class(Object, uses_jax=False)()
    for call in (of_numpy(add, **like), of_numpy(add, stream="shared", **like), methods.add.specialize(**like)):
        program = pjit(lambda x, who, call=call: lax.fori_loop(0, 20, lambda i, x: call(i, who, x), x))
        rendezvous.clear()
        found = []

        def run(who, program=program, found=found):
            x = jnp.zeros(8) if spec is None else jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, spec))
            found.extend(float(program(x, jnp.int32(who))[0]) for _ in range(3))

        threads = [threading.Thread(target=run, args=(who,)) for who in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [20.0] * 9
        assert [rendezvous.logs[who] for who in range(3)] == [[*range(20)] * 3] * 3


def test_calls_before_in_and_after_it_keep_their_order():
    """On the caller's stream and on a named one, with calls on a thread before and after."""
    for stream in (None, "kept"):
        slow = colocated_python(lambda i: rendezvous.hear("go") or note(i), out_specs_fn=lambda i: None, stream=stream)
        call = of_numpy(lambda i, x: (note(i), x)[1], out_specs_fn=lambda i, x: x, stream=stream)
        tell = of_numpy(lambda i: note(10 + i), out_specs_fn=lambda i: None, stream=stream)

        def fun(x, call=call, tell=tell):
            def iteration(k, x):
                tell(k)
                x = call(k, x) * 2
                tell(k + 100)
                return x

            return lax.fori_loop(0, 3, iteration, x)

        program = pjit(fun)
        assert waits(program.plan(jnp.ones(8)))
        rendezvous.clear()
        slow(jnp.int32(-1))
        threading.Timer(0.1, rendezvous.say, ["go"]).start()
        np.testing.assert_array_equal(program(jnp.ones(8)), np.full(8, 8))
        slow(jnp.int32(-2))
        assert [i for (i,) in calls()] == [-1, *(n for i in range(3) for n in (10 + i, i, 110 + i)), -2]


def test_a_program_in_a_call_makes_its_calls_there():
    inner = pjit(lambda x: lax.fori_loop(0, 3, of_numpy(lambda i, x: (note(i), x)[1], out_specs_fn=lambda i, x: x), x))

    def outer(x):
        note(-1)
        return inner(x)

    for stream in (None, "shared"):
        rendezvous.clear()
        colocated_python(outer, out_specs_fn=lambda x: x, stream=stream)(jnp.ones(8)).block_until_ready()
        assert [i for (i,) in calls()] == [-1, 0, 1, 2]


def test_functions_see_the_context_of_the_caller(mesh):
    """In the threads of eight devices too: its host arguments and its stream."""
    x = jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, P("x")))
    call = of_numpy(lambda what, x: (rendezvous.logs[what].append(1), x)[1], out_specs_fn=lambda what, x: x)
    program = pjit(lambda what, x: lax.fori_loop(0, 3, lambda _, x: call(what, x), x), host_argnums=0)
    for what in ("some", "other"):
        program(what, x)
        assert rendezvous.logs[what] == [1] * 3


@pytest.mark.parametrize("has_results", [True, False])
def test_functions_see_the_settings_of_the_caller(mesh, monkeypatch, has_results):
    """In the threads of eight devices too, where results are numbers of 64 bits."""
    monkeypatch.setattr(cheapness, "_QUICK_IN_A_ROW", 0)  # threads of the devices run those without results as well

    def half(x):
        note(jax.config.jax_enable_x64)
        return float(x[0]) / 2 if has_results else None

    with jax.enable_x64(True):
        number = jax.ShapeDtypeStruct((), np.float64) if has_results else None
        call = of_numpy(half, out_specs_fn=lambda x: number)
        x = jax.device_put(np.full(8, 1 / 3), NamedSharding(mesh, P("x")))

        def halve(_, x):
            return x * call(x) if has_results else (call(x), x)[1]

        last = pjit(lambda x: lax.fori_loop(0, 1, halve, x))(x)
        assert last[0] == (1 / 18 if has_results else 1 / 3)
    assert calls() == [(True,)]


def uses_jax_at(x):
    return np.asarray(rendezvous.programs["sine"](x))


def sines(mesh):
    """By name, functions of jax and executables."""
    struct = jax.ShapeDtypeStruct((8,), np.float32)
    with_call = pjit(lambda x: of_numpy(lambda x: x, out_specs_fn=lambda x: x)(jnp.sin(x)), name="with_call")
    return {
        "an operation": jnp.sin,
        "jax.jit": jax.jit(jnp.sin),
        "pjit": pjit(jnp.sin),
        "compiled by jax": jax.jit(jnp.sin).lower(struct).compile(),
        "compiled by pjit": pjit(jnp.sin, in_shardings=NamedSharding(mesh, P("x"))).lower(struct).compile(),
        "with a call, compiled": with_call.lower(struct).compile(),
    }


REFUSED = "uses_jax_at has uses_jax=False, but runs jax"


def test_jax_in_a_function_that_does_not_use_it_is_refused_wherever_it_runs(mesh):
    x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("x")))
    call = of_numpy(uses_jax_at)
    runs = (
        call,
        lambda x: call.specialize(mode="stream")(x).block_until_ready(),
        call.specialize(mode="inline"),
        pjit(lambda x: call(x) + 1),
        pjit(lambda x: lax.fori_loop(0, 3, lambda _, x: call(x), x)),
        pjit(lambda x: lax.fori_loop(0, 3, lambda _, x: call.specialize(mode="stream")(x), x)),
    )
    ones = np.ones(8, np.float32)
    for sine in sines(mesh).values():
        rendezvous.programs["sine"] = sine
        for _ in range(2):  # known to jax's quick path
            np.testing.assert_allclose(sine(ones), np.sin(ones), rtol=1e-6)
        for run in runs:
            with pytest.raises(RuntimeError, match=REFUSED):
                jax.block_until_ready(run(x))
        np.testing.assert_allclose(sine(ones), np.sin(ones), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(x), 1)


def test_a_failure_is_known_before_the_other_devices_go_on(mesh, monkeypatch):
    """Or one of them would fail first, of which the caller learns nothing but that a call failed."""
    known = []
    end = answering._Meeting.end

    def looking(meeting):
        known.extend(execution.failure for execution in answering._executions.values() if meeting.answers is None)
        end(meeting)

    monkeypatch.setattr(answering._Meeting, "end", looking)

    def fails(x):
        raise ValueError("it failed")

    x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("x")))
    with pytest.raises(ValueError, match="it failed"):
        pjit(lambda x: of_numpy(fails)(x * 2) + 1)(x)
    assert [str(failure[1]) for failure in known] == ["it failed"]


def test_options_that_exclude_each_other():
    for options, text in (
        ({"arrays": "jax"}, "uses_jax=False and arrays='jax' exclude each other: a function that does not use jax"),
        ({"layout": "per_shard"}, "uses_jax=False and layout='per_shard' exclude each other"),
    ):
        with pytest.raises(ValueError, match=text):
            colocated_python(note, uses_jax=False, **options)
    with pytest.raises(TypeError, match="uses_jax"):
        colocated_python(note, uses_jax="no")


def scan(call, n=3):
    return lambda x: lax.fori_loop(0, n, lambda _, x: call(x), x)


REASONS = {
    "it may use jax": ({"uses_jax": None, "arrays": "numpy"}, scan),
    "it runs on a thread": ({"mode": "stream"}, scan),
    "keys": ({"out_specs_fn": lambda k: jax.eval_shape(lambda: jax.random.key(0))}, None),
    "too many bytes": ({}, None),
    "work beside it": ({}, None),
    "work beside that of another iteration": ({}, None),
}


@pytest.mark.parametrize("why", REASONS)
def test_what_executables_do_not_wait_for(why):
    options, fun = REASONS[why]
    call = of_numpy(lambda *xs: xs[0], **options)
    x = jnp.ones((128, 128))
    if why == "keys":
        x = jnp.uint32(0)

        def fun(call):
            return scan(lambda x: jax.random.key_data(call(x))[0])
    elif why == "too many bytes":
        fun, x = scan, jnp.ones(choose_emitted.MOST_BYTES_COPIED // 8 + 1)
    elif why == "work beside it":

        def fun(call):
            return lambda x: lax.fori_loop(0, 3, lambda _, x: (x @ x) @ (x @ x) / 64 + call(x), x)

    elif why == "work beside that of another iteration":

        def fun(call):  # which can be called ahead, while the devices do the former iteration
            return lambda x: lax.fori_loop(0, 3, lambda i, x: (x @ x) @ (x @ x) / 64 + call(x[0, 0] * 0 + i), x)

    plan = pjit(fun(call)).plan(x)
    assert plan.calls
    assert not any(node.is_answered for node in plan.calls)


def test_work_beside_it_has_to_make_up_for_what_all_devices_do_to_leave_an_executable():
    call = of_numpy(lambda x: x)
    program = pjit(lambda x: lax.fori_loop(0, 3, lambda _, x: (x @ x) @ (x @ x) / 64 + call(x), x))
    for size, rows, is_waited_for in ((64, 1, True), (128, 1, False), (128, 8, True), (256, 8, False)):
        mesh = partjit.Mesh(np.array(jax.devices()[:rows]), ("x",))
        x = jax.device_put(np.ones((size, size), np.float32), jax.NamedSharding(mesh, P("x", None)))
        assert waits(program.plan(x)) == is_waited_for


@pytest.mark.parametrize("how", ["a scatter", "a slice", "a nested function"])
def test_an_update_in_place_beside_it_is_as_much_work_as_what_is_written(how):
    """A cache or a buffer on the devices, of more elements than the work that amortizes leaving an executable."""

    def write(buffer, i, x):
        return buffer.at[i].set(x) if how == "a scatter" else lax.dynamic_update_index_in_dim(buffer, x, i, 0)

    write = jax.jit(write) if how == "a nested function" else write
    call = of_numpy(lambda x: x)

    def program(buffer, x):
        return lax.fori_loop(0, 9, lambda i, state: (write(state[0], i, state[1]), call(state[1])), (buffer, x))

    plan = pjit(program).plan(jax.ShapeDtypeStruct((2**12, 2**12), jnp.int8), jax.ShapeDtypeStruct((2**12,), jnp.int8))
    assert waits(plan)


def updating():
    """A step that writes into a state, and calls a function for what the next one writes."""
    call = of_numpy(lambda x: x[::-1])

    def step(i, state):
        state, x = state
        return state.at[i].set(x), call(jnp.sin(x)) * 2

    return step


@pytest.mark.parametrize(("devices", "rows"), [(1, 2**4), (8, 2**7)])
@pytest.mark.parametrize("iterations", [None, 10])
def test_what_is_donated_is_updated_in_place_unless_it_is_copied_sooner_than_calls_are_made(devices, rows, iterations):
    """An executable that waits for calls copies it. In a loop it saves something in each iteration."""
    step, mesh = updating(), partjit.Mesh(np.array(jax.devices()[:devices]), "x")

    def program(state, x):
        return step(0, (state, x)) if iterations is None else lax.fori_loop(0, iterations, step, (state, x))

    for times, donates in itertools.product((1, 2), (False, True)):
        given = jnp.zeros((rows * times * (iterations or 1), 2**10)), jnp.arange(2.0**10)
        with mesh:
            expected = pjit(program, in_shardings=None, out_shardings=None)(*given)
            made = pjit(program, in_shardings=None, out_shardings=None, donate_argnums=0 if donates else ())
            assert any(call.is_answered for call in made.plan(*given).calls) == (times == 1 or not donates)
            np.testing.assert_array_equal(made(*given)[0], expected[0])
        assert given[0].is_deleted() == donates


def written(state, x):
    return lax.dynamic_update_slice(state, x[None], (1, 0))


BEFORE = {
    "an update": written,
    "two updates": lambda state, x: written(state, x).at[2].set(x),
    "a nested function": jax.jit(written),
    "a loop": lambda state, x: lax.fori_loop(0, 4, lambda i, state: state.at[i].set(x), state),
    "a branch": lambda state, x: lax.cond(x[1] > 0, written, lambda state, x: state, state, x),
}


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("before", BEFORE)
def test_a_loop_that_starts_from_an_updated_array_updates_it_in_place_as_well(before, devices):
    """Only an array that is donated and updated: another one that the program makes is the executable's own."""
    step, mesh = updating(), partjit.Mesh(np.array(jax.devices()[:devices]), "x")

    def program(state, x):
        return lax.fori_loop(0, 10, step, (BEFORE[before](state, x), x))

    def given():
        return jnp.ones((2**8 * devices, 2**10)), jnp.arange(2.0**10)

    with mesh:
        expected = pjit(program, in_shardings=None, out_shardings=None)(*given())
        for donates in (False, True):
            made = pjit(program, in_shardings=None, out_shardings=None, donate_argnums=0 if donates else ())
            assert any(call.is_answered for call in made.plan(*given()).calls) == (not donates)
            for _ in range(2):
                jax.tree.map(np.testing.assert_array_equal, made(*given()), expected)
        new = pjit(lambda state, x: program(state * 2, x), in_shardings=None, out_shardings=None, donate_argnums=0)
        assert any(call.is_answered for call in new.plan(*given()).calls)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_a_loop_in_a_loop_of_the_host_copies_nothing_that_the_other_one_carries(times, is_counted, devices):
    """If copying it takes longer than all calls save, and otherwise both are one executable, which copies it once."""
    call = of_numpy(lambda x: x[::-1])
    mesh = partjit.Mesh(np.array(jax.devices()[:devices]), "x")

    def step(i, state):
        state, x = state
        return state.at[i].set(x + state[i]), call(jnp.sin(x)) * 2

    def outer(i, state):
        return lax.fori_loop(0, 10, step, state)

    def program(state, x):
        if is_counted:
            return lax.fori_loop(0, 3, outer, (state, x))
        state, _ = lax.while_loop(lambda s: s[1] < 3, lambda s: (outer(0, s[0]), s[1] + 1), ((state, x), 0))
        return state

    def given():
        return jnp.ones((2**4 * 30 * devices * times, 2**10)), jnp.arange(2.0**10)

    with mesh:
        expected = pjit(program, in_shardings=None, out_shardings=None)(*given())
        made = pjit(program, in_shardings=None, out_shardings=None, donate_argnums=0)
        # A loop without a known end counts as one of a thousand iterations.
        assert any(call.is_answered for call in made.plan(*given()).calls) == (times == 1 or not is_counted)
        for _ in range(2):
            jax.tree.map(np.testing.assert_array_equal, made(*given()), expected)


@pytest.mark.parametrize("times", [1, 2])
def test_a_donated_array_beside_a_loop_is_updated_in_place_unless_it_is_copied_sooner(times):
    call = of_numpy(lambda x: x / 2)

    def program(state, x):
        return state.at[0].set(x), lax.fori_loop(0, 8, lambda _, x: call(jnp.sin(x)), x)

    given = jnp.zeros((2**4 * 8 * times, 2**10)), jnp.arange(2.0**10)
    expected = pjit(program)(*given)
    plan = pjit(program, donate_argnums=0).plan(*given)
    assert [len(fragment.calls) for fragment in plan.fragments] == ([1] if times == 1 else [0, 1])
    found = pjit(program, donate_argnums=0)(*given)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_work_before_and_after_it_does_not_matter():
    call = of_numpy(lambda x: x)
    program = pjit(lambda x: lax.fori_loop(0, 3, lambda _, x: call(x @ x) @ x / 64, x))
    assert waits(program.plan(jnp.ones((128, 128))))


@pytest.mark.usefixtures("never_at_once")
def test_in_a_row_the_caller_goes_on_while_the_devices_work():
    """Unless they have little to do: then one dispatch is less than two."""
    call = of_numpy(lambda x: x)
    program = pjit(lambda x: call(x + 1) @ x)
    assert waits(program.plan(jnp.ones((8, 8))))
    assert not waits(program.plan(jnp.ones((256, 256))))


def test_large_arguments_of_a_row_are_donated(monkeypatch):
    monkeypatch.setattr(choose_emitted, "MOST_BYTES_KEPT", 0)
    call = of_numpy(lambda x: x)
    for fun in (lambda x, y: (call(y) + 1, x * 2), lambda x, y: (scan(call)(y), x * 2)):
        program = pjit(fun, donate_argnums=0)
        assert not any(node.is_answered for node in program.plan(jnp.ones(8), jnp.ones(8)).calls)


def test_a_recording_has_every_call_and_where_it_comes_from():
    call = of_numpy(lambda x: x)
    program = pjit(scan(call, 5))
    plan = program.plan(jnp.ones(8))
    assert "calls <lambda> as it runs" in plan.source
    assert "in its executable, the caller" in plan._repr_html_()
    seen = []
    with partjit.events.subscribe(seen.append):
        program(jnp.ones(8))
    queued = [event for event in seen if isinstance(event, partjit.events.CallQueued)]
    assert [(event.program, event.node) for event in queued] == [(plan.name, plan.calls[0].name)] * 5
    with partjit.record() as timeline:
        program(jnp.ones(8))
    spans = [span for span in timeline.spans if span.kind == "call"]
    assert len(spans) == 5
    assert all(span.end is not None for span in spans)


# Calls without results that are quick


@pytest.mark.parametrize("spec", [None, P(), P("x")])
def test_quick_calls_run_in_threads_of_the_devices(mesh, spec, monkeypatch):
    """In their order, and with failures as those of other calls without results; of two calls in an iteration too."""
    monkeypatch.setattr(gather, "MOST_ITERATIONS", 1)
    monkeypatch.setattr(cheapness, "_QUICK_IN_A_ROW", 5)
    monkeypatch.setattr(cheapness, "_QUICK_SECONDS", 1.0)

    def look(i, x):
        rendezvous.logs["threads"].append(threading.get_ident())
        note(i, x.sum())
        if i in rendezvous.logs["failing"]:
            raise ValueError(f"{i} fails")

    log = of_numpy(look, out_specs_fn=lambda *_: None)
    more = of_numpy(lambda i: note(i), out_specs_fn=lambda *_: None)

    def iteration(i, x):
        log(i, x)
        x = x + 1
        more(i)
        return x

    x = np.zeros(8, np.float32)
    x = jnp.asarray(x) if spec is None else jax.device_put(x, NamedSharding(mesh, spec))
    program = pjit(lambda x: lax.fori_loop(0, 6, iteration, x))
    expected = [call for i in range(6) for call in ((i, 8.0 * i), (i,))]
    for quick in range(3):
        rendezvous.clear()
        np.testing.assert_array_equal(program(x), np.full(8, 6))
        if quick and spec is None:
            assert {*rendezvous.logs["threads"]} == {threading.get_ident()}, "XLA:CPU calls Python in this thread"
        assert calls() == expected
    rendezvous.clear()
    rendezvous.logs["failing"] = [2]
    np.testing.assert_array_equal(program(x), np.full(8, 6))
    with pytest.raises(ValueError, match="2 fails"):
        colocated.wait(timeout=60)
    assert calls() == expected


def test_calls_that_are_no_longer_quick_go_to_a_thread(monkeypatch):
    monkeypatch.setattr(gather, "MOST_ITERATIONS", 1)
    monkeypatch.setattr(cheapness, "_QUICK_IN_A_ROW", 3)
    monkeypatch.setattr(cheapness, "_QUICK_SECONDS", 0.2)

    def look(i, waits):
        rendezvous.logs["threads"].append(threading.get_ident())
        if waits:
            threading.Event().wait(0.24)

    log = of_numpy(look, out_specs_fn=lambda *_: None)
    program = pjit(lambda x, waits: lax.fori_loop(0, 3, lambda i, x: (log(i, waits), x)[1], x))
    here = []
    for slow in (False, False, True, False, False):
        rendezvous.clear()
        program(jnp.ones(8), slow)
        colocated.wait(timeout=60)
        here.append({*rendezvous.logs["threads"]} == {threading.get_ident()})
    assert here == [False, True, True, False, True]


def test_a_single_call_that_is_a_little_late_leaves_the_others_where_they_are(monkeypatch):
    monkeypatch.setattr(gather, "MOST_ITERATIONS", 1)
    monkeypatch.setattr(cheapness, "_QUICK_IN_A_ROW", 3)
    monkeypatch.setattr(cheapness, "_QUICK_SECONDS", 0.2)

    def look(i, late):
        rendezvous.logs["threads"].append(threading.get_ident())
        if late and int(i) == 0:
            threading.Event().wait(0.24)

    log = of_numpy(look, out_specs_fn=lambda *_: None)
    program = pjit(lambda x, late: lax.fori_loop(0, 3, lambda i, x: (log(i, late), x)[1], x))
    here = []
    for late in (False, True, True, True):
        rendezvous.clear()
        program(jnp.ones(8), late)
        colocated.wait(timeout=60)
        here.append({*rendezvous.logs["threads"]} == {threading.get_ident()})
    assert here == [False, True, True, True]


def test_two_loops_with_loggers_on_two_streams_are_one_executable():
    one, other = (of_numpy(note, out_specs_fn=lambda *_: None, stream=name) for name in ("one", "other"))

    def fun(x):
        for log in (one, other):
            x = lax.fori_loop(0, 3, lambda i, x, log=log: (log(i), x + 1)[1], x)
        return x

    plan = pjit(fun).plan(jnp.ones(8))
    assert [type(node) for node in plan.nodes] == [Fragment]
    pjit(fun)(jnp.ones(8))
    assert sorted(calls()) == [(i,) for i in range(3) for _ in range(2)]
