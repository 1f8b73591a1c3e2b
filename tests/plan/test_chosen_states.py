"""Branches with calls that give what leaves the program, of several devices, where the host knows which one is chosen.

The host chooses: the devices need no executable that makes calls in each step for what is called now and then.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import partjit
from partjit import P, colocated, pjit
from partjit.colocated import colocated_python
from partjit.plan.ir.nodes import Branch, Fragment
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

STEPS = 9


@colocated_python(out_specs_fn=lambda *_: None)
def save(i, x):
    rendezvous.logs["saved"].append((int(i), float(np.asarray(x)[1])))


@colocated_python(out_specs_fn=lambda x: x)
def next_of(x):
    return np.asarray(x) + 1


@colocated_python(out_specs_fn=lambda x: x, uses_jax=False)
def next_without_jax(x):
    return x + 1


@colocated_python(out_specs_fn=lambda i, x: x)
def refused_at_five(i, x):
    if int(i) == 5:
        raise ValueError("five")
    return np.asarray(x) + 1


def as_it_is(i, a, b):
    save(i, a)
    return a, b


def changed(i, a, b):
    save(i, a)
    return a * 2, b


def swapped(i, a, b):
    save(i, a)
    return b, a


def of_calls(i, a, b):
    save(i, a)
    return next_of(a), next_without_jax(b)


PLAIN = {
    as_it_is: lambda i, a, b: (a, b),
    changed: lambda i, a, b: (a * 2, b),
    swapped: lambda i, a, b: (b, a),
    of_calls: lambda i, a, b: (a + 1, b + 1),
}


def once(branch, i, a, b):
    return jax.lax.cond(i % 3 == 2, branch, lambda _, a, b: (a, b), i, a, b)


def twice(branch, i, a, b):
    return once(branch, i + 1, *once(branch, i, a, b))


def beside_more(branch, i, a, b):
    a, b = a + 1, b - 1
    return *once(branch, i, a, b), jnp.cos(a)


@pytest.fixture
def two_devices():
    with partjit.Mesh(np.array(jax.devices()[:2]), ("x",)) as mesh:
        yield mesh


def fresh(mesh):
    return [jax.device_put(jnp.arange(8.0) + k, NamedSharding(mesh, P("x"))) for k in (0, 10)]


def is_by_host(plan):
    """Whether the host chooses, and finds out what without the devices."""
    return any(isinstance(node, Branch) for node in plan.nodes) and "by the host" in str(plan)


@pytest.mark.parametrize("branch", PLAIN, ids=lambda branch: branch.__name__)
@pytest.mark.parametrize("body", [once, twice])
@pytest.mark.parametrize(("is_counted", "is_donated"), [(False, False), (False, True), (True, True)])
def test_the_host_decides_and_the_states_are_those_of_the_program_without_calls(
    branch, body, is_counted, is_donated, two_devices
):
    def step(i, a, b):
        return i + 1, *body(branch, i, a, b)

    plain = jax.jit(lambda i, a, b: body(PLAIN[branch], i, a, b))
    program = pjit(step, donate_argnums=(1, 2) if is_donated else ())
    i, state = 0, fresh(two_devices)
    if is_counted:
        i = jax.device_put(jnp.int32(0), NamedSharding(two_devices, P()))
    assert is_by_host(program.plan(i, *state))
    states, expected = [state], [[*map(np.asarray, state)]]
    for number in range(STEPS):
        after, *state = program(i, *state)
        i = after if is_counted else number + 1
        expected.append([*map(np.asarray, plain(number, *expected[-1]))])
        states.append(state)
        np.testing.assert_array_equal(state, expected[-1])
    colocated.wait()
    for given, values in [*zip(states, expected, strict=True)][-1 if is_donated else 0 :]:
        np.testing.assert_array_equal(given, values)
    assert len(rendezvous.logs["saved"]) == 3 * (1 if body is once else 2)
    assert rendezvous.logs["saved"][0] == (2, expected[2 if body is once else 1][0][1])


@pytest.mark.parametrize("branch", [as_it_is, changed, of_calls], ids=lambda branch: branch.__name__)
def test_what_else_the_devices_do_is_not_cut(branch, two_devices):
    program = pjit(lambda i, a, b: beside_more(branch, i, a, b))
    state = fresh(two_devices)
    plan = program.plan(0, *state)
    assert is_by_host(plan)
    assert sum(isinstance(node, Fragment) and not node.by_one_device for node in plan.nodes) == 1
    for i in range(STEPS):
        expected = beside_more(PLAIN[branch], i, *map(np.asarray, state))
        *state, cosine = program(i, *state)
        np.testing.assert_allclose([*state, cosine], expected, rtol=1e-6)


@pytest.mark.parametrize("is_donated", [False, True])
def test_a_call_that_fails_in_a_branch_fails_that_step_alone(is_donated, two_devices):
    def chosen(i, a, b):
        save(i, a)
        return refused_at_five(i, a), b

    program = pjit(lambda i, a, b: once(chosen, i, a + 1, b + 1), donate_argnums=(1, 2) if is_donated else ())
    for i in range(STEPS):
        outs = program(i, *fresh(two_devices))
        with pytest.raises(ValueError, match="five") if i == 5 else contextlib.nullcontext():
            np.testing.assert_array_equal(outs[0], np.arange(8.0) + 1 + (i % 3 == 2))
        np.testing.assert_array_equal(outs[1], np.arange(8.0) + 11)
    colocated.wait()
    assert rendezvous.logs["saved"] == [(2, 2.0), (5, 2.0), (8, 2.0)]


def test_what_a_branch_gives_is_not_kept_for_it_if_it_is_much():
    """Unless one of its blocks gives it as it is."""
    with partjit.Mesh(np.array(jax.devices()[:2]), ("x",)):
        large = np.ones((1024, 512), np.float32)

        def step(x, i):
            return jax.lax.cond(i % 3 == 2, lambda y: (save(i, y[0]), y * 2)[1], lambda y: y, x + 1)

        def summed(x, i):
            return jax.lax.cond(i % 3 == 2, lambda y: (save(i, y[0]), y.sum())[1], lambda y: y[0, 0], x + 1)

        assert is_by_host(pjit(step).plan(large, 0))
        assert not is_by_host(pjit(summed).plan(large, 0))
        assert is_by_host(pjit(summed).plan(large[:4], 0))
