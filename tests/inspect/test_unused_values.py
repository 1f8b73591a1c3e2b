"""What is computed for nothing, before XLA's folds or after them, is annotated or left out, and harms nobody."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from partjit import P, pjit
from partjit.inspect.needed import needed_equations
from partjit.inspect.predicted import predict
from tests.census import saw, sees
from tests.inspect.inspected import partitioned

_SHAPE = (8, 8)


def _positive(x):
    return (jnp.cos(x) > 0).astype(jnp.int32)


# Of two arrays; what some compute on the way is folded, and what that was computed from is used by nothing then.
WAYS = {
    "two equal cases": lambda x, y: lax.select_n(_positive(x), y, y),
    "three equal cases": lambda x, y: lax.select_n(_positive(x), y, y, y),
    "known case": lambda x, y: jnp.where(jnp.zeros_like(x) > 0, x, y),
    "half of a concatenation": lambda x, y: jnp.concatenate([jnp.sin(x), y])[8:],
    "nothing added": lambda x, y: y + jnp.zeros_like(x),
    "reshaped and back": lambda x, y: jnp.tanh(x).reshape(64).reshape(_SHAPE) + y,
    "factorized": lambda x, y: jnp.linalg.cholesky(x @ x.T) + y,
    "one of two factors": lambda x, y: jnp.linalg.qr(x @ y)[1],
    "factorized for nothing": lambda x, y: (jnp.linalg.eigh(x @ x.T), y * 2)[1],
    "sorted for one": lambda x, y: lax.sort([x, jnp.exp(y)], num_keys=1)[0],
    "nested": lambda x, y: jax.jit(lambda x, y: (jnp.sin(x), y - 1))(x, y)[1],
    "loop for one": lambda x, y: lax.fori_loop(0, 2, lambda _, c: (jnp.cos(c[0]), c[1] * 2), (x, y))[1],
    "folded in a loop": lambda x, y: lax.fori_loop(0, 2, lambda _, c: lax.select_n(_positive(x), c, c) + 1, y),
    "random for nothing": lambda x, y: (jax.random.normal(jax.random.key(0), x.shape) + x, y.T)[1],
    "told for nothing": lambda x, y: (jax.pure_callback(np.sin, jax.ShapeDtypeStruct(_SHAPE, x.dtype), x), -y)[1],
}


@sees("something folded away", "something needed by nothing", *WAYS)
@given(st.lists(st.tuples(st.sampled_from([*WAYS]), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6))
def test_what_is_computed_for_nothing_is_annotated_or_left_out(steps):
    def program(x, y):
        values = [x, y]
        for way, first, second in steps:
            values.append(WAYS[way](values[first % len(values)], values[second % len(values)]))
        return values[-1]

    found = partitioned(pjit(program, in_shardings=(P("data"), P(None, "model"))), *np.ones((2, *_SHAPE), np.float32))
    needed = needed_equations(found.tree)
    for equation in found.tree.walk():
        saw("something needed by nothing", when=equation.number not in needed)
        if equation.number in needed and not equation.bodies:
            known = [value.sharding is not None for value in equation.outputs]
            assert any(known), equation
            saw("something folded away", when=equation.primitive == "select_n")
    predict(found)
    for way in {way for way, *_ in steps}:
        saw(way)
