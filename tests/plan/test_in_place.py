"""Large arrays that loops of the host update in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from partjit import Mesh, pjit
from partjit.colocated import colocated_python
from partjit.plan.ir.nodes import Fragment
from partjit.plan.ir.walk import walk

ROWS = 2**7


def by_hand(cache, x, most):
    for i in range(most):
        x = np.sin(x) + cache[i]
        cache[i] = x
        if (x + cache[max(i - 1, 0)])[0] > 3:
            break
        x = x + 1
    return cache, x


def until(call, most):
    """A loop whose calls come after the update of an iteration, with work behind them."""

    def body(state):
        cache, x, i, _ = state
        x = jnp.sin(x) + cache[i]
        cache = lax.dynamic_update_index_in_dim(cache, x, i, 0)
        ends = call(x + cache[jnp.maximum(i - 1, 0)])
        return cache, jnp.where(ends, x, x + 1), i + 1, ends

    def goes_on(state):
        return (state[2] < most) & ~state[3]

    return lambda cache, x: lax.while_loop(goes_on, body, (cache, x, 0, False))[:2]


def counted(call, most):
    def step(state, i):
        cache, x = state
        x = jnp.sin(x) + cache[i]
        cache = cache.at[i].set(x)
        return (cache, jnp.where(call(x + cache[jnp.maximum(i - 1, 0)]), x, x + 1)), None

    return lambda cache, x: lax.scan(step, (cache, x), jnp.arange(most))[0]


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("donates", [False, True])
@pytest.mark.parametrize("make", [until, counted])
@pytest.mark.parametrize("width", [2**4, 2**11])
def test_a_cache_that_is_written_before_the_call_of_an_iteration_is_not_copied_for_the_next_one(
    make, width, donates, devices
):
    """One more dispatch in each iteration takes less, unless the cache is small."""
    call = colocated_python(lambda x: np.asarray(x)[0] > 3, out_specs_fn=lambda x: jax.ShapeDtypeStruct((), jnp.bool_))
    mesh = Mesh(np.array(jax.devices()[:devices]), "x")
    program = pjit(make(call, 5), in_shardings=None, out_shardings=None, donate_argnums=0 if donates else ())

    def given():
        return jnp.ones((ROWS, width)), jnp.linspace(0.5, 1, width)

    cache, x = map(np.array, given())
    expected = by_hand(cache, x, 5) if make is until else None
    with mesh:
        plan = program.plan(*given())
        results = [program(*given()) for _ in range(2)]
    if expected is None:
        expected = jax.jit(make(lambda x: x[0] > 3, 5))(*given())
    for found in results:
        for own, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-5)
    (loop,) = (node for node in plan.nodes if not isinstance(node, Fragment) and hasattr(node, "block"))
    caches = [
        sum(value.aval.shape == (ROWS, width) for value in node.outputs)
        for node in walk(loop.block.nodes)
        if isinstance(node, Fragment)
    ]
    assert max(caches) == (2 if width == 2**4 else 1)
