"""A program that is called with an argument that was deleted makes none of its calls."""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import P, colocated, events, pjit
from partjit._jax.dispatch import USE_OF_DONATED_BUFFERS_CRASHES
from partjit.plan.run import intact
from tests.colocated import rendezvous

SCALAR = jax.ShapeDtypeStruct((), np.float32)


def function(**options):
    @colocated.colocated_python(out_specs=SCALAR, devices=jax.devices()[:1], **options)
    def batch(*_):
        rendezvous.logs["calls"].append(1)
        return np.float32(1)

    return batch


def call_first(call):
    return lambda x, w: (w + call(), x)


def call_before_another_fragment(call):
    return lambda x, w: (w + call(jnp.sin(x).sum()), x)


def loop_first(call):
    def program(x, w):
        return jax.lax.fori_loop(0, 3, lambda _, y: y + call(y.sum()), x), w * 2

    return program


def branch_first(call):
    return lambda x, w: (w * jax.lax.cond(True, lambda: call(), lambda: jnp.float32(2)), x)


def two_calls(call):
    def program(x, w):
        number = call(x.sum())
        return x * number, w * call(number)

    return program


def given_to_a_second_call(call):
    def program(x, w):
        number = call(x.sum())
        return x * number, x + call(w)

    return program


PROGRAMS = [call_first, call_before_another_fragment, loop_first, branch_first, two_calls, given_to_a_second_call]
OPTIONS = [{}, {"mode": "inline"}, {"mode": "stream"}, {"uses_jax": False}, {"arrays": "numpy"}]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("is_observed", [False, True], ids=["", "observed"])
def test_a_call_with_a_deleted_argument_makes_no_calls(meeting, program, options, is_observed):
    step = pjit(program(function(**options)), donate_argnums=1)
    x = jnp.ones(4)
    observed = events.subscribe(lambda event: None) if is_observed else contextlib.nullcontext()
    with observed:
        for _ in range(3):  # the last ones are recognized
            w = jnp.full(4, 2.0)
            jax.block_until_ready(step(x, w))
            colocated.wait(timeout=60)
            made = len(meeting.logs["calls"])
            assert made
            assert w.is_deleted()
            with pytest.raises(RuntimeError, match="Array has been deleted") as raised:
                step(x, w)
            colocated.wait(timeout=60)
            assert len(meeting.logs["calls"]) == made
            named = f"w of {step.__name__} was deleted, or donated to an earlier call: pass what that call returned"
            assert named in str(raised.value) or "shape=" in str(raised.value)  # where jax is asked first


def test_an_executable_that_makes_calls_does_not_run_before_another_that_is_given_a_deleted_argument(meeting):
    @colocated.colocated_python(out_specs=(), devices=jax.devices()[:1])
    def log(_):
        rendezvous.logs["calls"].append(1)
        return ()

    answered = function(uses_jax=False)

    @pjit
    def step(x, w):
        x = jax.lax.fori_loop(0, 3, lambda _, y: (log(y.sum()), y + 1)[1], x)
        return x, jax.lax.fori_loop(0, 3, lambda _, y: y + answered(y.sum()), w)

    x, w = jnp.ones(4), jnp.ones(4) + 1
    assert [bool(fragment.calls) for fragment in step.plan(x, w).fragments] == [True, True]
    jax.block_until_ready(step(x, w))
    colocated.wait(timeout=60)
    assert len(meeting.logs["calls"]) == 6
    w.delete()
    with pytest.raises(RuntimeError, match="w of step was deleted"):
        step(x, w)
    colocated.wait(timeout=60)
    assert len(meeting.logs["calls"]) == 6


