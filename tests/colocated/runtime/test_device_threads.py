"""Threads of the devices that make calls keep what is local to them."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from partjit import P, colocated, pjit
from partjit.colocated import colocated_python
from tests.colocated import rendezvous

local = threading.local()
CALLS = 200


def visited():
    """Notes the thread, and whether it has been here before."""
    rendezvous.logs["visits"].append((threading.get_ident(), hasattr(local, "is_known")))
    local.is_known = True


def visiting(x):
    visited()
    return x


def on_the_way(_):
    visited()


@pytest.mark.parametrize("returns", [True, False], ids=["awaited", "without results"])
def test_what_is_local_to_a_thread_is_there_in_its_next_call(mesh, returns):
    """A call that an executable waits for, or which a thread of the devices makes because it is quick."""
    rendezvous.clear()
    if returns:
        call = colocated_python(visiting, uses_jax=False, out_specs_fn=lambda x: x)
    else:
        call = colocated_python(on_the_way, uses_jax=False, out_specs_fn=lambda x: None)

    def step(x, _):
        result = call(jnp.sum(x))
        return x + (0 if result is None else 0 * result), None

    program = pjit(lambda x: jax.lax.scan(step, x, None, CALLS)[0])
    x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("x")))
    for _ in range(2):
        jax.block_until_ready(program(x))
        colocated.wait()
    visits = rendezvous.logs["visits"]
    assert len(visits) == 2 * CALLS
    first = [thread for thread, is_known in visits if not is_known]
    assert len(first) == len({*first}) < CALLS
