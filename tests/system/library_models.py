"""Training steps out of the modules and optimizers of other libraries, with specs as one would write them."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from partjit import P, pjit


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, deterministic=True)(h, h)
        h = nn.LayerNorm()(x)
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(h)))


class LanguageModel(nn.Module):
    depth: int = 2

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, 32)(tokens)
        for _ in range(self.depth):
            x = Block()(x)
        return nn.Dense(64)(nn.LayerNorm()(x))


def by_name(spec_of):
    """Specs for the leaves of a tree, by their paths."""
    return lambda tree: jax.tree_util.tree_map_with_path(
        lambda path, leaf: spec_of(jax.tree_util.keystr(path), leaf.ndim), tree
    )


def flax_transformer():
    """A transformer of Flax, trained with AdamW and clipped gradients of Optax."""
    model = LanguageModel()
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    params = jax.eval_shape(lambda key: model.init(key, jnp.zeros((8, 16), jnp.int32)), jax.random.key(0))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = jax.eval_shape(optimizer.init, params)

    def step(params, state, tokens):
        def loss(params):
            logits = model.apply(params, tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    @by_name
    def specs(name, ndim):
        if ndim < 2:
            return P()
        is_second = "out" in name or ("Block" in name and "Dense_1" in name)
        return P("model") if is_second else P(None, "model")

    of_params, of_state = specs(params), specs(state)
    in_shardings, out_shardings = (of_params, of_state, P("data")), (of_params, of_state, None)
    made = pjit(step, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=(0, 1))
    return made, (params, state, tokens)


class Encoder(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    wide: eqx.nn.Linear
    narrow: eqx.nn.Linear
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(4, 32, key=keys[0])
        self.wide = eqx.nn.Linear(32, 128, key=keys[1])
        self.narrow = eqx.nn.Linear(128, 32, key=keys[2])
        self.norms = eqx.nn.LayerNorm(32), eqx.nn.LayerNorm(32)

    def __call__(self, x):
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h)
        h = jax.vmap(self.norms[1])(x)
        return x + jax.vmap(self.narrow)(jax.nn.gelu(jax.vmap(self.wide)(h)))


def equinox_transformer():
    """Layers of Equinox with stacked parameters, scanned and rematerialized."""

    def make(key):
        return eqx.filter_vmap(Encoder)(jax.random.split(key, 3))

    layers = eqx.filter_eval_shape(make, jax.random.key(0))
    params, static = eqx.partition(layers, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def loss(params, x, y):
        def layer(x, own):
            return jax.vmap(eqx.combine(own, static))(x), None

        return jnp.mean((jax.lax.scan(jax.checkpoint(layer), x, params)[0] - y) ** 2)

    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    @by_name
    def specs(name, ndim):
        if ndim < 3:
            return P()
        return P(None, None, "model") if "narrow" in name or "output" in name else P(None, "model")

    x = jax.ShapeDtypeStruct((8, 16, 32), jnp.float32)
    of_params = specs(params)
    made = pjit(step, in_shardings=(of_params, P("data"), P("data")), out_shardings=(of_params, None))
    return made, (params, x, x)


class ConvolutionNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (16, 32):
            y = nn.BatchNorm(use_running_average=False)(nn.Conv(features, (3, 3))(x))
            y = nn.GroupNorm(4)(nn.Conv(features, (3, 3))(nn.relu(y)))
            x = nn.max_pool(nn.relu(y + nn.Conv(features, (1, 1))(x)), (2, 2), (2, 2))
        return nn.Dense(16)(nn.Dropout(0.1, deterministic=False)(x.mean((1, 2))))


def convolution_net():
    """A convolution net of Flax with batch and group norms and dropout, trained with momentum of Optax."""
    model = ConvolutionNet()
    x = jax.ShapeDtypeStruct((16, 8, 8, 4), jnp.float32)
    labels = jax.ShapeDtypeStruct((16,), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.eval_shape(lambda: model.init(keys, jnp.zeros(x.shape)))
    optimizer = optax.sgd(optax.cosine_decay_schedule(0.1, 100), momentum=0.9)
    state = jax.eval_shape(optimizer.init, variables["params"])

    def step(variables, state, x, labels, key):
        def loss(params):
            given = {**variables, "params": params}
            logits, changed = model.apply(given, x, rngs={"dropout": key}, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), changed

        (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        updates, state = optimizer.update(grads, state)
        return {"params": optax.apply_updates(variables["params"], updates), **changed}, state, value

    @by_name
    def specs(name, ndim):
        return P(*[None] * (ndim - 1), "model") if ndim >= 2 else P()

    of_variables, of_state = specs(variables), specs(state)
    in_shardings = of_variables, of_state, P("data"), P("data"), None
    made = pjit(step, in_shardings=in_shardings, out_shardings=(of_variables, of_state, None))
    return made, (variables, state, x, labels, key)
