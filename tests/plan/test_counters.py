"""Integers in the state of a program, which the host counts along to know which branch the next execution chooses."""

import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import partjit
from partjit import P, colocated, pjit
from partjit.colocated import colocated_python
from partjit.plan.run import counters
from tests.census import saw, sees
from tests.colocated import rendezvous
from tests.effort import examples

pytestmark = pytest.mark.usefixtures("meeting")


@colocated_python(out_specs_fn=lambda *_: None)
def save(step, x):
    rendezvous.logs["calls"].append((int(step), float(x.sum())))


@pytest.fixture
def reads(monkeypatch):
    """The numbers that the host reads from arrays, which it waits for."""
    found = []
    read = counters.item_of
    monkeypatch.setattr(counters, "item_of", lambda array: found.append(read(array)) or found[-1])
    return found


def counted_up(state):
    return state["step"] + 1


def program(next_of=counted_up, is_due=lambda step: step % 3 == 2, **options):
    def step(state, x):
        new = {"w": state["w"] * 2 + x, "step": next_of(state)}
        jax.lax.cond(is_due(state["step"]), lambda: save(state["step"], new["w"]), lambda: None)
        return new

    return pjit(step, **options)


def new_state(step=0, devices=1):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))
    of_w, of_step = (jax.sharding.NamedSharding(mesh, spec) for spec in (P("x"), P()))
    return {"w": jax.device_put(np.ones(4, np.float32), of_w), "step": jax.device_put(jnp.asarray(step), of_step)}


@pytest.mark.parametrize("donated", [(), (0,)])
@pytest.mark.parametrize("devices", [1, 2])
def test_the_number_of_the_first_state_is_read_and_no_other(reads, devices, donated):
    step, state = program(donate_argnums=donated), new_state(devices=devices)
    plan = str(step.plan(state, 0.5))
    assert "by the host" in plan
    assert re.search(r"know\(\S+, \S+step\S*\)  # 1 equation", plan)
    for i in range(7):
        given = state["step"]
        state = step(state, 0.5)
        assert given.is_deleted() == bool(donated)
        assert int(state["step"]) == i + 1
    colocated.wait()
    assert reads == [0]
    assert [number for number, _ in rendezvous.logs["calls"]] == [2, 5]


