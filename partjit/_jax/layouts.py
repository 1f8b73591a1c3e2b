"""Layouts of arrays in memory: programs are compiled for the default one, and take arrays for what that says."""

import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jaxlib._jax import PjRtLayout

from partjit._jax.arrays import ArrayImpl, PRNGKeyArray, with_key_data
from partjit._jax.shardings import device_list
from partjit._jax.types import Device

__all__ = ["has_default_layout", "in_default_layout", "in_default_layouts"]


def has_default_layout(value: Any) -> bool:
    """Whether a value is no array with a layout that somebody chose, as `jax.experimental.layout.Format` can."""
    if type(value) is PRNGKeyArray:
        return has_default_layout(value._base_array)
    if type(value) is not ArrayImpl or value.aval.ndim < 2 or value.is_deleted():
        return True
    sharding = value._sharding
    default = _default_layout(sharding, value.aval.shape, value.aval.dtype)
    return default is None or cast(Any, value)._pjrt_layout == default


def in_default_layout(value: Any) -> Any:
    """A value itself, or a copy of an array in the default layout."""
    if has_default_layout(value):
        return value
    if type(value) is PRNGKeyArray:
        return with_key_data(value, in_default_layout(value._base_array))
    with jax.disable_jit(False):
        return _copy_to(value.sharding if value.committed else None)(value)


def in_default_layouts(values: Sequence[Any]) -> tuple[Sequence[Any], bool]:
    """Values with those arrays in the default layout that have another one; and whether there are any."""
    if all(map(has_default_layout, values)):
        return values, False
    return [*map(in_default_layout, values)], True


@functools.cache
def _copy_to(sharding: Sharding | None) -> Any:
    return jax.jit(jnp.copy, out_shardings=sharding)


@functools.lru_cache(maxsize=4096)
def _default_layout(sharding: Sharding, shape: tuple[int, ...], dtype: Any) -> PjRtLayout | None:
    """The default layout of arrays of a type; None if jax knows none of its devices, or none of the type."""
    devices = [device for device in device_list(sharding) if device in sharding.addressable_devices]
    return _default_layout_on(devices[0], sharding.shard_shape(shape), dtype) if devices else None


def _default_layout_on(device: Device, shape: tuple[int, ...], dtype: Any) -> PjRtLayout | None:
    try:
        return device.client.get_default_layout(dtype, shape, device)
    except jax.errors.JaxRuntimeError:
        return None
