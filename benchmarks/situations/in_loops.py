"""Calls in loops: now and then, in the condition, for progress, without arguments, and between epochs."""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from partjit import colocated, pjit
from situations import host
from situations.ways import (
    BY_HAND,
    DEBUG,
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
    scalar,
)

SIZE = 1024
"""Floats of the state: 4 kB."""

Spellings = Mapping[str, Mapping[str, Any]]
"""Options that a function of ours is given, for each further spelling."""


def begin(place: Place, size: int = SIZE) -> jax.Array:
    return place.put(np.linspace(0, 1, size, dtype=np.float32))


def work(x: jax.Array) -> jax.Array:
    """What the devices do in an iteration."""
    return jnp.cos(jnp.sin(x) * 2 + 1) - x / 2


# Now and then


def rare_call(
    place: Place, rounds: int, every: int = 100, size: int = SIZE, spellings: Spellings = MappingProxyType({})
) -> Situation:
    """A controller that corrects the state after every hundredth iteration, or another."""
    iterations = rounds * every
    x = begin(place, size)
    damping = colocated.colocated_python(host.damping, uses_jax=False, out_specs=scalar())
    others = {name: colocated.colocated_python(host.damping, out_specs=scalar(), **o) for name, o in spellings.items()}

    def loop(call: Any) -> Any:
        def step(x: Any, i: Any) -> Any:
            x = work(x)
            is_due = i % every == every - 1
            return x * lax.cond(is_due, lambda: call(jnp.mean(x)), lambda: jnp.float32(1)), None

        return lambda x: lax.scan(step, x, jnp.arange(iterations))[0]

    def nested(x: Any) -> Any:
        def round_(x: Any, _: Any) -> Any:
            x = lax.fori_loop(0, every, lambda _, x: work(x), x)
            return x * damping(jnp.mean(x)), None

        return lax.scan(round_, x, None, rounds)[0]

    @functools.partial(jax.jit, donate_argnums=0)
    def piece(x: Any, factor: Any) -> Any:
        x = lax.fori_loop(0, every, lambda _, x: work(x), x * factor)
        return x, jnp.mean(x)

    last = jax.jit(lambda x, factor: x * factor)

    def by_hand(call: Any) -> Run:
        def run() -> Any:
            state, factor = jnp.copy(x), np.float32(1)
            for _ in range(rounds):
                state, mean = piece(state, factor)
                factor = call(mean)
            return jax.block_until_ready(last(state, factor))

        return run

    def with_callback(way: str) -> Run:
        called = jax.jit(loop(lambda mean: callback(way, host.damping, scalar(), mean)))
        return lambda: finished(called(x))

    def with_ours(fun: Any) -> Run:
        called = pjit(fun)
        return lambda: ended(called(x))

    return Situation(
        iterations,
        {
            BY_HAND: by_hand(host.damping),
            JAX: by_hand(
                made_by_jax(lambda mean: jax.device_put(host.damping(np.asarray(mean)), place.everywhere)),
            ),
            OURS: with_ours(loop(damping)),
            f"{OURS}, a nested loop": with_ours(nested),
            **{f"{OURS}, {name}": with_ours(loop(call)) for name, call in others.items()},
            IO: with_callback(IO),
            PURE: with_callback(PURE),
        },
    )


