"""Calls whose first fragment C++ dispatches as it recognizes them."""

import contextlib
import enum
import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from partjit import colocated, events, pjit, results_so_far
from partjit.colocated import colocated_python
from partjit.colocated.runtime.streams import as_stream
from partjit.plan.run import first, recent
from tests.census import saw, sees
from tests.colocated import rendezvous
from tests.effort import examples

pytestmark = pytest.mark.usefixtures("meeting")

ROWS = 8
SHORT = "by a short cut"
nothing = {"out_specs_fn": lambda *xs: None}


@pytest.fixture(scope="module")
def calls_by_front():
    """Whether each call of the module's tests was recognized by C++, if that was asked; `SHORT` without being asked."""
    found = []
    real, real_data = recent.Recent._by_front, first.fast_path_then

    def by_front(self, *args):
        outcome = real(self, *args)
        found.append(outcome is not None)
        return outcome

    def fast_path_then(data, is_given, then, *, is_at_once=False):
        def noted(results):
            found.append(SHORT)
            return then(results)

        return real_data(data, is_given, noted if is_at_once else then, is_at_once=is_at_once)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(recent.Recent, "_by_front", by_front)
        monkeypatch.setattr(first, "fast_path_then", fast_path_then)
        yield found


@pytest.fixture
def by_front(calls_by_front):
    """The same of one test."""
    never_entered()
    calls_by_front.clear()
    return calls_by_front


def never_entered():
    """Forgets that the stream of the programs was entered: of those that use it none would have a short cut again."""
    as_stream("log").was_entered = False


def note(name, **options):
    def write(*xs):
        rendezvous.logs[name].append([np.asarray(x).tolist() for x in xs])

    return colocated_python(write, **nothing, **options)


def logged(name):
    colocated.wait()
    found = [*rendezvous.logs[name]]
    rendezvous.logs[name].clear()
    return found


# What programs do besides, with the donated state, an array, and a number of the host


def logs_the_loss(state, x, step):
    note_log(jnp.sum(state))
    return state + x, jnp.max(x)


def logs_the_step(state, x, step):
    note_log(step, jnp.sum(state))
    return state + x, jnp.max(x)


def logs_an_argument(state, x, step):
    out = state + x
    note_log(x, step, jnp.sum(out))
    return out, x  # as it came


def reads_them_in_another_order(state, x, step):
    note_log(jnp.sum(x))
    return x - state, jnp.max(x)


def waits_for_a_call(state, x, step):
    y = twice(state + x)
    note_log(jnp.sum(y), step)
    return y - state, jnp.sum(x)


def calls_in_a_loop(state, x, step):
    def body(i, carry):
        note_log(jnp.sum(carry), step)
        return carry + x

    return jax.lax.fori_loop(0, 2, body, state * 2), jnp.sum(state)


def calls_first(state, x, step):
    note_log(step)
    return state - x, jnp.sum(x)


note_log = note("log", stream="log")
twice = colocated_python(lambda y: 2 * np.asarray(y), arrays="numpy", out_specs_fn=lambda y: y)
# The same with NumPy: results and what is logged
PROGRAMS = {
    logs_the_loss: lambda s, x, i: ((s + x, x.max()), [[s.sum()]]),
    logs_the_step: lambda s, x, i: ((s + x, x.max()), [[i, s.sum()]]),
    logs_an_argument: lambda s, x, i: ((s + x, x), [[x.tolist(), i, (s + x).sum()]]),
    reads_them_in_another_order: lambda s, x, i: ((x - s, x.max()), [[x.sum()]]),
    waits_for_a_call: lambda s, x, i: ((s + 2 * x, x.sum()), [[2 * (s + x).sum(), i]]),
    calls_in_a_loop: lambda s, x, i: ((2 * s + 2 * x, s.sum()), [[2 * s.sum(), i], [(2 * s + x).sum(), i]]),
    calls_first: lambda s, x, i: ((s - x, x.sum()), [[i]]),
}
SIZES = (2, 3)
CIRCUMSTANCES = {
    "plain": contextlib.nullcontext,
    "observed": lambda: events.subscribe(lambda _: None),
    "in its stream": lambda: colocated.stream("log"),
    "in another stream": lambda: colocated.stream("another"),
    "checked for NaNs": lambda: jax.debug_nans(True),
    "without jit": jax.disable_jit,
}


