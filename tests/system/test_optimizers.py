"""Gradients are found in the training steps of Optax's optimizers, which rewrite them in their own ways."""

import functools

import jax
import optax
import pytest

from partjit import P, pjit
from tests.inspect.inspected import BATCH, partitioned
from tests.inspect.test_lookup import MODELS, assert_gradients, paths_of


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["adamw", "momentum", "clipped"])
def test_the_gradients_of_a_step_of_an_optimizer(model, name):
    optimizer = {
        "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
        "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
        "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    }[name]()
    loss, make = MODELS[model]
    params, specs = make()
    state = {"params": params, "opt": optimizer.init(params)}

    @functools.partial(pjit, in_axis_resources=({"params": specs, "opt": None}, P("data")), out_axis_resources=None)
    def step(state, x):
        value, grads = jax.value_and_grad(loss)(state["params"], x)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        program = partitioned(step, state, BATCH)
    assert_gradients(program, loss, (state, BATCH), params, paths_of(params, "state['params']"))
