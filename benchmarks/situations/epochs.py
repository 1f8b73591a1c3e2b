"""An epoch of a training as one loop, which logs and saves now and then."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from partjit import colocated, pjit
from situations import host
from situations.in_loops import nothing
from situations.training import batch_for, new_params, update
from situations.ways import BY_HAND, DEBUG, IO, OURS, Place, Run, Situation, callback, ended, finished

EVERY = 10
"""Steps from one log to the next; checkpoints are ten times as rare."""


def two_loggers(place: Place, rounds: int) -> Situation:
    """Every tenth step is logged, and in every hundredth a checkpoint is written, on a stream of its own."""
    steps = rounds * EVERY * 10
    params, batch = new_params(place), batch_for(place)

    def epoch_with(log: Any, save: Any) -> Any:
        def step(params: Any, i: Any, batch: Any) -> Any:
            params, loss = update(params, batch)
            lax.cond(i % EVERY == EVERY - 1, lambda: nothing(log(i, loss)), nothing)
            lax.cond(i % (EVERY * 10) == EVERY * 10 - 1, lambda: nothing(save(params)), nothing)
            return params, None

        return lambda params, batch: lax.scan(lambda p, i: step(p, i, batch), params, jnp.arange(steps))[0]

    @functools.partial(jax.jit, donate_argnums=0)
    def piece(params: Any, batch: Any) -> Any:
        return lax.fori_loop(0, EVERY, lambda _, state: update(state[0], batch), (params, jnp.float32(0)))

    def by_hand() -> Any:
        own = jax.tree.map(jnp.copy, params)
        for k in range(steps // EVERY):
            own, loss = piece(own, batch)
            host.log_step((k + 1) * EVERY - 1, loss)
            if k % 10 == 9:
                host.save(own)
        return jax.block_until_ready(own), _seen()

    def within(epoch: Any, end: Any) -> Run:
        return lambda: (end(epoch(params, batch)), _seen())

    def with_callback(way: str) -> Run:
        calls = (functools.partial(callback, way, f, None) for f in (host.log_step, host.save))
        return within(jax.jit(epoch_with(*calls)), finished)

    ours = (
        colocated.colocated_python(f, stream=name, out_specs_fn=nothing)
        for f, name in ((host.log_step, "log"), (host.save, "checkpoints"))
    )
    return Situation(
        steps,
        {
            BY_HAND: by_hand,
            OURS: within(pjit(epoch_with(*ours)), ended),
            IO: with_callback(IO),
            DEBUG: with_callback(DEBUG),
        },
    )


def _seen() -> list[str]:
    """What the functions have seen: numbers, and numbers with a loss."""
    found = sorted(map(str, host.SEEN))
    host.SEEN.clear()
    return found