def _arguments(width, is_sharded, is_elsewhere, mesh):
    rng = np.random.default_rng(width)
    values = [rng.integers(0, 9, (ROWS, width)).astype(np.float32) for _ in range(2)]
    if is_elsewhere:
        return [*map(jnp.asarray, values)]
    return jax.device_put(values, jax.NamedSharding(mesh, P("x")) if is_sharded else jax.devices()[0])


@functools.cache
def step_of(program, is_donated, is_sharded):
    """It with or without donation, over a mesh or on one device."""
    specs = {"in_shardings": (P("x"), P("x"), None), "out_shardings": (P("x"), None)} if is_sharded else {}
    return pjit(program, donate_argnums=0 if is_donated else (), **specs)


_FOUND = "recognized by C++", "in another order, recognized by C++", "not recognized by C++", SHORT
_SHORT = "plain", "in another stream", "checked for NaNs"
"""The circumstances that a short cut needs not see before."""


@sees(*_FOUND, "donated", "donated elsewhere", "a large integer", *CIRCUMSTANCES)
@examples(60)
@given(data=st.data())
def test_a_call_does_what_the_first_one_did(mesh, calls_by_front, data):
    """Of one program, with arguments of several types, under all circumstances in which calls may come."""
    never_entered()
    logged("log")  # what is left of an example that failed
    program = data.draw(st.sampled_from([*PROGRAMS]), "program")
    is_donated = is_sharded = data.draw(st.booleans(), "donated and sharded")
    step = step_of(program, is_donated, is_sharded)
    circumstances = [how for how in CIRCUMSTANCES if how != "checked for NaNs" or not is_donated]  # it donates nothing
    for number in range(data.draw(st.integers(3, 9), "calls")):
        how = data.draw(st.sampled_from(["plain"] * 3 + circumstances), "how")
        width = data.draw(st.sampled_from(SIZES), "width")
        index = data.draw(st.sampled_from([number, 2**30, 7.5]), "step")
        by_name = data.draw(st.booleans(), "by name")
        is_elsewhere = is_sharded and data.draw(st.booleans(), "on one device, uncommitted")
        state, x = _arguments(width, is_sharded, is_elsewhere, mesh)
        expected, log = PROGRAMS[program](np.asarray(state), np.asarray(x), index)
        was = len(calls_by_front)
        with mesh if is_sharded else contextlib.nullcontext(), CIRCUMSTANCES[how]():
            found = step(state, x, step=index) if by_name and not is_sharded else step(state, x, index)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        np.testing.assert_equal(logged("log"), log)
        saw(how)
        if index == 2**30:
            saw("a large integer")
        is_short, is_by_front = SHORT in calls_by_front[was:], any(calls_by_front[was:])
        assert not is_by_front or how == "plain" or (is_short and how in _SHORT)
        saw(SHORT, when=is_short)
        is_moved = is_elsewhere and program is waits_for_a_call  # as several fragments read it
        if is_donated and how != "without jit" and program is not calls_first and not is_moved:
            with mesh, pytest.raises(RuntimeError, match=r"deleted|donated"):
                step(state, x, index)
            saw("donated elsewhere" if is_elsewhere else "donated")
        saw("in another order, recognized by C++", when=is_by_front and program is reads_them_in_another_order)
        saw("recognized by C++" if is_by_front else "not recognized by C++")


