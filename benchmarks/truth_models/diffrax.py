"""A neural differential equation: Diffrax, with layers of Equinox."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from partjit import P
from truth_models.equinox import arrays_of
from truth_models.training import Model, floats, training_step


def neural_ode() -> Model:
    params, static = arrays_of(lambda key: eqx.nn.MLP(8, 8, 32, 2, activation=jnp.tanh, key=key))

    def loss(params, start, end):
        model = eqx.combine(params, static)

        def solve(x):
            term = diffrax.ODETerm(lambda t, x, _: model(x))
            times = diffrax.SaveAt(t1=True)
            control = diffrax.ConstantStepSize()
            found = diffrax.diffeqsolve(
                term, diffrax.Tsit5(), 0.0, 1.0, 0.1, x, saveat=times, stepsize_controller=control, max_steps=16
            )
            return found.ys[-1]

        return jnp.mean((jax.vmap(solve)(start) - end) ** 2)

    def spec_of(path, shape):
        # The weights of Equinox are outputs by inputs.
        if len(shape) < 2 or "layers[2]" in path:
            return P()
        return P("model") if "layers[0]" in path else P(None, "model")

    return training_step(loss, params, optax.adam(1e-3), {"start": floats(16, 8), "end": floats(16, 8)}, spec_of)
