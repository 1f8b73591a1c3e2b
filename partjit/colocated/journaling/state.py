"""The state of a program in a commit: the leaves of a tree, each in pieces that the processes have."""

import os
import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from partjit._jax.arrays import PRNGKeyArray, keys_of_data, with_weak_type
from partjit._jax.moves import resharded
from partjit._jax.to_numpy import as_numpy
from partjit._jax.types import PyTree
from partjit.checks import shown
from partjit.colocated.journaling.durable import Checksum, checked
from partjit.colocated.journaling.payloads import Index, index_of
from partjit.colocated.runtime.pending import PendingArray
from partjit.errors import JournalError

__all__ = ["read_state", "write_state"]


class _Stored(NamedTuple):
    """A piece of a leaf in a file.

    Attributes:
        part: which of the leaf it is.
        start, length: where its bytes are.
    """

    part: Index
    start: int
    length: int


class _Leaf(NamedTuple):
    """A leaf in a file.

    Attributes:
        shape, dtype: of the whole leaf.
        pieces: those in this file.
        keys: of an array of keys, whose data this is, the name of its dtype; "" for others. Journals from before it was
            written have None.
    """

    shape: tuple[int, ...]
    dtype: Any
    pieces: list[_Stored]
    keys: str | None = None


def write_state(path: str, state: PyTree, process: int) -> Checksum:
    """Writes the pieces that are up to this process: of every piece of an array, one process writes one copy."""
    with_paths, _ = jax.tree_util.tree_flatten_with_path(state)
    leaves: dict[str, _Leaf] = {}
    with open(path, "wb") as file:
        sink = _Sink(file)
        for key_path, leaf in with_paths:
            key = jax.tree_util.keystr(key_path)
            if key in leaves:
                raise ValueError(
                    f"Journal.commit: two leaves of the state have the path state{key}, and could not be told apart "
                    "when they are restored: give their keys different texts (__repr__)"
                )
            leaves[key] = _written(sink, leaf, process, f"state{key}")
        table = pickle.dumps(leaves)
        sink.write(table)
        sink.write(len(table).to_bytes(8, "little"))
        file.flush()
        os.fsync(file.fileno())
    return Checksum(sink.length, sink.crc)


class _Sink:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.length = self.crc = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.crc = zlib.crc32(data, self.crc)
        self.length += len(data)


def _written(sink: _Sink, leaf: Any, process: int, path: str) -> _Leaf:
    if isinstance(leaf, PendingArray):
        leaf = leaf.value()
    keys = _name_of_keys(leaf)
    if isinstance(leaf, PRNGKeyArray):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array):
        shape = leaf.shape
        parts = [
            (index_of(shard.index, shape), as_numpy(shard.data))
            for shard in leaf.addressable_shards
            # An array that one process has alone, all of them may have one like it.
            if shard.replica_id == 0 and (process == 0 or not leaf.is_fully_addressable)
        ]
        dtype = np.dtype(leaf.dtype)
    else:
        value = _integer(leaf) if _is_integer(leaf) else np.asarray(leaf)
        if value.dtype.hasobject or value.dtype.kind == "T" or isinstance(leaf, str | bytes):
            raise TypeError(
                f"Journal.commit: {path} is {shown(leaf)}, which is neither an array nor a number: leave it out of the "
                "state, or commit a number or an array in its place"
            )
        shape, dtype = value.shape, value.dtype
        parts = [(tuple((0, n) for n in shape), value)] if process == 0 else []
    pieces = []
    for index, data in parts:
        contiguous = np.ascontiguousarray(data)
        start = sink.length
        sink.write(contiguous.reshape(-1).view(np.uint8).data if contiguous.size else b"")
        pieces.append(_Stored(index, start, sink.length - start))
    return _Leaf(tuple(shape), dtype, pieces, keys)


def _name_of_keys(leaf: Any) -> str:
    """Which keys these are, if they are any: the data of several kinds have the same type."""
    dtype = getattr(leaf, "dtype", None)
    return str(dtype) if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) else ""


def _integer(value: int) -> np.ndarray:
    """A Python integer as NumPy's, or as its bytes where 64 bits do not hold it."""
    if -(2**63) <= value < 2**63:
        return np.asarray(value)
    return np.asarray(np.void(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)))


class _Source(NamedTuple):
    leaf: _Leaf
    data: bytes


