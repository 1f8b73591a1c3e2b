"""A machine measured: how fast its devices multiply, copy, launch and send, by programs that run on all at once."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from partjit.checks import require_mesh_type, require_number, wrong_value
from partjit.mesh import auto_twin
from partjit.search.machine import Link, Machine, TimedCollective

__all__ = ["measure_machine"]

_DTYPES = {"f32": jnp.float32, "f16": jnp.bfloat16}
_UNKNOWN_MEMORY = 16_000_000_000
_ITERATIONS = 8
_LAUNCHES = 32
_LEAST = 3
"""How often each loop is timed at least."""


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """How large what is timed is: the rows of a matrix, images, and the elements of a small and a large array."""

    matrix: int
    batch: int
    image: int
    channels: int
    small: int
    large: int


_SIZES = {"cpu": _Sizes(128, 2, 16, 64, 1 << 6, 1 << 18)}
_OF_ACCELERATORS = _Sizes(4096, 64, 64, 256, 1 << 8, 1 << 24)


def measure_machine(mesh: Mesh, *, seconds: float = 10.0) -> Machine:
    """Times products, convolutions, copies, launches and collectives on the devices of a mesh, all of them at once.

    Products of square matrices give the rate of float32 and of bf16, convolutions with a window of 3 x 3 theirs, and
    products of tiny matrices the time of a launch. Collectives of each kind, over each axis and over all axes together,
    give their latencies while they are small and their bandwidths while they are large. All but the large arrays are
    computed in loops, so that what calling a program takes does not count; large ones once in a call, into memory that
    is fresh, as a step does. The programs take turns, and of each the fastest turn counts: what else the host does
    makes a turn slower, never faster.

    Args:
        mesh: the mesh, of devices that are there. Devices that share the cores of one host, as virtual ones do, are
            measured as what they are together.
        seconds: how long to measure in all; each program is timed three times at least. What compiling takes comes on
            top of it, some tenths of a second for each of 8 programs, and of 10 for each axis and for all together.

    Returns:
        The machine, with the memory that the devices report, or 16 GB for those that report none. Links are what
        all-gathers say; collectives that were timed go by their own figures.

    Raises:
        TypeError, ValueError: `mesh` is no mesh of devices, or `seconds` no number above 0.

    Example:
        >>> import numpy as np
        >>> from partjit import Mesh
        >>> machine = measure_machine(Mesh(np.array(jax.devices()[:2]), ("data",)), seconds=0.2)
        >>> [*machine.links], machine.links["data"].bandwidth > 1e6, machine.launch > 0
        (['data'], True, True)

    Source: Hockney, The communication challenge for MPP, 1994, for the two figures of a collective.
    """
    require_mesh_type("measure_machine", "mesh", mesh)
    expected = "a number of seconds above 0"
    if require_number("measure_machine", "seconds", seconds, expected) <= 0:
        raise wrong_value("measure_machine", "seconds", seconds, expected)
    auto = auto_twin(mesh)
    platform = next(iter(mesh.devices.flat)).platform
    sizes = _SIZES.get(platform, _OF_ACCELERATORS)
    axes = [axis for axis in auto.axis_names if auto.shape[axis] > 1]
    groups = [(axis,) for axis in axes] + ([tuple(axes)] if len(axes) > 1 else [])
    programs = _computing(auto, sizes)
    for over, (kind, sends), is_large in itertools.product(groups, _COLLECTIVES.items(), (False, True)):
        size, count = sizes.large if is_large else sizes.small, _count(auto, over)
        shape = (max(1, size // count) if kind == "all-gather" else size // count * count or count,)
        body = functools.partial(sends, over=over, count=count)
        programs[kind, over, is_large] = _program(auto, body, shape, 1 if is_large else _ITERATIONS)
    taken = _least_times(programs, seconds)
    collectives = tuple(
        _fitted(kind, over, _count(auto, over), sizes, taken) for over, kind in itertools.product(groups, _COLLECTIVES)
    )
    gathers = {one.axes[0]: one for one in collectives if one.kind == "all-gather" and len(one.axes) == 1}
    return Machine(
        f"{platform}, measured",
        {name: 2 * sizes.matrix**3 / taken["product", name] for name in _DTYPES},
        _memory(mesh),
        2 * 4 * sizes.large / _besides(taken, "copy"),
        {str(axis): _link(gathers.get(axis), auto.shape[axis]) for axis in auto.axis_names},
        max((taken["launches", _LAUNCHES + 1] - taken["launches", 1]) / _LAUNCHES, 1e-9),
        {"f32": _flops_of_convolution(sizes) / taken["convolution"]},
        collectives,
    )


_Program: TypeAlias = tuple[Callable[[], object], int]
"""What runs a program, and how many iterations that is."""


def _computing(mesh: Mesh, sizes: _Sizes) -> dict[Any, _Program]:
    """The programs that send nothing."""
    n = sizes.matrix
    images = sizes.batch, sizes.image, sizes.image, sizes.channels

    def convolved(x: Any) -> Any:
        kernel = jnp.full((3, 3, sizes.channels, sizes.channels), 1e-3, jnp.float32)
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def launched(x: Any, count: int) -> Any:
        for _ in range(count):
            x = lax.dot(x, x)  # which nothing is fused with
        return x

    counts = {count: functools.partial(launched, count=count) for count in (1, _LAUNCHES + 1)}
    return {
        **{("product", name): _program(mesh, _squared, (n, n), dtype=dtype) for name, dtype in _DTYPES.items()},
        **{("launches", count): _program(mesh, body, (8, 8)) for count, body in counts.items()},
        "convolution": _program(mesh, convolved, images),
        "copy": _program(mesh, lambda x: x + 1, (sizes.large,), 1),
        "call": _program(mesh, lambda x: x + 1, (sizes.small,), 1),
    }


def _squared(x: Any) -> Any:
    return lax.dot(x, x)


def _permuted(x: Any, over: tuple[str, ...], count: int) -> Any:
    return lax.ppermute(x, over, [(j, (j + 1) % count) for j in range(count)])


_COLLECTIVES: Mapping[str, Callable[..., Any]] = {
    "all-gather": lambda x, over, **_: lax.all_gather(x, over, tiled=True),
    "all-reduce": lambda x, over, **_: lax.psum(x, over),
    "all-to-all": lambda x, over, **_: lax.all_to_all(x, over, 0, 0, tiled=True),
    "collective-permute": _permuted,
    "reduce-scatter": lambda x, over, **_: lax.psum_scatter(x, over, tiled=True),
}


def _program(
    mesh: Mesh,
    body: Callable[[Any], Any],
    shape: tuple[int, ...],
    iterations: int = _ITERATIONS,
    dtype: Any = jnp.float32,
) -> _Program:
    """A program that computes something of an array of this shape on each device, so often one after the other."""
    over = P(mesh.axis_names)

    def again(_: Any, x: Any) -> Any:
        y = body(x)
        return y if y.shape == x.shape else jnp.tile(y, -(-x.size // y.size))[: x.size]

    def run(x: Any) -> Any:
        return (body(x[0]) if iterations == 1 else lax.fori_loop(0, iterations, again, x[0]))[None]

    x = jax.device_put(jnp.full((mesh.size, *shape), 1e-3, dtype), NamedSharding(mesh, over))
    compiled = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=over, out_specs=over, check_vma=False))
    return lambda: compiled(x), iterations


def _least_times(programs: Mapping[Any, _Program], seconds: float) -> dict[Any, float]:
    """The least time of an iteration of each program; they take turns until so much time has passed."""
    for run, _ in programs.values():
        jax.block_until_ready(run())
    least = dict.fromkeys(programs, math.inf)
    end, turns = time.perf_counter() + seconds, 0
    while turns < _LEAST or time.perf_counter() < end:
        for name, (run, iterations) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            least[name] = min(least[name], (time.perf_counter() - start) / iterations)
        turns += 1
    return {name: max(taken, 1e-9) for name, taken in least.items()}


def _besides(taken: Mapping[Any, float], name: object) -> float:
    """What a program takes that runs once, besides calling it."""
    return max(taken[name] - taken["call"], taken[name] / 10)


def _fitted(kind: str, over: tuple[str, ...], count: int, sizes: _Sizes, taken: Mapping[Any, float]) -> TimedCollective:
    """The latency and the bandwidth of a collective over so many devices."""
    latency, large = taken[kind, over, False], _besides(taken, (kind, over, True))
    return TimedCollective(kind, over, latency, 4 * (sizes.large // count * count) / max(large - latency, large / 10))


def _link(gather: TimedCollective | None, size: int) -> Link:
    """The link that takes as long for an all-gather."""
    if gather is None:
        return Link(1e12, 0.0)
    return Link((size - 1) / size * gather.bandwidth, gather.latency / max(1, (size - 1).bit_length()))


def _flops_of_convolution(sizes: _Sizes) -> float:
    """Of a window of 3 x 3 within images, whose borders have less of it."""
    return 2 * sizes.batch * (3 * sizes.image - 2) ** 2 * sizes.channels**2


def _count(mesh: Mesh, over: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in over)


def _memory(mesh: Mesh) -> int:
    """The memory of the device that has least of it."""
    stats = [device.memory_stats() if device.platform != "cpu" else None for device in mesh.local_devices]
    known = [one["bytes_limit"] for one in stats if one and "bytes_limit" in one]
    return int(min(known, default=_UNKNOWN_MEMORY))
