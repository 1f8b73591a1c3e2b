"""Calls in the middle of a step: an environment, an embedding, a round trip, a number, shards, a function of SciPy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax import lax

from partjit import P, colocated, pjit
from situations import host
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
    scalar,
)

# An environment


def environment(place: Place, iterations: int) -> Situation:
    """A scan of a policy and eight environments on the host, which has the observations as its carry."""
    count = 8
    begun = place.put(np.full((count, 4), 0.01, np.float32) * np.arange(1, count + 1, dtype=np.float32)[:, None])
    params = place.replicate(np.random.default_rng(0).normal(size=(4, 1)).astype(np.float32))
    specs = (
        place.spec(count, 4),
        place.spec(count),
        jax.ShapeDtypeStruct((count,), bool, sharding=place.spec(8).sharding),
    )

    def policy(params: Any, state: Any) -> Any:
        return jnp.tanh(state @ params)[:, 0]

    def rollout(call: Any) -> Any:
        def step(state: Any, _: Any) -> Any:
            state, reward, done = call(state, policy(params, state))
            return state, (reward, done)

        def loop(params: Any, state: Any) -> Any:
            state, (rewards, dones) = lax.scan(step, state, None, iterations)
            return state, jnp.sum(rewards), jnp.sum(dones)

        return loop

    def placing(move: Any) -> Any:
        def step(state: Any, action: Any) -> Any:
            return tuple(map(move, host.env_step(np.asarray(state), np.asarray(action))))

        return step

    def to_rows(x: Any) -> Any:
        return jax.device_put(x, place.rows)

    quickest = place.quickest(to_rows)
    jitted = jax.jit(policy)

    def by_hand() -> Any:
        state, total, ends = np.asarray(begun), 0.0, 0
        for _ in range(iterations):
            state, reward, done = host.env_step(state, np.asarray(jitted(params, quickest(state))))
            total, ends = total + reward.sum(), ends + done.sum()
        return state, np.float32(total), ends

    by_jax = made_by_jax(placing(to_rows))

    def with_jax() -> Any:
        state, rewards, dones = begun, [], []
        for _ in range(iterations):
            state, reward, done = by_jax(state, jitted(params, state))
            rewards.append(reward)
            dones.append(done)
        return state, np.float32(np.sum([*map(np.asarray, rewards)])), np.sum([*map(np.asarray, dones)])

    def with_callback(way: str) -> Run:
        called = jax.jit(rollout(lambda *args: callback(way, host.env_step, specs, *args)))
        return lambda: finished(called(params, begun))

    def with_ours(fun: Any, **options: Any) -> Run:
        called = pjit(rollout(colocated.colocated_python(fun, out_specs=specs, **options)))
        return lambda: ended(called(params, begun))

    return Situation(
        iterations,
        {
            BY_HAND: by_hand,
            JAX: with_jax,
            OURS: with_ours(host.env_step, uses_jax=False),
            f"{OURS}, jax arrays": with_ours(placing(jnp.asarray)),
            IO: with_callback(IO),
            PURE: with_callback(PURE),
        },
    )


# Between two pieces of a step


def embedding(place: Place, iterations: int) -> Situation:
    """The rows of a table on the host, for ids that the devices compute, in each step of a training."""
    batch = 128
    tokens = place.put(np.arange(batch, dtype=np.int32))
    weights = place.replicate(np.ones((64, 8), np.float32) / 64)

    def ids_of(w: Any, tokens: Any) -> Any:
        return (tokens * 7919 + 13) % len(host.TABLE)

    def step(w: Any, tokens: Any, rows: Any) -> Any:
        return w - 0.01 * jax.grad(lambda w: jnp.mean(jnp.tanh(rows @ w) ** 2))(w), tokens + 1

    return _between(place, iterations, (weights, tokens), ids_of, host.look_up, step, (batch, 64))


def round_trip(place: Place, iterations: int, size: int) -> Situation:
    """Device work, a NumPy function of so many floats, device work."""
    x = place.put(np.linspace(0, 1, size, dtype=np.float32))

    def before(x: Any) -> Any:
        return jnp.sin(x) * 2 + 1

    def after(x: Any, halved: Any) -> Any:
        return (jnp.cos(halved) - 1,)

    return _between(place, iterations, (x,), before, lambda x: x * np.float32(0.5), after, (size,))


def from_scipy(place: Place, iterations: int) -> Situation:
    """A Bessel function, which jax does not have, of a thousand numbers in a step."""
    x = place.put(np.linspace(0, 1, 1024, dtype=np.float32))

    def before(x: Any) -> Any:
        return jnp.abs(x) + 0.1

    def after(x: Any, values: Any) -> Any:
        return (x / 2 + values,)

    def bessel(x: Any) -> Any:
        return scipy.special.jv(np.float32(1.5), x)

    return _between(place, iterations, (x,), before, bessel, after, (1024,))


def small_call(place: Place, iterations: int) -> Situation:
    """A number from the mean of a kilobyte, once in each step."""
    return _damped(place, iterations, host.damping, colocated.colocated_python(host.damping, out_specs=scalar()))


def small_method(place: Place, iterations: int) -> Situation:
    """The same by a method of an object, which counts its calls."""
    controller: Any = colocated.colocated_python_class(host.Controller)()
    method = controller.damping.specialize(out_specs=scalar())
    return _damped(place, iterations, host.Controller().damping, method)


def _damped(place: Place, iterations: int, fun: Any, ours: Any) -> Situation:
    x = place.put(np.linspace(0, 1, 256, dtype=np.float32))

    def after(x: Any, factor: Any) -> Any:
        return (x * factor + 0.1,)

    return _between(place, iterations, (x,), jnp.mean, fun, after, (), ours)


def _between(
    place: Place,
    iterations: int,
    state: Any,
    before: Any,
    fun: Any,
    after: Any,
    shape: tuple[int, ...],
    ours: Any = None,
) -> Situation:
    """A step `after(*state, fun(before(*state)))`, whose NumPy function returns floats of this shape.

    Ours is colocated already where it is given.
    """
    spec = place.spec(*shape) if shape else scalar()

    def stepping(call: Any) -> Any:
        return lambda *state: after(*state, call(before(*state)))

    def repeated(step: Any, end: Any) -> Run:
        def run() -> Any:
            own = state
            for _ in range(iterations):
                own = step(*own)
            return end(own)

        return run

    first, last = jax.jit(before), jax.jit(after)

    def to_devices(x: Any) -> Any:
        return jax.device_put(x, place.rows if shape else place.everywhere)

    quickest = place.quickest(to_devices)

    def by_hand(call: Any) -> Run:
        return repeated(lambda *state: last(*state, call(first(*state))), jax.block_until_ready)

    def with_callback(way: str) -> Run:
        return repeated(jax.jit(stepping(lambda x: callback(way, fun, spec, x))), finished)

    def with_ours(fun: Any) -> Run:
        return repeated(pjit(stepping(fun)), ended)

    numpy_in_jax = colocated.colocated_python(lambda x: jnp.asarray(fun(np.asarray(x))), out_specs=spec)
    ours = ours or colocated.colocated_python(lambda x: fun(np.asarray(x)), out_specs=spec)
    return Situation(
        iterations,
        {
            BY_HAND: by_hand(lambda x: quickest(fun(np.asarray(x)))),
            JAX: by_hand(made_by_jax(lambda x: to_devices(fun(np.asarray(x))))),
            OURS: with_ours(ours.specialize(uses_jax=False)),
            f"{OURS}, without uses_jax": with_ours(ours),
            f"{OURS}, jax arrays": with_ours(numpy_in_jax),
            IO: with_callback(IO),
            PURE: with_callback(PURE),
        },
    )


# Shards


def per_shard(place: Place, iterations: int) -> Situation:
    """A NumPy function of each shard of 64 kB, on its own, in a step."""
    size = 8 * 16_384
    x = place.put(np.linspace(0, 1, size, dtype=np.float32))
    part = (size // place.count,)

    def clip(shard: np.ndarray) -> np.ndarray:
        return np.clip(shard, shard.min() * 0.9, shard.max() * 0.9)

    first, last = jax.jit(lambda x: jnp.sin(x) + 1), jax.jit(lambda x: jnp.cos(x) / 2)

    def assembled(x: Any) -> Any:
        shards = [jax.device_put(clip(np.asarray(s.data)), s.device) for s in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

    def repeated(step: Any, end: Any) -> Run:
        def run() -> Any:
            own = x
            for _ in range(iterations):
                own = step(own)
            return end(own)

        return run

    def by_hand(call: Any) -> Run:
        return repeated(lambda x: last(call(first(x))), jax.block_until_ready)

    def mapped(call: Any) -> Any:
        return functools.partial(jax.shard_map, mesh=place.mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)(
            call
        )

    def with_callback(way: str) -> Run:
        struct = jax.ShapeDtypeStruct(part, np.float32)
        called = mapped(lambda x: callback(way, clip, struct, x))
        return repeated(jax.jit(lambda x: jnp.cos(called(jnp.sin(x) + 1)) / 2), finished)

    def with_ours(call: Any) -> Run:
        return repeated(pjit(lambda x: jnp.cos(call(jnp.sin(x) + 1)) / 2), ended)

    of_shards = colocated.colocated_python(
        lambda shard: clip(np.asarray(shard.data)), layout="per_shard", out_specs=place.spec(size)
    )
    in_body = colocated.colocated_python(clip, arrays="numpy", out_specs_fn=lambda x: x)
    return Situation(
        iterations,
        {
            BY_HAND: by_hand(assembled),
            JAX: by_hand(made_by_jax(assembled)),
            OURS: with_ours(of_shards),
            f"{OURS}, in shard_map": with_ours(mapped(in_body)),
            IO: with_callback(IO),
            PURE: with_callback(PURE),
        },
    )
