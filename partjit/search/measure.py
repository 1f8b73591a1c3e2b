"""A machine measured: how fast its devices multiply, copy and send, by timing programs on all of them."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from partjit.checks import require_mesh_type, require_number, wrong_value
from partjit.mesh import auto_twin
from partjit.search.machine import Link, Machine

__all__ = ["measure_machine"]

_DTYPES = {"f32": jnp.float32, "f16": jnp.bfloat16}
_UNKNOWN_MEMORY = 16_000_000_000


def measure_machine(mesh: Mesh, *, seconds: float = 10.0) -> Machine:
    """Times products, copies and collectives on the devices of a mesh, all of them at once.

    Products of square matrices give the rate of float32 and of bf16, an addition to a large array that of the memory,
    all-gathers of a small and a large array over each axis its latency and its bandwidth. What compiling takes comes on
    top of the time limit, some tenths of a second for each of these programs.

    Args:
        mesh: the mesh, of devices that are there. Devices that share the cores of one host, as virtual ones do, are
            measured as what they are together.
        seconds: how long to measure in all.

    Returns:
        The machine, with the memory that the devices report, or 16 GB for those that report none.

    Raises:
        TypeError, ValueError: `mesh` is no mesh of devices, or `seconds` no number above 0.

    Example:
        >>> import numpy as np
        >>> from partjit import Mesh
        >>> machine = measure_machine(Mesh(np.array(jax.devices()[:2]), ("data",)), seconds=0.2)
        >>> [*machine.links], machine.links["data"].bandwidth > 1e6
        (['data'], True)
    """
    require_mesh_type("measure_machine", "mesh", mesh)
    expected = "a number of seconds above 0"
    if require_number("measure_machine", "seconds", seconds, expected) <= 0:
        raise wrong_value("measure_machine", "seconds", seconds, expected)
    auto = auto_twin(mesh)
    axes = [axis for axis in auto.axis_names if auto.shape[axis] > 1]
    share = seconds / (len(_DTYPES) + 1 + 2 * len(axes))
    platform = next(iter(mesh.devices.flat)).platform
    n = 256 if platform == "cpu" else 4096
    flops = {name: 2 * n**3 / _seconds_of(_product(auto, n, dtype), share) for name, dtype in _DTYPES.items()}
    size = (1 << 22) if platform == "cpu" else (1 << 28)
    memory_bandwidth = 2 * size / _seconds_of(_copy(auto, size), share)
    links = {str(axis): Link(1e12, 0.0) for axis in auto.axis_names}
    large = size // 4
    for axis in axes:
        parts = auto.shape[axis]
        latency = _seconds_of(_gather(auto, axis, 4 * parts), share)
        taken = _seconds_of(_gather(auto, axis, large), share)
        sent = (parts - 1) / parts * large
        links[str(axis)] = Link(sent / max(taken - latency, taken / 10), latency / max(1, (parts - 1).bit_length()))
    return Machine(f"{platform}, measured", flops, _memory(mesh), memory_bandwidth, links)


def _product(mesh: Mesh, n: int, dtype: Any) -> Callable[[], object]:
    """A product of two square matrices on each device."""
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    a = jax.device_put(jnp.ones((mesh.size, n, n), dtype), sharding)
    run = jax.jit(lambda a: jnp.einsum("dij,djk->dik", a, a), out_shardings=sharding)
    return lambda: run(a)


def _copy(mesh: Mesh, nbytes: int) -> Callable[[], object]:
    """An addition to so many bytes on each device: reads them, and writes as many."""
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    x = jax.device_put(jnp.ones((mesh.size, nbytes // 4), jnp.float32), sharding)
    run = jax.jit(lambda x: x + 1, out_shardings=sharding)
    return lambda: run(x)


def _gather(mesh: Mesh, axis: str, nbytes: int) -> Callable[[], object]:
    """An all-gather of so many bytes over an axis, along all others at once."""
    others = tuple(name for name in mesh.axis_names if name != axis)
    rows, columns = mesh.size // mesh.shape[axis], nbytes // 4 // mesh.shape[axis] * mesh.shape[axis]
    x = jax.device_put(jnp.ones((rows, columns), jnp.float32), NamedSharding(mesh, P(others, axis)))
    run = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P(others, None)))
    return lambda: run(x)


def _seconds_of(run: Callable[[], object], limit: float) -> float:
    """The median time of a program that has run before, within a time limit but at least of three runs."""
    jax.block_until_ready(run())

    def times() -> Iterator[float]:
        end = time.perf_counter() + limit
        while True:
            start = time.perf_counter()
            jax.block_until_ready(run())
            now = time.perf_counter()
            yield now - start
            if now > end:
                return

    found = [*times()]
    while len(found) < 3:
        found += times()
    return max(statistics.median(found), 1e-9)


def _memory(mesh: Mesh) -> int:
    """The memory of the device that has least of it."""
    stats = [device.memory_stats() if device.platform != "cpu" else None for device in mesh.local_devices]
    known = [one["bytes_limit"] for one in stats if one and "bytes_limit" in one]
    return int(min(known, default=_UNKNOWN_MEMORY))
