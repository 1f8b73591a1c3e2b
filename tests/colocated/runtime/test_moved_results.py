"""Results that a function returns on one device, and that are needed elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding

from partjit import P, pjit
from partjit.colocated import colocated_python
from tests.colocated import rendezvous

pytestmark = pytest.mark.usefixtures("meeting")

SHAPE = (64, 512)
SPECS = [P(), P("x"), P(("y", "x")), P(None, "y"), P("y", "x")]
MODES = ["inline", "stream"]


def returned(x):
    """An array on the first device, of which the test has another reference."""
    result = jnp.asarray(np.asarray(x) + 1, dtype=jnp.float32)
    rendezvous.logs["kept"].append(result.block_until_ready())
    return result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_it_is_sharded_as_specified_and_outlives_what_was_returned(spec, mode, mesh):
    sharding = NamedSharding(mesh, spec)
    x = jax.device_put(np.arange(64 * 512, dtype=np.float32).reshape(SHAPE), NamedSharding(mesh, P()))
    f = colocated_python(returned, out_specs=jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=sharding), mode=mode)
    with mesh:
        program = pjit(lambda x: f(x * 2))
    for call, expected in ((f, x + 1), (f, x + 1), (program, x * 2 + 1)):
        with mesh:
            result = jax.block_until_ready(call(x))
        assert result.sharding.is_equivalent_to(sharding, 2)
        rendezvous.logs["kept"].pop().delete()
        np.testing.assert_array_equal(result, expected)
        for shard in result.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[shard.index])


def test_rows_of_it_are_not_copied(mesh):
    sharding = NamedSharding(mesh, P(("x", "y")))
    f = colocated_python(returned, out_specs=jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=sharding), mode="inline")
    for _ in range(2):
        result = f(jnp.zeros(SHAPE))
        begin = rendezvous.logs["kept"][-1].unsafe_buffer_pointer()
        places = [shard.data.unsafe_buffer_pointer() for shard in result.addressable_shards]
        assert places == [begin + k * result.nbytes // 8 for k in range(8)]


@jax.jit
def slow(x):
    """What takes XLA a tenth of a second, which it does in a thread of its own."""
    large = jnp.full((400, 400), x[0] / 400)
    return x + jax.lax.fori_loop(0, 100, lambda _, y: large @ y, large)[0, 0]


def test_one_that_is_not_computed_yet_is_not_waited_for(mesh):
    sharding = NamedSharding(mesh, P("x"))
    spec = jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding)
    f = colocated_python(lambda x: slow(x), out_specs=spec, mode="inline")
    x = jnp.ones(8)
    for _ in range(2):  # compiled in the first one
        result = f(x)
    assert not result.is_ready()
    np.testing.assert_allclose(result, 1 + 1 / 400, rtol=1e-3)


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_it_is_moved_to_the_memory_that_is_specified(kind, mesh):
    for sharding in (
        SingleDeviceSharding(jax.devices()[0], memory_kind=kind),
        SingleDeviceSharding(jax.devices()[1], memory_kind=kind),
        NamedSharding(mesh, P("x"), memory_kind=kind),
    ):
        f = colocated_python(
            returned, out_specs=jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=sharding), mode="inline"
        )
        result = f(jax.device_put(np.zeros(SHAPE, np.float32), sharding))
        assert {shard.data.sharding.memory_kind for shard in result.addressable_shards} == {kind}
        assert result.sharding == sharding
        np.testing.assert_array_equal(result, np.ones(SHAPE))
