"""Functions for which jax keeps equations with rules of their own until all transformations are done."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import P, colocated, pjit
from partjit.inspect import explain
from tests.effort import sample


def places(x):
    """Positions, a search and the values there are: some jax versions trace each to one equation."""
    return (
        jnp.nonzero(x, size=3)[0],
        jnp.searchsorted(jnp.sort(x[:, 0]), x[0]),
        jnp.unique(x[0], size=2),
    )


X = np.arange(64, dtype=np.float32).reshape(8, 8) % 7


@colocated.colocated_python(out_specs=jax.ShapeDtypeStruct(X.shape, X.dtype))
def same(x):
    return x * 1


WAYS = {
    "called": lambda x: pjit(places, in_shardings=P("x"))(x),
    "under jit": lambda x: jax.jit(pjit(places, in_shardings=P("x")))(x),
    "nested": lambda x: pjit(pjit(places, in_shardings=P("x")))(x),
    "compiled ahead": lambda x: pjit(places, in_shardings=P("x")).lower(x).compile()(x),
    "batched": lambda x: jax.tree.map(lambda batch: batch[0], jax.vmap(pjit(places))(np.stack([x, x + 1]))),
    "rematerialized": lambda x: pjit(jax.checkpoint(places))(x),
    "in a loop": lambda x: jax.tree.map(
        lambda stack: stack[1], pjit(lambda x: jax.lax.scan(lambda c, _: (c, places(c)), x, None, length=2)[1])(x)
    ),
    "beside a call": lambda x: pjit(lambda x: places(same(x) + 0), in_shardings=P("x"))(x),
}


@pytest.mark.soak
@pytest.mark.parametrize("way", sample([*WAYS], 2))
def test_they_are_what_they_are_without_partitioning(way, mesh):
    with mesh:
        results = WAYS[way](X)
    for result, expected in zip(results, places(jnp.asarray(X)), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_derivatives_beside_them_are_right(mesh):
    def loss(x):
        return jnp.unique(x[0], size=2).sum() + (x**2).sum()

    with mesh:
        gradient = jax.grad(lambda x: pjit(loss, in_shardings=P("x"))(x))(X)
    np.testing.assert_allclose(gradient, jax.grad(loss)(jnp.asarray(X)))


def test_they_can_be_read(mesh):
    report = explain(pjit(places, in_shardings=P("x")), X, mesh=mesh)
    assert [value for value in report.values if value.is_array and value.spec is None] == []
    assert [value.path for value in report.whole.results] == ["result[0]", "result[1]", "result[2]"]