def test_what_a_call_that_fails_leaves(by_front):
    def check(x):
        if float(x) > 2:
            raise ValueError("too much")

    checked = colocated_python(check, mode="inline", **nothing)
    step = pjit(lambda x: (x + 1, checked(jnp.sum(x)))[0], donate_argnums=0)
    x = jnp.float32(0)
    for _ in range(3):
        x = step(x)
    with pytest.raises(ValueError, match="too much") as info:
        step(x)
    assert by_front == [False, SHORT, SHORT]
    assert float(results_so_far(info.value)) == 4


@pytest.mark.parametrize("number", [0, 1, 4])
def test_what_a_failed_call_has_consumed_is_deleted(mesh, number):
    """jax 0.10 would use it, and the process would end."""

    @colocated_python(mode="inline", arrays="numpy", out_specs_fn=lambda _: None)
    def fail(x):
        if x[0] == number:
            raise ValueError("no")

    step = pjit(lambda x: (fail(x + 0), x + 1)[1], donate_argnums=0)
    x = jax.device_put(np.zeros(8, np.float32), jax.sharding.NamedSharding(mesh, P(("x", "y"))))
    for _ in range(number):
        x = step(x)
    with pytest.raises(ValueError, match="no"):
        step(x)
    assert x.is_deleted()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="deleted"):
            step(x)


def _grown(scale):
    """On a thread: the calls are long."""
    time.sleep(3e-4)
    return np.float32(2 * scale)


def _with_statics(step):
    return pjit(lambda state, x, kind: step(state, x), static_argnums=2)


STATES = {
    "an argument": (lambda w, scale: (w, scale), lambda state: state),
    "in a tree": (
        lambda w, scale: {"w": [w], "of the host": {"scale": scale}},
        lambda state: (state["w"][0], state["of the host"]["scale"]),
    ),
}


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("kind", [*STATES])
def test_what_calls_made_of_the_state_is_waited_for_and_the_step_is_dispatched_by_cpp(kind, is_static, by_front):
    make, take = STATES[kind]
    call = colocated_python(_grown, arrays="numpy", out_specs=jax.ShapeDtypeStruct((), np.float32))

    def step(state, x):
        w, scale = take(state)
        return make(w + scale * x, call(scale))

    program = _with_statics(step) if is_static else pjit(step)
    rest = ("kind",) if is_static else ()
    state, w, scale = make(jnp.zeros(4), jnp.float32(1)), 0.0, 1.0
    for i in range(6):
        state = program(state, np.float32(i) * jnp.ones(4), *rest)
        w, scale = w + scale * i, 2 * scale
        assert type(take(state)[1]) is not type(take(state)[0]), "it is pending"
    np.testing.assert_array_equal(np.asarray(take(state)[0]), w)
    assert float(take(state)[1]) == scale
    assert by_front[-3:] == [True] * 3


def test_it_is_waited_for_beside_an_array_that_is_passed_twice_as_well(by_front):
    """As tied weights are, or equal numbers."""
    call = colocated_python(_grown, arrays="numpy", out_specs=jax.ShapeDtypeStruct((), np.float32))
    step = pjit(lambda x, y, scale, n, m: (x + y * scale + n + m, call(scale)))
    w, scale = jnp.ones(4), jnp.float32(1)
    for _ in range(6):
        result, scale = step(w, w, scale, 1.0, 1.0)
    np.testing.assert_array_equal(np.asarray(result), 35)
    assert by_front[-3:] == [True] * 3


def test_a_call_that_failed_is_raised_by_the_step_that_needs_its_result(by_front):
    def fails_at_8(scale):
        time.sleep(3e-4)
        if scale == 8:
            raise ValueError("eight")
        return np.float32(2 * scale)

    call = colocated_python(fails_at_8, arrays="numpy", out_specs=jax.ShapeDtypeStruct((), np.float32))
    step = pjit(lambda w, scale: (w + scale, call(scale)))
    state = jnp.zeros(4), jnp.float32(1)
    for _ in range(4):
        state = step(*state)
    for _ in range(2):
        with pytest.raises(ValueError, match="eight"):
            step(*state)
    assert any(by_front)
    np.testing.assert_array_equal(np.asarray(step(state[0], jnp.float32(1))[0]), 16)


