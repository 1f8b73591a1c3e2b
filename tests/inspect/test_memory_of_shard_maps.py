"""The memory of `shard_map`s: what they return to others is computed where it is used, as if they were not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partjit
from partjit import P, pjit
from partjit.inspect import explain

EXPERTS, CAPACITY = 8, 32


@pytest.fixture(scope="module")
def mesh():
    return partjit.Mesh(np.array(jax.devices()).reshape(8), ("expert",))


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def routed(x, scores, up, down):
    """Tokens of a device go to the experts of all, and back."""
    expert = jnp.argmax(x @ scores, -1)
    one = jax.nn.one_hot(expert, EXPERTS, dtype=jnp.int32)
    slot = expert * CAPACITY + jnp.minimum(jnp.sum(jnp.cumsum(one, 0) * one, -1), CAPACITY) - 1
    sent = jnp.zeros((EXPERTS * CAPACITY, x.shape[1])).at[slot].set(x).reshape(EXPERTS, CAPACITY, -1)
    sent = jax.lax.all_to_all(sent, "expert", 0, 1, tiled=True)
    hidden = jax.nn.relu(jnp.einsum("ecd,edf->ecf", sent, up))
    back = jax.lax.all_to_all(jnp.einsum("ecf,efd->ecd", hidden, down), "expert", 1, 0, tiled=True)
    return back.reshape(EXPERTS * CAPACITY, -1)[slot]


def elementwise(x, scores, up, down):
    """A chain of which the backward pass compares what the forward pass has computed."""
    return jax.nn.relu(jax.nn.relu(x @ up[0]) @ down[0])


@pytest.mark.parametrize("local", [routed, elementwise])
def test_gradients_of_a_shard_map_need_what_is_estimated(local, mesh):
    token, specs = P("expert"), (P(), P("expert"), P("expert"))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(token, *specs), out_specs=token)

    def loss(params, x, y):
        return jnp.mean((x + mapped(x, *params) - y) ** 2)

    step = pjit(jax.value_and_grad(loss), in_shardings=(specs, token, token), out_shardings=(None, specs))
    params = f32(64, EXPERTS), f32(EXPERTS, 64, 512), f32(EXPERTS, 512, 64)
    report = explain(step, params, f32(1024, 64), f32(1024, 64), mesh=mesh, compiled=True)
    (estimate,), (found,) = report.estimates, report.memory
    assert 0.95 <= estimate.peak / found.peak <= 1.05, (str(estimate), str(found))