def read_state(files: Mapping[str, Checksum], like: PyTree) -> PyTree:
    """The state that some files have.

    Args:
        files: their paths, and what is known of them.
        like: a tree of arrays, or of structs, or of numbers, as the result is to have them; of any mesh.

    Raises:
        JournalError: a file is damaged, or the state is of another structure, shape or dtype.
    """
    found: dict[str, list[_Source]] = {}
    for path, checksum in files.items():
        data = checked(path, checksum)
        length = int.from_bytes(data[-8:], "little")
        for name, leaf in pickle.loads(data[len(data) - 8 - length : -8]).items():
            found.setdefault(name, []).append(_Source(leaf, data))
    with_paths, tree = jax.tree_util.tree_flatten_with_path(like)
    paths = [jax.tree_util.keystr(path) for path, _ in with_paths]
    differing = [f"{path} is not in the journal" for path in paths if path not in found]
    differing += [f"{path} is in the journal only" for path in found if path not in paths]
    leaves = []
    for path, (_, leaf) in zip(paths, with_paths, strict=True):
        if path in found:
            shape, dtype = _shape_and_dtype(leaf)
            own = found[path][0].leaf
            if _is_integer(leaf) and own.dtype.kind == "V" and own.dtype.names is None:
                shape, dtype = own.shape, own.dtype  # of any size
            if (own.shape, own.dtype) != (shape, dtype):
                differing.append(f"{path} is {own.dtype}{[*own.shape]} in the journal, and {dtype}{[*shape]} here")
            elif own.keys not in (None, keys := _name_of_keys(leaf)):
                differing.append(f"{path} is {own.keys or own.dtype} in the journal, and {keys or dtype} here")
            elif not differing:
                leaves.append(_restored(found[path], leaf, path))
    if differing:
        raise JournalError("Journal.restore: the state is another one than was committed: " + "; ".join(differing))
    return tree.unflatten(leaves)


def _shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
    if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return data.shape, np.dtype(data.dtype)
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return tuple(leaf.shape), np.dtype(leaf.dtype)
    return np.shape(leaf), np.dtype(int) if _is_integer(leaf) else np.asarray(leaf).dtype


def _is_integer(leaf: Any) -> bool:
    return isinstance(leaf, int) and not isinstance(leaf, bool)


def _restored(sources: Sequence[_Source], leaf: Any, path: str) -> Any:
    shape, dtype = sources[0].leaf.shape, sources[0].leaf.dtype
    everything = tuple(slice(None) for _ in shape)

    def part(slices: tuple[slice, ...] | None) -> np.ndarray:
        return _part(sources, index_of(slices or everything, shape), dtype, path)

    if _is_integer(leaf) and dtype.kind == "V":
        return type(leaf)(int.from_bytes(part(everything).tobytes(), "little", signed=True))
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)(part(everything)[()])
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return part(everything)[()] if isinstance(leaf, np.generic) else part(everything)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        keys = keys_of_data(leaf.dtype, part(everything))
        return keys if leaf.sharding is None else resharded(keys, leaf.sharding)
    sharding = leaf.sharding
    with jax.enable_x64(True):  # or 64 bits become 32, whatever the program has set where it made the array
        if sharding is None or (isinstance(leaf, jax.Array) and not leaf.committed):
            array = jax.numpy.asarray(part(everything))
        else:
            array = jax.make_array_from_callback(shape, sharding, part)
        return with_weak_type(array, True) if leaf.weak_type else array


def _part(sources: Sequence[_Source], index: Index, dtype: np.dtype, path: str) -> np.ndarray:
    """A part of a leaf, put together out of what the files have of it."""
    result = np.empty([end - start for start, end in index], dtype)
    missing = np.ones(result.shape, bool)
    for leaf, data in sources:
        for stored in leaf.pieces:
            cut = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(index, stored.part, strict=True)]
            if any(start >= end for start, end in cut):
                continue
            there = tuple(slice(s - a, e - a) for (s, e), (a, _) in zip(cut, stored.part, strict=True))
            here = tuple(slice(s - a, e - a) for (s, e), (a, _) in zip(cut, index, strict=True))
            piece = np.frombuffer(data, np.uint8, stored.length, stored.start).view(dtype)
            result[here] = piece.reshape([end - start for start, end in stored.part])[there]
            missing[here] = False
    if missing.any():
        raise JournalError(f"Journal.restore: {path} is not complete in the files of the commit")
    return result
