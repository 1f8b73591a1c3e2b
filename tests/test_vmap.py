"""Batching: where the batch axis goes in specs and values, and `spmd_axis_name`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from partjit import P, ShardingError, SpecSync, pjit, with_sharding_constraint
from partjit.primitive import pjit_p, sharding_constraint_p

X = np.arange(48.0, dtype=np.float32).reshape(6, 8) / 48


def equations(jaxpr, primitive):
    return [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive is primitive]


def laid_out(array, mesh, spec):
    assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim), array.sharding


# Specs


def test_an_unsharded_axis_is_inserted_in_front_of_the_specs_of_what_is_batched(mesh):
    function = pjit(lambda a, b: (a * b, b + 1), in_axis_resources=(P("x"), P("y")), out_axis_resources=(P("x"), P("y")))
    with mesh:
        jaxpr = jax.make_jaxpr(jax.vmap(function, in_axes=(0, None), out_axes=(0, None)))(X, X[0])
    (eqn,) = equations(jaxpr, pjit_p)
    batched_in, in_spec = eqn.params["in_specs"]
    batched_out, out_spec = eqn.params["out_specs"]
    assert (batched_in.partitions, in_spec.partitions) == (((), ("x",)), (("y",),))
    assert (batched_out.partitions, out_spec.partitions) == (((), ("x",)), (("y",),))
    assert batched_in.sync is batched_out.sync is SpecSync.DIM_PERMUTE
    assert in_spec.sync is out_spec.sync is SpecSync.IN_SYNC
    assert in_spec.user_spec == P("y")


def test_spmd_axis_name_divides_the_batch(mesh):
    function = pjit(lambda a: a * 2, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        batched = jax.vmap(function, spmd_axis_name="y")
        (eqn,) = equations(jax.make_jaxpr(batched)(X), pjit_p)
        for specs in (eqn.params["in_specs"], eqn.params["out_specs"]):
            assert specs[0].partitions == (("y",), ("x",))
            assert specs[0].sync is SpecSync.OUT_OF_SYNC
        for call in (batched, jax.jit(batched)):
            out = call(X)
            np.testing.assert_array_equal(out, X * 2)
            laid_out(out, mesh, P("y", "x"))


def test_spmd_axis_name_of_several_axes(mesh):
    function = pjit(lambda a: a * 2, in_axis_resources=P(), out_axis_resources=P())
    with mesh:
        out = jax.vmap(function, spmd_axis_name=("y", "x"))(np.ones((8, 3), np.float32))
    laid_out(out, mesh, P(("y", "x")))


@pytest.mark.parametrize("options", [{"in_axis_resources": P("x")}, {"out_axis_resources": P(("y", "x"))}])
def test_an_axis_that_divides_a_dimension_already_cannot_divide_the_batch(mesh, options):
    with mesh, pytest.raises(ShardingError, match="spmd_axis_name .*cannot appear in.*already uses 'x'"):
        jax.vmap(pjit(lambda a: a, **options), spmd_axis_name="x")(np.ones((8, 8), np.float32))


def test_the_same_holds_for_a_constraint(mesh):
    def fun(a):
        return with_sharding_constraint(a, P("x"))

    for wrapped in (pjit(fun), jax.jit(fun)):
        with mesh, pytest.raises(ShardingError, match="spmd_axis_name .*with_sharding_constraint arguments.*uses 'x'"):
            jax.vmap(wrapped, spmd_axis_name="x")(np.ones((8, 8), np.float32))


def test_spmd_axis_name_must_be_an_axis_that_divides_the_batch(mesh):
    function = pjit(lambda a: a, in_axis_resources=P("x"))
    with mesh, pytest.raises(ShardingError, match="names resource axis q, which is undefined: the mesh has x=4, y=2"):
        jax.vmap(function, spmd_axis_name="q")(X)
    with mesh, pytest.raises(ShardingError, match="size of the batch should be divisible by 2, but it is equal to 3"):
        jax.vmap(function, spmd_axis_name="y")(X[:3])


# Values


@pytest.mark.parametrize(("in_axes", "out_axes"), [(0, 0), (1, 0), (0, 1), (1, 1), (-1, -1)])
def test_any_batch_dimension(mesh, in_axes, out_axes):
    function = pjit(lambda a: jnp.sin(a) + a.sum(), in_axis_resources=P("x"), out_axis_resources=P("x"))
    value = np.moveaxis(X, 0, in_axes)
    expected = np.moveaxis(np.sin(X) + X.sum(1, keepdims=True), 0, out_axes)
    with mesh:
        for call in (jax.vmap(function, in_axes, out_axes), jax.jit(jax.vmap(function, in_axes, out_axes))):
            out = call(value)
            np.testing.assert_allclose(out, expected, rtol=1e-5)
            laid_out(out, mesh, P(None, "x") if out_axes == 0 else P("x", None))


def test_an_unbatched_result(mesh):
    function = pjit(lambda a, b: (a + b, b * 2), in_axis_resources=(P("x"), P("y")), out_axis_resources=P("y"))
    with mesh:
        batched, single = jax.vmap(function, in_axes=(0, None), out_axes=(0, None))(X, X[0])
    np.testing.assert_allclose(batched, X + X[0])
    np.testing.assert_allclose(single, X[0] * 2)
    laid_out(batched, mesh, P(None, "y"))
    laid_out(single, mesh, P("y"))


def test_nested_vmap(mesh):
    function = pjit(lambda a, b: a @ b, in_axis_resources=(P("x"), P("x")), out_axis_resources=None)
    with mesh:
        outer = jax.vmap(jax.vmap(function, (None, 0)), (0, None))
        for call in (outer, jax.jit(outer)):
            np.testing.assert_allclose(call(X, X), X @ X.T, rtol=1e-5)
        (eqn,) = equations(jax.make_jaxpr(outer)(X, X), pjit_p)
    assert [spec.partitions for spec in eqn.params["in_specs"]] == [((), ("x",)), ((), ("x",))]
    assert [spec.partitions for spec in eqn.params["out_specs"]] == [((), ())]


def test_a_twice_batched_value_has_two_axes_in_front(mesh):
    function = pjit(lambda a: a + 1, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        twice = jax.vmap(jax.vmap(function), spmd_axis_name="y")
        out = twice(np.ones((2, 3, 8), np.float32))
        (eqn,) = equations(jax.make_jaxpr(twice)(np.ones((2, 3, 8), np.float32)), pjit_p)
    assert eqn.params["in_specs"][0].partitions == (("y",), (), ("x",))
    assert eqn.params["in_specs"][0].sync is SpecSync.OUT_OF_SYNC
    laid_out(out, mesh, P("y", None, "x"))


def test_vmap_of_grad_and_grad_of_vmap(mesh):
    function = pjit(lambda a: jnp.sin(a) ** 2, in_axis_resources=P("x"), out_axis_resources=P("x"))
    expected = 2 * np.sin(X) * np.cos(X)
    with mesh:
        per_example = jax.vmap(jax.grad(lambda a: function(a).sum()))(X)
        of_all = jax.grad(lambda a: jax.vmap(function)(a).sum())(X)
    for out in (per_example, of_all):
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-6)
        laid_out(out, mesh, P(None, "x"))


def test_collectives_over_the_axis_of_vmap(mesh):
    function = pjit(lambda a: a - jax.lax.pmean(a, "batch"), in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        out = jax.vmap(function, axis_name="batch")(X)
    np.testing.assert_allclose(out, X - X.mean(0), atol=1e-6)


def test_a_batch_of_one_and_of_none(mesh):
    function = pjit(lambda a: a * 2, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with mesh:
        for size in (1, 0):
            assert jax.vmap(function)(X[:size]).shape == (size, 8)


# Constraints


@pytest.mark.parametrize("in_axes", [0, 1])
def test_a_constraint_gets_the_axis_where_the_batch_is(mesh, in_axes):
    def fun(a):
        return with_sharding_constraint(a, P("x"))

    value = np.moveaxis(np.ones((3, 8), np.float32), 0, in_axes)
    with mesh:
        jaxpr = jax.make_jaxpr(jax.vmap(fun, in_axes=in_axes))(value)
        (eqn,) = equations(jaxpr, sharding_constraint_p)
        assert eqn.params["spec"].partitions == ((("x",), ()) if in_axes else ((), ("x",)))
        assert eqn.params["spec"].sync is SpecSync.DIM_PERMUTE
        laid_out(jax.jit(jax.vmap(fun, in_axes=in_axes))(value), mesh, P(None, "x"))


def test_a_short_constraint_is_padded_up_to_the_batch(mesh):
    def fun(a):
        return with_sharding_constraint(a, P("x"))

    with mesh:
        jaxpr = jax.make_jaxpr(jax.vmap(fun, in_axes=2))(np.ones((8, 2, 3), np.float32))
        (eqn,) = equations(jaxpr, sharding_constraint_p)
    assert eqn.params["spec"].partitions == (("x",), (), ())


def test_a_constraint_with_unconstrained_dims(mesh):
    def fun(a):
        return with_sharding_constraint(a, P(P.UNCONSTRAINED, "x"))

    with mesh:
        out = jax.jit(jax.vmap(fun, spmd_axis_name="y"))(np.arange(64.0).reshape(2, 8, 4))
    np.testing.assert_array_equal(out, np.arange(64.0).reshape(2, 8, 4))
    assert "y" in out.sharding.spec[0]
    assert "x" in out.sharding.spec[2]
