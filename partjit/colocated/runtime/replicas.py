"""Parts of a result per shard that several devices have: the function returns them once for each, and they are one."""

import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Sharding

from partjit._jax.arrays import data_of
from partjit._jax.types import Device
from partjit.checks import abridged

__all__ = ["check_replicas"]

_COMPARED_BYTES = 4096
"""Larger parts are not compared, since that would take longer than to put them together."""


def check_replicas(
    by_device: Mapping[Device, jax.Array | np.ndarray], sharding: Sharding, shape: tuple[int, ...], name: str, i: int
) -> None:
    """Checks that small shards which are the same part of an array are equal, to the bit.

    Args:
        by_device: the shards, of the devices of this process.
        sharding, shape: those of the array.
        name, i: the name of the function that returned them, and which of its results this is, for messages.

    Raises:
        ValueError: they differ.
    """
    groups = _having_the_same(sharding, shape)
    if not groups:
        return
    a_shard = data_of(by_device[groups[0][0]])
    if a_shard.size * a_shard.dtype.itemsize > _COMPARED_BYTES:
        return
    for first, *others in groups:
        one = by_device[first]
        contents = _contents(one)
        for device in others:
            other = by_device[device]
            if other is not one and _contents(other) != contents:
                index = sharding.devices_indices_map(shape)[first]
                raise ValueError(
                    f"{name} is called once per shard and returned different shards as result {i} on {first} and "
                    f"{device}, which have the same part [{_text(index, shape)}] of it: "
                    f"{abridged(_array(one).tolist())} and {abridged(_array(other).tolist())}. Its sharding is "
                    f"{getattr(sharding, 'spec', sharding)}: return equal shards there, or give the result in "
                    "out_specs a sharding over the axes along which they differ"
                )


@functools.lru_cache(maxsize=1024)
def _having_the_same(sharding: Sharding, shape: tuple[int, ...]) -> Sequence[Sequence[Device]]:
    """The devices of this process that have each part which several of them have."""
    groups: dict[str, list[Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        groups.setdefault(_text(index or (), shape), []).append(device)
    return [group for group in groups.values() if len(group) > 1]


def _text(index: tuple[slice, ...], shape: Sequence[int]) -> str:
    spans = [span.indices(size)[:2] for span, size in zip(index, shape, strict=False)]
    return ", ".join(
        ":" if span == (0, size) else f"{span[0]}:{span[1]}" for span, size in zip(spans, shape, strict=True)
    )


def _contents(shard: jax.Array | np.ndarray) -> object:
    array = _array(shard)
    return array.tolist() if array.dtype.kind == "T" else array.tobytes()  # of texts, the bytes are addresses


def _array(shard: jax.Array | np.ndarray) -> np.ndarray:
    return shard if type(shard) is np.ndarray else np.asarray(data_of(shard))
