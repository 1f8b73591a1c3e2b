"""A NumPy function of one example, under `jax.vmap`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from partjit import colocated, pjit
from situations.ways import BY_HAND, OURS, PURE, Place, Run, Situation, finished

EXAMPLES = 32
WIDTH = 16


def batch_of_examples(place: Place, iterations: int) -> Situation:
    """A step that sorts each of 32 examples, by a function of a single one."""
    x = place.put(np.random.default_rng(0).normal(size=(EXAMPLES, WIDTH)).astype(np.float32))

    def largest_first(x: Any) -> Any:
        return np.sort(np.asarray(x))[::-1]

    def before(x: Any) -> Any:
        return jnp.sin(x) * 2

    def after(x: Any, ordered: Any) -> Any:
        return jnp.cos(ordered) + x / 2

    def step(call: Any) -> Any:
        return lambda x: after(x, jax.vmap(call)(before(x)))

    def repeated(step: Any) -> Run:
        def run() -> Any:
            own = x
            for _ in range(iterations):
                own = step(own)
            return finished(own)

        return run

    first, last = jax.jit(before), jax.jit(after)
    put = place.quickest(place.put)

    def by_hand(x: Any) -> Any:
        return last(x, put(np.stack([largest_first(row) for row in np.asarray(first(x))])))

    spec = jax.ShapeDtypeStruct((WIDTH,), np.float32)
    ours = colocated.colocated_python(largest_first, out_specs=spec)
    return Situation(
        iterations,
        {
            BY_HAND: repeated(by_hand),
            OURS: repeated(pjit(step(ours.specialize(uses_jax=False)))),
            f"{OURS}, without uses_jax": repeated(pjit(step(ours))),
            PURE: repeated(
                jax.jit(step(lambda x: jax.pure_callback(largest_first, spec, x, vmap_method="sequential")))
            ),
        },
    )
