"""Models of third-party libraries as arguments of a pjit, with the specs that rules over their paths give."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import partjit
from partjit import P, ShardingError, pjit, specs_like, with_sharding_constraint

X = np.arange(64, dtype=np.float32).reshape(8, 8) / 64
RULES = {
    "(up|Dense_0)/(kernel|weight)": P("y"),
    "(down|Dense_1)/(kernel|weight)": P(None, "y"),
    "bias|scale|mean|var|norm/weight": P(),
}


@pytest.fixture(autouse=True)
def promotion():
    # The libraries take promotion for granted, which jax is told to refuse in these tests.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class OfEquinox(eqx.Module):
    up: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    drop: eqx.nn.Dropout
    down: eqx.nn.Linear
    activation: object
    name: str
    width: int = eqx.field(static=True)

    def __init__(self, key):
        keys = jax.random.split(key)
        self.up, self.down = eqx.nn.Linear(8, 16, key=keys[0]), eqx.nn.Linear(16, 8, key=keys[1])
        self.norm, self.drop = eqx.nn.LayerNorm(16), eqx.nn.Dropout(0.5, inference=True)
        self.activation, self.name, self.width = jax.nn.relu, "model", 16

    def __call__(self, x):
        return self.down(self.drop(self.activation(self.norm(self.up(x)))))


class OfNNX(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.activation = jax.nn.relu

    def __call__(self, x):
        return self.down(self.drop(self.activation(self.norm(self.up(x)))))


class OfLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.BatchNorm(use_running_average=False)(nn.Dense(16, kernel_init=_columns)(x))
        return nn.Dense(8, kernel_init=_columns)(nn.relu(h))


_columns = nn.with_partitioning(nn.initializers.ones, (None, "y"))


class State(TrainState):
    batch_stats: object


def equinox_step():
    model = OfEquinox(jax.random.key(0))
    optimizer = optax.sgd(0.1, momentum=0.9)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    state = params, optimizer.init(params)

    def step(state, x):
        params, of_optimizer = state

        def loss(model):
            return jnp.mean(jax.vmap(model)(x) ** 2)

        value, grads = eqx.filter_value_and_grad(loss)(eqx.combine(params, static))
        updates, of_optimizer = optimizer.update(grads, of_optimizer, params)
        return (eqx.apply_updates(params, updates), of_optimizer), value

    return step, state


def nnx_step():
    model = OfNNX(nnx.Rngs(0))
    definition, state = nnx.split((model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)))

    def step(state, x):
        model, optimizer = nnx.merge(definition, state)
        value, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    return step, state


def linen_step():
    model = OfLinen()
    variables = model.init(jax.random.key(0), X)
    state = State.create(apply_fn=model.apply, tx=optax.sgd(0.1, momentum=0.9), **variables)

    def step(state, x):
        def loss(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            out, changed = state.apply_fn(variables, x, mutable=["batch_stats"])
            return jnp.mean(out**2), changed

        (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, **changed), value

    return step, state


def bare(tree):
    """The leaves of a tree as NumPy arrays, keys as their data."""
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in map(jnp.asarray, jax.tree.leaves(tree))]
    leaves = zip(jax.tree.leaves(tree), is_key, strict=True)
    return [np.asarray(jax.random.key_data(leaf) if is_key else leaf) for leaf, is_key in leaves]


@pytest.mark.parametrize("make", [equinox_step, nnx_step, linen_step])
def test_a_training_step_keeps_the_specs_of_its_state_and_computes_what_jit_does(make, mesh):
    step, state = make()
    specs = specs_like(state, RULES)
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    wanted = jax.tree.leaves(specs)
    assert {P("y"), P(None, "y"), P()} == {*wanted}
    sharded = pjit(step, in_shardings=(specs, P("x")), out_shardings=(specs, None))
    plain, of_jit = state, jax.jit(step)
    with mesh:
        for _ in range(2):
            state, value = sharded(state, X)
            plain, expected = of_jit(plain, X)
            np.testing.assert_allclose(value, expected, rtol=1e-3)
        for ours, theirs in zip(bare(state), bare(plain), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
        constrained = pjit(lambda state: with_sharding_constraint(state, specs))(state)
    assert [leaf.sharding.spec for leaf in jax.tree.leaves(state)] == wanted
    assert [leaf.sharding.spec for leaf in jax.tree.leaves(constrained)] == wanted


def test_a_module_of_equinox_is_passed_as_its_arrays(mesh):
    model = OfEquinox(jax.random.key(0))
    specs = specs_like(model, RULES)
    assert (specs.activation, specs.name, specs.width, specs.drop.p) == (None, None, 16, P())
    params, static = eqx.partition(model, eqx.is_array)

    def apply(params, x):
        return jax.vmap(eqx.combine(params, static))(x)

    with mesh:
        out = pjit(apply, in_shardings=(specs, P("x")), out_shardings=P("x"))(params, X)
        of_static = pjit(
            lambda params, static, x: jax.vmap(eqx.combine(params, static))(x),
            in_shardings=(specs, P("x")),
            static_argnums=1,
        )
        np.testing.assert_array_equal(of_static(params, static, X), out)
        np.testing.assert_array_equal(eqx.filter_jit(pjit(apply, in_shardings=(specs, P("x"))))(params, X), out)
        made = pjit(lambda key: eqx.filter(OfEquinox(key), eqx.is_array), out_shardings=specs)(jax.random.key(0))
        assert made.up.weight.sharding.spec == P("y")
        with pytest.raises(TypeError, match=r"Argument model.activation of .* pass only the arrays of the tree"):
            pjit(lambda model, x: jax.vmap(model)(x), in_shardings=(specs, P("x")))(model, X)


def test_an_nnx_module_is_an_argument_itself_and_is_split_and_merged_inside(mesh):
    model = OfNNX(nnx.Rngs(0))
    model.eval()
    specs = specs_like(model, RULES)
    assert isinstance(specs, OfNNX)
    definition, params, rest = nnx.split(model, nnx.Param, ...)
    of_params = specs_like(params, RULES)
    with mesh:
        whole = pjit(lambda model, x: model(x), in_shardings=(specs, P("x")))(model, X)
        merged = pjit(
            lambda definition, params, rest, x: nnx.merge(definition, params, rest)(x),
            in_shardings=(of_params, None, P("x")),
            static_argnums=0,
        )(definition, params, rest, X)
        made = pjit(lambda: nnx.state(OfNNX(nnx.Rngs(0)), nnx.Param), out_shardings=of_params)()
    np.testing.assert_allclose(whole, merged)
    assert made["up"]["kernel"].get_value().sharding.spec == P("y")


def test_specs_that_flax_keeps_with_its_variables_are_specs_of_a_pjit(mesh):
    model = OfLinen()
    shapes = jax.eval_shape(model.init, jax.random.key(0), X)
    specs = nn.get_partition_spec(shapes)
    with mesh:
        variables = pjit(lambda key: model.init(key, X), out_shardings=specs)(jax.random.key(0))
        assert variables["params"]["Dense_0"]["kernel"].value.sharding.spec == P(None, "y")

    class Annotated(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((8, 8)), out_sharding=("x", "y"))

    with partjit.set_mesh(mesh):  # flax asks jax.set_mesh for the mesh, not `with mesh:`
        definition, state = nnx.split(Annotated())
        specs = nnx.get_partition_spec(state)
        out = pjit(lambda s: nnx.merge(definition, s).w[...] * 2, in_shardings=(specs,), out_shardings=P("x", "y"))(
            state
        )
    assert out.sharding.spec == P("x", "y")


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: eqx.filter(OfEquinox(jax.random.key(0)), eqx.is_array), "tree.up.weight"),
        (lambda: nnx.split(OfNNX(nnx.Rngs(0)))[1], "tree['up']['kernel'].value"),
        (lambda: OfLinen().init(jax.random.key(0), X), "tree['params']['Dense_0']['kernel'].value"),
    ],
)
def test_what_does_not_fit_is_named_by_its_path(make, path, mesh):
    tree = make()
    specs = specs_like(tree, {"(up|Dense_0)/(kernel|weight)": P(None, "z")}, default=P())
    with mesh, pytest.raises(ShardingError) as caught:
        pjit(lambda tree: tree, in_shardings=(specs,))(tree)
    assert f"One of pjit arguments, {path} (float32[" in str(caught.value)


def arrays(model):
    return eqx.filter(model, eqx.is_array)


AROUND = {
    "filter_jit": lambda program, model, x: eqx.filter_jit(lambda model, x: program(arrays(model), x))(model, x),
    "filter_vmap": lambda program, model, x: eqx.filter_vmap(
        lambda model, x: program(arrays(model), x), in_axes=(None, 0)
    )(model, np.stack([x, x])),
    "filter_grad": lambda program, model, x: arrays(
        eqx.filter_grad(lambda model, x: program(arrays(model), x).sum())(model, x)
    ),
    "filter_jit of filter_value_and_grad": lambda program, model, x: eqx.filter_jit(
        eqx.filter_value_and_grad(lambda model, x: program(arrays(model), x).sum())
    )(model, x)[0],
    "filter_checkpoint": lambda program, model, x: jax.grad(
        lambda x: eqx.filter_checkpoint(lambda model, x: program(arrays(model), x))(model, x).sum()
    )(x),
}
INSIDE = {
    "filter_jit": lambda model, x: eqx.filter_jit(lambda model, x: jax.vmap(model)(x))(model, x),
    "filter_vmap": lambda model, x: eqx.filter_vmap(model)(x),
    "filter_grad": lambda model, x: arrays(eqx.filter_grad(lambda model: jax.vmap(model)(x).sum())(model)),
    "filter_checkpoint": lambda model, x: eqx.filter_checkpoint(lambda model, x: jax.vmap(model)(x))(model, x),
}


@pytest.mark.parametrize(("where", "wrapper"), [*(("around", w) for w in AROUND), *(("inside", w) for w in INSIDE)])
def test_filtered_wrappers_go_around_a_program_and_inside_of_one(where, wrapper, mesh):
    model = OfEquinox(jax.random.key(0))
    specs = specs_like(model, RULES)
    params, static = eqx.partition(model, eqx.is_array)
    inner = INSIDE[wrapper] if where == "inside" else lambda model, x: jax.vmap(model)(x)

    def bare(params, x):
        return inner(eqx.combine(params, static), x)

    program = pjit(bare, in_shardings=(specs, P("x")))
    with mesh:
        called = [AROUND[wrapper](f, model, X) if where == "around" else f(params, X) for f in (program, bare)]
    for ours, theirs in zip(*map(jax.tree.leaves, called), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_transformations_of_nnx_go_around_a_program(mesh):
    model = OfNNX(nnx.Rngs(0))
    model.eval()
    definition, state = nnx.split(model)
    program = pjit(lambda state, x: nnx.merge(definition, state)(x), in_shardings=(specs_like(state, RULES), P("x")))

    def call(program):
        def apply(model, x):
            return program(nnx.state(model), x)

        grads = nnx.jit(nnx.grad(lambda model, x: apply(model, x).sum()))(model, X)
        batched = nnx.vmap(apply, in_axes=(None, 0))(model, np.stack([X, X]))
        return nnx.jit(apply)(model, X), batched, nnx.remat(apply)(model, X), nnx.to_pure_dict(grads)

    with mesh:
        called = call(program), call(lambda state, x: nnx.merge(definition, state)(x))
    for ours, theirs in zip(*map(jax.tree.leaves, called), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
