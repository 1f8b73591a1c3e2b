"""Steps that get what the host made of the last one, and steps for batches in turns."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from partjit import colocated, pjit
from situations import host
from situations.training import WIDTH, new_params, pool, update
from situations.ways import (
    BY_HAND,
    IO,
    OURS,
    THREAD,
    Place,
    Run,
    Situation,
    callback,
    ended,
    finished,
    scalar,
    waited_for,
)


def loss_scale(place: Place, iterations: int) -> Situation:
    """An object of the host keeps the scale of the loss: it hears whether the gradients of a step were finite."""
    params = new_params(place)
    batch = place.put(np.random.default_rng(1).normal(size=(64, WIDTH)).astype(np.float32))

    def scaled(params: Any, scale: Any) -> Any:
        found, _ = update(params, batch)
        gradients = jax.tree.map(lambda p, q: (q - p) * scale / scale, params, found)
        is_finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in gradients]))
        return jax.tree.map(lambda p, g: jnp.where(is_finite, p + g, p), params, gradients), is_finite

    def begun() -> Any:
        return params, place.replicate(np.float32(1024))

    return _repeated(place, iterations, scaled, begun, host.LossScale, (scalar(),))


def agent(place: Place, iterations: int) -> Situation:
    """A small agent learns in each step from the observation and the reward that its last action had."""

    def learned(weights: Any, observation: Any, reward: Any) -> Any:
        return weights + 0.01 * reward * jnp.outer(observation, observation), jnp.tanh(observation @ weights)

    def begun() -> Any:
        return tuple(map(place.replicate, (np.zeros((8, 8), np.float32), np.zeros(8, np.float32), np.float32(0))))

    specs = jax.ShapeDtypeStruct((8,), np.float32, sharding=place.everywhere), scalar()
    return _repeated(place, iterations, learned, begun, host.Walk, specs)


def _repeated(place: Place, iterations: int, step: Any, begun: Any, cls: Any, specs: tuple[Any, ...]) -> Situation:
    """A loop over a step, whose last result an object of the host gets, and makes what the next one gets besides."""
    jitted = jax.jit(step)
    quickest = place.quickest(lambda x: jax.device_put(x, place.everywhere))

    def loop(make: Any, end: Any) -> Run:
        def run() -> Any:
            called, state = make(), begun()
            for _ in range(iterations):
                state = called(*state)
            return end(state)

        return run

    def by_hand() -> Any:
        own = cls()

        def called(*state: Any) -> Any:
            first, shown = jitted(*state)
            return first, *map(quickest, own.told(shown))

        return called

    def calling(call: Any) -> Any:
        def called(*state: Any) -> Any:
            first, shown = step(*state)
            return first, *call(shown)

        return called

    of_hosts: Any = colocated.colocated_python_class(cls)
    made = of_hosts()
    by_ours = pjit(calling(made.told.specialize(out_specs=specs)))
    again = made.begin_again.specialize(out_specs_fn=lambda _: None)
    own = cls()
    by_callback = jax.jit(calling(lambda shown: callback(IO, own.told, specs, shown)))

    def ours() -> Any:
        again(np.float32(0))
        return by_ours

    def io() -> Any:
        own.begin_again(0)
        return by_callback

    return Situation(
        iterations,
        {BY_HAND: loop(by_hand, jax.block_until_ready), OURS: loop(ours, ended), IO: loop(io, finished)},
    )


def lengths(place: Place, iterations: int) -> Situation:
    """Batches of eight lengths in turns; each step logs its loss."""
    params = new_params(place)
    rng = np.random.default_rng(1)
    batches = [place.put(rng.normal(size=(8 * k, WIDTH)).astype(np.float32)) for k in range(1, 9)]
    jitted = jax.jit(update)
    ours = colocated.colocated_python(host.log, stream="log", out_specs_fn=lambda *_: None)

    def logged(params: Any, batch: Any) -> Any:
        params, loss = update(params, batch)
        ours(loss)
        return params

    called = pjit(logged)

    def by_hand(submit: Any, end: Any) -> Run:
        def run() -> Any:
            own, calls = params, []
            for i in range(iterations):
                own, loss = jitted(own, batches[i % len(batches)])
                calls.append(submit(loss))
            end(calls)
            return jax.block_until_ready(own), host.seen()

        return run

    def with_ours() -> Any:
        own = params
        for i in range(iterations):
            own = called(own, batches[i % len(batches)])
        return ended(own), host.seen()

    return Situation(
        iterations,
        {
            BY_HAND: by_hand(host.log, lambda _: None),
            THREAD: by_hand(functools.partial(pool.submit, host.log), waited_for),
            OURS: with_ours,
        },
    )
