"""Calls beside gradients: a loader of microbatches, and a NumPy function with a NumPy derivative."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from partjit import colocated, pjit
from situations.ways import (
    BY_HAND,
    IO,
    JAX,
    OURS,
    PURE,
    Place,
    Run,
    Situation,
    callback,
    ended,
    finished,
    made_by_jax,
)

WIDTH, MICROBATCHES = 64, 8
_batches = np.random.default_rng(2).normal(size=(MICROBATCHES, 64, WIDTH)).astype(np.float32)


class Loader:
    """One batch after another, from the beginning again at the end."""

    def __init__(self) -> None:
        self.count = 0

    def next_batch(self) -> np.ndarray:
        self.count += 1
        return _batches[self.count % MICROBATCHES]


_loader = Loader()


def next_batch() -> np.ndarray:
    return _loader.next_batch()


def _weights(place: Place) -> jax.Array:
    return place.replicate(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype(np.float32) / 16)


def _added(grads: Any, w: Any, x: Any) -> Any:
    return grads + jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) - x) ** 2))(w)


def microbatches(place: Place, steps: int) -> Situation:
    """The gradients of eight batches are added up before an update; each batch comes from a loader."""
    w, spec = _weights(place), place.spec(64, WIDTH)

    def step_with(call: Any) -> Any:
        def step(w: Any) -> Any:
            def body(grads: Any, _: Any) -> Any:
                return _added(grads, w, call()), None

            return w - 0.1 * lax.scan(body, jnp.zeros_like(w), None, MICROBATCHES)[0]

        return step

    def repeated(step: Any, end: Any) -> Run:
        def run() -> Any:
            _loader.count, own = 0, w
            for _ in range(steps):
                own = step(own)
            return end(own), _loader.count

        return run

    add, update = jax.jit(_added), jax.jit(lambda w, grads: w - 0.1 * grads)

    def by_hand(load: Any) -> Any:
        def step(w: Any) -> Any:
            grads = jnp.zeros_like(w)
            for _ in range(MICROBATCHES):
                grads = add(grads, w, load())
            return update(w, grads)

        return step

    def of_jax(_: Any) -> Any:
        return place.put(next_batch())

    def by_callback() -> Any:
        batch = callback(IO, next_batch, spec)
        return batch if place.count == 1 else lax.with_sharding_constraint(batch, place.rows)

    quickest, by_jax, some = place.quickest(place.put), made_by_jax(of_jax), place.replicate(np.float32(0))
    ours = colocated.colocated_python(next_batch, out_specs=spec, uses_jax=False)
    return Situation(
        steps * MICROBATCHES,
        {
            BY_HAND: repeated(by_hand(lambda: quickest(next_batch())), jax.block_until_ready),
            JAX: repeated(by_hand(lambda: by_jax(some)), jax.block_until_ready),
            OURS: repeated(pjit(step_with(ours)), ended),
            IO: repeated(jax.jit(step_with(by_callback)), finished),
        },
    )


def sine(x: Any) -> np.ndarray:
    return np.sin(np.asarray(x))


def sine_backward(x: Any, cotangents: Any) -> np.ndarray:
    return np.cos(np.asarray(x)) * np.asarray(cotangents)


def derivative(place: Place, iterations: int) -> Situation:
    """A NumPy function in a loss, whose derivative is another one (`jax.custom_vjp`), in a step of a training."""
    w, x = _weights(place), place.put(_batches[0])

    def step_with(call: Any, backward: Any) -> Any:
        @jax.custom_vjp
        def function(x: Any) -> Any:
            return call(x)

        function.defvjp(lambda x: (call(x), x), lambda x, cotangents: (backward(x, cotangents),))
        return lambda w, x: w - 1e-3 * jax.grad(lambda w: jnp.sum(function(x @ w) ** 2))(w)

    def repeated(step: Any, end: Any) -> Run:
        def run() -> Any:
            own = w
            for _ in range(iterations):
                own = step(own, x)
            return end(own)

        return run

    before, between = jax.jit(lambda w, x: x @ w), jax.jit(lambda y: 2 * y)
    after = jax.jit(lambda w, x, cotangents: w - 1e-3 * (x.T @ cotangents))
    quickest = place.quickest(place.put)

    def by_hand(call: Any, backward: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            z = before(w, x)
            return after(w, x, backward(z, between(call(z))))

        return step

    def with_callback(way: str) -> Run:
        spec = place.spec(64, WIDTH)
        calls = (lambda *args, f=f: callback(way, f, spec, *args) for f in (sine, sine_backward))
        return repeated(jax.jit(step_with(*calls)), finished)

    made = (made_by_jax(lambda *args, f=f: place.put(f(*args))) for f in (sine, sine_backward))
    ours = (
        colocated.colocated_python(f, arrays="numpy", uses_jax=False, out_specs_fn=lambda x, *_: x)
        for f in (sine, sine_backward)
    )
    return Situation(
        iterations,
        {
            BY_HAND: repeated(
                by_hand(lambda z: quickest(sine(z)), lambda *args: quickest(sine_backward(*args))),
                jax.block_until_ready,
            ),
            JAX: repeated(by_hand(*made), jax.block_until_ready),
            OURS: repeated(pjit(step_with(*ours)), ended),
            IO: with_callback(IO),
            PURE: with_callback(PURE),
        },
    )