def test_the_argument_that_was_deleted_is_named(meeting):
    batch = function()
    step = pjit(lambda state, scale: (state["w"] + batch(), state["b"] * scale), donate_argnums=0)
    state = {"w": jnp.ones(4), "b": jnp.ones(3)}
    state["b"].delete()
    with pytest.raises(RuntimeError) as raised:
        step(state, 2.0)
    assert str(raised.value) == (
        "state['b'] of <lambda> was deleted, or donated to an earlier call: pass what that call returned in its place. "
        "Array has been deleted with type float32[3]"
    )
    assert not meeting.logs["calls"]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("donated", [0, 1, (0, 1)])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["", "compiled"])
def test_an_array_that_is_passed_twice_and_donated_is_refused_before_calls(meeting, options, donated, is_compiled):
    call = function(**options)
    step = pjit(lambda x, w: (x + call(), w["a"] * 3), donate_argnums=donated)
    x = jnp.ones(4)
    run = step.lower(x, {"a": x + 1}).compile() if is_compiled else step
    for count in range(3):  # of the calls that were made; later ones are recognized
        with pytest.raises(RuntimeError, match="donated") as raised:
            run(x, {"a": x})
        pair, named = ("w['a'] and x", "w['a']") if donated == 1 else ("x and w['a']", "x")
        text = f"{pair} of <lambda> are one array, of type float32[4], and {named} is donated: pass a copy of it"
        refused_by_dispatch = USE_OF_DONATED_BUFFERS_CRASHES and not is_compiled
        assert ("passed a second time" if refused_by_dispatch else text) in str(raised.value)
        colocated.wait(timeout=60)
        assert len(meeting.logs["calls"]) == count
        assert not x.is_deleted()
        jax.block_until_ready(run(jnp.copy(x), {"a": jnp.copy(x)}))


def test_an_array_on_one_device_that_is_passed_twice_and_replicated_is_refused_before_calls(mesh, meeting):
    """One of the devices would compute with the array itself: XLA fails there, and then hangs, as the others go on."""
    call = function()
    step = pjit(lambda x, w: (x + call(), w * 3), in_shardings=P(), donate_argnums=(0, 1))
    x = jnp.ones(4)
    with mesh:
        with pytest.raises(RuntimeError, match="donated"):
            step(x, x)
        assert not meeting.logs["calls"]
        assert not x.is_deleted()
        jax.block_until_ready(step(x, x + 1))


@pytest.mark.skipif(USE_OF_DONATED_BUFFERS_CRASHES, reason="the dispatch refuses all")
def test_what_the_plan_copies_or_has_read_before_may_be_passed_twice(meeting, mesh):
    call = function()
    spread = pjit(lambda x, w: (x + call(), w * 3), in_shardings=(P("x"), P("x")), donate_argnums=1)
    read_before = pjit(lambda x, w: w * call(x.sum()), donate_argnums=1)
    unread = pjit(lambda x, w: w * call(), donate_argnums=1)
    results = []
    with mesh:
        x = jnp.ones(8)
        results += spread(x, x)
    for step in (read_before, unread):
        x = jnp.ones(8)
        results.append(step(x, x))
    assert [np.unique(result).tolist() for result in results] == [[2], [3], [1], [1]]


def test_host_values_that_are_one_object_are_passed_twice(meeting):
    step = pjit(lambda x, w: (x + function()(), w * 3), donate_argnums=1)
    value = np.ones(4, np.float32)
    assert [float(result[0]) for result in step(value, value)] == [2, 3]
    assert [float(result) for result in step(1.0, 1.0)] == [2, 3]


def test_a_hot_call_asks_for_the_id_of_no_argument(meeting, monkeypatch):
    """Python audits it: where there is an audit hook, that would take as long as to dispatch the arrays of a model."""
    log = colocated.colocated_python(lambda x: None, mode="inline", out_specs_fn=lambda x: None)

    @partial(pjit, donate_argnums=0)
    def step(state):
        log(state[0])
        return [x + 1 for x in state]

    asked = []
    monkeypatch.setattr(intact, "id", asked.append, raising=False)
    state = [jnp.full((), i) for i in range(5)]
    for _ in range(3):
        state = step(state)
    assert [int(x) for x in state] == [3, 4, 5, 6, 7]
    assert asked == []
