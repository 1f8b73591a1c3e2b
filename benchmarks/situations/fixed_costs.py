"""What costs the same whatever is computed: eager gradients, asynchronous calls, reading an OpSharding."""

import concurrent.futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.sharding import AbstractMesh

from partjit import P, colocated, parse_op_sharding, pjit, to_op_sharding
from situations.ways import OURS, THREAD, Place, Run, Situation, ended, waited_for

_pool = concurrent.futures.ThreadPoolExecutor(1)


def eager_grad(place: Place, iterations: int) -> Situation:
    """`jax.grad` of a program, not in a `jax.jit`."""
    rng = np.random.default_rng(0)
    params = place.replicate({f"w{i}": rng.normal(size=(32, 32)).astype(np.float32) / 6 for i in range(6)})
    x = place.put(rng.normal(size=(64, 32)).astype(np.float32))

    def loss(params: Any, x: Any) -> Any:
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def of(wrap: Any) -> Run:
        grad = jax.grad(wrap(loss))

        def run() -> Any:
            grads = params
            for _ in range(iterations):
                grads = grad(params, x)
            return jax.block_until_ready(grads)

        return run

    return Situation(iterations, {"jax.jit": of(jax.jit), OURS: of(pjit)})


def asynchronous_call(place: Place, iterations: int) -> Situation:
    """Calls of a cheap function on a thread, all waited for at the end."""
    x = jax.block_until_ready(place.put(np.linspace(0, 1, 1024, dtype=np.float32)))

    def host(x: Any) -> Any:
        return x

    ours = colocated.colocated_python(host, mode="stream", out_specs_fn=lambda x: x)

    def by_hand() -> Any:
        futures = [_pool.submit(host, x) for _ in range(iterations)]
        waited_for(futures)
        return [future.result() for future in futures]

    return Situation(iterations, {THREAD: by_hand, OURS: lambda: ended([ours(x) for _ in range(iterations)])})


def asynchronous_result(place: Place, iterations: int) -> Situation:
    """A call of a cheap function on a thread, whose result is waited for before the next one is made."""
    x = jax.block_until_ready(place.put(np.linspace(0, 1, 1024, dtype=np.float32)))

    def host(x: Any) -> Any:
        return x

    ours = colocated.colocated_python(host, mode="stream", out_specs_fn=lambda x: x)

    def repeated(call: Any) -> Run:
        def run() -> Any:
            result = x
            for _ in range(iterations):
                result = call(x)
            return result

        return run

    return Situation(
        iterations,
        {
            THREAD: repeated(lambda x: _pool.submit(host, x).result()),
            OURS: repeated(lambda x: ours(x).block_until_ready()),
        },
    )


def list_of_shardings(_: Place, iterations: int, devices: int) -> Situation:
    """Reading OpShardings that list their devices, on an abstract mesh of so many."""
    mesh = AbstractMesh((devices // 2, 2), ("x", "y"))
    specs = P("x"), P(("y", "x")), P("y", "x")
    shardings = [to_op_sharding(spec, mesh, 2, as_list=True) for spec in specs]

    def of(parse: Any, spec_of: Any) -> Run:
        def run() -> Any:
            found = []
            for _ in range(iterations):
                found = [parse(sharding, mesh) for sharding in shardings]
            return [str(spec_of(spec)) for spec in found]

        return run

    return Situation(
        iterations,
        {
            "jax's reader": of(parse_flatten_op_sharding, lambda specs: P(*_short(specs[0]))),
            OURS: of(parse_op_sharding, lambda spec: P(*_short(spec))),
        },
    )


def _short(spec: Any) -> tuple[Any, ...]:
    """The entries of a spec, without unsharded dimensions at its end, and with one axis written as one."""
    entries = [*spec]
    while entries and not entries[-1]:
        entries.pop()
    return tuple(e[0] if isinstance(e, tuple) and len(e) == 1 else e for e in entries)
