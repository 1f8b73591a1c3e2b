"""Functions for which jax keeps equations with rules of their own until all transformations are done."""

import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partjit import P, colocated, pjit
from partjit.inspect import explain
from tests.colocated import rendezvous
from tests.effort import sample
from tests.inspect.compiled_shardings import as_asked


def places(x):
    """Positions, a search and the values there are: some jax versions trace each to one equation."""
    return (
        jnp.nonzero(x, size=3)[0],
        jnp.searchsorted(jnp.sort(x[:, 0]), x[0]),
        jnp.unique(x[0], size=2),
    )


X = np.arange(64, dtype=np.float32).reshape(8, 8) % 7
PLAIN = jax.jit(places)


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
    for result, expected in zip(results, PLAIN(X), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_derivatives_beside_them_are_right(mesh):
    def loss(x):
        return jnp.unique(x[0], size=2).sum() + (x**2).sum()

    with mesh:
        gradient = jax.grad(lambda x: pjit(loss, in_shardings=P("x"))(x))(X)
    np.testing.assert_allclose(gradient, jax.jit(jax.grad(loss))(X))


def test_they_can_be_read(mesh):
    report = explain(pjit(places, in_shardings=P("x")), X, mesh=mesh)
    values = as_asked(report.whole).tree.values
    assert [value for value in values if value.is_array and value.spec is None] == []
    assert [value.path for value in report.whole.results] == ["result[0]", "result[1]", "result[2]"]


@pytest.fixture(scope="module")
def features():
    """The module with a hijax type."""
    path = pathlib.Path(__file__).parents[1] / "docs" / "features.py"
    spec = importlib.util.spec_from_file_location("features_of_docs", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_what_values_of_hijax_types_cannot_do_is_an_error_that_says_what_can(features, mesh):
    pair = features.Pair(jnp.asarray(X), jnp.asarray(X))
    total = features.Sum(features.PairType(X.shape))
    step = pjit(lambda pair, x: total(pair) + x, name="step")
    with_call = pjit(lambda pair, x: total(pair) + same(x), name="with_call")
    with mesh:
        for ask in (
            lambda: step.lower(pair, X),
            lambda: with_call.lower(pair, X),
            lambda: with_call.plan(pair, X),
            lambda: explain(step, pair, X),
        ):
            with pytest.raises(TypeError, match=r"hijax types \(PairType\).*lower jax.jit\((step|with_call)\)"):
                ask()
        with pytest.raises(ValueError, match="the colocated function same") as caught:
            with_call(pair, X)
        assert "with_call is run by jax.jit, for it takes or returns values of hijax types" in caught.value.__notes__
        with pytest.raises(TypeError, match="x of the colocated function same has the hijax type PairType"):
            pjit(lambda pair: same(pair))(pair)
        np.testing.assert_array_equal(step(pair, X), 3 * X)
        np.testing.assert_array_equal(jax.jit(step).lower(pair, X).compile()(pair, X), 3 * X)


def test_calls_without_results_are_made_beside_values_of_hijax_types(features, mesh, meeting):
    pair = features.Pair(jnp.asarray(X), jnp.asarray(X))
    total = features.Sum(features.PairType(X.shape))
    log = colocated.colocated_python(note_sum, out_specs_fn=lambda x: None)

    def step(pair):
        result = total(pair)
        log(result)
        return result

    with mesh:
        np.testing.assert_array_equal(pjit(step)(pair), 2 * X)
    colocated.wait()
    assert meeting.logs["sums"] == [float(2 * X.sum())]


def note_sum(x):
    rendezvous.logs["sums"].append(float(np.sum(np.asarray(x))))
