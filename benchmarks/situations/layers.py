"""Calls in loops that are short, and run in each step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from partjit import colocated, pjit
from situations import host
from situations.training import WIDTH, pool
from situations.ways import (
    BY_HAND,
    DEBUG,
    IO,
    OURS,
    THREAD,
    Place,
    Run,
    Situation,
    callback,
    ended,
    finished,
    waited_for,
)

LAYERS = 12


def log_of_layers(place: Place, iterations: int) -> Situation:
    """A step whose layers log the mean of their activations: by hand they are results, which are logged after it."""
    rng = np.random.default_rng(0)
    x = place.put(rng.normal(size=(64, WIDTH)).astype(np.float32))
    weights = place.replicate(rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5)

    def step(call: Any) -> Any:
        def layer(x: Any, numbered: Any) -> Any:
            i, own = numbered
            x = jnp.tanh(x @ own)
            return x, call(i, jnp.mean(jnp.abs(x)))

        return lambda x, weights: lax.scan(layer, x, (jnp.arange(LAYERS), weights))

    jitted = jax.jit(step(lambda i, mean: mean))

    def log_all(means: Any) -> None:
        for i, mean in enumerate(np.asarray(means)):
            host.log_step(i, mean)

    def by_hand(submit: Any, end: Any) -> Run:
        def run() -> Any:
            own, calls = x, []
            for _ in range(iterations):
                own, means = jitted(own, weights)
                calls.append(submit(means))
            end(calls)
            return jax.block_until_ready(own), host.seen()

        return run

    def within(wrap: Any, call: Any, end: Any) -> Run:
        called = wrap(lambda x, weights: step(call)(x, weights)[0])

        def run() -> Any:
            own = x
            for _ in range(iterations):
                own = called(own, weights)
            return end(own), host.seen()

        return run

    ours = colocated.colocated_python(host.log_step, stream="layers", out_specs_fn=lambda *_: None)
    return Situation(
        iterations,
        {
            BY_HAND: by_hand(log_all, lambda _: None),
            THREAD: by_hand(functools.partial(pool.submit, log_all), waited_for),
            OURS: within(pjit, lambda *args: ours(*args), ended),
            IO: within(jax.jit, lambda i, mean: callback(IO, host.log_step, None, i, mean), finished),
            DEBUG: within(jax.jit, lambda i, mean: callback(DEBUG, host.log_step, None, i, mean), finished),
        },
    )
