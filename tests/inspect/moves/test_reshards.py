"""What XLA remembers of reshards, and how it makes those that are left, is predicted as it is compiled."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from partjit import P, with_sharding_constraint
from tests.inspect.moves.test_constrained import assert_equal, explained, floats


def of_keys_and_values(x):
    """Two results of one sort, of which one is sorted again."""
    first, second = lax.sort((x, -x), dimension=0, num_keys=1)
    return jnp.concatenate([first, first]), second


# What is computed, and the shapes and specs of its arguments.
PROGRAMS = {
    "a product's operand is resharded after it": (
        lambda y, w: (y @ w, jnp.sort(w, 1)),
        {(16, 32): P(), (32, 16): P(None, "x")},
    ),
    "a sharding on the way to another one is wanted as well": (
        lambda x: (with_sharding_constraint(x, P("x", None, None)), with_sharding_constraint(x, P(None, None, "x"))),
        {(32, 16, 32): P(None, "y", "x")},
    ),
    "it is wanted before": (
        lambda x: (with_sharding_constraint(x, P(None, None, "x")), with_sharding_constraint(x, P("x", None, None))),
        {(32, 16, 32): P(None, "y", "x")},
    ),
    "a product's operand is resharded before it": (
        lambda y, w: (jnp.sort(w, 1), y @ w),
        {(16, 32): P(), (32, 16): P(None, "x")},
    ),
    "what a product uses is the copy that a constraint makes": (
        lambda y, w: (y @ with_sharding_constraint(w, P(None, "x")), jnp.sort(w, 1)),
        {(16, 64): P(), (64, 16): P(None, "x")},
    ),
    "a product's result": (
        lambda w: jnp.concatenate([w @ w.T, w @ w.T]),
        {(48, 16): P("x", "y")},
    ),
    "a product's batch": (
        lambda y, w: (jnp.einsum("bij,bjk->bik", y, w), jnp.sort(w, 0)),
        {(4, 8, 16): P("y"), (4, 16, 32): P("y")},
    ),
    "nothing is known of the copy that a constraint makes": (
        lambda w: jnp.sort(with_sharding_constraint(w, P("x")), 0),
        {(32, 24): P(None, "x")},
    ),
    "what is replicated on the way is replicated once": (
        lambda x: [with_sharding_constraint(x, P(*axes)) * 2 for axes in (["y"], [None, "x"], ["x"], [])],
        {(16, 40): P(None, ("x", "y"))},
    ),
    "nothing is known of the elements of a tuple": (of_keys_and_values, {(16, 8): P("y", "x")}),
    "a dimension of one element is not sharded before it has more": (
        lambda v, w: jnp.pad(v[None], ((0, 31), (0, 0))) + w,
        {(56,): P(), (32, 56): P("x")},
    ),
}


@pytest.fixture(autouse=True)
def lenient():
    """The programs are those of users, who may let jax promote."""

    with jax.numpy_rank_promotion("allow"):
        yield


def test_reshards_are_predicted_as_they_are_compiled():
    """All in one program, in which they have nothing to do with each other: that takes about as long as three."""

    def fun(*arguments):
        left = iter(arguments)
        return [one(*[next(left) for _ in arrays]) for one, arrays in PROGRAMS.values()]

    arrays = [array for _, found in PROGRAMS.values() for array in found.items()]
    report = explained(fun, tuple(spec for _, spec in arrays), *(floats(*shape) for shape, _ in arrays))
    assert_equal(report)
