"""A layer of Penzai, whose arrays have named axes."""

import jax
import jax.numpy as jnp
import optax
from penzai import pz

from truth_models.training import Model, columns, floats, training_step


def perceptron() -> Model:
    def build(key):
        layers = [
            pz.nn.Linear.from_config("up", key, {"features": 32}, {"hidden": 64}),
            pz.nn.Elementwise(jax.nn.gelu),
            pz.nn.Linear.from_config("down", key, {"hidden": 64}, {"features": 32}),
        ]
        return pz.unbind_params(pz.nn.Sequential(layers))

    model, params = build(jax.random.key(0))
    values = {str(param.label): param.value for param in params}
    shapes = jax.eval_shape(lambda: values)

    def loss(params, x):
        given = [pz.Parameter(label=param.label, value=params[str(param.label)]) for param in variables]
        out = pz.bind_variables(model, given)(pz.nx.wrap(x).tag("batch", "features"))
        return jnp.mean(out.untag("batch", "features").unwrap() ** 2)

    variables = params
    return training_step(loss, shapes, optax.adam(1e-3), {"x": floats(16, 32)}, columns)
