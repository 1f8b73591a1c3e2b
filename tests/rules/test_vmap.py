"""`jax.vmap` of pjit functions: values, what happens to each spec, and batches sharded over mesh axes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from partjit import UNSPECIFIED, P, ShardingError, SpecSync, pjit, with_sharding_constraint
from partjit.primitive import pjit_p, sharding_constraint_p
from tests.census import saw, sees

A = np.arange(3 * 8 * 4, dtype=np.float32).reshape(3, 8, 4) / 50
B = np.linspace(-1, 1, 8 * 4, dtype=np.float32).reshape(8, 4)
FREE = P.UNCONSTRAINED


@pytest.fixture(autouse=True)
def under_mesh(mesh):
    with mesh:
        yield


def equation(fun, *args, primitive=pjit_p):
    (found,) = [eqn for eqn in jax.make_jaxpr(fun)(*args).eqns if eqn.primitive is primitive]
    return found


def inner_constraint(fun, *args):
    jaxpr = equation(fun, *args).params["jaxpr"].jaxpr
    (found,) = [eqn for eqn in jaxpr.eqns if eqn.primitive is sharding_constraint_p]
    return found.params["spec"]


def laid_out(array, mesh, spec):
    assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim), array.sharding


def combine(a, b):
    return a * 2 + b, jnp.sin(b)


program = pjit(combine, in_axis_resources=(P("x", "y"), P("y")), out_axis_resources=(P("y", "x"), P("x")))


# Values, for every way to say where the batch is


@pytest.mark.parametrize("out_axes", [0, 1, 2, -1, (0, 1), (2, None), {"none": 0}], ids=str)
@pytest.mark.parametrize("in_axes", [0, 1, 2, -1], ids=str)
def test_values_are_those_of_the_plain_function(in_axes, out_axes):
    out_axes = 0 if isinstance(out_axes, dict) else out_axes
    a = np.moveaxis(A, 0, in_axes)
    if isinstance(out_axes, int):
        ours = jax.vmap(program, in_axes=(in_axes, None), out_axes=(out_axes, 0))(a, B)
        plain = jax.vmap(combine, in_axes=(in_axes, None), out_axes=(out_axes, 0))(a, B)
    else:
        ours = jax.vmap(program, in_axes=(in_axes, None), out_axes=out_axes)(a, B)
        plain = jax.vmap(combine, in_axes=(in_axes, None), out_axes=out_axes)(a, B)
    for actual, expected in zip(ours, plain, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_the_other_dimensions_stay_divided(mesh):
    for in_axis in (0, 1, 2):
        first, second = jax.vmap(program, in_axes=(in_axis, None), out_axes=(0, None))(np.moveaxis(A, 0, in_axis), B)
        laid_out(first, mesh, P(None, "y", "x"))
        laid_out(second, mesh, P("x"))


def test_out_axes_move_the_divided_dimensions_along(mesh):
    first, _ = jax.vmap(program, in_axes=(0, None), out_axes=(1, None))(A, B)
    assert first.shape == (8, 3, 4)
    laid_out(first, mesh, P("y", None, "x"))


def test_nested_vmaps(mesh):
    a = np.stack([A, A + 1])
    ours = jax.vmap(jax.vmap(program, in_axes=(0, None)), in_axes=(0, None))(a, B)
    plain = jax.vmap(jax.vmap(combine, in_axes=(0, None)), in_axes=(0, None))(a, B)
    np.testing.assert_allclose(ours[0], plain[0], rtol=1e-6)
    laid_out(ours[0], mesh, P(None, None, "y", "x"))


def test_nested_vmaps_over_different_arguments():
    b = np.stack([B, 2 * B])
    ours = jax.vmap(jax.vmap(program, in_axes=(0, None)), in_axes=(None, 0))(A, b)
    plain = jax.vmap(jax.vmap(combine, in_axes=(0, None)), in_axes=(None, 0))(A, b)
    for actual, expected in zip(ours, plain, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_vmap_of_grad_and_grad_of_vmap(mesh):
    loss = pjit(lambda a: (combine(a, B)[0] ** 2).sum(), in_axis_resources=P("x", "y"), out_axis_resources=None)
    expected = 4 * (2 * A + B)
    per_example = jax.vmap(jax.grad(loss))(A)
    np.testing.assert_allclose(per_example, expected, rtol=1e-5)
    laid_out(per_example, mesh, P(None, "x", "y"))
    total = jax.grad(lambda a: jax.vmap(loss)(a).sum())(A)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    hessian = jax.jit(jax.vmap(jax.hessian(lambda s: loss(s * A[0]))))(np.arange(3, dtype=np.float32))
    np.testing.assert_allclose(hessian, [8 * (A[0] ** 2).sum()] * 3, rtol=1e-5)


def test_pytrees_of_batched_and_unbatched_arguments():
    tree_program = pjit(
        lambda t: {"sum": t["a"] + t["b"], "b": t["b"]},
        in_axis_resources=({"a": P("x"), "b": P("y")},),
        out_axis_resources={"sum": P("x"), "b": None},
    )
    out = jax.vmap(tree_program, in_axes=({"a": 0, "b": None},), out_axes={"sum": 0, "b": None})({"a": A, "b": B})
    np.testing.assert_allclose(out["sum"], A + B)
    np.testing.assert_array_equal(out["b"], B)


def test_nothing_batched_but_the_size_given():
    out = jax.vmap(lambda: program(B, B)[0], axis_size=5)()
    assert out.shape == (5, 8, 4)
    np.testing.assert_allclose(out[3], 3 * B, rtol=1e-6)


def test_a_batch_of_any_size_needs_no_divisor():
    for size in (1, 3, 7):
        out, _ = jax.vmap(program, in_axes=(0, None))(np.stack([B] * size), B)
        np.testing.assert_allclose(out, np.stack([3 * B] * size), rtol=1e-6)


def test_a_batch_of_none(mesh):
    function = pjit(lambda a: a * 2, in_axis_resources=P("x"), out_axis_resources=P("x"))
    assert jax.vmap(function)(A[:0]).shape == (0, 8, 4)


def test_under_jit_everything_is_laid_out_alike(mesh):
    batched = jax.vmap(program, in_axes=(1, None), out_axes=(2, None))
    for call in (batched, jax.jit(batched)):
        first, second = call(np.moveaxis(A, 0, 1), B)
        np.testing.assert_allclose(first, np.moveaxis(2 * A + B, 0, 2), rtol=1e-6)
        laid_out(first, mesh, P("y", "x"))
        laid_out(second, mesh, P("x"))


def test_closed_over_batched_values():
    def outer(a):
        return pjit(lambda b: a + b, in_axis_resources=P("x"), out_axis_resources=P("y"))(B)

    np.testing.assert_allclose(jax.vmap(outer)(A), A + B)


def test_vmap_inside_a_program(mesh):
    function = pjit(
        lambda a, b: jax.vmap(combine, in_axes=(0, None))(a, b)[0],
        in_axis_resources=(P(None, "x"), None),
        out_axis_resources=P(None, "y"),
    )
    out = function(A, B)
    np.testing.assert_allclose(out, 2 * A + B, rtol=1e-6)
    laid_out(out, mesh, P(None, "y"))


# Specs


def test_a_free_dimension_is_inserted_where_something_is_batched_and_only_there():
    eqn = equation(jax.vmap(program, in_axes=(0, None), out_axes=(0, None)), A, B)
    assert [spec.partitions for spec in eqn.params["in_specs"]] == [(FREE, ("x",), ("y",)), (("y",),)]
    assert [spec.partitions for spec in eqn.params["out_specs"]] == [(FREE, ("y",), ("x",)), (("x",),)]


def test_the_batch_is_moved_to_the_front():
    eqn = equation(jax.vmap(program, in_axes=(2, None)), np.moveaxis(A, 0, 2), B)
    assert eqn.invars[0].aval.shape == (3, 8, 4)
    assert eqn.params["in_specs"][0].partitions == (FREE, ("x",), ("y",))


def test_specs_know_how_far_they_are_what_the_user_wrote():
    eqn = equation(jax.vmap(program, in_axes=(0, None)), A, B)
    batched, unbatched = eqn.params["in_specs"]
    assert (batched.sync, unbatched.sync) == (SpecSync.DIM_PERMUTE, SpecSync.IN_SYNC)
    assert [spec.sync for spec in eqn.params["out_specs"]] == [SpecSync.DIM_PERMUTE, SpecSync.IN_SYNC]
    assert unbatched.user_spec == P("y")
    with pytest.raises(AssertionError):
        _ = batched.user_spec

    one_axis = pjit(combine, in_axis_resources=(P("x"), P("y")), out_axis_resources=None)
    batched, unbatched = equation(
        jax.vmap(one_axis, in_axes=(0, None), spmd_axis_name="y"), np.concatenate([A, A]), B
    ).params["in_specs"]
    assert batched.partitions == (("y",), ("x",))
    assert (batched.sync, unbatched.sync) == (SpecSync.OUT_OF_SYNC, SpecSync.IN_SYNC)
    with pytest.raises(AssertionError):
        _ = batched.user_spec


def test_the_users_spec_object_is_unchanged():
    spec = P("x", "y")
    function = pjit(lambda a: a, in_axis_resources=spec, out_axis_resources=spec)
    jax.vmap(function)(A)
    assert spec == P("x", "y")
    assert equation(function, B).params["in_specs"][0].sync is SpecSync.IN_SYNC


def test_a_replicated_spec_stays_replicated_at_any_rank(mesh):
    function = pjit(lambda a, s: (a + s, s), in_axis_resources=(None, P()), out_axis_resources=(None, P()))
    out, scalars = jax.vmap(function)(A, np.arange(3, dtype=np.float32))
    np.testing.assert_allclose(out, A + np.arange(3)[:, None, None])
    assert out.sharding.is_fully_replicated
    assert len(out.sharding.device_set) == 8
    assert scalars.shape == (3,)


def test_unspecified_specs_stay_unspecified():
    function = pjit(lambda a: a * 2)
    params = equation(jax.vmap(function), A).params
    assert params["in_specs"] == params["out_specs"] == (UNSPECIFIED,)
    np.testing.assert_array_equal(jax.vmap(function)(A), 2 * A)


def test_a_spec_shorter_than_the_rank():
    function = pjit(lambda a: a.T, in_axis_resources=P("x"), out_axis_resources=P("y"))
    np.testing.assert_array_equal(jax.vmap(function)(A), A.transpose(0, 2, 1))


# Constraints


@pytest.mark.parametrize(
    ("in_axis", "spec", "expected"),
    [
        (0, P("x", "y"), (FREE, ("x",), ("y",))),
        (1, P("x", "y"), (("x",), FREE, ("y",))),
        (2, P("x", "y"), (("x",), ("y",), FREE)),
        (2, P("x"), (("x",), (), FREE)),
        (2, P(), ((), (), FREE)),
        (1, None, ((), FREE)),
        (0, P(("x", "y")), (FREE, ("x", "y"))),
    ],
)
def test_the_batch_axis_of_a_constraint_is_inserted_where_the_batch_is(in_axis, spec, expected):
    a = np.moveaxis(A, 0, in_axis)
    fun = jax.vmap(lambda a: with_sharding_constraint(a, spec), in_axes=in_axis, out_axes=in_axis)
    parsed = equation(fun, a, primitive=sharding_constraint_p).params["spec"]
    partitions = parsed.partitions
    assert partitions == expected
    assert parsed.sync is SpecSync.DIM_PERMUTE
    np.testing.assert_array_equal(fun(a), a)
    np.testing.assert_array_equal(jax.jit(fun)(a), a)


def test_a_constraint_inside_a_batched_program(mesh):
    function = pjit(lambda a: with_sharding_constraint(a * 2, P("x", "y")), in_axis_resources=P("x"))
    assert inner_constraint(jax.vmap(function), A).partitions == (FREE, ("x",), ("y",))
    out = jax.vmap(function)(A)
    np.testing.assert_array_equal(out, 2 * A)
    laid_out(out, mesh, P(None, "x", "y"))


def test_a_constraint_with_unconstrained_dimensions_under_vmap():
    spec = P("x", P.UNCONSTRAINED)
    function = pjit(lambda a: with_sharding_constraint(a * 2, spec), in_axis_resources=P("x"))
    assert inner_constraint(jax.vmap(function), A).partitions == (FREE, ("x",), FREE)
    np.testing.assert_array_equal(jax.vmap(function)(A), 2 * A)


# Batches that are left to the partitioner

WRAPPERS = {
    "itself": lambda f: f,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](x),
    "jvp of vjp": lambda f: lambda x: jax.jvp(lambda x: jax.vjp(f, x)[1](x)[0], (x,), (x,)),
}


def constraints(f, *args):
    """What the constraints of a lowered function say, in order."""
    return re.findall(r"sdy\.sharding_constraint .*?<@mesh, (.*?)>", jax.jit(f).lower(*args).as_text())


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_constraint_under_vmap_is_lowered_as_jax_lowers_its_own(mesh, wrap):
    @sees("depth 1", "depth 2", "name None", "name y", "at 0", "at 1", "at 2")
    @settings(max_examples=30, deadline=None)
    @given(st.data())
    def check(data):
        batched = data.draw(
            st.lists(st.tuples(st.integers(0, 2), st.sampled_from([None, "y"])), min_size=1, max_size=2)
        )
        if [name for _, name in batched].count("y") == 2:
            batched[0] = (batched[0][0], None)
        axes = ["x", FREE, None] if any(name for _, name in batched) else ["x", "y", ("x", "y"), FREE, None]
        entries = data.draw(st.lists(st.sampled_from(axes), max_size=2).filter(is_spec))
        if len(batched) == 2 and not {*entries} - {FREE, None}:
            # Where a spec names no axis jax leaves the dimension free that the first batch had before the second.
            entries = ["x"]
        spec = NamedSharding(mesh, P(*entries))
        ours, theirs = (
            functools.reduce(
                lambda f, how: jax.vmap(f, how[0], how[0], spmd_axis_name=how[1]),
                batched,
                lambda x, constrain=constrain: constrain(2 * x, spec),
            )
            for constrain in (with_sharding_constraint, jax.lax.with_sharding_constraint)
        )
        x = np.ones((8,) * (2 + len(batched)), np.float32)
        found = constraints(wrap(ours), x)
        assert found == constraints(wrap(theirs), x)
        assert found
        saw(f"depth {len(batched)}")
        for dim, name in batched:
            saw(f"name {name}")
            saw(f"at {dim}")

    check()


def is_spec(entries):
    axes = [axis for entry in entries if isinstance(entry, str | tuple) for axis in entry]
    return len(axes) == len({*axes})


def test_a_nested_program_leaves_a_batch_sharded_as_it_is(mesh):
    inner = pjit(jnp.sin, in_axis_resources=P("x"), out_axis_resources=P("x"))
    batch = jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh, P("y", "x")))
    for call in (
        jax.vmap(inner),
        jax.jit(jax.vmap(inner)),
        pjit(jax.vmap(inner)),
        jax.jit(jax.vmap(jax.grad(total(inner)))),
    ):
        laid_out(call(batch), mesh, P("y", "x"))
    assert constraints(jax.vmap(inner), batch) == ['[{?}, {"x"}]'] * 2
    assert constraints(jax.vmap(inner, spmd_axis_name="y"), batch) == ['[{"y"}, {"x"}]'] * 2


@pytest.mark.parametrize("shape", [(2, 0, 8), (0, 4, 8)])
def test_a_batch_without_elements_is_sharded_as_specs_request(mesh, shape):
    spec = NamedSharding(mesh, P(None, "x"))
    for inner in (jax.jit(jnp.sin, out_shardings=spec), pjit(jnp.sin, out_shardings=spec)):
        laid_out(jax.vmap(inner)(np.ones(shape, np.float32)), mesh, P(None, None, "x"))


def test_a_batch_without_elements_stays_sharded_over_explicit_axes():
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    with jax.set_mesh(mesh):
        batch = jax.device_put(np.ones((4, 0, 8), np.float32), P("x"))
        for inner in (jax.jit(jnp.sin), pjit(jnp.sin), pjit(jnp.sin, out_shardings=P(None, "y"))):
            result = jax.vmap(inner)(batch)
            assert jax.typeof(result).sharding.spec == result.sharding.spec
            assert result.sharding.spec[0] == "x"
    assert result.sharding.spec[2] == "y"


def total(f):
    return lambda x: f(x).sum()


def test_a_batch_keeps_no_axis_that_a_spec_names(mesh):
    inner = pjit(jnp.sin, in_axis_resources=P("y"), out_axis_resources=P("y"))
    batch = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P(("x", "y"))))
    result = jax.vmap(inner)(batch)
    np.testing.assert_allclose(result, np.sin(batch), rtol=1e-6)
    laid_out(result, mesh, P("x", "y"))


# Batches sharded over mesh axes


@pytest.mark.parametrize("name", ["y", ("y",)])
def test_spmd_axis_name_divides_the_batch_as_well(mesh, name):
    function = pjit(lambda a: a + 1, in_axis_resources=P("x"), out_axis_resources=P("x"))
    a = np.arange(4 * 8.0, dtype=np.float32).reshape(4, 8)
    fun = jax.vmap(function, spmd_axis_name=name)
    out = fun(a)
    np.testing.assert_array_equal(out, a + 1)
    laid_out(out, mesh, P("y", "x"))
    assert out.addressable_shards[0].data.shape == (2, 2)
    params = equation(fun, a).params
    assert params["in_specs"][0].partitions == params["out_specs"][0].partitions == (("y",), ("x",))


def test_spmd_axis_name_of_several_axes(mesh):
    function = pjit(lambda a: a + 1, in_axis_resources=None, out_axis_resources=None)
    a = np.arange(16 * 3, dtype=np.float32).reshape(16, 3)
    out = jax.vmap(function, spmd_axis_name=("x", "y"))(a)
    np.testing.assert_array_equal(out, a + 1)
    laid_out(out, mesh, P(("x", "y")))


def test_nested_vmaps_over_different_mesh_axes(mesh):
    function = pjit(lambda a: a + 1, in_axis_resources=None, out_axis_resources=None)
    a = np.arange(8 * 2 * 3, dtype=np.float32).reshape(8, 2, 3)
    out = jax.vmap(jax.vmap(function, spmd_axis_name="y"), spmd_axis_name="x")(a)
    np.testing.assert_array_equal(out, a + 1)
    laid_out(out, mesh, P("x", "y"))


def test_a_twice_batched_spec_is_out_of_sync_if_one_of_the_batches_was_sharded():
    function = pjit(lambda a: a + 1, in_axis_resources=P("x"), out_axis_resources=P("x"))
    for fun, partitions in [
        (jax.vmap(jax.vmap(function), spmd_axis_name="y"), (("y",), FREE, ("x",))),
        (jax.vmap(jax.vmap(function, spmd_axis_name="y")), (FREE, ("y",), ("x",))),
    ]:
        params = equation(fun, np.ones((2, 2, 8), np.float32)).params
        for spec in (*params["in_specs"], *params["out_specs"]):
            assert spec.partitions == partitions
            assert spec.sync is SpecSync.OUT_OF_SYNC


def test_spmd_axis_name_and_unconstrained_dimensions(mesh):
    def fun(a):
        return with_sharding_constraint(a, P(P.UNCONSTRAINED, "x"))

    value = np.arange(64, dtype=np.float32).reshape(2, 8, 4)
    out = jax.jit(jax.vmap(fun, spmd_axis_name="y"))(value)
    np.testing.assert_array_equal(out, value)
    assert "y" in out.sharding.spec[0]
    assert "x" in out.sharding.spec[2]


def test_spmd_axis_name_reaches_constraints_inside(mesh):
    function = pjit(lambda a: with_sharding_constraint(a + 1, P("x")), in_axis_resources=P("x"))
    a = np.ones((4, 8), np.float32)
    fun = jax.vmap(function, spmd_axis_name="y")
    spec = inner_constraint(fun, a)
    assert spec.partitions == (("y",), ("x",))
    assert spec.sync is SpecSync.OUT_OF_SYNC
    laid_out(fun(a), mesh, P("y", "x"))


def test_spmd_axis_name_under_grad_and_jit(mesh):
    function = pjit(lambda a: jnp.sum(a**3), in_axis_resources=P("x"), out_axis_resources=None)
    a = np.arange(4 * 8.0, dtype=np.float32).reshape(4, 8)
    for transform in (lambda f: f, jax.jit):
        grad = transform(jax.vmap(jax.grad(function), spmd_axis_name="y"))(a)
        np.testing.assert_allclose(grad, 3 * a**2, rtol=1e-6)
        laid_out(grad, mesh, P("y", "x"))


@pytest.mark.parametrize(
    ("in_spec", "out_spec"),
    [
        (P("y"), None),
        (P(None, ("x", "y")), None),
        (None, P("y")),
        (P("x"), P("x", "y")),
        (P("x"), P(None, ("y", "x"))),
    ],
)
@pytest.mark.parametrize("name", ["y", ("y",)])
def test_an_spmd_axis_that_a_spec_already_uses_is_refused(in_spec, out_spec, name):
    function = pjit(lambda a: a, in_axis_resources=in_spec, out_axis_resources=out_spec)
    with pytest.raises(ValueError, match=r"spmd_axis_name.*already uses 'y'"):
        jax.vmap(function, spmd_axis_name=name)(np.ones((4, 8, 8), np.float32))


def test_an_spmd_axis_that_a_constraint_already_uses_is_refused():
    function = pjit(lambda a: with_sharding_constraint(a, P(None, "y")))
    with pytest.raises(ShardingError, match=r"with_sharding_constraint.*already uses 'y'"):
        jax.vmap(function, spmd_axis_name="y")(np.ones((4, 8, 8), np.float32))
    with pytest.raises(ShardingError, match="already uses 'y'"):
        jax.vmap(lambda a: with_sharding_constraint(a, P("y")), spmd_axis_name="y")(np.ones((4, 8), np.float32))


def test_an_spmd_axis_used_by_an_unbatched_argument_is_no_clash(mesh):
    function = pjit(lambda a, b: a + b, in_axis_resources=(P("x"), P("y")), out_axis_resources=P("x"))
    out = jax.vmap(function, in_axes=(0, None), spmd_axis_name="y")(np.ones((4, 8), np.float32), np.ones(8, np.float32))
    np.testing.assert_array_equal(out, np.full((4, 8), 2))
    laid_out(out, mesh, P("y", "x"))


def test_the_same_spmd_axis_in_two_nested_vmaps_is_refused():
    function = pjit(lambda a: a, in_axis_resources=None, out_axis_resources=None)
    with pytest.raises(ShardingError, match="already uses 'y'"):
        jax.vmap(jax.vmap(function, spmd_axis_name="y"), spmd_axis_name="y")(np.ones((4, 4), np.float32))


def test_an_spmd_axis_the_mesh_does_not_have_is_refused():
    function = pjit(lambda a: a, in_axis_resources=P("x"), out_axis_resources=P("x"))
    with pytest.raises(ValueError, match="resource axis model, which is undefined"):
        jax.vmap(function, spmd_axis_name=("model", "data"))(np.ones((4, 8), np.float32))


def test_a_batch_that_the_spmd_axis_does_not_divide_is_refused():
    function = pjit(lambda a: a, in_axis_resources=P("y"), out_axis_resources=P("y"))
    with pytest.raises(ValueError, match=r"batch.*divisible by 4.*equal to 6"):
        jax.vmap(function, spmd_axis_name="x")(np.ones((6, 8), np.float32))


# Names


def test_collectives_over_the_name_of_the_batch_work_inside():
    function = pjit(
        lambda a: (jax.lax.psum(a, "batch"), jax.lax.pmax(a, "batch"), a - jax.lax.pmean(a, "batch")),
        in_axis_resources=P("x"),
        out_axis_resources=P("x"),
    )
    total, largest, centred = jax.vmap(function, axis_name="batch", out_axes=(None, None, 0))(A)
    np.testing.assert_allclose(total, A.sum(0), rtol=1e-6)
    np.testing.assert_allclose(largest, A.max(0))
    np.testing.assert_allclose(centred, A - A.mean(0), rtol=1e-5, atol=1e-6)


def test_the_index_of_the_batch_is_known_inside():
    function = pjit(
        lambda a: a + jax.lax.axis_index("batch").astype(a.dtype), in_axis_resources=P("x"), out_axis_resources=P("x")
    )
    out = jax.vmap(function, axis_name="batch")(A)
    np.testing.assert_allclose(out, A + np.arange(3, dtype=np.float32)[:, None, None], rtol=1e-6)


def test_the_same_program_with_and_without_the_name():
    function = pjit(lambda a: a * 2, in_axis_resources=P("x"), out_axis_resources=P("x"))
    for _ in range(2):
        np.testing.assert_array_equal(function(B), 2 * B)
        np.testing.assert_array_equal(jax.vmap(function, axis_name="batch")(A), 2 * A)
        np.testing.assert_array_equal(jax.vmap(function)(A), 2 * A)


def test_donation_under_vmap_and_keyword_arguments(mesh):
    function = pjit(lambda a, *, s: a * s, donate_argnums=0, out_axis_resources=P("x"))
    a = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P(None, "x")))
    out = jax.vmap(lambda a, s: function(a, s=s))(a, np.arange(8, dtype=np.float32))
    np.testing.assert_array_equal(out, np.arange(8)[:, None] * np.ones((8, 8)))
    laid_out(out, mesh, P(None, "x"))


def test_a_constraint_with_a_batch_that_is_left_open_under_disable_jit(mesh):
    x = np.arange(128, dtype=np.float32).reshape(2, 8, 8)
    with mesh, jax.disable_jit():
        found = jax.vmap(lambda x: with_sharding_constraint(x, P("x", "y")))(x)
    np.testing.assert_array_equal(found, x)
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "x", "y")), 3)