def test_what_was_made_is_donated_once(by_front):
    """Also where it is passed twice, which is refused or copied as without calls."""
    call = colocated_python(lambda x: x + np.float32(1), arrays="numpy", out_specs_fn=lambda x: x)
    step = pjit(lambda x, y: (call(x) + y, call(y * 2)), donate_argnums=1)
    x = y = jnp.ones(4)
    y = y + 0
    for _ in range(4):
        before = y
        y = step(x, before)[1]
        assert before.is_deleted()
    np.testing.assert_array_equal(np.asarray(y), 2.0**4 + 2**4 - 1)
    with contextlib.suppress(ValueError, RuntimeError):  # as jax has it, of whichever version
        found = step(y, y)
        np.testing.assert_array_equal(np.asarray(found[0]), 31 + 1 + 31)


@pytest.mark.parametrize("calls", [2, 3])
def test_an_integer_too_large_is_named_and_nothing_is_lost(calls, by_front):
    step = pjit(logs_the_step, donate_argnums=0)
    step.clear_cache()
    state, x = jnp.zeros(3), jnp.ones(3)
    for i in range(calls):
        state, _ = step(state, x, i)
    assert by_front == [False, SHORT, SHORT][: calls - 1]
    with pytest.raises(OverflowError, match=r"Argument step of logs_the_step") as info:
        step(state, x, 2**31)
    if by_front[-1] == SHORT:  # C++ has dispatched the fragment, and what it has computed is kept
        state, _ = results_so_far(info.value)
        assert state.tolist() == [calls + 1.0] * 3
    else:
        assert not state.is_deleted()
    logged("log")


def test_numbers_are_read_wherever_they_are(by_front):
    """In calls of several kinds in turn: beside trees, in them, and by name."""

    def program(state, *given, **named):
        note_log(*jax.tree.leaves((given, named)), jnp.sum(state["x"]))
        return {"w": state["w"] + 1, "x": state["x"] + 1}

    step = pjit(program, donate_argnums=0)
    state = {"w": jnp.zeros(3), "x": jnp.float32(0)}
    kinds_of_calls = [
        lambda i: ((i,), {}),
        lambda i: (([7, i],), {}),
        lambda i: ((i, i + 1), {}),
        lambda i: ((), {"step": i}),
    ]
    number = 0
    for kinds in (kinds_of_calls[:1], kinds_of_calls[:2], kinds_of_calls[:3], kinds_of_calls):
        for repetition in range(3):
            for kind in kinds:
                given, named = kind(number)
                by_front.clear()
                state = step(state, *given, **named)
                assert logged("log") == [[*jax.tree.leaves((given, named)), number]]
                assert any(by_front) or repetition < 2, "not recognized"
                number += 1


@pytest.mark.parametrize("read", [lambda n: {}, lambda n: {"step": n}, lambda n: {"steps": [n]}])
def test_an_integer_too_large_in_a_tree_is_named_before_anything_is_consumed(read, by_front):
    def program(state, **named):
        x, n = state
        note_log(*jax.tree.leaves(named), jnp.sum(x))
        return x + n

    step = pjit(program, donate_argnums=0)
    x = jnp.zeros(3)
    for i in range(3):
        x = step((x, i), **read(i))
    assert by_front[-1]
    with pytest.raises(OverflowError, match="2147483648"):
        step((x, 2**31), **read(1))
    assert not x.is_deleted()
    logged("log")


class Size(enum.IntEnum):
    LARGE = 2**40


