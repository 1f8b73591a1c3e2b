"""Typed sharding: on meshes with Explicit axes a pjit has the types, jaxprs, results and refusals of `jax.jit`."""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding, reshard

import partjit
from partjit import P, ShardingError, pjit, with_sharding_constraint
from partjit.colocated import colocated_python
from partjit.primitive import sharding_constraint_p
from tests.census import saw, sees
from tests.colocated import rendezvous
from tests.effort import EVERYTHING, examples, sample

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
AXIS_TYPES = [*itertools.product((EXPLICIT, AUTO), repeat=2)]
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
SPECS = [P(), P("x"), P("y"), P(None, "x"), P("x", "y"), P("y", "x"), P(("x", "y")), P(None, ("y", "x"))]


def make_mesh(types):
    return partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"), axis_types=types)


def put(mesh, spec, x=X):
    return jax.device_put(x, NamedSharding(mesh, spec))


def explicit_part(spec, mesh):
    """What a type says of a value with this spec: its Explicit axes."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    kept = [tuple(axis for axis in axes if kinds.get(axis) is EXPLICIT) or None for axes in entries]
    return P(*kept, *[None] * (2 - len(kept)))


# Programs in which types decide: some are refused with some types.
PROGRAMS = {
    "elementwise": lambda x: jnp.sin(x) * 2,
    "transpose": lambda x: x.T + 1,
    "sum": lambda x: x.sum(0),
    "product": lambda x: x @ x,
    "product with its transpose": lambda x: x @ x.T,
    "reshape": lambda x: x.reshape(64),
    "concatenate": lambda x: jnp.concatenate([x, x], 1),
    "slice": lambda x: x[:4],
    "scan": lambda x: lax.scan(lambda c, s: (jnp.cos(c) * s, c.sum()), x, jnp.arange(3, dtype=jnp.float32)),
    "cond": lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "nested": lambda x: jax.jit(lambda x: x * 2)(jnp.exp(x)),
    "custom": lambda x: jax.nn.relu(x) + jax.nn.softmax(x),
}
USES = {
    "call": lambda f: f,
    "grad": lambda f: jax.grad(lambda x: sum(jnp.sum(y) for y in jax.tree.leaves(f(x)))),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "vmap": lambda f: jax.vmap(lambda row: f(jnp.outer(row, row))),
    "checkpoint": lambda f: jax.grad(lambda x: sum(jnp.sum(y) for y in jax.tree.leaves(jax.checkpoint(f)(x)))),
    "in jit": lambda f: jax.jit(lambda x: jax.tree.map(lambda y: y * 2, f(x))),
}


def outcome(function, x):
    """The types and values of results, or how it was refused."""
    try:
        results = jax.tree.leaves(function(x))
    except Exception as error:
        return type(error).__name__, None
    return [(str(jax.typeof(y)), y.sharding.mesh) for y in results], results


def same(ours, theirs):
    (what, values), (expected, others) = ours, theirs
    assert what == expected
    for value, other in zip(values or (), others or (), strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-5)
        assert value.sharding.is_equivalent_to(other.sharding, value.ndim) or AUTO in value.sharding.mesh.axis_types


@pytest.mark.soak
def test_a_program_has_the_types_results_and_refusals_of_jit():
    @sees("refused", "sharded type", "Explicit", "Auto", *USES)
    @examples(20, in_soak=400)
    @given(
        st.sampled_from(AXIS_TYPES[:3]), st.sampled_from(SPECS), st.sampled_from([*PROGRAMS]), st.sampled_from([*USES])
    )
    def check(types, spec, program, use):
        mesh = make_mesh(types)
        fun, x = PROGRAMS[program], put(mesh, spec)
        with jax.set_mesh(mesh):
            ours, theirs = (outcome(USES[use](wrap(fun)), x) for wrap in (pjit, jax.jit))
        same(ours, theirs)
        for feature in (use, *(kind.name for kind in types)):
            saw(feature)
        saw("refused", when=ours[1] is None)
        saw("sharded type", when="@" in str(ours[0]))

    check()
    assert check.census.counts["sharded type"] > 5


DERIVATIVES = {
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,))[1],
    "jvp of one of two": lambda f, x: jax.jvp(lambda y: jax.jvp(f, (y,), (x,))[1], (x,), (0 * x,))[0],
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_find_the_mesh_that_specs_alone_know(name):
    """The argument, and with it the tangent, has none of the axes, so that both are resharded."""
    sharding = NamedSharding(make_mesh((EXPLICIT, EXPLICIT)), P("x"))
    found = DERIVATIVES[name](pjit(jnp.sin, in_shardings=sharding, out_shardings=sharding), X)
    np.testing.assert_allclose(found, np.cos(X) * X, rtol=1e-5, atol=1e-6)
    assert found.sharding.is_equivalent_to(sharding, 2)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_jaxpr_is_that_of_jit(program):
    mesh, fun = make_mesh((EXPLICIT, EXPLICIT)), PROGRAMS[program]
    compared = 0
    with jax.set_mesh(mesh):
        for spec in SPECS:
            found = []
            for wrap in (pjit, jax.jit):
                try:
                    found.append(str(wrap(fun).trace(put(mesh, spec)).jaxpr))
                except Exception as error:
                    found.append(type(error).__name__)
            assert found[0] == found[1]
            compared += "@" in found[0]
    assert compared or program == "product with its transpose"  # refused, but for replicated arguments


def test_what_jax_refuses_comes_with_what_to_do():
    mesh = make_mesh((EXPLICIT, AUTO))
    product = pjit(lambda x, w: x @ w, in_shardings=(P(None, "x"), P("x")), name="product")
    with jax.set_mesh(mesh), pytest.raises(Exception, match="ambiguous") as caught:
        product(X, X)
    (note,) = [note for note in caught.value.__notes__ if "Explicit" in note]
    assert "whose axes x are Explicit" in note
    with make_mesh((AUTO, AUTO)):
        np.testing.assert_allclose(product(X, X), X @ X, rtol=1e-5, atol=1e-5)


@pytest.mark.soak
def test_inside_types_are_those_of_the_specs_and_outside_those_of_the_out_specs():
    seen = collections.Counter()
    cases = [
        (types, first, second, given_as)
        for types, first, second, given_as in itertools.product(AXIS_TYPES, SPECS[:5], SPECS[2:6], SPECS[:3])
        if (SPECS.index(first) + 2 * SPECS.index(second) + 3 * SPECS.index(given_as)) % 7 == 0
    ]
    run = sample(range(len(cases)), 3)
    for number, (types, first, second, given_as) in enumerate(cases):
        mesh, inside, outside = make_mesh(types), [], []

        def fun(x, inside=inside):
            inside.append(jax.typeof(x))
            return x * 2

        function = pjit(fun, in_shardings=first, out_shardings=second)

        def outer(x, function=function, outside=outside):
            y = function(x)
            outside.append(jax.typeof(y))
            return y

        with jax.set_mesh(mesh), partjit.reshard_policy("allow"):
            x = put(mesh, given_as)
            jax.jit(outer).trace(x)  # which is enough to see types
            for result in (function(x), jax.jit(outer)(x)) if number in run else ():
                np.testing.assert_allclose(result, 2 * X)
                assert result.sharding.is_equivalent_to(NamedSharding(mesh, second), 2)
        for type_, spec in ((inside[0], first), (outside[0], second)):
            if EXPLICIT in types:
                assert type_.sharding.spec == explicit_part(spec, mesh)
                seen["with an axis"] += type_.sharding.spec != P(None, None)
        seen["resharded"] += first != given_as
    assert seen["with an axis"] > 15
    assert seen["resharded"] > 10


def test_under_the_policy_error_every_argument_of_another_type_is_named():
    mesh = make_mesh((EXPLICIT, EXPLICIT))
    inner = pjit(lambda a, b, c: (a, 2 * b, c), in_shardings=(P("x"), P("y"), P(None, "x")))
    with jax.set_mesh(mesh):
        args = put(mesh, P("x")), put(mesh, P("x")), put(mesh, P("y"))
        with partjit.reshard_policy("error"), pytest.raises(ShardingError) as caught:
            jax.jit(lambda *args: inner(*args))(*args)
        for policy in ("warn", "allow"):
            with partjit.reshard_policy(policy):
                np.testing.assert_allclose(jax.jit(lambda *args: inner(*args))(*args)[1], 2 * X)
    assert "b (float32[8@x,8]) has the sharding P('x', None) in its type, and its spec says P('y', None)" in str(
        caught.value
    )
    assert "c (float32[8@y,8])" in str(caught.value)
    assert "a (" not in str(caught.value)


@pytest.mark.soak
@pytest.mark.parametrize("types", AXIS_TYPES, ids=lambda types: "-".join(kind.name for kind in types))
def test_our_constraint_reshards_over_explicit_axes_and_constrains_over_the_others(types):
    mesh = make_mesh(types)

    def fun(x, spec):
        y = with_sharding_constraint(jnp.sin(x), spec)
        assert EXPLICIT not in types or jax.typeof(y).sharding.spec == explicit_part(spec, mesh)
        return y

    cases = [*itertools.product(SPECS[:4], SPECS)]
    with jax.set_mesh(mesh):
        for given_as, spec in cases if EVERYTHING else cases[AXIS_TYPES.index(types) :: 10]:
            x = put(mesh, given_as)
            for call in (fun, jax.jit(fun, static_argnums=1), pjit(fun, static_argnums=1)):
                result = call(x, spec)
                np.testing.assert_allclose(result, np.sin(X), rtol=1e-6)
                assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
            gradient = jax.grad(pjit(lambda x, spec=spec: fun(x, spec).sum()))(x)
            np.testing.assert_allclose(gradient, np.cos(X), rtol=1e-5)
            assert jax.typeof(gradient) == jax.typeof(x)


@pytest.mark.parametrize("types", AXIS_TYPES[:3], ids=lambda types: "-".join(kind.name for kind in types))
def test_calls_take_and_give_the_types_of_their_arguments(types):
    mesh = make_mesh(types)
    colocated = colocated_python(lambda x: 2 * x, out_specs_fn=lambda x: x, mode="inline")
    inside = []

    def fun(x):
        x = reshard(x, explicit_part(P("y", "x"), mesh))
        y = colocated(jnp.sin(x))
        inside.extend([jax.typeof(x), jax.typeof(y)])
        return lax.scan(lambda c, _: (colocated(c), None), y, None, 2)[0]

    with jax.set_mesh(mesh):
        x = put(mesh, P("x"))
        result = pjit(fun)(x)
        np.testing.assert_allclose(result, 8 * np.sin(X), rtol=1e-5)
        assert inside[0].sharding == inside[1].sharding
        assert jax.typeof(result).sharding == inside[1].sharding
        with jax.disable_jit():
            np.testing.assert_allclose(pjit(fun)(x), result, rtol=1e-6)


def test_a_call_with_specs_gives_the_type_of_its_spec():
    mesh = make_mesh((EXPLICIT, EXPLICIT))
    struct = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(mesh, P("y")))
    load = colocated_python(lambda: jnp.asarray(X), out_specs=struct)

    def fun(x):
        loaded = load()
        assert jax.typeof(loaded).sharding.spec == P("y", None)
        return reshard(x, P("y")) + loaded

    with jax.set_mesh(mesh):
        result = pjit(fun)(put(mesh, P("x")))
    np.testing.assert_allclose(result, 2 * X)
    assert result.sharding.is_equivalent_to(NamedSharding(mesh, P("y")), 2)


def test_requests_of_a_program_with_calls_are_kept():
    """Products with `out_sharding=`, unreduced ones, and what jax makes on a mesh, beside a call."""
    mesh = make_mesh((EXPLICIT, EXPLICIT))

    def fun(identity, x, w):
        y = jnp.dot(x, w, out_sharding=P("x", None))
        z = reshard(jnp.dot(x, w, out_sharding=P("x", None, unreduced={"y"})), P("x"))
        zeros = jnp.zeros((8, 8), np.float32, out_sharding=P("x", "y"))
        wide = jax.sharding.auto_axes(lambda x: x @ x, out_sharding=P("x", None))(y)
        return identity(y + z) + zeros, wide

    called = colocated_python(lambda x: x, out_specs_fn=lambda x: x)
    with jax.set_mesh(mesh):
        x, w = put(mesh, P("x", "y")), put(mesh, P("y"))
        ours, theirs = pjit(functools.partial(fun, called))(x, w), jax.jit(functools.partial(fun, lambda x: x))(x, w)
    for result, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
        assert jax.typeof(result) == jax.typeof(expected)


@pytest.mark.parametrize("types", AXIS_TYPES, ids=lambda types: "-".join(kind.name for kind in types))
def test_a_constraint_that_does_not_divide_is_padded_over_auto_axes_only(types):
    mesh = make_mesh(types)
    x = np.arange(6, dtype=np.float32)
    for axis, kind in zip("xy", types, strict=True):
        function = pjit(lambda x, axis=axis: with_sharding_constraint(x[:5], P(axis)))
        with jax.set_mesh(mesh):
            if kind is AUTO:
                np.testing.assert_array_equal(function(x), x[:5])
            else:
                with pytest.raises(ShardingError, match=rf"divisible by {mesh.shape[axis]}, but it is equal to 5"):
                    function(x)


@pytest.mark.parametrize("types", AXIS_TYPES, ids=lambda types: "-".join(kind.name for kind in types))
def test_batches_over_all_axis_types(types):
    """Nested programs and constraints in a batch: left to the partitioner where there is one, typed where not."""
    mesh = make_mesh(types)
    inner = pjit(lambda x: with_sharding_constraint(jnp.sin(x), P("x")), in_shardings=P("x"), out_shardings=P("x"))
    with jax.set_mesh(mesh):
        for spec in [(P(), P("y", "x")), (P("y"), P(None, "x"))][AXIS_TYPES.index(types) % 2]:
            batch = put(mesh, spec)
            for call in (jax.vmap(inner), jax.jit(jax.vmap(inner)), pjit(jax.vmap(inner))):
                result = call(batch)
                np.testing.assert_allclose(result, np.sin(X), rtol=1e-6)
                assert result.sharding.spec[1] == "x"
            spmd = jax.vmap(inner, spmd_axis_name="y")(batch if spec in (P("y"), P("y", "x")) else X)
            assert spmd.sharding.is_equivalent_to(NamedSharding(mesh, P("y", "x")), 2)


def test_a_call_gets_arrays_of_the_types_of_its_arguments_whatever_others_need(meeting):
    mesh = make_mesh((EXPLICIT, EXPLICIT))

    def note(x):
        rendezvous.logs["shardings"].append(x.sharding)

    colocated = colocated_python(note, out_specs_fn=lambda x: None)

    def fun(x):
        y = jnp.tanh(jnp.ones((8, 8), np.float32, out_sharding=P()))
        colocated(y)
        return x * reshard(y, P("x"))

    with jax.set_mesh(mesh):
        pjit(fun)(put(mesh, P("x")))
        partjit.colocated.wait()
    (seen,) = rendezvous.logs["shardings"]
    assert seen.is_fully_replicated
    assert len(seen.device_set) == 8


def test_what_a_program_with_calls_requests_is_a_constraint_in_its_fragments():
    mesh = make_mesh((EXPLICIT, EXPLICIT))
    identity = colocated_python(lambda x: x, out_specs_fn=lambda x: x)

    def fun(x, w):
        return identity(jnp.sin(jnp.dot(x, w, out_sharding=P("x", None))))

    with jax.set_mesh(mesh):
        plan = pjit(fun).plan(put(mesh, P("x", "y")), put(mesh, P("y")))
    fragment = next(node for node in plan.nodes if hasattr(node, "jaxpr"))
    (found,) = [eqn.params["spec"] for eqn in fragment.jaxpr.jaxpr.eqns if eqn.primitive is sharding_constraint_p]
    assert found.partition_spec == P("x", None)


@pytest.mark.parametrize("types", AXIS_TYPES, ids=lambda types: "-".join(kind.name for kind in types))
def test_programs_and_constraints_where_one_axis_is_manual(types):
    mesh, seen = make_mesh(types), []
    inner = pjit(lambda x: jnp.sin(x) * 2, in_shardings=P(None, "y"), out_shardings=P("y"))

    def each(x):
        y = inner(x)
        z = with_sharding_constraint(y, P(None, "y"))
        seen.append([jax.typeof(value).sharding.spec for value in (y, z)])
        return z

    def fun(x):
        return jax.shard_map(each, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})(x)

    with jax.set_mesh(mesh):
        x = put(mesh, P("x"))
        for wrap in (jax.jit, pjit):
            np.testing.assert_allclose(wrap(fun)(x), 2 * np.sin(X), rtol=1e-5)
        np.testing.assert_allclose(jax.grad(pjit(lambda x: fun(x).sum()))(x), 2 * np.cos(X), rtol=1e-5, atol=1e-5)
    expected = [P("y", None), P(None, "y")] if types[1] is EXPLICIT else [P(None, None)] * 2
    assert seen
    assert all(specs == expected for specs in seen)


def test_a_plan_names_arguments_and_keeps_constants_as_on_auto_axes():
    """jax forgets both where a jaxpr gets other variables."""
    call = colocated_python(lambda x: x, out_specs_fn=lambda x: x)
    plans = []
    for kind in (AUTO, EXPLICIT):
        mesh = make_mesh((kind, kind))
        constant = put(mesh, P())

        @pjit(in_shardings=(P("x"), P()), out_shardings=P("x"))
        def step(w, y, constant=constant):
            return call(w + 1) + lax.scan(lambda c, _: (c + constant, None), y, None, 2)[0]

        with jax.set_mesh(mesh):
            plans.append(str(step.plan(X, X)))
            np.testing.assert_allclose(step(X, X), 4 * X + 1, rtol=1e-6)
    assert plans[0] == plans[1]
    assert plans[0].startswith("def step(w, y):")


def test_what_jax_replicates_by_itself_is_resharded_without_a_warning():
    mesh = make_mesh((EXPLICIT, AUTO))
    double = pjit(lambda x: 2 * x, in_shardings=P("x"))
    with jax.set_mesh(mesh):
        ones = jnp.ones((8, 8))
        assert ones.committed
        np.testing.assert_array_equal(double(ones), 2 * ones)  # a ReshardWarning would be an error here
        with pytest.warns(partjit.ReshardWarning, match="moving 384 bytes"):
            double(put(mesh, P(None, "x")))
        with partjit.reshard_policy("error"), pytest.raises(ShardingError, match="moving 0 bytes"):
            double(ones)


def stacked_rows(call, x):
    """Rows that a loop in a loop stacks, in another sharding than that in which the loop writes them."""

    def iteration(x, _):
        rows = lax.scan(lambda _, row: (None, call(row)), None, with_sharding_constraint(x, P()))[1]
        return with_sharding_constraint(rows, P("x")), None

    return lax.scan(iteration, with_sharding_constraint(x, P("x")), None, 2)[0]


def in_vmap_of_scan(call, x):
    return jax.vmap(lambda row: lax.scan(lambda c, _: (call(jnp.cos(c)), None), row, None, 2)[0])(x)


WITH_CALLS = {
    "of a constant": lambda call, x: x + call(jnp.asarray(X)) + call(X),
    "of a call": lambda call, x: (call(call(x)), call(jnp.sin(call(x)))),
    "into a sum": lambda call, x: call(jnp.sin(x)) + x,
    "in a branch": lambda call, x: lax.cond(x.sum() > -99, call, lambda x: x * 3, x),
    "while": lambda call, x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, call(jnp.cos(s[1]))), (0, x)),
    "stacked": lambda call, x: lax.scan(lambda c, _: (jnp.cos(c), call(c)), x, None, 3),
    "stacked in a loop": stacked_rows,
    "vmap": lambda call, x: jax.vmap(lambda row: call(jnp.sin(row)) * 2)(x),
    "vmap of vmap": lambda call, x: jax.vmap(jax.vmap(lambda x: call(jnp.sin(x))))(x),
    "vmap of scan": in_vmap_of_scan,
    "grad of vmap": lambda call, x: jax.grad(lambda x: jax.vmap(call)(jnp.sin(x)).sum())(x),
    "grad of vmap of scan": lambda call, x: jax.grad(lambda x: in_vmap_of_scan(call, x).sum())(x),
}


@pytest.mark.soak
@pytest.mark.parametrize("program", WITH_CALLS)
def test_a_program_with_calls_has_the_types_and_results_of_jit_without_them(program):
    """On all types of axes. The function computes with what it gets, so these are arrays of the mesh that is set."""
    call = colocated_python(lambda x: x * 1, out_specs_fn=lambda x: x)
    call.defvjp(lambda x: (call(x), None), lambda _, ct: (call(ct),))
    k = [*WITH_CALLS].index(program)
    cases = [*zip(AXIS_TYPES, [P(("x", "y")), P("y", "x"), P(("x", "y")), P("x")], strict=True)]
    for types, spec in cases if EVERYTHING else [cases[k % 3]]:
        mesh = make_mesh(types)
        with jax.set_mesh(mesh):
            ours, theirs = (
                outcome(wrap(functools.partial(WITH_CALLS[program], f)), put(mesh, spec))
                for wrap, f in ((pjit, call), (jax.jit, lambda x: x))
            )
        assert ours[1] is not None, ours
        assert ours[0] == theirs[0]
        for value, other in zip(ours[1], theirs[1], strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrap", [pjit, jax.jit])
def test_second_derivatives_through_a_part_over_auto_axes(wrap):
    """Their residuals are values of that part, with its types."""
    mesh = make_mesh((EXPLICIT, EXPLICIT))
    square = wrap(lambda x: jax.sharding.auto_axes(lambda x: (x @ x.T) ** 2, out_sharding=P("x"))(x).sum())
    with jax.set_mesh(mesh):
        second = jax.grad(lambda x: (jax.grad(square)(x) ** 2).sum())(put(mesh, P("x")))
    expected = jax.jit(jax.grad(lambda x: (jax.grad(lambda x: ((x @ x.T) ** 2).sum())(x) ** 2).sum()))(X)
    np.testing.assert_allclose(second, expected, rtol=1e-3, atol=1e-2)
    assert jax.typeof(second).sharding.spec == P("x", None)


@pytest.mark.parametrize("types", [(EXPLICIT, EXPLICIT), (AUTO, AUTO)], ids=["Explicit", "Auto"])
def test_an_eager_batch_that_is_sharded_is_called_row_by_row_with_numbers_beside_it(types):
    x = put(make_mesh(types), P("x"))
    scale = colocated_python(lambda a, x: a * x, out_specs_fn=lambda a, x: x)
    np.testing.assert_array_equal(jax.vmap(lambda row: scale(6, row))(x), 6 * X)  # no mesh is set
    with jax.set_mesh(x.sharding.mesh):
        result = jax.vmap(lambda row: scale(6, row))(x)
    np.testing.assert_array_equal(result, 6 * X)
    assert types[0] is AUTO or jax.typeof(result) == jax.typeof(x)
