"""Results as bytes: the parts that a process has of them become the same array again."""

import jax
import numpy as np
import pytest
from jax.core import ShapedArray
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from partjit.colocated.journaling.payloads import Piece, index_of, put
from partjit.colocated.runtime.out_spec import OutSpec


@pytest.mark.parametrize("spec", [P("x", "y"), P("y"), P(None, ("x", "y"))])
def test_typed_keys_come_back_from_their_parts(mesh, spec):
    """As on several processes, where none has all of them."""
    sharding = NamedSharding(mesh, spec)
    keys = jax.device_put(jax.random.split(jax.random.key(7), (8, 8)), sharding)
    data = jax.random.key_data(keys)
    parts = {index_of(shard.index, data.shape): np.asarray(shard.data) for shard in data.addressable_shards}
    pieces = [Piece(*part) for part in parts.items()]
    assert len(pieces) > 1
    found = put(OutSpec(ShapedArray(keys.shape, keys.dtype), sharding, True), pieces)
    assert found.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys))
