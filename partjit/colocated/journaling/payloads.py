"""Results of calls as bytes, and back: their digests, and arrays with the shards that this process has."""

import dataclasses
import hashlib
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.core import ShapedArray
from jax.sharding import Sharding

from partjit._jax.arrays import (
    ArrayImpl,
    PRNGKeyArray,
    array_of_shards,
    buffers_of,
    keys_of_data,
)
from partjit._jax.moves import resharded
from partjit._jax.to_numpy import as_numpy
from partjit.colocated.runtime.out_spec import OutSpec
from partjit.colocated.runtime.pending import PendingArray
from partjit.errors import JournalError
from partjit.typed import typed_by

__all__ = ["Described", "Piece", "described", "digest_of", "packed", "pieces_of", "put", "unpacked"]

DIGEST_SIZE = 16
_NOTHING = hashlib.blake2b(digest_size=DIGEST_SIZE).digest()

_kinds: dict[np.dtype, str] = {}

Index = tuple[tuple[int, int], ...]
"""Per dimension, where a part of an array begins and ends."""


class Piece(NamedTuple):
    """A part of an array.

    Attributes:
        part: which one; None for all of it.
        data: its elements.
    """

    part: Index | None
    data: np.ndarray


@dataclasses.dataclass(frozen=True)
class Described:
    """What an array is besides its elements.

    Attributes:
        shape, dtype, weak_type: its type.
        sharding: its sharding.
        committed: whether it is committed to that.
    """

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    sharding: Sharding
    committed: bool

    @property
    def spec(self) -> OutSpec:
        """The spec of such an array."""
        aval = ShapedArray(self.shape, self.dtype, self.weak_type)
        return OutSpec(typed_by(aval, self.sharding), self.sharding, self.committed)


def described(array: jax.Array | OutSpec) -> Described:
    """What an array is, or is to be."""
    return Described(array.shape, array.dtype, array.aval.weak_type, array.sharding, array.committed)


def index_of(slices: Sequence[slice], shape: Sequence[int]) -> Index:
    """Slices of step one, as jax has them for shards, as where each begins and ends."""
    return tuple(s.indices(size)[:2] for s, size in zip(slices, shape, strict=True))


def pieces_of(array: Any) -> list[Piece]:
    """The parts of an array that this process has, each of them once."""
    if type(array) is ArrayImpl and array.is_fully_replicated:
        return [Piece(None, as_numpy(buffers_of(array)[0]))]  # `addressable_data` would make another array
    if isinstance(array, PendingArray):
        array = array.value()
    if isinstance(array, PRNGKeyArray):
        array = jax.random.key_data(array)
    if not isinstance(array, jax.Array):
        return [Piece(None, np.asarray(array))]
    if array.is_fully_addressable:
        return [Piece(None, as_numpy(array))]
    found: dict[Index, np.ndarray] = {}
    for shard in array.addressable_shards:
        index = index_of(shard.index, array.shape)
        if index not in found:
            found[index] = as_numpy(cast(jax.Array, shard.data))
    return [Piece(index, data) for index, data in found.items()]


def digest_of(results: Sequence[Sequence[Piece]]) -> bytes:
    """The digest of results: their types and elements."""
    if not results:
        return _NOTHING
    digest = hashlib.blake2b(digest_size=DIGEST_SIZE)
    for pieces in results:
        for index, data in pieces:
            kind = _kinds.get(data.dtype)
            if kind is None:  # which takes longer than the rest
                kind = _kinds[data.dtype] = str(data.dtype)
            digest.update(f"{index}{kind}{data.shape}".encode())
            is_in_one = data.dtype.kind not in "OT"  # elements of these are elsewhere
            digest.update(data.tobytes() if is_in_one else pickle.dumps(data.tolist()))
    return digest.digest()


def packed(values: object, what: str) -> bytes:
    """A state or results as bytes.

    Raises:
        JournalError: they cannot be pickled.
    """
    try:
        return pickle.dumps(values, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise JournalError(f"{what} cannot be written to the journal: {error!r} when it is pickled") from error


def unpacked(data: bytes, what: str) -> Any:
    """What `packed` was given.

    Raises:
        JournalError: it cannot be read, because a class that it needs is not there any more.
    """
    try:
        return pickle.loads(data)
    except Exception as error:
        raise JournalError(f"{what} cannot be read from the journal: {error!r} when it is unpickled") from error


def put(spec: OutSpec, pieces: Sequence[Piece]) -> jax.Array:
    """The array of a spec that has these parts in this process; ValueError or KeyError if they are another's."""
    if jax.dtypes.issubdtype(spec.dtype, jax.dtypes.prng_key):
        return _put_keys(spec, pieces)
    if spec.sharding.is_fully_addressable:
        data = pieces[0].data
        if (data.shape, data.dtype) != (spec.shape, spec.dtype):
            raise ValueError("an array of another type")
        return spec.put_numpy(data)
    by_index = dict(pieces)
    by_device = {}
    for device, slices in spec.sharding.addressable_devices_indices_map(spec.shape).items():
        found = by_index.get(None)
        by_device[device] = by_index[index_of(slices or (), spec.shape)] if found is None else found[slices or ...]
    return array_of_shards(spec.aval, spec.sharding, by_device)


def _put_keys(spec: OutSpec, pieces: Sequence[Piece]) -> jax.Array:
    """As `put`, of typed keys: of each part the data is known, which has one dimension more."""
    shape, sharding = spec.shape, spec.sharding
    by_index = {part and part[: len(shape)]: keys_of_data(spec.dtype, data) for part, data in pieces}
    if None in by_index:
        return resharded(by_index[None], sharding)
    return jax.make_array_from_callback(shape, sharding, lambda index: by_index[index_of(index or (), shape)])
