"""Variational inference of NumPyro: a Bayesian regression whose data are sharded."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import numpyro.infer
import numpyro.infer.autoguide
import numpyro.optim

from partjit import P, pjit
from truth_models.training import Model, by_path, floats, two_axes


def variational() -> Model:
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(jnp.zeros((32, 16)), 1.0).to_event(2))
        v = numpyro.sample("v", dist.Normal(jnp.zeros(16), 1.0).to_event(1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(jnp.tanh(x @ w) @ v, 0.1), obs=y)

    guide = numpyro.infer.autoguide.AutoNormal(model)
    svi = numpyro.infer.SVI(model, guide, numpyro.optim.Adam(1e-2), numpyro.infer.Trace_ELBO())
    start = svi.init(jax.random.PRNGKey(0), jnp.zeros((64, 32)), jnp.zeros(64))
    state = jax.eval_shape(lambda: start)
    specs = by_path(state, lambda path, shape: P(None, "model") if shape == (32, 16) else P())

    def step(state, x, y):
        return svi.update(state, x, y)

    made = pjit(step, in_shardings=(specs, P("data"), P("data")), out_shardings=(specs, None), donate_argnums=0)
    return Model(made, (state, floats(64, 32), floats(64)), two_axes())
