"""Models of Equinox, trained by optax."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from truth_models.training import Model, columns, floats, megatron, training_step


def arrays_of(make):
    """The arrays of a module as structs, and the rest of it."""
    module = eqx.filter_eval_shape(make, jax.random.key(0))
    return eqx.partition(module, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))


class Encoder(eqx.Module):
    """A layer of a transformer."""

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


def transformer() -> Model:
    """Stacked layers, scanned and rematerialized."""
    params, static = arrays_of(lambda key: eqx.filter_vmap(Encoder)(jax.random.split(key, 3)))

    def loss(params, x):
        def layer(x, own):
            return jax.vmap(eqx.combine(own, static))(x), None

        return jnp.mean((jax.lax.scan(jax.checkpoint(layer), x, params)[0] - x) ** 2)

    def spec_of(path, shape):
        # The weights of Equinox are outputs by inputs, and here stacked.
        return columns(path, shape) if "narrow" in path or "output" in path else megatron((path,))(path, shape)

    return training_step(
        loss,
        params,
        optax.adamw(1e-3),
        {"x": floats(8, 16, 32)},
        lambda path, shape: spec_of(path, shape if len(shape) > 2 else ()),
    )


class Mamba(eqx.Module):
    """A selective state space, scanned step by step."""

    into: eqx.nn.Linear
    convolution: eqx.nn.Conv1d
    selection: eqx.nn.Linear
    step: eqx.nn.Linear
    decay: jax.Array
    skip: jax.Array
    out: eqx.nn.Linear

    def __init__(self, key, width=32, inner=64, states=8):
        keys = jax.random.split(key, 5)
        self.into = eqx.nn.Linear(width, 2 * inner, key=keys[0])
        self.convolution = eqx.nn.Conv1d(inner, inner, 4, groups=inner, padding=[(3, 0)], key=keys[1])
        self.selection = eqx.nn.Linear(inner, 2 * states + 2, key=keys[2])
        self.step = eqx.nn.Linear(2, inner, key=keys[3])
        self.decay = jnp.log(jnp.tile(jnp.arange(1.0, states + 1), (inner, 1)))
        self.skip = jnp.ones(inner)
        self.out = eqx.nn.Linear(inner, width, key=keys[4])

    def __call__(self, x):
        u, gate = jnp.split(jax.vmap(self.into)(x), 2, axis=-1)
        u = jax.nn.silu(self.convolution(u.T).T)
        rank, b, c = jnp.split(jax.vmap(self.selection)(u), [2, 10], axis=-1)
        delta = jax.nn.softplus(jax.vmap(self.step)(rank))
        a = -jnp.exp(self.decay)

        def scan(state, at):
            delta, u, b, c = at
            state = jnp.exp(delta[:, None] * a) * state + (delta * u)[:, None] * b
            return state, state @ c

        _, y = jax.lax.scan(scan, jnp.zeros(a.shape), (delta, u, b, c))
        return jax.vmap(self.out)((y + u * self.skip) * jax.nn.silu(gate))


def mamba() -> Model:
    params, static = arrays_of(lambda key: [Mamba(key) for key in jax.random.split(key, 2)])

    def loss(params, x):
        y = x
        for layer in eqx.combine(params, static):
            y = y + jax.vmap(layer)(y)
        return jnp.mean((y - x) ** 2)

    def spec_of(path, shape):
        if ".out" in path or ".selection" in path:
            return columns(path, shape)
        return megatron((path,))(path, shape) if len(shape) == 2 else megatron((path,))(path, ())

    return training_step(loss, params, optax.adamw(1e-3), {"x": floats(8, 16, 32)}, spec_of)
