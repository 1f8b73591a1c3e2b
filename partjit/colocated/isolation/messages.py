"""The messages between a worker process and its parent.

A message is one packet of a socket, so that it is sent and received as a whole or not at all. What does not fit, and
large arrays, are in memory that both processes map: a `Segment` for each direction, which the parent makes. Arrays are
views of it there. Whoever reads a segment reports when arrays have outlived the call; the next message then uses a new
one, and the old one lives as long as they do.

A worker loads this module without its package, which imports jax: it may import nothing but the standard library,
NumPy, cloudpickle and `standard_objects`.
"""

import io
import mmap
import os
import pickle
import sys
import types
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from partjit.colocated.standard_objects import reduced_standard_object

try:
    import cloudpickle as _cloudpickle
except ImportError:  # needed to make a call, not to import
    _cloudpickle = None

__all__ = [
    "PACKET_BYTES",
    "Content",
    "Failed",
    "Reply",
    "Request",
    "Segment",
    "definition_of",
    "dumps",
    "pack",
    "size_of",
    "unpack",
]

PACKET_BYTES = 65_536
"""The longest packet."""
_BODY_BYTES = 32_768
"""A longer body does not travel in the packet."""
_LARGE = 16_384
"""In bytes: larger arrays do not travel in the body."""
_MOST_PIECES = 1000
"""More arrays travel in the body: the places of the pieces have to fit into a packet."""
_ALIGNMENT = 64


Content = tuple[bytes | None, Sequence[tuple[int, int]]]
"""A pickled value: its pickle, None if that is the first piece in the segment; offset and size of each piece there."""


class Request(NamedTuple):
    """What a parent asks for.

    Attributes:
        number: counts the requests; the reply has the same number.
        action: "call" a function; "construct" the object, or call a "method" of it; "end"; "memory", for a result that
            waits for it; "synchronize" after a request of which the reply was not awaited.
        key: the function.
        method: the name of the method.
        definition: with the first call of a function, and to construct: whether it comes with the arguments.
        arguments: the arguments, after the definition and the import path if they come with them.
        forget: functions that are not called any more; None for all.
        has_inbox, has_outbox: whether descriptors of new segments come with the packet: of that in which the arguments
            are, and of that for results.
        drops_outbox: whether the parent still uses the previous result.
    """

    number: int
    action: str
    key: int = 0
    method: str | None = None
    definition: bool = False
    arguments: Content | None = None
    forget: Sequence[int] | None = ()
    has_inbox: bool = False
    has_outbox: bool = False
    drops_outbox: bool = False


class Reply(NamedTuple):
    """What a worker answers.

    Attributes:
        number: that of the request.
        content: the result, or a `Failed`.
        has_failed: whether it is a failure.
        needed: how many bytes of memory the result needs that waits for it; the content is then missing.
        keeps_inbox: whether something in the worker still uses the arguments.
        has_function: whether the worker has the function: it may have failed to read it, or what came with it.
    """

    number: int
    content: Content | None = None
    has_failed: bool = False
    needed: int = 0
    keeps_inbox: bool = False
    has_function: bool = False


class Failed(NamedTuple):
    """An exception, in a form that can be read everywhere.

    Attributes:
        pickled: the exception; None if it cannot be pickled and read again.
        text: its type and message.
        traceback: its traceback, with its causes.
    """

    pickled: bytes | None
    text: str
    traceback: str


