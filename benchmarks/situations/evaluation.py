"""Evaluations: what each batch gives is counted on the host, beside the labels that came with it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from partjit import colocated, pjit
from situations import host
from situations.training import BATCH, WIDTH, new_params, pool
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

BATCHES = 8


def metrics_of_batches(place: Place, iterations: int) -> Situation:
    """A metrics object is given predictions and labels of each batch of an evaluation set, which is on the devices."""
    rng = np.random.default_rng(0)
    params = new_params(place)
    batches = [
        (
            place.put(rng.normal(size=(BATCH, WIDTH)).astype(np.float32)),
            place.put(rng.integers(0, WIDTH, BATCH, dtype=np.int32)),
        )
        for _ in range(BATCHES)
    ]

    def predict(params: Any, x: Any) -> Any:
        return jnp.argmax(jnp.tanh(x @ params[0]) @ params[1], -1).astype(np.int32)

    jitted = jax.jit(predict)
    plain, metrics = host.Accuracy(), colocated.colocated_python_class(host.Accuracy)()
    update = metrics.update.specialize(out_specs_fn=lambda *_: None)
    reset = metrics.reset.specialize(out_specs_fn=lambda *_: None, devices=[*place.mesh.devices.flat])

    def by_hand(submit: Any, end: Any) -> Run:
        def run() -> Any:
            calls = []
            for i in range(iterations):
                x, labels = batches[i % BATCHES]
                calls.append(submit(jitted(params, x), labels))
            end(calls)
            plain.reset()
            return host.seen()

        return run

    def within(wrap: Any, update: Any, reset: Any, end: Any) -> Run:
        def step(params: Any, x: Any, labels: Any) -> Any:
            update(predict(params, x), labels)
            return 0

        called = wrap(step)

        def run() -> Any:
            result = None
            for i in range(iterations):
                result = called(params, *batches[i % BATCHES])
            end(result)
            reset()
            end(None)
            return host.seen()

        return run

    return Situation(
        iterations,
        {
            BY_HAND: by_hand(plain.update, lambda _: None),
            THREAD: by_hand(functools.partial(pool.submit, plain.update), waited_for),
            OURS: within(pjit, update, reset, ended),
            IO: within(jax.jit, lambda *args: callback(IO, plain.update, None, *args), plain.reset, finished),
            DEBUG: within(jax.jit, lambda *args: callback(DEBUG, plain.update, None, *args), plain.reset, finished),
        },
    )