@pytest.mark.parametrize("number", [2**31, Size.LARGE], ids=repr)
def test_an_integer_too_large_that_only_calls_read_is_named_as_well(number, by_front):
    tell = colocated_python(lambda n, x: np.float32(x), mode="stream", arrays="numpy", out_specs_fn=lambda n, x: x)
    step = pjit(lambda x, n: (x + 1, tell(n, jnp.sum(x))), donate_argnums=0, name="step")
    x = jnp.zeros(3)
    for i in range(3):
        x, _ = step(x, i)
    assert by_front[-1] is True
    with pytest.raises(OverflowError, match="Argument n of step is"):
        step(x, number)
    assert not x.is_deleted()


@pytest.mark.parametrize("result", [None, (), {"loss": None}], ids=str)
def test_a_program_without_results_that_is_dispatched_by_cpp(result, by_front):
    note_loss = note("losses")

    @pjit
    def evaluate(x):
        note_loss(jnp.sum(x))
        return result

    x = jnp.ones(3)
    assert [evaluate(x) for _ in range(4)] == [result] * 4
    assert by_front[-1]
    assert logged("losses") == [[3.0]] * 4


def test_cleared_it_recognizes_nothing(by_front):
    step = pjit(logs_the_loss)
    for clear in (lambda: None, step.clear_cache, jax.clear_caches):
        clear()
        by_front.clear()
        for _ in range(4):
            step(jnp.zeros(3), jnp.ones(3), 0)
        assert not by_front[0], "C++ learns of it at the second call"
        assert all(by_front[1:])
        assert by_front[2] == SHORT
    assert logged("log") == [[0.0]] * 12


def test_several_threads_at_once(by_front):
    def inside(x):
        return step(np.asarray(x) - 1) if np.all(np.asarray(x) > 0) else x

    down = colocated_python(inside, mode="inline", out_specs_fn=lambda x: x)
    step = pjit(lambda x: down(x + 0) + 1)
    found = []
    threads = [threading.Thread(target=lambda: found.append(float(step(jnp.float32(4))))) for _ in range(4)]
    assert float(step(jnp.float32(4))) == 5
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [5.0] * 4


note_text = colocated_python(
    lambda text, *xs: rendezvous.logs["log"].append([text, *(np.asarray(x).tolist() for x in xs)]),
    stream="log",
    **nothing,
)


@pytest.mark.parametrize("is_donated", [False, True])
def test_programs_with_objects_of_the_host_are_dispatched_by_cpp(by_front, is_donated):
    def step(x, text, scale=2.0, *, note="no note", how=None):
        note_text(text, note, jnp.sum(x))
        return x * scale if how is None else x - 1

    options = {"host_argnums": 1, "host_argnames": "note", "static_argnames": "how"}
    step = pjit(step, donate_argnums=(0,) if is_donated else (), **options)
    calls = [((), {}), ((2.0,), {}), ((), {"note": "a note"}), ((), {"how": "down"}), ((), {"how": "down", "note": 1})]
    for i, (args, kwargs) in enumerate(calls * 4):
        x = jnp.float32(np.ones(3))
        given = x if is_donated else x + 0
        by_front.clear()
        y = step(given, f"text {i}", *args, **kwargs)
        assert y.tolist() == [0.0 if "how" in kwargs else 2.0] * 3
        assert given.is_deleted() == is_donated
        assert logged("log") == [[f"text {i}", kwargs.get("note", "no note"), 3.0]]
        # The first two of each kind are compared in Python, or run the fragment for the first time.
        assert i < 2 * len(calls) or by_front == [True]


def test_of_many_static_arguments_each_has_its_own_result(by_front):
    @functools.partial(pjit, static_argnums=1)
    def step(x, k):
        note_log(jnp.sum(x) + k)
        return x * k

    for _ in range(4):
        for k in range(1, 8):
            assert step(jnp.ones(2), k).tolist() == [k, k]
            assert logged("log") == [[2.0 + k]]
    for _ in range(2):
        by_front.clear()
        assert step(jnp.ones(2), 7).tolist() == [7, 7]
    assert by_front == [True]