class Segment:
    """Memory that two processes map.

    Args:
        size: in bytes.
        descriptor: of the file in memory, which belongs to the segment from then on; without one, a file is made.

    Attributes:
        size: in bytes.
        descriptor: the open file.
    """

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        # A file without a name: no process can leave it behind, and it is not limited by the size of /dev/shm, which is
        # small in containers.
        self.descriptor = os.memfd_create("partjit") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, size)
        self.size = size
        self._memory = mmap.mmap(self.descriptor, size)
        self._read: list[weakref.ref[np.ndarray]] = []

    @staticmethod
    def of(descriptor: int) -> "Segment":
        """That of an open file, of its size."""
        return Segment(os.fstat(descriptor).st_size, descriptor)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def write(self, pieces: Sequence[bytes | memoryview]) -> Sequence[tuple[int, int]]:
        """Copies pieces to it, without holding the interpreter; returns their offsets and sizes."""
        places, offset, memory = [], 0, np.frombuffer(self._memory, np.uint8)
        for piece in pieces:
            source = np.frombuffer(piece, np.uint8)
            np.copyto(memory[offset : offset + source.size], source)
            places.append((offset, source.size))
            offset += _aligned(source.size)
        return places

    def read(self, places: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Views of the pieces at these places."""
        # A view of an array refers to the array in which the chain of arrays begins, so each piece is the first of one.
        pieces = [np.frombuffer(self._memory, np.uint8, size, offset) for offset, size in places]
        self._read += map(weakref.ref, pieces)
        return [piece.data for piece in pieces]

    def is_unused(self) -> bool:
        """Whether nothing refers to what was read, so that it may be overwritten."""
        while self._read and self._read[-1]() is None:
            self._read.pop()
        return not self._read


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def size_of(pieces: Sequence[bytes | memoryview]) -> int:
    """How many bytes a segment needs for these pieces."""
    return sum(_aligned(len(piece)) for piece in pieces)


_Base: Any = pickle.Pickler if _cloudpickle is None else _cloudpickle.Pickler


class _Pickler(_Base):
    """Cloudpickle's, for a reader without jax: its arrays are written as NumPy arrays."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.ndarray:
            return self._of_user_dtype(obj) if obj.dtype.isbuiltin == 2 else NotImplemented
        if _is_remade_by_init(obj):
            _, args, *state = obj.__reduce__()
            return _exception, (type(obj), args), *state
        jax: Any = sys.modules.get("jax")
        if jax is not None and isinstance(obj, getattr(jax, "Array", ())):
            value = np.asarray(obj)
            return self._of_user_dtype(value) if value.dtype.isbuiltin == 2 else value.__reduce_ex__(5)
        if jax is not None and isinstance(obj, getattr(jax, "Shard", ())):
            of_device = ("id", "platform", "process_index")
            device = types.SimpleNamespace(**{name: getattr(obj.device, name) for name in of_device})
            shard = {"data": obj.data, "index": obj.index, "device": device, "replica_id": obj.replica_id}
            return types.SimpleNamespace, (), shard
        if _cloudpickle is None:
            return NotImplemented
        return reduced_standard_object(self, obj, has_own_main=True) or super().reducer_override(obj)

    def _of_user_dtype(self, array: np.ndarray) -> Any:
        # NumPy copies such arrays, those of ml_dtypes for example, into the pickle, and they become writable.
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        flat.flags.writeable = array.flags.writeable
        return np.ndarray, (array.shape, array.dtype, pickle.PickleBuffer(flat.data))


def _is_remade_by_init(value: object) -> bool:
    """Whether it is an exception that pickle makes with its `args`, which its `__init__` may have made of others."""
    if not isinstance(value, BaseException):
        return False
    own = {name for base in type(value).__mro__ if not _is_native(base) for name in vars(base)}
    return "__init__" in own and own.isdisjoint({"__new__", "__reduce__", "__reduce_ex__", "__slots__"})


def _is_native(cls: type) -> bool:
    return cls.__module__ == "builtins"


def _exception(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An exception of that class with these `args`, but for its state."""
    error = cls.__new__(cls, *args)
    next(base for base in cls.__mro__ if _is_native(base)).__init__(error, *args)
    return error


def definition_of(value: object) -> bytes:
    """The pickle of a function or an object to be constructed: it owns its arrays."""
    if _cloudpickle is None:
        raise ModuleNotFoundError("isolate='process' needs cloudpickle: pip install cloudpickle", name="cloudpickle")
    file = io.BytesIO()
    _Pickler(file, 5).dump(value)
    return file.getvalue()


def dumps(value: object) -> tuple[bytes, list[memoryview]]:
    """A pickle, and the large arrays that are not in it; arrays that cannot be written to remain so."""
    large: list[memoryview] = []
    try:
        return pickle.dumps((True, _encoded(value, large)), 5), large
    except _NotPlainError:
        large.clear()

    def is_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes <= _LARGE or len(large) >= _MOST_PIECES:
            return True
        large.append(raw)
        return False

    file = io.BytesIO()
    _Pickler(file, 5, buffer_callback=is_in_pickle).dump((False, value))
    return file.getvalue(), large


# Pickling an array takes several times as long as copying a small one. So values of nothing but arrays, numbers and
# texts in containers are written in another form: a tuple is (_TUPLE, *items), an array (_ARRAY, dtype, shape, whether
# it can be written to, its bytes or the number of its piece).

_TUPLE, _ARRAY = 0, 1
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})


class _NotPlainError(Exception):
    """A value has types that the other form does not have."""


def _encoded(value: Any, large: list[memoryview]) -> Any:
    kind = type(value)
    if kind is np.ndarray:
        dtype, flags = value.dtype, value.flags
        if dtype.kind not in "biufc" or dtype.isbuiltin == 2 or not flags.c_contiguous:
            raise _NotPlainError
        data: bytes | int
        if value.nbytes <= _LARGE or len(large) >= _MOST_PIECES:
            data = value.tobytes()
        else:
            data = len(large)
            large.append(value.data.cast("B"))
        return _ARRAY, dtype.str, value.shape, flags.writeable, data
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return _TUPLE, *[_encoded(item, large) for item in value]
    if kind is list:
        return [_encoded(item, large) for item in value]
    if kind is dict and _PLAIN.issuperset(map(type, value)):
        return {key: _encoded(item, large) for key, item in value.items()}
    raise _NotPlainError


def _decoded(value: Any, pieces: Sequence[memoryview]) -> Any:
    kind = type(value)
    if kind is tuple:
        if value[0] == _TUPLE:
            return tuple([_decoded(item, pieces) for item in value[1:]])
        _, dtype, shape, is_writable, data = value
        if type(data) is int:
            return np.ndarray(shape, dtype, pieces[data] if is_writable else pieces[data].toreadonly())
        return np.ndarray(shape, dtype, bytearray(data) if is_writable else data)
    if kind is list:
        return [_decoded(item, pieces) for item in value]
    if kind is dict:
        return {key: _decoded(item, pieces) for key, item in value.items()}
    return value


def pack(body: bytes, large: Sequence[memoryview]) -> tuple[bytes | None, Sequence[bytes | memoryview]]:
    """The body, if it fits into a packet, and the pieces for a segment."""
    return (None, [body, *large]) if len(body) > _BODY_BYTES else (body, large)


def unpack(content: Content, segment: Segment | None) -> Any:
    """The value of a content, whose pieces are in the segment."""
    body, places = content
    pieces = segment.read(places) if segment is not None and places else []
    if body is None:
        body, pieces = pieces[0], pieces[1:]
    is_plain, value = pickle.loads(body, buffers=pieces)
    return _decoded(value, pieces) if is_plain else value
