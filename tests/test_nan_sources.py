"""Where NaNs come from: the operation and line that the error names, of programs that C++ or a plan runs."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from partjit import Mesh, P, colocated, pjit, reshard_policy

X = jnp.full(8, -1.0)
MESH = Mesh(np.array(jax.devices()[:4]), ("x",))

log = colocated.colocated_python(lambda x: None, stream="log", out_specs_fn=lambda x: None)
passed = colocated.colocated_python(lambda x: np.asarray(x), out_specs=jax.ShapeDtypeStruct((8,), jnp.float32))


def loss(x):
    return jnp.sum(jnp.where(x > 0, jnp.log(x), jnp.sqrt(x)))


def resharded():
    with reshard_policy("allow"), MESH:
        pjit(loss, in_shardings=P("x"))(jax.device_put(X, NamedSharding(MESH, P())))


CALLS = {
    "grad": lambda: jax.grad(pjit(loss))(X),
    "vmap": lambda: jax.vmap(pjit(loss))(X[None]),
    "nested": lambda: jax.vmap(pjit(lambda x: pjit(jax.jit(loss))(2 * x)))(X[None]),
    "custom derivative": lambda: jax.vmap(pjit(lambda x: jax.nn.relu(loss(x))))(X[None]),
    "checkpoint": lambda: jax.vmap(pjit(jax.checkpoint(loss)))(X[None]),
    "NaNs that are wanted": lambda: jax.vmap(pjit(lambda x: jnp.where(x < 0, 1, jnp.nan) + loss(x)))(X[None]),
    "resharded": resharded,
    "a program with a log": lambda: pjit(lambda x: (log(x), loss(x))[1])(X),
    "a program with a call": lambda: pjit(lambda x: loss(passed(x)))(X),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_operation_and_its_line_are_named_on_the_first_and_on_later_calls(call):
    line = inspect.getsourcelines(loss)[1] + 1
    with jax.debug_nans(True):
        for _ in range(2):
            with pytest.raises(
                FloatingPointError, match=rf"\(nan\) encountered in log at .*test_nan_sources.py:{line} in loss"
            ):
                CALLS[call]()
        colocated.wait()


def test_an_infinity_that_is_wanted_is_not_blamed():
    masked = pjit(lambda x: jnp.sum(jnp.exp(jnp.where(x < 0, -jnp.inf, x))) + jnp.sum(1 / (x + 1)))
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"\(inf\) encountered in div at "):
        jax.vmap(masked)(X[None])


def test_a_loop_is_named_by_its_own_line():
    looped = pjit(lambda x: jax.lax.scan(lambda x, _: (jnp.log(x), None), x, length=2)[0])
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"\(nan\) encountered in scan at "):
        jax.vmap(looped)(X[None])
