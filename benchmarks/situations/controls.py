"""What the host decides as a program goes on: the rate of a step, when a text ends, the state of an iteration."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from partjit import colocated, pjit
from situations import host
from situations.in_loops import begin, work
from situations.training import batch_for, new_params, pool, update
from situations.ways import (
    BY_HAND,
    DEBUG,
    IO,
    OURS,
    PURE,
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


def schedule(place: Place, iterations: int) -> Situation:
    """The rate of each step is a Python function of its number."""
    params, batch = new_params(place), batch_for(place)

    def stepping(rate_of: Any) -> Any:
        def step(params: Any, batch: Any, number: Any) -> Any:
            found, _ = update(params, batch)
            rate = rate_of(number)
            return jax.tree.map(lambda p, q: p + rate * (q - p), params, found)

        return step

    def repeated(step: Any, end: Any) -> Run:
        def run() -> Any:
            own = params
            for number in range(iterations):
                own = step(own, batch, number)
            return end(own)

        return run

    given = jax.jit(stepping(lambda rate: rate))
    quickest = place.quickest(lambda rate: jax.device_put(rate, place.everywhere))

    def by_hand(params: Any, batch: Any, number: int) -> Any:
        return given(params, batch, quickest(host.rate(number)))

    def with_callback(way: str) -> Run:
        return repeated(jax.jit(stepping(lambda number: callback(way, host.rate, scalar(), number))), finished)

    ours = colocated.colocated_python(host.rate, out_specs=scalar())
    inline = colocated.colocated_python(host.rate, out_specs=scalar(), mode="inline")
    return Situation(
        iterations,
        {
            BY_HAND: repeated(by_hand, jax.block_until_ready),
            OURS: repeated(pjit(stepping(ours)), ended),
            f"{OURS}, mode='inline'": repeated(pjit(stepping(inline)), ended),
            IO: with_callback(IO),
            PURE: with_callback(PURE),
        },
    )


def generation(place: Place, length: int) -> Situation:
    """Tokens are computed one by one until the host has seen the end of the text."""
    width = 64
    rng = np.random.default_rng(0)
    weights = place.replicate(rng.normal(size=(width, width)).astype(np.float32))
    begun = place.replicate(np.ones(width, np.float32))

    def token_of(weights: Any, state: Any) -> Any:
        state = jnp.tanh(state @ weights)
        return state, jnp.argmax(state).astype(jnp.int32)

    def until(goes_on: Any) -> Any:
        def generate(weights: Any, state: Any) -> Any:
            def body(carry: Any) -> Any:
                state, token = token_of(weights, carry[1])
                return goes_on(token), state

            return lax.while_loop(lambda carry: carry[0], body, (jnp.bool_(True), state))[1]

        return generate

    jitted = jax.jit(token_of)
    text = host.Text(length)

    def by_hand() -> Any:
        state, goes_on = begun, True
        while goes_on:
            state, token = jitted(weights, state)
            goes_on = text.add(token)
        return jax.block_until_ready(state)

    def with_ours(**options: Any) -> Run:
        texts: Any = colocated.colocated_python_class(host.Text)(length)
        called = pjit(until(texts.add.specialize(out_specs=scalar(np.bool_), **options)))
        return lambda: ended(called(weights, begun))

    called = jax.jit(until(lambda token: callback(IO, host.Text(length).add, scalar(np.bool_), token)))
    return Situation(
        length,
        {
            BY_HAND: by_hand,
            OURS: with_ours(uses_jax=False),
            f"{OURS}, without uses_jax": with_ours(),
            IO: lambda: finished(called(weights, begun)),
        },
    )


def filtered(place: Place, iterations: int, is_logged: bool = False) -> Situation:
    """A NumPy filter of a state of 4 kB after each iteration; if it `is_logged`, with a log of its first number."""
    x = begin(place)
    spec = place.spec(x.size)

    def loop(call: Any, log: Any) -> Any:
        def iteration(_: Any, x: Any) -> Any:
            x = call(work(x))
            if is_logged:
                log(x[0])
            return x

        return lambda x: lax.fori_loop(0, iterations, iteration, x)

    jitted = jax.jit(work)
    quickest = place.quickest(lambda x: jax.device_put(x, place.rows))

    def by_hand(log: Any, end: Any) -> Run:
        def run() -> Any:
            own, logged = x, []
            for _ in range(iterations):
                found = host.smoothed(np.asarray(jitted(own)))
                if is_logged:
                    logged.append(log(found[0]))
                own = quickest(found)
            end(logged)
            return own

        return run

    def with_callback(way: str, log_way: str) -> Run:
        log = functools.partial(callback, log_way, host.log, None)
        called = jax.jit(loop(lambda x: callback(way, host.smoothed, spec, x), log))
        return lambda: finished(called(x))

    def with_ours(**options: Any) -> Run:
        log = colocated.colocated_python(host.log, stream="log")
        called = pjit(loop(colocated.colocated_python(host.smoothed, out_specs=spec, **options), log))
        return lambda: ended(called(x))

    in_thread = {THREAD: by_hand(functools.partial(pool.submit, host.log), waited_for)}
    return Situation(
        iterations,
        {
            BY_HAND: by_hand(host.log, lambda _: None),
            **(in_thread if is_logged else {}),
            OURS: with_ours(uses_jax=False),
            f"{OURS}, without uses_jax": with_ours(arrays="numpy"),
            IO: with_callback(IO, IO),
            PURE: with_callback(PURE, DEBUG),
        },
    )
