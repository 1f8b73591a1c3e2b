"""Branches by the host on CPU devices.

What tells which one is chosen is computed by the host, or by one device alone, if it follows from numbers that the
program is called with. Otherwise it is computed, and read, before the rest on a single device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import partjit
from partjit import P, colocated, pjit
from partjit.colocated import colocated_python
from partjit.plan.ir.nodes import Branch, Fragment
from tests.census import saw, sees
from tests.colocated import rendezvous
from tests.effort import examples

pytestmark = pytest.mark.usefixtures("meeting")

LARGE, SMALL = np.eye(128, dtype=np.float32), np.eye(4, dtype=np.float32)


@colocated_python(out_specs_fn=lambda *_: None)
def save(step, x):
    rendezvous.logs["calls"].append((int(step), float(x.sum())))


@colocated_python(out_specs_fn=lambda x: x)
def late(x):
    return x + 1


def of_number(step, x):
    return step % 3 == 2


def of_rest(step, x):
    return (step % 3 == 2) & (jnp.sum(x) > -1)


def of_call(step, x):
    return late(step) % 3 == 0


def program(predicate):
    def step(x, number):
        x = x @ x @ x
        jax.lax.cond(predicate(number, x), lambda: save(number, x), lambda: None)
        return x

    return pjit(step, donate_argnums=0)


@pytest.mark.parametrize(
    ("predicate", "x", "equations"),
    [
        # Two products of 128 x 128 amortize a fragment of their own, those of 4 x 4 do not.
        (of_number, LARGE, "by the host"),
        (of_number, SMALL, "by the host"),
        (of_number, LARGE, "apart"),
        (of_number, SMALL, "together"),
        (of_rest, LARGE, "together"),
        (of_rest, SMALL, "together"),
        (of_call, LARGE, "beside the call"),
    ],
)
def test_the_predicate_has_a_fragment_of_its_own_where_it_is_little_and_the_rest_is_not(predicate, x, equations):
    step = program(predicate)
    kind = int if equations == "by the host" else jnp.int32
    plan = step.plan(x, kind(0))
    fragments = [node for node in plan.nodes if isinstance(node, Fragment)]
    products = [[eqn.primitive.name for eqn in node.jaxpr.eqns].count("dot_general") for node in fragments]
    assert isinstance(plan.nodes[-1], Branch)
    if equations == "by the host":
        assert products == [2, 0]
        assert asked_of_one_device(plan) == [True]
        assert "equations, by the host" in str(plan)
    elif equations == "apart":
        assert products == [0, 2]
        assert plan.nodes[-1].inputs[0] in fragments[0].outputs
    elif equations == "together":
        assert products == [2]
    else:
        assert sum(products) == 2
    for number in range(6):
        x = step(x, kind(number))
    colocated.wait()
    assert rendezvous.logs["calls"] == [(2, len(x)), (5, len(x))]


def asked_of_one_device(plan):
    """The fragments that one device runs, each with whether the branch that follows it reads its result."""
    found = [(i, node) for i, node in enumerate(plan.nodes) if isinstance(node, Fragment) and node.by_one_device]
    return [isinstance(plan.nodes[i + 1], Branch) and plan.nodes[i + 1].inputs[0] in node.outputs for i, node in found]


@pytest.mark.parametrize("explicit", [False, True])
def test_of_several_devices_one_is_asked_which_branch_is_chosen_if_that_follows_from_numbers(explicit):
    kinds = (jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), axis_types=kinds)
    everywhere = jax.sharding.NamedSharding(mesh, P())
    step = program(of_number)
    with jax.set_mesh(mesh):
        x = jax.device_put(LARGE, jax.sharding.NamedSharding(mesh, P("x", None)))
        assert asked_of_one_device(step.plan(x, 0)) == [True]
        # An array may still be computed: the devices decide.
        assert asked_of_one_device(step.plan(x, jax.device_put(0, everywhere))) == []
        for i, kind in enumerate([int, np.int64, np.array, jnp.int32, lambda i: jax.device_put(i, everywhere), int]):
            x = step(x, kind(i))
        compiled = step.lower(x, 6).compile()
        for i in (7, 8):
            x = compiled(x, i)
        x = compiled(x, jax.device_put(11, everywhere))
    colocated.wait()
    assert rendezvous.logs["calls"] == [(2, 128), (5, 128), (8, 128), (11, 128)]


@pytest.mark.parametrize("count", [1, 2])
def test_accelerators_are_not_asked_what_the_host_cannot_compute(accelerators, count):
    mesh = partjit.Mesh(accelerators[:count], ("x",))

    def of_floats(step, x):
        return step / 3 > 1.5

    with jax.set_mesh(mesh):
        x = jax.device_put(SMALL, jax.sharding.NamedSharding(mesh, P("x", None)))
        by_host, on_devices = program(of_number), program(of_floats)
        assert len(asked_of_one_device(by_host.plan(x, 0))) == 1
        assert "equations, by the host" in str(by_host.plan(x, 0))
        assert asked_of_one_device(on_devices.plan(x, 0)) == []
        for number in range(6):
            x = by_host(x, number)
        for number in range(6):
            x = on_devices(x, number)
    colocated.wait()
    assert rendezvous.logs["calls"] == [(2, 4), (5, 4), (5, 4)]


def test_all_devices_make_the_call_where_what_it_gets_would_be_kept_for_it():
    with partjit.Mesh(np.array(jax.devices()[:2]), ("x",)):
        large = np.ones((1024, 512), np.float32)
        step = pjit(lambda x, i: jax.lax.cond(i % 3 == 2, lambda: save(i, x * 2), lambda: None))
        assert asked_of_one_device(step.plan(large, 0)) == [True]  # it is an argument
        step = pjit(lambda x, i: jax.lax.cond(i % 3 == 2, save, lambda *_: None, i, x * 2))
        assert asked_of_one_device(step.plan(large, 0)) == []
        assert asked_of_one_device(step.plan(large[0], 0)) == [True]


def with_a_result_that_is_used(i, x):
    return jax.lax.cond(i % 3 == 2, lambda: (save(i, x), x)[1], lambda: x + 1) * 2


def of_an_array(i, x):
    jax.lax.cond((i % 3 == 2) & (x[0, 0] > 0), lambda: save(i, x), lambda: None)


@pytest.mark.parametrize("body", [with_a_result_that_is_used, of_an_array])
def test_all_devices_decide_where_they_have_to(body):
    with partjit.Mesh(np.array(jax.devices()[:2]), ("x",)):
        step = pjit(lambda i, x: body(i, x))
        ones = np.ones((4, 4), np.float32)
        assert asked_of_one_device(step.plan(0, ones)) == []
        for i in range(4):
            step(i, ones)
    colocated.wait()
    assert rendezvous.logs["calls"] == [(2, 16)]


def of_what_leaves(i, x):
    is_due = i % 3 == 2
    jax.lax.cond(is_due, lambda: save(i, x), lambda: None)
    return is_due


def of_what_is_used(i, x):
    is_due = i % 3 == 2
    jax.lax.cond(is_due, lambda: save(i, x), lambda: None)
    return jnp.where(is_due, x, 0)


def of_what_is_captured(i, x):
    left = i % 3
    jax.lax.cond(left == 2, lambda: save(i, x + left - 2), lambda: None)


def of_what_decides_twice(i, x):
    is_due = i % 3 == 2
    jax.lax.cond(is_due, lambda: save(i, x), lambda: None)
    jax.lax.cond(is_due & (i > 2), lambda: save(i, x), lambda: None)


@pytest.mark.parametrize("body", [of_what_leaves, of_what_is_used, of_what_is_captured, of_what_decides_twice])
def test_what_others_need_as_well_is_computed_a_second_time(body):
    with partjit.Mesh(np.array(jax.devices()[:2]), ("x",)):
        step = pjit(lambda i, x: body(i, x))
        ones = np.ones((4, 4), np.float32)
        assert asked_of_one_device(step.plan(0, ones))
        for i in range(4):
            step(i, ones)
    colocated.wait()
    assert rendezvous.logs["calls"] == [(2, 16)]


OPERATIONS = {
    "%": lambda a, b: a % (abs(b) + 1),
    "+": lambda a, b: a + b,
    "min": jnp.minimum,
    "where": lambda a, b: jnp.where(a > b, a, 7),
    "float": lambda a, b: jnp.float32(a) * 0.5 > jnp.float32(b),
}
steps = st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9)), max_size=5)


@sees("different examples", "several elements", "a call", "no call", "by the host", "by one device", *OPERATIONS)
@examples(25)
@given(
    st.sampled_from([1, 2]),
    steps,
    st.lists(st.tuples(st.integers(-9, 9), st.sampled_from([int, np.int32, np.array])), min_size=2, max_size=3),
)
def test_predicates_of_numbers_are_what_all_devices_would_compute(devices, steps, arguments):
    rendezvous.clear()

    def predicate(*numbers):
        values = [jnp.int32(number) for number in numbers]
        for name, i, k in steps:
            values.append(jnp.int32(OPERATIONS[name](values[i % len(values)], values[k % len(values)])))
        return values[-1] % 2 == 1

    def body(x, *numbers):
        x = x * 2
        jax.lax.cond(predicate(*numbers), lambda: save(numbers[0], x), lambda: None)
        return x

    numbers = [kind(value) for value, kind in arguments]
    with partjit.Mesh(np.array(jax.devices()[:devices]), ("x",)):
        step = pjit(body, in_shardings=(P("x"), *(P() for _ in numbers)))
        plan = step.plan(np.ones(2, np.float32), *numbers)
        assert asked_of_one_device(plan) == [True]
        saw("by the host" if "by the host" in str(plan) else "by one device")
        for _ in range(2):
            step(np.ones(2, np.float32), *numbers)
    colocated.wait()
    is_due = bool(predicate(*numbers))
    for what in {"a call" if is_due else "no call", *(name for name, *_ in steps)}:
        saw(what)
    assert rendezvous.logs["calls"] == [(int(numbers[0]), 4.0)] * 2 * is_due
