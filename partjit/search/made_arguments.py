"""Arguments for steps that are timed: copies of those that are given, and made up ones."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

__all__ = ["MadeArguments", "Struct", "is_array"]

Struct = tuple[tuple[int, ...], Any]
"""The shape and the dtype of an argument."""


def is_array(value: object) -> bool:
    """Whether an argument has elements."""
    return isinstance(value, jax.Array | np.ndarray)


class MadeArguments:
    """New arguments, as often as they are wanted: what a step consumes may be the user's.

    Args:
        structs: their shapes and dtypes.
        given: their values; what is no array is made up: numbers between -0.02 and 0.02, and zeros where they are no
            floats.
    """

    def __init__(self, structs: Sequence[Struct], given: Sequence[object]) -> None:
        self._structs, self._given = structs, given
        self._makers: dict[object, Callable[[], jax.Array]] = {}

    def on(self, shardings: Sequence[NamedSharding]) -> list[jax.Array]:
        """The arguments with these shardings."""
        return [
            _copied(value, sharding) if is_array(value) else self._made_up(struct, sharding)
            for struct, value, sharding in zip(self._structs, self._given, shardings, strict=True)
        ]

    def _made_up(self, struct: Struct, sharding: NamedSharding) -> jax.Array:
        key = *struct, sharding
        if key not in self._makers:
            made = jax.jit(lambda: _numbers(*struct), out_shardings=sharding)
            self._makers[key] = made.lower().compile()  # ahead of time: where this is asked, something may be traced
        return self._makers[key]()


def _copied(value: Any, sharding: NamedSharding) -> jax.Array:
    """A copy with this sharding.

    Of an array on one of the devices jax uses what is there for its replica, whatever `may_alias` says: a step would
    consume it.
    """
    if isinstance(value, jax.Array) and value.sharding.device_set != sharding.device_set:
        value = jnp.copy(value)
    return jax.device_put(value, sharding, may_alias=False)


def _numbers(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.lax.broadcast(jax.random.key(0), shape)
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.zeros(shape, dtype)
    place = sum((k + 1.37) * jax.lax.broadcasted_iota(jnp.float32, shape, k) for k in range(len(shape)))
    return (0.02 * jnp.sin(1.0 + place)).astype(dtype)
