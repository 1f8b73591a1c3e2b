"""NumPy arrays of arrays over several devices are those of `np.asarray`."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from partjit import P
from partjit._jax import to_numpy
from partjit._jax.to_numpy import as_numpy


@pytest.fixture
def gathered(monkeypatch):
    """How many shards each array was put together from."""
    counts, own = [], to_numpy._gathered
    monkeypatch.setattr(to_numpy, "_gathered", lambda array, parts: (counts.append(len(parts)), own(array, parts))[1])
    return counts


def sharding_of(mesh, spec, kind=AxisType.Auto):
    return NamedSharding(jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(kind, kind)), spec)


SHARDS = {P("x"): 4, P(None, "y"): 2, P("x", "y"): 8, P("y", "x"): 8, P(("x", "y")): 8, P(None, ("y", "x")): 8}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shards_are_put_together_as_jax_does(mesh, gathered, kind):
    values = [np.arange(64).reshape(8, 8).astype(dtype) for dtype in (np.float32, np.int8, bool, np.complex64)]
    values += [np.arange(64).reshape(8, 8).astype(jnp.bfloat16)]
    for spec in SHARDS:
        for value in values:
            x = jax.device_put(value, sharding_of(mesh, spec, kind))
            found = as_numpy(x)
            assert found.dtype == value.dtype
            assert not found.flags.writeable
            np.testing.assert_array_equal(found, value)
    assert gathered == [count for count in SHARDS.values() for _ in values]
    assert as_numpy(jax.device_put(np.zeros((8, 0)), sharding_of(mesh, P("x")))).shape == (8, 0)


def test_the_others_are_left_to_jax(mesh, gathered):
    key = jax.device_put(jax.random.split(jax.random.key(0), 8), sharding_of(mesh, P("x")))
    small = jax.device_put(jnp.arange(8, dtype=jnp.int4), sharding_of(mesh, P("x")))
    replicated = jax.device_put(np.arange(8), sharding_of(mesh, P()))
    on_one = jax.device_put(np.arange(8))
    for x in (small, replicated, on_one):
        np.testing.assert_array_equal(as_numpy(x).astype(int), np.arange(8))
    with pytest.raises(TypeError, match="key"):
        as_numpy(key)
    read = jax.device_put(np.arange(8), sharding_of(mesh, P("x")))
    assert as_numpy(read).base is None
    assert gathered == [4]
    kept = np.asarray(read)
    assert np.shares_memory(as_numpy(read), kept), "what jax has put together is not put together again"
    assert gathered == [4]


def test_what_was_deleted_is_said_as_jax_says_it(mesh):
    x = jax.device_put(np.arange(8), sharding_of(mesh, P("x")))
    x.delete()
    with pytest.raises(RuntimeError, match="Array has been deleted"):
        as_numpy(x)


def test_threads_read_an_array_that_is_being_computed(mesh):
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 2000, lambda _, x: jnp.sin(x) * 0 + x, x))
    x = slow(jax.device_put(np.arange(8.0), sharding_of(mesh, P("x"))))
    found = []
    threads = [threading.Thread(target=lambda: found.append(as_numpy(x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for value in found:
        np.testing.assert_array_equal(value, np.arange(8))
