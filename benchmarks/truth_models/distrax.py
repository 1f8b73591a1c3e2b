"""A normalizing flow of Distrax, with conditioners of Haiku."""

import distrax
import haiku as hk
import jax
import jax.numpy as jnp
import optax

from truth_models.training import Model, columns, floats, training_step


def flow() -> Model:
    def log_probability(x):
        def conditioner(name):
            return hk.Sequential([hk.Linear(32, name=f"{name}_up"), jnp.tanh, hk.Linear(16, name=f"{name}_down")])

        def bijector(params):
            shift, scale = jnp.split(params, 2, axis=-1)
            return distrax.ScalarAffine(shift, log_scale=jnp.tanh(scale))

        layers = []
        for k in range(3):
            mask = (jnp.arange(8) + k) % 2 == 0
            layers.append(distrax.MaskedCoupling(mask, conditioner(f"layer_{k}"), bijector))
        base = distrax.MultivariateNormalDiag(jnp.zeros(8), jnp.ones(8))
        return distrax.Transformed(base, distrax.Block(distrax.Chain(layers), 0)).log_prob(x)

    model = hk.without_apply_rng(hk.transform(log_probability))
    params = jax.eval_shape(lambda key: model.init(key, jnp.zeros((16, 8))), jax.random.key(0))
    return training_step(
        lambda params, x: -jnp.mean(model.apply(params, x)), params, optax.adam(1e-3), {"x": floats(16, 8)}, columns
    )
