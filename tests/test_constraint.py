"""`with_sharding_constraint`, inside and outside of programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from partjit import (
    FROM_ARRAY,
    UNSPECIFIED,
    Mesh,
    MissingMeshError,
    P,
    ShardingError,
    pjit,
    set_mesh,
    with_sharding_constraint,
)
from partjit.primitive import sharding_constraint_p

X = np.arange(32.0, dtype=np.float32).reshape(8, 4)


def laid_out(array, mesh, spec):
    assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim), array.sharding


# Outside


@pytest.mark.parametrize("spec", [P("x"), P("x", "y"), P(("y", "x")), P(None, "y"), P(), None])
def test_applied_at_once(mesh, spec):
    with mesh:
        out = with_sharding_constraint(X, spec)
    np.testing.assert_array_equal(out, X)
    laid_out(out, mesh, P() if spec is None else spec)
    assert out.committed


def test_a_named_sharding_needs_no_ambient_mesh(mesh):
    laid_out(with_sharding_constraint(X, NamedSharding(mesh, P("y"))), mesh, P("y"))


def test_trees_by_prefix(mesh):
    with mesh:
        out = with_sharding_constraint({"a": [X, X], "b": X}, {"a": P("x"), "b": None})
    laid_out(out["a"][1], mesh, P("x"))
    laid_out(out["b"], mesh, P())


@pytest.mark.parametrize("spec", [P("x"), P(), None])
def test_without_a_mesh(spec):
    for error in (RuntimeError, ValueError, MissingMeshError):
        with pytest.raises(error, match="with_sharding_constraint requires a non-empty mesh"):
            with_sharding_constraint(X, spec)


@pytest.mark.parametrize("leaf", ["x", UNSPECIFIED, FROM_ARRAY, 3])
def test_a_leaf_that_is_no_spec(mesh, leaf):
    with mesh, pytest.raises((TypeError, ValueError)):
        with_sharding_constraint(X, leaf)


def test_an_indivisible_array_is_refused_and_never_replicated(mesh):
    with mesh, pytest.raises(ShardingError) as raised:
        with_sharding_constraint({"a": X[:7], "b": X}, P("x"))
    assert "One of with_sharding_constraint arguments, x['a'] (float32[7,4])" in str(raised.value)
    assert "divisible by 4, but it is equal to 7" in str(raised.value)
    with mesh, pytest.raises(ValueError, match="rank of at least 3, but it is 2"):
        with_sharding_constraint(X, P("x", None, None))


def test_unconstrained_dims_outside(mesh):
    with mesh:
        out = with_sharding_constraint(X, P(P.UNCONSTRAINED, "y"))
    np.testing.assert_array_equal(out, X)
    assert out.sharding.spec[1] == "y"


# Inside


def test_the_lowered_program_carries_it(mesh):
    with mesh:
        lowered = pjit(lambda x: with_sharding_constraint(x * 2, P(None, "y")) + 1).lower(X)
        text = lowered.as_text()
    assert "sdy.sharding_constraint" in text
    assert '[{}, {"y"}]' in text


@pytest.mark.parametrize("wrap", [pjit, jax.jit])
def test_an_intermediate_need_not_divide(mesh, wrap):
    def fun(x):
        return with_sharding_constraint(x[:7] * 2, P("x", "y")).sum(axis=1)

    with mesh:
        np.testing.assert_array_equal(wrap(fun)(X), X[:7].sum(axis=1) * 2)


def test_under_jit_with_numpy_arguments_the_devices_are_those_of_the_mesh(mesh):
    with mesh:
        out = jax.jit(lambda x: with_sharding_constraint(x * 2, P("x")))(X)
    laid_out(out, mesh, P("x"))


def test_unconstrained_dims_follow_the_partitioner(mesh):
    def fun(x):
        return with_sharding_constraint(x * 2, P(P.UNCONSTRAINED, None))

    with mesh:
        out = pjit(fun, in_axis_resources=P("x", "y"))(X)
    np.testing.assert_array_equal(out, X * 2)
    laid_out(out, mesh, P("x"))


@pytest.mark.parametrize(
    "options", [{"in_axis_resources": P(P.UNCONSTRAINED)}, {"out_shardings": P(None, P.UNCONSTRAINED)}]
)
def test_unconstrained_dims_are_for_constraints(options):
    with pytest.raises(ValueError, match="Unconstrained dims are not allowed"):
        pjit(lambda x: x, **options)


# Differentiation


def test_the_cotangent_is_constrained_alike(mesh):
    def fun(x):
        return (with_sharding_constraint(x, P("x", "y")) ** 2).sum()

    with mesh:
        jaxpr = jax.make_jaxpr(jax.grad(fun))(X)
        constraints = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive is sharding_constraint_p]
        assert len(constraints) == 2
        assert {eqn.params["spec"].partitions for eqn in constraints} == {(("x",), ("y",))}
        grad = jax.jit(jax.grad(fun))(X)
        np.testing.assert_array_equal(grad, 2 * X)
        laid_out(grad, mesh, P("x", "y"))
        np.testing.assert_array_equal(jax.jvp(fun, (X,), (X,))[1], (2 * X * X).sum())
        np.testing.assert_array_equal(jax.grad(fun)(jnp.asarray(X)), 2 * X)
        (transposed,) = jax.linear_transpose(lambda x: with_sharding_constraint(3 * x, P("y")), X)(X)
        np.testing.assert_array_equal(transposed, 3 * X)


def test_integers_and_keys(mesh):
    with mesh:
        laid_out(with_sharding_constraint(np.arange(8), P("x")), mesh, P("x"))
        keys = with_sharding_constraint(jax.random.split(jax.random.key(0), 8), P("x"))
        laid_out(keys, mesh, P("x"))
        laid_out(pjit(lambda k: with_sharding_constraint(k, P("y")))(keys), mesh, P("y"))


def test_in_control_flow_and_checkpoints(mesh):
    def body(carry, _):
        return with_sharding_constraint(jnp.sin(carry), P("x")), None

    def fun(x):
        return jax.checkpoint(lambda x: jax.lax.scan(body, x, None, length=2)[0])(x).sum()

    with mesh:
        np.testing.assert_allclose(jax.jit(jax.grad(fun))(X), np.cos(X) * np.cos(np.sin(X)), rtol=1e-4, atol=1e-6)


def test_an_axis_that_is_manual_is_refused_and_others_are_kept(mesh):
    def whole(x):
        return with_sharding_constraint(x, P("x"))

    with mesh, pytest.raises(ShardingError, match="resource axis x is manual here"):
        jax.jit(jax.shard_map(whole, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(X)

    def partial(x):
        return with_sharding_constraint(x * 2, P(None, "y"))

    with mesh:
        out = jax.jit(jax.shard_map(partial, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}))(X)
    np.testing.assert_array_equal(out, X * 2)
    laid_out(out, mesh, P("x", "y"))


def test_a_constraint_on_another_mesh_of_the_same_devices(mesh):
    other = Mesh(mesh.devices.reshape(8), "z")
    with mesh:
        out = pjit(lambda x: with_sharding_constraint(x, NamedSharding(other, P("z"))), in_axis_resources=P("x"))(X)
    assert out.addressable_shards[0].data.shape == (1, 4)


# Laws


SPECS = [None, P(), P("x"), P("y"), P(None, "x"), P("x", "y"), P("y", "x"), P(("x", "y")), P(("y", "x")), P("x", None)]


@pytest.mark.parametrize("first", SPECS, ids=str)
def test_the_last_of_two_constraints_decides_and_the_value_is_kept(mesh, first):
    value = np.arange(64, dtype=np.int32).reshape(8, 8)

    def fun(x):
        return [with_sharding_constraint(with_sharding_constraint(x, first), spec) for spec in SPECS]

    wrap = jax.jit if SPECS.index(first) % 2 else pjit
    with mesh:
        for outs in (fun(value), wrap(fun)(value)):
            for out, spec in zip(outs, SPECS, strict=True):
                np.testing.assert_array_equal(out, value)
                laid_out(out, mesh, P() if spec is None else spec)


@pytest.mark.parametrize("spec", [P("x"), P(("x", "y")), P(None, ("x", "y"))], ids=str)
def test_uneven_intermediates_have_the_right_value_and_gradient(mesh, spec):
    values = {size: np.arange(size * 3, dtype=np.float32).reshape(size, 3) for size in (1, 3, 5, 7, 9)}

    def fun(values):
        return {size: jnp.sin(with_sharding_constraint(x * 2, spec)).sum(axis=0) for size, x in values.items()}

    with mesh:
        sums, pull = jax.vjp(pjit(fun), values)
        (gradients,) = pull({size: np.ones(3, np.float32) for size in values})
    for size, value in values.items():
        np.testing.assert_allclose(sums[size], np.sin(value * 2).sum(axis=0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(gradients[size], 2 * np.cos(value * 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 3, 6, 7])
def test_uneven_arrays_are_refused_outside(mesh, size):
    with mesh, pytest.raises(ValueError, match=rf"divisible by 4, but it is equal to {size}"):
        with_sharding_constraint(np.ones((size, 2), np.float32), P("x"))


@pytest.mark.parametrize("wrap", [lambda f: f, pjit, jax.jit], ids=["outside", "pjit", "jit"])
def test_every_problem_is_listed_with_its_path(mesh, wrap):
    def fun(tree):
        return with_sharding_constraint(tree, {"a": P("data"), "b": P("x", None, None)})

    with mesh, pytest.raises(ShardingError) as caught:
        wrap(fun)({"a": X, "b": [X]})
    message = str(caught.value)
    assert "x['a']" in message
    assert "resource axis data is undefined" in message
    assert "x['b'][0]" in message
    assert "rank of at least 3, but it is 2" in message


def test_an_axis_used_twice_is_refused(mesh):
    for wrap in (lambda f: f, pjit):
        with mesh, pytest.raises(ValueError, match="duplicate entries for `x`"):
            wrap(lambda a: with_sharding_constraint(a, P("x", ("y", "x"))))(X)


@pytest.mark.parametrize("wrap", [pjit, jax.jit])
def test_inside_a_program_without_a_mesh(wrap):
    for spec in (P("x"), None):
        with pytest.raises(RuntimeError, match="requires a non-empty mesh"):
            wrap(lambda a, spec=spec: with_sharding_constraint(a, spec))(X)


@pytest.mark.parametrize("enter", [lambda mesh: mesh, set_mesh, jax.set_mesh], ids=["with", "set_mesh", "jax.set_mesh"])
def test_every_way_to_set_the_mesh_counts(mesh, enter):
    with enter(Mesh(mesh.devices, mesh.axis_names)):
        laid_out(with_sharding_constraint(X, P("x")), mesh, P("x"))
        laid_out(pjit(lambda a: with_sharding_constraint(a * 2, P("y")))(X), mesh, P("y"))
        laid_out(jax.jit(lambda a: with_sharding_constraint(a * 2, P("y")))(X), mesh, P("y"))


def test_on_a_mesh_with_explicit_axes():
    explicit = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with set_mesh(explicit):
        out = with_sharding_constraint(X, P("x"))
        laid_out(out, explicit, P("x"))
        out = pjit(lambda a: with_sharding_constraint(a * 2, P("y")), in_axis_resources=P("x"))(X)
        np.testing.assert_array_equal(out, 2 * X)
        laid_out(out, explicit, P("y"))


def test_scalars_weak_types_and_empty_trees(mesh):
    with mesh:
        assert with_sharding_constraint({}, None) == {}
        assert with_sharding_constraint((), P("x")) == ()
        scalar = with_sharding_constraint(3.0, P())
        assert scalar == 3.0
        assert len(scalar.sharding.device_set) == 8
        assert pjit(lambda s: with_sharding_constraint(s, P()))(3.0).weak_type
        nothing = with_sharding_constraint({"a": X, "n": None}, {"a": P("x"), "n": None})
        assert nothing["n"] is None
        empty = with_sharding_constraint(np.ones((0, 4), np.float32), P("x"))
        assert empty.shape == (0, 4)


def test_a_committed_array_is_moved_onto_the_mesh(mesh):
    alone = jax.device_put(X, jax.devices()[5])
    with mesh:
        out = with_sharding_constraint(alone, P("x", "y"))
    np.testing.assert_array_equal(out, X)
    laid_out(out, mesh, P("x", "y"))


def test_unconstrained_keeps_what_the_partitioner_propagates_and_none_does_not(mesh):
    def run(spec):
        with mesh:
            return pjit(lambda a: with_sharding_constraint(a + 1, spec), in_axis_resources=P("x", "y"))(X)

    laid_out(run(P(P.UNCONSTRAINED, P.UNCONSTRAINED)), mesh, P("x", "y"))
    laid_out(run(P(None, P.UNCONSTRAINED)), mesh, P(None, "y"))
    laid_out(run(P(P.UNCONSTRAINED, None)), mesh, P("x"))
    laid_out(run(P(None, None)), mesh, P())


def test_unconstrained_under_differentiation(mesh):
    def fun(a):
        return (with_sharding_constraint(a * 2, P(P.UNCONSTRAINED, "y")) ** 2).sum()

    with mesh:
        grad = jax.grad(pjit(fun, in_axis_resources=P("x")))(X)
        eager = jax.grad(fun)(jnp.asarray(X))
    np.testing.assert_allclose(grad, 8 * X)
    np.testing.assert_allclose(eager, 8 * X)


@pytest.mark.parametrize("axis", ["x", "y"])
def test_unconstrained_dimensions_count_for_the_rank_and_not_for_duplicates(mesh, axis):
    with mesh:
        with pytest.raises(ValueError, match="rank of at least 3, but it is 2"):
            pjit(lambda a: with_sharding_constraint(a, P(P.UNCONSTRAINED, P.UNCONSTRAINED, axis)))(X)
        out = pjit(lambda a: with_sharding_constraint(a, P(P.UNCONSTRAINED, axis)))(X)
    np.testing.assert_array_equal(out, X)


def test_a_constraint_shows_in_a_jaxpr(mesh):
    with mesh:
        text = str(jax.make_jaxpr(lambda a: with_sharding_constraint(a, P("x", P.UNCONSTRAINED)))(X))
    assert "sharding_constraint[" in text
    assert "'x'" in text
    assert "UNCONSTRAINED" in text
    assert "mesh=(x=4, y=2)" in text
    assert "witness" not in text
