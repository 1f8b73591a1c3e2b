"""Hamiltonian Monte Carlo of BlackJAX: chains over one axis, data over the other."""

import blackjax
import jax
import jax.numpy as jnp

from partjit import P, pjit
from truth_models.training import Model, floats, two_axes


def chains() -> Model:
    def many(keys, start, x, y):
        def log_density(w):
            return -jnp.sum((x @ w - y) ** 2) - jnp.sum(w**2)

        sampler = blackjax.hmc(log_density, step_size=0.1, inverse_mass_matrix=jnp.ones(8), num_integration_steps=4)

        def one(key, start):
            def step(state, key):
                state, _ = sampler.step(key, state)
                return state, state.position

            return jax.lax.scan(step, sampler.init(start), jax.random.split(key, 5))[1]

        return jax.vmap(one)(keys, start)

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    made = pjit(many, in_shardings=(P("data"), P("data"), P("model"), P("model")), out_shardings=P("data"))
    return Model(made, (keys, floats(8, 8), floats(64, 8), floats(64)), two_axes())
