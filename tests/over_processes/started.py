"""This process, as one of a group over eight devices, and what its checks have in common."""

import faulthandler
import os
import sys
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

number, count, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
faulthandler.dump_traceback_later(200, exit=True)
jax.config.update("jax_num_cpu_devices", 8 // count)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, count, number)

import partjit  # noqa: E402
from partjit import P  # noqa: E402

grid = np.array(jax.devices())
mesh = partjit.Mesh(grid.reshape(4, 2), ("x", "y"))
"""Split over processes along x."""
columns = partjit.Mesh(grid.reshape(2, 4).T, ("x", "y"))
"""Split over processes along y; over four of them along both."""
interleaved = partjit.Mesh(grid.reshape(2, 4).T.reshape(8), "x")
"""Of which no process has a box."""

IS_SOAK = os.environ.get("PARTJIT_PROFILE") == "soak"

numbers = np.arange(16, dtype=np.float32)


def distributed(value: np.ndarray, *spec: object, mesh: jax.sharding.Mesh = mesh) -> jax.Array:
    """An array of which all processes know the value."""
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index], dtype=value.dtype)


def own_piece(value: np.ndarray, sharding: NamedSharding) -> np.ndarray:
    """What this process has of an array of which it knows the value."""
    indices = sharding.addressable_devices_indices_map(value.shape).values()
    for dim, size in enumerate(value.shape):
        held = sorted({index[dim].indices(size) for index in indices})
        value = np.take(value, np.concatenate([np.arange(*part) for part in held]), axis=dim)
    return value


def require_equal(array: jax.Array, value: object) -> None:
    """Checks the shards that this process has."""
    value = np.asarray(value)
    assert array.shape == value.shape, (array.shape, value.shape)
    for shard in array.addressable_shards:
        np.testing.assert_allclose(np.asarray(shard.data), value[shard.index], rtol=1e-5, atol=1e-6)


def refused(call: Callable[..., object], *args: object, **kwargs: object) -> str:
    """The text of the error for a call."""
    try:
        call(*args, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    raise AssertionError("it was not refused")


def on_each_shard(change: Callable[[np.ndarray], np.ndarray], array: jax.Array) -> jax.Array:
    """An array whose shards in this process are changed."""
    shards = [jax.device_put(change(np.asarray(shard.data)), shard.device) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def held(devices: Sequence[jax.Device]) -> str:
    """Which process has which of the devices, as errors say it."""
    by_process = {d.process_index: [e.id for e in devices if e.process_index == d.process_index] for d in devices}
    parts = [f"{ids} of process {process}" for process, ids in sorted(by_process.items())]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