@pytest.mark.parametrize("has_64_bits", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
@pytest.mark.parametrize("devices", [1, 2])
def test_divisions_by_0_are_computed_of_the_array(dtype, has_64_bits, devices):
    """By a device, for what they are depends on XLA; a Python integer would be of another type."""
    with jax.enable_x64(has_64_bits):

        def is_due(step):
            return jax.lax.div(jnp.asarray(7, dtype), step) < 7

        step, state = program(is_due=is_due), new_state(np.zeros((), dtype), devices)
        assert "by the host" in str(step.plan(state, 0.5))
        expected = []
        for i in range(3):
            expected += [i] * bool(jax.jit(is_due)(state["step"]))
            state = step(state, 0.5)
        colocated.wait()
        assert [number for number, _ in rendezvous.logs["calls"]] == expected
        assert expected[-1:] == [2]


def test_accelerators_are_not_waited_for(reads, accelerators):
    mesh = partjit.Mesh(accelerators[:2], ("x",))
    with jax.set_mesh(mesh):
        state = {"w": jnp.ones(4), "step": jnp.int32(0)}
        state = jax.device_put(state, jax.sharding.NamedSharding(mesh, P()))
        step = program(donate_argnums=0)
        assert "by the host" in str(step.plan(state, 0.5))
        for _ in range(6):
            state = step(state, 0.5)
    colocated.wait()
    assert reads == [0]
    assert [number for number, _ in rendezvous.logs["calls"]] == [2, 5]


def is_due_by_halves(step):
    return step * 0.5 == 2.5


@pytest.mark.parametrize(
    ("next_of", "is_due"),
    [
        (lambda state: state["step"] + jnp.int32(state["w"][0]), lambda step: step % 3 == 2),  # not of integers alone
        (lambda state: jnp.int32(state["w"][0]), lambda step: step % 3 == 2),  # not of the counter at all
        (counted_up, is_due_by_halves),
        (lambda state: state["step"].astype(float).astype(int), lambda step: step % 3 == 2),
    ],
)
def test_the_devices_decide_what_the_host_cannot_count(reads, next_of, is_due):
    step, state = program(next_of, is_due), new_state()
    assert "know(" not in str(step.plan(state, 0.5))
    numbers = []
    for _ in range(8):
        if is_due(int(state["step"])):
            numbers.append(int(state["step"]))
        state = step(state, 0.5)
    colocated.wait()
    assert [number for number, _ in rendezvous.logs["calls"]] == numbers
    assert reads == []


@colocated_python(out_specs_fn=lambda x: x)
def corrected(x):
    rendezvous.logs["calls"].append(float(x.sum()))
    return x / 2


@pytest.mark.parametrize("devices", [1, 2])
def test_a_branch_with_results_is_chosen_as_well(reads, devices):
    @pjit
    def step(state):
        w = jax.lax.cond(state["step"] % 3 == 2, lambda: corrected(state["w"]), lambda: state["w"] + 1)
        return {"w": w, "step": state["step"] + 1}

    state = new_state(devices=devices)
    assert "by the host" in str(step.plan(state))
    for _ in range(6):
        state = step(state)
    assert state["w"].tolist() == [1.75] * 4
    assert rendezvous.logs["calls"] == [12.0, 14.0]
    assert reads == [0]


def test_other_integers_are_not_asked_for(reads):
    """They may be what another program computes, for which the host would have to wait."""

    @pjit
    def step(state):
        jax.lax.cond(state["step"] % 3 == 2, lambda: save(state["step"], state["w"]), lambda: None)
        by = state["by"]
        return {"w": state["w"], "step": state["step"] + by, "by": by * 1, "tokens": state["tokens"] + 7}

    state = {**new_state(), "by": jnp.int32(1), "tokens": jnp.int32(0)}
    assert "know(out_by, out_step, state_by, state_step)" in str(step.plan(state)).replace("'", "")
    for _ in range(6):
        state = step({**state, "tokens": state["tokens"] + 1})
    colocated.wait()
    assert sorted(reads) == [0, 1]
    assert [number for number, _ in rendezvous.logs["calls"]] == [2, 5]
    assert int(state["tokens"]) == 48


def test_a_function_may_be_called_know():
    @colocated_python(out_specs_fn=lambda *_: None)
    def know(step):
        rendezvous.logs["calls"].append(int(step))

    @pjit
    def step(state):
        jax.lax.cond(state % 2 == 0, lambda: know(state), lambda: None)
        return state + 1

    state = jnp.int32(0)
    for _ in range(4):
        state = step(state)
    colocated.wait()
    assert rendezvous.logs["calls"] == [0, 2]


def test_the_numbers_of_arrays_that_are_gone_are_forgotten():
    gc.collect()
    before = len(counters._known)
    step, state = program(), new_state()
    for _ in range(5):
        state = step(state, 0.5)
    colocated.wait()
    gc.collect()
    assert len(counters._known) <= before + 2  # that of the first state, if anybody has it still, and of the last
    del state
    gc.collect()
    assert len(counters._known) <= before + 1


CHANGES = {
    "as it is": lambda state: state,
    "from NumPy": lambda state: {**state, "step": np.asarray(state["step"])},
    "by another program": jax.jit(lambda state: {**state, "step": state["step"] * 3 - 5}),
    "started anew": lambda state: {**state, "step": jnp.zeros_like(state["step"])},
    "the same again": None,
    "near the end of its type": lambda state: {
        **state,
        "step": jnp.full_like(state["step"], jnp.iinfo(state["step"].dtype).max - 1),
    },
}
COUNTING = {
    "up": counted_up,
    "by two numbers": lambda state: state["step"] + state["by"],
    "down, from 7": lambda state: jnp.where(state["step"] == 0, 7, state["step"] - 1),
    "not at all": lambda state: state["step"],
}
DUE = {
    "each third": lambda state, new: state["step"] % 3 == 0,
    "of what comes next": lambda state, new: new["step"] % 2 == 0,
    "of two numbers": lambda state, new: (state["step"] > state["by"]) & (new["step"] % 2 == 1),
}


def kind_and_values(x):
    return x.dtype, x.tolist()


@sees("different examples", "several elements", "a call", "no call", *CHANGES, *COUNTING, *DUE)
@examples(20)
@given(
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from(sorted(COUNTING)),
    st.sampled_from(sorted(DUE)),
    st.sampled_from([np.int32, np.uint8, np.int8]),
    st.lists(st.sampled_from(sorted(CHANGES)), min_size=3, max_size=6),
)
def test_calls_are_those_of_the_numbers_in_the_arrays(devices, is_donated, counting, due, kind, changes):
    rendezvous.clear()

    def counted(state):
        return {"w": state["w"] + 1, "step": COUNTING[counting](state).astype(kind), "by": state["by"] + 0}

    def step(state):
        new = counted(state)
        jax.lax.cond(DUE[due](state, new), lambda: save(state["step"], new["w"]), lambda: None)
        return new

    run = pjit(step, donate_argnums=(0,) if is_donated else ())
    by_jax = jax.jit(lambda state: (new := counted(state), DUE[due](state, new)))
    expected = []

    def checked(state):
        new, is_due = by_jax(state)
        if is_due:
            expected.append((int(state["step"]), float(new["w"].sum())))
        saw("a call" if is_due else "no call")
        found = run(state)
        assert jax.tree.map(kind_and_values, found) == jax.tree.map(kind_and_values, new)
        return found

    state = {**new_state(kind(0), devices), "by": new_state(kind(3), devices)["step"]}
    assert "know(" in str(run.plan(state))
    saw(counting)
    saw(due)
    for change in changes:
        saw(change)
        if CHANGES[change] is not None:
            state = CHANGES[change](state)
        elif not is_donated:
            checked(state)
        state = checked(state)
    colocated.wait()
    assert rendezvous.logs["calls"] == expected
