"""What is left of the results when a call in a loop over donated arguments fails."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import partjit
from partjit import colocated, pjit, results_so_far
from partjit.colocated import colocated_python

pytestmark = pytest.mark.usefixtures("meeting")

scalar = jax.ShapeDtypeStruct((), np.float32)
DONE = 7
"""The iterations that end."""


class Stop(BaseException):
    """Such as Ctrl-C."""


def failing(error=ValueError, **options):
    """A call that gives 1 until it has been called often enough."""
    calls = []  # its own, in each of its copies

    def check(x):
        calls.append(1)
        if len(calls) > DONE:
            raise error("enough")
        return np.float32(1)

    return colocated_python(check, arrays="numpy", out_specs_fn=lambda x: scalar, **options)


def reads_the_state_afterwards(check):
    return lambda c, x: (c + check(jnp.sum(c)) * x, jnp.sum(c))


def does_not_read_it_afterwards(check):
    return lambda c, x: (jnp.full(8, check(c) * x + jnp.max(c)), jnp.sum(c))


def has_computed_the_next_state(check):
    def body(c, x):
        following = c + x
        return following, check(jnp.sum(following)) * x

    return body


BODIES = {
    reads_the_state_afterwards: [8.0 * k for k in range(7)],
    has_computed_the_next_state: [1.0] * 7,
}


def program(body, **options):
    def scanned(state, xs):
        c, ys = jax.lax.scan(body, state["c"], xs)
        return {"c": c, "ys": ys, "sum": jnp.sum(ys)}

    return pjit(scanned, donate_argnums=0, **options)


def arguments():
    return {"c": jnp.zeros(8)}, jnp.ones(20)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("mode", ["inline", "stream"])
@pytest.mark.parametrize("is_observed", [False, True])
def test_the_last_carry_is_left_when_a_call_fails(mesh, body, mode, is_observed):
    ys = BODIES[body]
    for donated in ({"in_axis_resources": (P("x"), None)}, {}):
        call = failing(mode=mode)
        f = program(body(call), **donated)
        listening = partjit.record() if is_observed else contextlib.nullcontext()
        with mesh, listening, pytest.raises(ValueError, match="enough") as caught:
            f(*arguments())
        left = results_so_far(caught.value)
        assert left["sum"] is None
        np.testing.assert_array_equal(left["c"], [7.0] * 8)
        np.testing.assert_array_equal(left["ys"][: len(ys)], ys)
        np.testing.assert_array_equal(left["ys"][len(ys) + 1 :], 0)


def test_a_carry_that_the_rest_of_the_iteration_does_not_read_is_left_too():
    f = program(does_not_read_it_afterwards(failing()))
    with pytest.raises(ValueError, match="enough") as caught:
        f(*arguments())
    np.testing.assert_array_equal(results_so_far(caught.value)["c"], [7.0] * 8)


def test_it_is_left_at_an_interrupt_in_an_ahead_of_time_program_and_under_grad_too():
    f = program(reads_the_state_afterwards(failing(Stop)))
    compiled = f.lower(*arguments()).compile()
    with pytest.raises(Stop) as caught:
        compiled(*arguments())
    np.testing.assert_array_equal(results_so_far(caught.value)["c"], [7.0] * 8)
    g = program(lambda c, x: (c + jax.lax.stop_gradient(x), failing_once(jax.lax.stop_gradient(jnp.sum(c)))))
    with pytest.raises(ValueError, match="enough"):
        jax.value_and_grad(lambda c: jnp.sum(g({"c": c}, jnp.ones(20))["c"]))(jnp.zeros(8))


failing_once = failing()


def test_what_the_failed_iteration_has_reused_is_not_left():
    first, second = failing(), failing()

    def body(c, x):
        c = c + first(jnp.sum(c)) * x
        return c * second(jnp.sum(c)), None

    f = program(lambda c, x: (body(c, x)[0], jnp.sum(c)))
    with pytest.raises(ValueError, match="enough") as caught:
        f(*arguments())
    assert results_so_far(caught.value)["c"] is not None  # the first one fails, before anything is reused

    first = colocated_python(lambda x: np.float32(1), out_specs=scalar)
    f = program(lambda c, x: (body(c, x)[0], jnp.sum(c)))
    with pytest.raises(ValueError, match="enough") as caught:
        f(*arguments())
    assert results_so_far(caught.value)["c"] is None


def test_the_next_call_works_and_errors_of_others_have_nothing():
    once = failing()
    f = program(reads_the_state_afterwards(once))
    with pytest.raises(ValueError, match="enough"):
        f(*arguments())
    assert results_so_far(ValueError("of somebody else")) is None
    with pytest.raises(TypeError, match="results_so_far: error must be the exception that a program raised"):
        results_so_far("enough")


def test_what_was_not_donated_is_intact():
    f = pjit(lambda c, xs: jax.lax.scan(does_not_read_it_afterwards(failing()), c, xs))
    c = jnp.zeros(8)
    with pytest.raises(ValueError, match="enough"):
        f(c, jnp.ones(20))
    np.testing.assert_array_equal(c, 0)
    colocated.wait()


@pytest.mark.parametrize("mode", ["inline", "stream"])
def test_what_only_a_call_reads_is_left_when_it_fails(mode):
    check = failing(mode=mode)
    kept = colocated_python(lambda x: x + 0, out_specs_fn=lambda x: x, mode="inline")
    for body in (
        lambda c: jnp.full(4, check(c)) + 1,
        lambda c: kept(jnp.full(4, check(c)) + 1),
        lambda c: kept(kept(c) + check(c)) - 1 / 2,
    ):
        step = pjit(lambda c, body=body: jax.lax.fori_loop(0, 10, lambda _, c: body(c), c), donate_argnums=0)
        with pytest.raises(ValueError, match="enough") as caught:
            jax.block_until_ready(step(jnp.zeros(4)))
        assert results_so_far(caught.value).tolist() in ([2] * 4, [DONE / 2] * 4)