def rare_log(
    place: Place, rounds: int, every: int = 100, size: int = SIZE, spellings: Spellings = MappingProxyType({})
) -> Situation:
    """The mean of the state is logged after every hundredth iteration, or another."""
    iterations = rounds * every
    x = begin(place, size)

    def loop(call: Any) -> Any:
        def step(x: Any, i: Any) -> Any:
            x = work(x)
            lax.cond(i % every == every - 1, lambda: nothing(call(jnp.mean(x))), lambda: None)
            return x, None

        return lambda x: lax.scan(step, x, jnp.arange(iterations))[0]

    @functools.partial(jax.jit, donate_argnums=0)
    def piece(x: Any) -> Any:
        x = lax.fori_loop(0, every, lambda _, x: work(x), x)
        return x, jnp.mean(x)

    def by_hand() -> Any:
        state = jnp.copy(x)
        for _ in range(rounds):
            state, mean = piece(state)
            host.log(mean)
        return jax.block_until_ready(state), host.seen()

    def within(called: Any, end: Any) -> Run:
        return lambda: (end(called(x)), host.seen())

    def with_callback(way: str) -> Run:
        return within(jax.jit(loop(functools.partial(callback, way, host.log, None))), finished)

    def with_ours(**options: Any) -> Run:
        log = colocated.colocated_python(host.log, stream="rare log", out_specs_fn=nothing, **options)
        return within(pjit(loop(log)), ended)

    return Situation(
        iterations,
        {
            BY_HAND: by_hand,
            OURS: with_ours(uses_jax=False),
            **{f"{OURS}, {name}": with_ours(**options) for name, options in spellings.items()},
            IO: with_callback(IO),
            DEBUG: with_callback(DEBUG),
        },
    )


def nothing(*_: Any) -> None:
    """The results of a call that returns none."""


# In the condition


def predicate(place: Place, iterations: int) -> Situation:
    """A while_loop whose condition is the host's."""
    x = jax.block_until_ready(place.put(np.ones(SIZE, np.float32)))
    least = float(0.99 ** (2 * iterations - 1))

    def step(state: Any) -> Any:
        x = state[0] * 0.99
        return x, jnp.mean(x * x)

    def is_above(loss: Any) -> Any:
        return np.bool_(float(loss) > least)

    def loop(condition: Any) -> Any:
        return lambda x: lax.while_loop(lambda state: condition(state[1]), step, (x, jnp.float32(1)))

    improves = colocated.colocated_python(is_above, uses_jax=False, out_specs=scalar(bool))
    jitted = jax.jit(step, donate_argnums=0)

    def by_hand(condition: Any) -> Run:
        def run() -> Any:
            state = jnp.copy(x), place.replicate(np.float32(1))
            while condition(state[1]):
                state = jitted(state)
            return jax.block_until_ready(state)

        return run

    def with_callback(way: str) -> Run:
        called = jax.jit(loop(lambda loss: callback(way, is_above, scalar(bool), loss)))
        return lambda: finished(called(x))

    called = pjit(loop(improves))
    return Situation(
        iterations,
        {
            BY_HAND: by_hand(is_above),
            JAX: by_hand(made_by_jax(lambda loss: jax.device_put(is_above(loss), place.everywhere))),
            OURS: lambda: ended(called(x)),
            IO: with_callback(IO),
            PURE: with_callback(PURE),
        },
    )


def early_stopping(place: Place, rate: float) -> Situation:
    """Epochs of twenty steps each, until the loss no longer improves; the state decays by `rate` in a step."""
    x = place.put(np.ones(SIZE, np.float32))
    steps = 20
    epochs, stopper = 1, host.Stopper()
    while stopper.goes_on(1 + rate ** (2 * steps * epochs)):
        epochs += 1

    def epoch(x: Any) -> Any:
        x = lax.fori_loop(0, steps, lambda _, x: x * np.float32(rate), x)
        return x, 1 + jnp.mean(x * x)

    def loop(goes_on: Any) -> Any:
        def body(state: Any) -> Any:
            x, _, count = state
            x, loss = epoch(x)
            return x, goes_on(loss), count + 1

        return lambda x: lax.while_loop(lambda state: state[1], body, (x, jnp.bool_(True), jnp.int32(0)))[::2]

    goes_on = colocated.colocated_python(host.goes_on, uses_jax=False, out_specs=scalar(bool))
    jitted = jax.jit(epoch, donate_argnums=0)

    def by_hand(goes_on: Any) -> Run:
        def run() -> Any:
            host.begin_epochs()
            state, is_on, count = jnp.copy(x), True, 0
            while is_on:
                state, loss = jitted(state)
                is_on = goes_on(loss)
                count += 1
            return jax.block_until_ready(state), count

        return run

    def within(called: Any, end: Any) -> Run:
        def run() -> Any:
            host.begin_epochs()
            return end(called(x))

        return run

    def with_callback(way: str) -> Run:
        return within(jax.jit(loop(lambda loss: callback(way, host.goes_on, scalar(bool), loss))), finished)

    return Situation(
        epochs,
        {
            BY_HAND: by_hand(host.goes_on),
            JAX: by_hand(made_by_jax(lambda loss: jax.device_put(host.goes_on(loss), place.everywhere))),
            OURS: within(pjit(loop(goes_on)), ended),
            IO: with_callback(IO),
            PURE: with_callback(PURE),
        },
    )


