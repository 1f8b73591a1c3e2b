"""Derivatives that functions define themselves, and what they donate: mistakes in both are found."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import P, pjit
from partjit.testing import assert_same_meaning
from partjit.testing.derivatives import custom_calls, wrong_derivative

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, 2)


def with_rule(fun, rule):
    made = jax.custom_vjp(fun)
    made.defvjp(lambda x: (fun(x), x), lambda x, ct: (rule(x, ct),))
    return made


@partial(with_rule, rule=lambda x, ct: 3 * ct)
def tripled(x):
    return 2 * x


@partial(with_rule, rule=lambda x, ct: ct * jnp.cos(x) / 2)
def halved(x):
    return jnp.sin(x)


@jax.custom_jvp
def negated(x, y):
    return jnp.tanh(x) * y


@negated.defjvp
def _negated_jvp(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    return negated(x, y), -(1 - jnp.tanh(x) ** 2) * dx * y + jnp.tanh(x) * dy


def in_scan(x):
    return jax.lax.scan(lambda carry, row: (carry + halved(row), None), jnp.zeros(2), x)[0]


def in_attention(x):
    return jax.nn.softmax(jax.jit(tripled)(x) @ x.T)  # which has a jax.lax.stop_gradient


def in_sum(x):
    return jnp.sum(halved(x) ** 2)


def with_itself(x):
    return negated(x, x)


@pytest.mark.parametrize(
    ("fun", "message"),
    [
        (in_sum, r"halved \(a jax.custom_vjp at .*test_derivatives.py:\d+\): with respect to args\[0\] it is"),
        (with_itself, r"negated \(a jax.custom_jvp at .*test_derivatives.py:\d+\): with respect to args\[0\] it is"),
        (in_scan, "halved"),
        (in_attention, "tripled"),
    ],
)
def test_wrong_rules_are_found_wherever_they_are_called(fun, message):
    (call,) = {call.fun: call for call in custom_calls(fun, [X])}.values()
    assert re.match(message, f"{call}: {wrong_derivative(call.fun, call.args)}")


def test_a_wrong_custom_derivative_is_found_without_a_reference(mesh):
    options = {"mesh": mesh, "in_specs": P("x"), "vmap": False}
    message = r"^the derivative of tripled \(a jax.custom_vjp at .*\) is wrong: .*; where that is meant, pass custom_"
    with pytest.raises(AssertionError, match=message):
        assert_same_meaning(tripled, X, **options)
    assert_same_meaning(tripled, X, **options, custom_derivatives=False)
    assert_same_meaning(tripled, X, **options, grad=False)


def test_a_wrong_custom_vjp_in_a_shard_map_is_found(mesh):
    @partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    def on_shards(x):
        return tripled(x)

    with pytest.raises(AssertionError, match=r"^the derivative of a jax.custom_vjp in the function is wrong"):
        assert_same_meaning(on_shards, X, mesh=mesh, in_specs=P("x"), vmap=False)


@pytest.mark.parametrize(
    "fun",
    [
        with_rule(jnp.sin, lambda x, ct: ct * jnp.cos(x)),
        with_rule(lambda x: jnp.maximum(x, 0), lambda x, ct: jnp.where(x > 0, ct, 0)),  # a kink at an element
        with_rule(jnp.floor, lambda x, ct: 0 * ct),
        with_rule(lambda x: jnp.log(x), lambda x, ct: ct / x),  # not of negative numbers
        with_rule(lambda x: jnp.exp(8 * x), lambda x, ct: 8 * ct * jnp.exp(8 * x)),
        with_rule(lambda x: 1e4 + 1e-3 * x, lambda x, ct: 1e-3 * ct),  # rounding is greater than the derivative
        jax.nn.gelu,
        lambda x: jax.nn.log_softmax(jax.nn.relu(x)),
        lambda x: jax.scipy.special.logsumexp(jax.nn.silu(x)),
    ],
    ids=["sin", "relu", "floor", "log", "steep", "flat", "gelu", "log_softmax", "logsumexp"],
)
def test_right_ones_and_those_that_cannot_be_judged_pass(fun):
    for x in (X, np.zeros((8, 2), np.float32), X + 1):
        assert wrong_derivative(fun, [x]) is None


def test_short_floats_integers_and_other_objects_are_no_trouble():
    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def scaled(how, i, x):
        return how(x) * i

    scaled.defvjp(lambda how, i, x: (scaled(how, i, x), i), lambda how, i, ct: (None, 2 * ct * i))
    assert wrong_derivative(scaled, [jnp.negative, 3, X]) is not None
    assert wrong_derivative(tripled, [jnp.ones(4, jnp.bfloat16)]) is None
    assert wrong_derivative(tripled, [np.ones((0, 2), np.float32)]) is None


# Donation


consume = jax.jit(lambda x: x + 1, donate_argnums=0)
consume_both = pjit(lambda x, y: x + y, donate_argnums=(0, 1))


@pytest.mark.parametrize(
    ("fun", "message"),
    [
        (
            lambda x: consume(x) + x,
            r"args\[0\] is donated to <lambda> at .*test_derivatives.py:\d+ in .* and read .*, by add",
        ),
        (lambda x: consume(x) + consume(x), r"args\[0\] is donated to <lambda>.* and read afterwards, by <lambda>"),
        (lambda x: consume_both(x, x), r"args\[0\] is donated and passed a second time in one call of <lambda>"),
        (lambda x: (consume(x), x), r"args\[0\] is donated to <lambda> at .* and returned"),
        (
            jax.jit(lambda x: (y := 2 * x, consume(y), y)[1:]),
            r"a value float32\[8,2\] is donated to <lambda> .* and returned",
        ),
        (
            lambda x: jax.lax.scan(lambda c, _: (consume(c) + c, None), x, None, length=2)[0],
            r"a value float32\[8,2\] is donated",
        ),
    ],
    ids=["read", "donated twice", "donated twice in a call", "returned", "in a program", "in a loop"],
)
def test_what_is_read_after_it_was_donated_inside_of_a_function_is_found(mesh, fun, message):
    with pytest.raises(AssertionError, match=f"^{message}"):
        assert_same_meaning(fun, X, mesh=mesh, in_specs=P("x"), grad=False, vmap=False)


def test_donation_of_what_is_not_used_again_is_right(mesh):
    assert_same_meaning(lambda x: consume(2 * x) + x, X, mesh=mesh, in_specs=P("x"), grad=False, vmap=False)
