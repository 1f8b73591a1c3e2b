"""Shardings as jax and XLA have them."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
from jax._src import config
from jax._src.named_sharding import DuplicateSpecError
from jax._src.sharding_impls import UNSPECIFIED, UnspecifiedValue
from jax.core import ShapedArray
from jax.extend.sharding import GSPMDSharding
from jax.sharding import Sharding
from jaxlib._hlo import HloSharding, OpSharding
from jaxlib._jax import DeviceList

from partjit._jax.types import Device

__all__ = [
    "UNSPECIFIED",
    "DeviceList",
    "DuplicateSpecError",
    "HloSharding",
    "MaybeSharding",
    "OpSharding",
    "Part",
    "UnspecifiedValue",
    "addressable_devices",
    "default_device",
    "device_list",
    "in_memory_of_type",
    "kind_of_memory",
    "memory_of_type",
    "or_none",
    "or_unspecified",
    "parts_of",
    "to_proto",
]

S = TypeVar("S", bound=Sharding)
MaybeSharding = Sharding | UnspecifiedValue
"""Of an argument or result; UNSPECIFIED where the partitioner chooses."""


def kind_of_memory(sharding: Sharding) -> str:
    """That of a sharding: the devices' own, unless it names another one."""
    return sharding.memory_kind or "device"


def memory_of_type(aval: ShapedArray) -> str | None:
    """The memory that a type says its values are in; None if that is the devices' own."""
    return "pinned_host" if aval.memory_space is jax.memory.Space.Host else None


def in_memory_of_type(sharding: S, aval: ShapedArray) -> S:
    """A sharding in the memory that a type says, unless that is the devices' own."""
    kind = memory_of_type(aval)
    return sharding if kind is None else cast(S, sharding.with_memory_kind(kind))


def or_none(sharding: MaybeSharding) -> Sharding | None:
    """None for UNSPECIFIED."""
    return None if isinstance(sharding, UnspecifiedValue) else sharding


def or_unspecified(sharding: Sharding | None) -> MaybeSharding:
    """UNSPECIFIED for None."""
    return UNSPECIFIED if sharding is None else sharding


def to_proto(sharding: Any) -> OpSharding | None:
    """The OpSharding that an OpSharding, HloSharding or GSPMDSharding is; None for anything else."""
    if isinstance(sharding, OpSharding):
        return sharding
    if isinstance(sharding, GSPMDSharding):
        sharding = sharding._hlo_sharding
    return sharding.to_proto() if isinstance(sharding, HloSharding) else None


def device_list(sharding: Sharding) -> DeviceList:
    """The devices of a sharding in their order, as one hashable value."""
    return sharding._internal_device_list


def addressable_devices(sharding: Sharding) -> Sequence[Device]:
    """The devices of a sharding in this process, in the order in which arrays list their buffers."""
    return sharding._internal_device_list.addressable_device_list


class Part(NamedTuple):
    """A part of an array that a device has.

    Attributes:
        bounds: where it begins and ends in each dimension, and the step: equal for equal parts.
        slices: the same, to take it with.
    """

    bounds: tuple[tuple[int, int, int], ...]
    slices: tuple[slice, ...]


def parts_of(sharding: Sharding, shape: tuple[int, ...]) -> list[Part]:
    """What each of the `addressable_devices` has of an array of this shape."""
    by_device = sharding.addressable_devices_indices_map(shape)
    indices: list[Any] = [by_device[device] for device in addressable_devices(sharding)]
    return [Part(tuple(own.indices(n) for own, n in zip(index, shape, strict=True)), index) for index in indices]


def default_device() -> Device | str | None:
    """What `jax_default_device` is here: a device, the name of a platform or None (a private reader: jax 0.10.2 has the
    public attribute, but not in its types).
    """
    return config.default_device.value