# Without results


def progress(place: Place, iterations: int) -> Situation:
    """A progress bar that is updated in each iteration."""
    x = begin(place)

    def loop(call: Any) -> Any:
        def step(x: Any, i: Any) -> Any:
            call(i)
            return work(x), None

        return lambda x: lax.scan(step, x, jnp.arange(iterations))[0]

    jitted = jax.jit(work, donate_argnums=0)

    def by_hand() -> Any:
        state = jnp.copy(x)
        for i in range(iterations):
            host.progress(i)
            state = jitted(state)
        return jax.block_until_ready(state), host.seen()

    def within(called: Any, end: Any) -> Run:
        return lambda: (end(called(x)), host.seen())

    def with_callback(way: str) -> Run:
        return within(jax.jit(loop(lambda i: callback(way, host.progress, None, i))), finished)

    def with_ours(**options: Any) -> Run:
        shown = colocated.colocated_python(host.progress, out_specs_fn=lambda i: None, uses_jax=False, **options)
        return within(pjit(loop(shown)), ended)

    return Situation(
        iterations,
        {
            BY_HAND: by_hand,
            OURS: with_ours(),
            f"{OURS}, mode='inline'": with_ours(mode="inline"),
            IO: with_callback(IO),
            DEBUG: with_callback(DEBUG),
        },
    )


# Without arguments


def loader(place: Place, iterations: int) -> Situation:
    """A loop that takes a batch of 4 kB in each iteration."""
    batches: Any = colocated.colocated_python_class(host.Batches, uses_jax=False)(iterations, (SIZE,))
    return _without_arguments(
        place, iterations, lambda: host.Batches(iterations, (SIZE,)).next, batches.next, place.spec(SIZE)
    )


def clock(place: Place, iterations: int) -> Situation:
    """A loop that reads a clock in each iteration."""
    ticking: Any = colocated.colocated_python_class(host.Clock, uses_jax=False)(iterations)
    return _without_arguments(place, iterations, lambda: host.Clock(iterations).read, ticking.read, scalar())


def _without_arguments(place: Place, iterations: int, make: Any, method: Any, spec: Any) -> Situation:
    """`make` makes a NumPy function, and `method` is the method of ours that does the same."""
    x = begin(place)

    def step(x: Any, given: Any) -> Any:
        return work(x) + 0.01 * given

    def loop(call: Any) -> Any:
        return lambda x: lax.scan(lambda x, _: (step(x, call()), None), x, None, iterations)[0]

    jitted = jax.jit(step, donate_argnums=0)
    sharding = place.rows if spec.shape else place.everywhere

    def by_hand(call: Any) -> Run:
        def run() -> Any:
            state = jnp.copy(x)
            for _ in range(iterations):
                state = jitted(state, call())
            return jax.block_until_ready(state)

        return run

    def with_callback(way: str) -> Run:
        read = make()
        called = jax.jit(loop(lambda: callback(way, read, spec)))
        return lambda: finished(called(x))

    def with_ours(**options: Any) -> Run:
        called = pjit(loop(method.specialize(out_specs=spec, devices=[*place.mesh.devices.flat], **options)))
        return lambda: ended(called(x))

    def put(x: Any) -> Any:
        return jax.device_put(x, sharding)

    plain, read_by_jax, quickest = make(), make(), place.quickest(put)
    by_jax = made_by_jax(lambda: put(read_by_jax())).specialize(devices=[*place.mesh.devices.flat])
    return Situation(
        iterations,
        {
            BY_HAND: by_hand(lambda: quickest(plain())),
            JAX: by_hand(by_jax),
            OURS: with_ours(),
            f"{OURS}, mode='inline'": with_ours(mode="inline"),
            IO: with_callback(IO),
        },
    )
