"""Meshes with Explicit axes: results are those on the mesh of the same devices with Auto axes, but on the user's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import partjit
from partjit import UNSPECIFIED, P, pjit, with_sharding_constraint
from partjit._jax.tracing import ShardingTypeError
from partjit.colocated import colocated_python
from tests.effort import EVERYTHING

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
TYPES = [(EXPLICIT, EXPLICIT), (AUTO, EXPLICIT)]
CONTEXTS = {"with": lambda mesh: mesh, "partjit.set_mesh": partjit.set_mesh, "jax.set_mesh": jax.set_mesh}

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
W = np.linspace(0.5, -0.7, 64, dtype=np.float32).reshape(8, 8)


def make_mesh(types):
    return partjit.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"), axis_types=types)


def matmul(x, w):
    """The product, sharded over Explicit axes as its first factor: jax has that said where factors share an axis."""
    explicit = any(axes is not None for axes in jax.typeof(x).sharding.spec)
    return jnp.matmul(x, w, out_sharding=jax.typeof(x).sharding if explicit else None)


def mlp(w, x):
    return jnp.sin(matmul(x, w)) + jnp.cos(x)


pjit_mlp = pjit(mlp, in_axis_resources=(P("y"), P("x", "y")), out_axis_resources=P("x", "y"))
pjit_sin = pjit(jnp.sin, in_axis_resources=(P("y"),), out_axis_resources=P("y"))
pjit_free = pjit(mlp)
pjit_nested = pjit(
    lambda w, x: pjit_mlp(with_sharding_constraint(w, P("x")), jnp.tanh(x)),
    in_axis_resources=(None, P("y", "x")),
    out_axis_resources=P(None, "x"),
)


def total(f):
    return lambda *args: f(*args).sum()


@jax.jit
def stacked(x):
    return jnp.stack([x, 2 * x, x, x])


def scanned(w, x):
    # So that the types of the carry and of its cotangent are the same before and after a turn.
    w, carry = with_sharding_constraint((w, x), (P("y"), P("x", "y")))
    return jax.lax.scan(lambda c, s: (pjit_mlp(w, c) * s, None), carry, np.array([0.5, 0.9], np.float32))[0]


def vjp_twice(w, x):
    y, pullback = jax.vjp(pjit_mlp, w, x)
    return pullback(y), pullback(2 * y)


CALLS = {
    "call": pjit_mlp,
    "nested": pjit_nested,
    "unspecified": pjit_free,
    "grad": jax.grad(total(pjit_mlp), (0, 1)),
    "grad of nested": jax.grad(total(pjit_nested), (0, 1)),
    "grad of unspecified": jax.grad(total(pjit_free), (0, 1)),
    "value and grad": jax.value_and_grad(total(pjit_mlp)),
    "grad of remat": jax.grad(total(jax.checkpoint(pjit_mlp)), (0, 1)),
    "grad of scan": jax.grad(total(scanned), (0, 1)),
    "jvp": lambda w, x: jax.jvp(pjit_mlp, (w, x), (2 * w, 3 * x)),
    "linearize": lambda w, x: jax.linearize(pjit_mlp, w, x)[1](2 * w, 3 * x),
    "vjp twice": vjp_twice,
    "second derivative": lambda w, x: jax.grad(lambda x: (jax.grad(total(pjit_mlp), 1)(w, x) ** 2).sum())(x),
    "jvp of grad": lambda w, x: jax.jvp(lambda x: jax.grad(total(pjit_mlp), 1)(w, x), (x,), (x,)),
    "vmap": lambda w, x: jax.vmap(pjit_mlp, (None, 0))(w, stacked(x)),
    "vmap of grad": lambda w, x: jax.vmap(jax.grad(total(pjit_mlp), 1), (None, 0))(w, stacked(x)),
    "vmap along the last axis": lambda w, x: jax.vmap(pjit_sin, -1, -1)(with_sharding_constraint(x, P("y"))),
    "spmd": lambda w, x: jax.vmap(pjit_sin, spmd_axis_name="x")(stacked(x)),
    "grad of spmd": lambda w, x: jax.grad(lambda x: jax.vmap(pjit_sin, spmd_axis_name="x")(x).sum())(stacked(x)),
    "spmd of grad": lambda w, x: jax.vmap(jax.grad(total(pjit_sin)), spmd_axis_name="x")(stacked(pjit_sin(x))),
    "constraint": lambda w, x: with_sharding_constraint(x, P("y", "x")),
    "grad of constraint": lambda w, x: jax.grad(lambda x: jnp.sin(with_sharding_constraint(x, P("y", "x"))).sum())(x),
    "arithmetic around": lambda w, x: jnp.cos(pjit_mlp(w, x)) * pjit_mlp(w, x) + 1,
}
# Whose results have specs that say how they lie. A gradient has the type of its argument, wherever that lies.
LAID_OUT = {"call", "nested", "jvp", "vmap", "vmap along the last axis", "spmd", "constraint"}
PLACES = {
    "numpy": lambda x, mesh, spec: x,
    "as specified": lambda x, mesh, spec: jax.device_put(x, NamedSharding(mesh, spec)),
    "elsewhere": lambda x, mesh, spec: jax.device_put(x, NamedSharding(mesh, P("y" if spec != P("y") else "x"))),
}


@functools.cache
def results(name, types, place, compiled):
    mesh = make_mesh(types)
    call = jax.jit(CALLS[name]) if compiled else CALLS[name]
    args = PLACES[place](W, mesh, P("y")), PLACES[place](X, mesh, P("x", "y"))
    context = CONTEXTS[dict(zip(PLACES, CONTEXTS, strict=True))[place]]
    with context(mesh), partjit.reshard_policy("allow"):
        return jax.tree.leaves(call(*args))


# Each call eagerly and compiled: one of the two with the one mesh, one with the other.
CASES = [
    pytest.param(name, types, compiled, id=f"{name}-{'-'.join(kind.name for kind in types)}-{compiled=}")
    for k, name in enumerate(CALLS)
    for i, types in enumerate(TYPES)
    for compiled in (False, True)
    if EVERYTHING or compiled == (k + i) % 2
]


@pytest.mark.soak
@pytest.mark.parametrize(("name", "types", "compiled"), CASES)
def test_results_are_those_of_the_auto_twin_on_the_mesh_of_the_user(name, types, compiled):
    mesh = make_mesh(types)
    # Eager and compiled calls have arguments in different places, and one compiled twin, which is one program.
    first = [*CALLS].index(name)
    for k in range(len(PLACES)) if EVERYTHING else [(first + compiled) % len(PLACES)]:
        place = [*PLACES][k]
        twin = results(name, (AUTO, AUTO), [*PLACES][first % len(PLACES)], True)
        for result, expected in zip(results(name, types, place, compiled), twin, strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
            assert result.sharding.mesh == mesh
            if name in LAID_OUT:
                spec = NamedSharding(expected.sharding.mesh, result.sharding.spec)
                assert spec.is_equivalent_to(expected.sharding, result.ndim), place


@pytest.mark.parametrize("types", TYPES, ids=lambda types: "-".join(kind.name for kind in types))
def test_a_gradient_has_the_type_of_its_argument_and_the_spec_of_one_that_has_no_type(types):
    mesh = make_mesh(types)
    with mesh:
        of_numpy = jax.grad(total(pjit_mlp), 1)(W, X)
        assert of_numpy.sharding.is_equivalent_to(NamedSharding(mesh, P("x", "y")), 2)
        elsewhere = jax.device_put(X, NamedSharding(mesh, P("y")))
        of_array = jax.grad(total(pjit_mlp), 1)(W, elsewhere)
        assert of_array.sharding.is_equivalent_to(elsewhere.sharding, 2)


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_the_type_of_a_result_says_its_spec_where_types_say_so(context):
    mesh = make_mesh((EXPLICIT, AUTO))
    seen = []

    @jax.jit
    def outer(x):
        y = pjit_mlp(x, x)
        z = pjit(jnp.sin, in_axis_resources=UNSPECIFIED)(x)
        seen.extend(jax.typeof(value).sharding.spec for value in (y, z))
        return y + z

    with context(mesh):
        outer(jax.device_put(X, NamedSharding(mesh, P("x"))))
    assert seen == [P("x", None), P("x", None)]  # of the Auto axis a type says nothing


def test_a_batch_stays_where_its_type_says():
    mesh = make_mesh((EXPLICIT, EXPLICIT))
    batch = jax.device_put(stacked(X), NamedSharding(mesh, P("x", "y")))
    with jax.set_mesh(mesh):
        for vmap in (jax.vmap(pjit_sin), jax.jit(jax.vmap(pjit_sin))):
            result = vmap(batch)
            np.testing.assert_allclose(result, np.sin(stacked(X)), rtol=1e-6)
            assert result.sharding.is_equivalent_to(NamedSharding(mesh, P("x", "y")), 3)


@pytest.mark.parametrize("place", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_batch_over_an_axis_that_a_spec_names_is_refused(place):
    mesh = make_mesh((EXPLICIT, EXPLICIT))
    batch = jax.device_put(X, NamedSharding(mesh, P(None, "y")))
    with mesh, pytest.raises(partjit.ShardingError, match=r"sharded over P\('y',?\).*another dimension.*jax.vmap"):
        place(jax.vmap(pjit_sin, 1, 1))(batch)


def test_a_mesh_that_was_first_seen_while_ambient_is_known_outside_as_well():
    mesh = partjit.Mesh(jax.devices(), "first_seen_while_ambient", axis_types=(EXPLICIT,))
    everywhere = NamedSharding(mesh, P())
    function = pjit(jnp.sin, in_shardings=everywhere, out_shardings=everywhere)
    with mesh:
        jax.jit(function)(X)
    np.testing.assert_allclose(jax.jit(lambda x: function(x))(X), np.sin(X), rtol=1e-6)


def logged(fun, **options):
    """A program with a call of Python on each of its arguments."""
    log = colocated_python(lambda x: None, out_specs_fn=lambda x: None)

    def with_calls(*args):
        for x in args:
            log(x)
        return fun(*args)

    return pjit(with_calls, **options)


def in_turns(x, n):
    """A loop that logs the number of each iteration and what it carries."""
    log = colocated_python(lambda i, x: None, out_specs_fn=lambda i, x: None)
    return jax.lax.fori_loop(0, n, lambda i, x: (log(i, x), x * 2 + i)[1], x)


# Each takes the transformation (`jax.jit`, or one of ours), an array over both axes, and one over the first.
WITHOUT_MESH = {
    "elements": lambda jit, a, c: jit(lambda x, y: x * 2 + y)(a, c),
    "a sum": lambda jit, a, c: jit(lambda x: jnp.sum(x, 0))(a),
    "a constant": lambda jit, a, c: jit(lambda x: (x + jnp.ones((8, 8)), jnp.arange(3)))(a),
    "a product": lambda jit, a, c: jit(lambda x, y: x @ y)(c, jnp.ones((8, 3))),
    "a product that types leave open": lambda jit, a, c: jit(lambda x: x.T @ x)(a),
    "scan": lambda jit, a, c: jit(lambda x: jax.lax.scan(lambda x, i: (x + i, None), x, jnp.arange(3.0))[0])(a),
    "over a sharded dimension": lambda jit, a, c: jit(lambda x: jax.lax.scan(lambda s, r: (s + r, r), 0 * x[0], x))(c),
    "cond": lambda jit, a, c: jit(lambda x: jax.lax.cond(jnp.sum(x) > 0, lambda x: x * 2, lambda x: x, x))(c),
    "constraint": lambda jit, a, c: jit(lambda x: jax.sharding.reshard(x, NamedSharding(MESH, P("y"))))(a),
    "shard_map": lambda jit, a, c: jit(jax.shard_map(jnp.sin, mesh=MESH, in_specs=P("x"), out_specs=P("x")))(c),
    "vmap": lambda jit, a, c: jax.vmap(jit(lambda x: x * 2))(c),
    "vmap inside": lambda jit, a, c: jit(jax.vmap(lambda x: x * 2))(c),
    "grad inside": lambda jit, a, c: jit(jax.grad(lambda x: jnp.sum(jnp.sin(x) * x)))(a),
    "jvp": lambda jit, a, c: jax.jvp(jit(lambda x: jnp.sin(x)), (a,), (a,)),
    "vjp": lambda jit, a, c: jax.vjp(jit(lambda x: jnp.sin(x) * x), a)[1](a),
    "in jit": lambda jit, a, c: jax.jit(lambda x: jax.lax.dynamic_update_slice(x, jit(lambda x: x * 2)(x), (0, 0)))(a),
    "jit inside": lambda jit, a, c: jit(lambda x: jax.jit(lambda x: x * 2)(x) + x)(a),
    "in itself": lambda jit, a, c: jit(lambda x: jit(lambda x: x * 2)(x) + x)(a),
    "in a checkpoint": lambda jit, a, c: jax.jit(jax.grad(jax.checkpoint(lambda x: jnp.sum(jit(jnp.sin)(x)))))(a),
    "out spec": lambda jit, a, c: jit(lambda x: x * 2, out_shardings=NamedSharding(MESH, P("y")))(a),
    "compiled": lambda jit, a, c: jit(lambda x: x * 2).lower(a).compile()(a),
    "a number beside": lambda jit, a, c: jit(lambda x, n: x * n)(a, 2.0),
    "of its result": lambda jit, a, c: jit(lambda x: x * 2)(jit(lambda x: x + 1)(a)),
}
REFUSED = {"a product that types leave open", "over a sharded dimension"}
MESH = make_mesh((EXPLICIT, EXPLICIT))


def outcome(fun, jit, *arrays):
    """The types and values of what a program returns, or the error that jax raises."""
    try:
        leaves = jax.tree.leaves(fun(jit, *arrays))
    except ShardingTypeError:
        return ShardingTypeError
    return [(jax.typeof(leaf), leaf.sharding.mesh, np.asarray(leaf).tolist()) for leaf in leaves]


@pytest.mark.parametrize("name", WITHOUT_MESH)
def test_where_no_mesh_is_set_types_are_those_of_the_arguments_as_under_jit(name):
    """As `jax.make_mesh` makes them, and `jax.device_put` puts arrays on them."""
    a, c = (jax.device_put(X, NamedSharding(MESH, spec)) for spec in (P("x", "y"), P("x")))
    expected = outcome(WITHOUT_MESH[name], jax.jit, a, c)
    assert outcome(WITHOUT_MESH[name], pjit, a, c) == expected
    assert outcome(WITHOUT_MESH[name], logged, a, c) == expected
    assert (expected is ShardingTypeError) == (name in REFUSED)


@pytest.mark.parametrize("spec", [P(), P("x"), P("x", "y")], ids=str)
def test_where_no_mesh_is_set_a_loop_hands_over_what_it_carries(spec):
    x = jax.device_put(X, NamedSharding(MESH, spec))
    result = pjit(lambda x: in_turns(x, 3))(x)
    np.testing.assert_allclose(result, X * 8 + 4)
    assert jax.typeof(result) == jax.typeof(x)
