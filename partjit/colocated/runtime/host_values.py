"""NumPy arrays and Python numbers, as arguments and results of colocated functions.

They become arrays as they would in jax: numbers have a weak type, and 64 bits are 32 unless `jax_enable_x64` is set.
Each is put directly to the devices that its sharding names.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import AbstractValue, ShapedArray
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from partjit._jax.arrays import TypedComplex, TypedFloat, TypedInt, numpy_putter, shareable
from partjit._jax.types import Device, PyTree
from partjit.colocated.devices import replicated_over
from partjit.colocated.runtime.pending import OnDemand, PendingArray

__all__ = [
    "KINDS_OF_NUMPY",
    "LARGE",
    "NUMBERS",
    "Destination",
    "HostArgument",
    "HostValue",
    "is_host_value",
    "is_new",
    "is_object",
    "owned",
    "put_arguments",
    "put_host_arguments",
]

NUMBERS: dict[type, type] = {
    bool: np.bool_,
    **dict.fromkeys((int, TypedInt), np.int64),  # typed are those that jax gives to the rules of a custom derivative
    **dict.fromkeys((float, TypedFloat), np.float64),
    **dict.fromkeys((complex, TypedComplex), np.complex128),
}
"""Types of Python numbers, and the dtypes of the arrays that they become if 64 bits are enabled."""
KINDS_OF_NUMPY = frozenset("mMOSU")  # dates, objects and strings, which arrays on devices cannot have
_ALIGNMENT = 64
"""In bytes, of memory that XLA uses on a CPU without a copy. NumPy aligns what it allocates to 16."""
LARGE = 65_536
"""In bytes: copying smaller arrays twice costs less than aligning the first copy."""
_IN_ORDER = (np.bool_, np.integer, np.floating, np.complexfloating)
_CONTAINERS = frozenset({tuple, list, dict})
_SCALARS = frozenset({bool, int, float, complex, *(np.dtype(kind).type for kind in "?bhilqBHILQefdFD")})


def is_host_value(value: object) -> bool:
    """Whether a value is a Python number, or a NumPy array or scalar of a dtype that jax has."""
    if type(value) in NUMBERS:
        return True
    if not isinstance(value, np.ndarray | np.generic):
        return _number_type(type(value)) is not None
    return not isinstance(value, np.ma.MaskedArray) and _is_of_jax(value.dtype)


@functools.lru_cache(maxsize=256)
def _number_type(kind: type) -> type | None:
    """That of `NUMBERS` which a type is or is made of, as an `enum.IntEnum` is of `int`; jax takes these alike."""
    if issubclass(kind, np.generic):  # NumPy's double is a `float`
        return None
    return next((base for base in kind.__mro__ if base in NUMBERS), None)


@functools.lru_cache(maxsize=256)
def _is_of_jax(dtype: np.dtype) -> bool:
    if dtype.kind == "V":  # the dtypes of ml_dtypes, bfloat16 for example, are of the kind of records
        return bool(jax.numpy.issubdtype(dtype, np.number))
    return dtype.kind not in KINDS_OF_NUMPY and dtype not in (np.longdouble, np.clongdouble)


def is_object(value: object) -> bool:
    """Whether an argument of a colocated function is an object that it gets as it is, and no array or type of one."""
    if isinstance(value, jax.Array) or is_host_value(value):
        return False
    # What jax computes with, such as a ref, has a type.
    return not isinstance(value, jax.ShapeDtypeStruct | AbstractValue) and not hasattr(value, "aval")


def is_new(returned: PyTree) -> bool:
    """Whether what a function has returned is no array of jax, nor in the memory of one, at a glance."""
    kind = type(returned)
    if kind in _CONTAINERS:
        return all(map(is_new, returned.values() if kind is dict else returned))
    return kind in _SCALARS or (kind is np.ndarray and returned.flags.writeable)


class HostValue:
    """A NumPy array or Python number that is to become an array.

    Attributes:
        shape, dtype, weak_type: those of the array.
    """

    __slots__ = ("_value", "dtype", "shape", "weak_type")

    def __init__(self, value: Any) -> None:
        number = _number_type(type(value))
        own = None if number is None else NUMBERS[number]
        self._value = value if number is None or type(value) is number else number(value)
        self.shape: tuple[int, ...] = () if own is not None else value.shape
        self.dtype: np.dtype = _dtype_in_jax(value.dtype if own is None else np.dtype(own))
        self.weak_type = own is not None and own is not np.bool_

    @property
    def aval(self) -> ShapedArray:
        """The type of the array."""
        return ShapedArray(self.shape, self.dtype, self.weak_type)

    def is_deleted(self) -> bool:
        """False, as for an array that is not deleted."""
        return False

    def has_dtype(self, dtype: np.dtype) -> bool:
        """Whether it may become an array of this dtype: a number may have that of any kind that includes its own."""
        if self.dtype == dtype:
            return self.too_large_for(dtype) is None
        if not self.weak_type or not jax.numpy.issubdtype(dtype, np.number):
            return False
        return _kind(self.dtype) <= _kind(dtype) and _fits(self._value, dtype)

    def too_large_for(self, dtype: np.dtype) -> int | None:
        """One of its integers that is none of this dtype, which the array would have; None if there is none."""
        value = self._value
        if type(value) is int:
            return None if _fits(value, dtype) else value
        if self.dtype.kind not in "iu" or self.dtype != dtype or value.dtype.itemsize == dtype.itemsize:
            return None
        bounds = (int(value.min()), int(value.max())) if value.size else ()
        return next((bound for bound in bounds if not _fits(bound, dtype)), None)

    def put(self, aval: ShapedArray, sharding: Sharding, committed: bool, *, is_explicit: bool = False) -> jax.Array:
        """The array of this type, of the same shape, on the devices of a sharding.

        Args:
            aval, sharding, committed: the type of the array, and where it is put.
            is_explicit: whether this is an explicit transfer to jax's transfer guard.

        Raises:
            OverflowError: it is an integer too large for the dtype.
        """
        return numpy_putter(aval, sharding, committed, is_explicit=is_explicit)(self.as_numpy(aval.dtype))

    def as_numpy(self, dtype: np.dtype, unshared: Collection[int] = ()) -> np.ndarray:
        """A NumPy array of this dtype that nobody else changes: the array itself if that is one of the `unshared`.

        Args:
            dtype: the dtype.
            unshared: the ids of those that nobody else refers to, from `LARGE` on, and that one device gets.

        Raises:
            OverflowError: it is an integer too large for the dtype.
        """
        return _own_numpy(self._value, dtype, unshared)

    def put_by_default(self) -> jax.Array:
        """The array on the default device, or replicated over the mesh that `jax.set_mesh` has set."""
        value = self._value
        if self.shape:  # for each other shape `jax.numpy.array` compiles a program
            with jax.transfer_guard("allow"):
                number = jax.numpy.array(0)
            return self.put(self.aval, number.sharding, number.committed)
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.isnative:
            value = np.asarray(value, self.dtype)
        return jax.numpy.array(value)


class Destination:
    """Where NumPy arrays and numbers of one type are put.

    Args:
        aval: the type of the arrays.
        sharding, committed: theirs.
        is_explicit: whether these are explicit transfers to jax's transfer guard.

    Attributes:
        are_used: whether a function used more than the number of one of them. The next ones had better be put at once:
            an operation on an array that is put when it is used takes several times as long, also once it is there.
    """

    __slots__ = ("_is_explicit", "_is_number", "_least", "_most", "_put", "are_used", "aval", "committed", "sharding")

    def __init__(self, aval: ShapedArray, sharding: Sharding, committed: bool, *, is_explicit: bool = False) -> None:
        self._is_explicit = is_explicit
        self.are_used = False
        self.aval = aval
        self.sharding = sharding
        self.committed = committed
        self._put: Callable[[np.ndarray], jax.Array] | None = None
        dtype = np.dtype(aval.dtype)
        self._is_number = aval.shape == () and dtype.kind in "biuf"
        is_integer = aval.shape == () and dtype.kind in "iu"
        self._least, self._most = (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)) if is_integer else (1, 0)

    def argument(self, value: Any) -> "HostArgument":
        """Of an array or number as it is now. Raises OverflowError for an integer too large for its dtype."""
        if type(value) is int and self._least <= value <= self._most:
            return HostArgument(None, self, value)
        own = np.array(value, self.aval.dtype) if type(value) in NUMBERS else _own_numpy(value, self.aval.dtype)
        return HostArgument(own, self, own.item() if self._is_number else None)

    def when_used(self, value: np.ndarray) -> jax.Array:
        """The array of one that nobody changes; of a number, put on the devices when more than the number is used."""
        is_lazy = self._is_number and not self.are_used
        return HostArgument(value, self, value.item()).when_used() if is_lazy else self.put(value)

    def put(self, value: np.ndarray) -> jax.Array:
        """The array on the devices."""
        if self._put is None:
            self._put = numpy_putter(self.aval, self.sharding, self.committed, is_explicit=self._is_explicit)
        return shareable(self._put(value))


class HostArgument(OnDemand):
    """A NumPy array or number that a program was called with and that only its calls read.

    It is put on devices by the first call that needs it there, in the thread of that call.

    Args:
        value: the NumPy array, or that of the number, which nobody else changes; None for an integer of the dtype.
        destination: where it is put.
        number: what the elements are, if it is one of them alone.
    """

    __slots__ = ("_array", "_destination", "_number", "_value")

    def __init__(self, value: np.ndarray | None, destination: Destination, number: bool | int | float | None) -> None:
        self._value = value
        self._destination = destination
        self._number = number
        self._array: jax.Array | None = None

    @property
    def number(self) -> bool | int | float | None:
        """See `OnDemand`."""
        return self._number

    @property
    def dtype(self) -> np.dtype:
        """That of the array."""
        return np.dtype(self._destination.aval.dtype) if self._value is None else self._value.dtype

    @property
    def _numpy(self) -> np.ndarray:
        if self._value is None:
            self._value = np.array(self.number, self._destination.aval.dtype)
        return self._value

    @property
    def read_only(self) -> np.ndarray:
        """The NumPy array, which cannot be written into."""
        value = self._numpy
        if value.flags.writeable:
            value = self._value = value.view()
            value.setflags(write=False)
        return value

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return self._numpy

    def array(self) -> jax.Array:
        """The array on the devices."""
        if self._array is None:
            self._array = self._destination.put(self._numpy)
        return self._array

    def __call__(self) -> jax.Array:
        """As `array`, where more than the number is used."""
        self._destination.are_used = True
        return self.array()

    def when_used(self) -> jax.Array:
        """The array; of a number, one that is put on the devices when a function uses more than the number."""
        destination = self._destination
        if self.number is None or destination.are_used:
            return self.array()
        return PendingArray.made_by(self, destination.aval, destination.sharding, destination.committed)

    def itself(self) -> Any:
        """The argument, for a function of NumPy arrays."""
        return self

    def moved(self, sharding: Sharding) -> "HostArgument":
        """The same with another sharding."""
        return HostArgument(self._value, Destination(self._destination.aval, sharding, True), self.number)


def put_host_arguments(leaves: Sequence[Any], *, when_used: bool = False) -> Sequence[Any]:
    """The flat arguments of a call, with those that are not on devices put there; numbers `when_used`, if so."""
    if HostArgument not in map(type, leaves):
        return leaves
    put = HostArgument.when_used if when_used else HostArgument.array
    return [put(leaf) if type(leaf) is HostArgument else leaf for leaf in leaves]


@functools.lru_cache(maxsize=256)
def _in_native_order(dtype: np.dtype) -> np.dtype:
    return dtype.newbyteorder("=")


def _dtype_in_jax(dtype: np.dtype) -> np.dtype:
    """The dtype of an array in jax: of 32 bits for 64 unless these are enabled, in the host's order of bytes."""
    return jax.dtypes.canonicalize_dtype(dtype if dtype.isnative else _in_native_order(dtype))


def _own_numpy(value: Any, dtype: np.dtype, unshared: Collection[int] = ()) -> np.ndarray:
    is_own = isinstance(value, np.ndarray) and value.dtype == dtype
    return owned(value, unshared, is_for_one=True) if is_own else np.array(value, dtype)


def _kind(dtype: np.dtype) -> int:
    return next(i for i, kind in enumerate(_IN_ORDER) if jax.numpy.issubdtype(dtype, kind))


def _fits(value: object, dtype: np.dtype) -> bool:
    if type(value) is not int or jax.numpy.issubdtype(dtype, np.bool_):
        return True
    bounds = jax.numpy.iinfo(dtype) if jax.numpy.issubdtype(dtype, np.integer) else jax.numpy.finfo(np.float64)
    return bool(int(bounds.min) <= value <= int(bounds.max))


def owned(value: np.ndarray, unshared: Collection[int] = (), *, is_for_one: bool = False) -> np.ndarray:
    """The array, or a copy if whoever made it may change it later.

    Args:
        value: the array.
        unshared: the ids of those that nobody else refers to, from `LARGE` on.
        is_for_one: whether one device gets it: then XLA copies one that is not aligned, in less time than this does.
    """
    if not value.flags.writeable and _is_of_an_array(value):
        return value
    if value.nbytes < LARGE:
        return np.array(value)
    if id(value) in unshared and value.flags.c_contiguous and (is_for_one or not value.ctypes.data % _ALIGNMENT):
        return value
    memory = np.empty(value.nbytes + _ALIGNMENT, np.uint8)
    copy = np.ndarray(value.shape, value.dtype, memory, -memory.ctypes.data % _ALIGNMENT)
    copy[...] = value
    return copy


def _is_of_an_array(value: np.ndarray) -> bool:
    """Whether its memory is that of an array of jax, which nobody changes."""
    base: Any = value
    while isinstance(base, np.ndarray) and not base.flags.writeable:
        base = base.base
    return isinstance(base, memoryview) and isinstance(base.obj, jax.Array)


def put_arguments(
    leaves: Sequence[object],
    specs: Sequence[jax.ShapeDtypeStruct | None] | None,
    devices: Sequence[Device] | None,
) -> list[Any]:
    """The flat arguments of a call, with arrays in place of NumPy arrays and numbers.

    Each is sharded as its spec says; else it is replicated over the devices of the call, which are those of the first
    array unless they are given.

    Args:
        leaves: the arguments.
        specs: what is specified of each.
        devices: those of the call, if they are specified.

    Raises:
        OverflowError: one is an integer too large for its dtype.
    """
    arrays = (leaf for leaf in leaves if isinstance(leaf, jax.Array))
    like = None if devices else next(arrays, None)
    if specs is None or len(specs) != len(leaves):
        specs = [None] * len(leaves)
    return [
        _put(HostValue(leaf), spec, devices, like) if is_host_value(leaf) else leaf
        for leaf, spec in zip(leaves, specs, strict=True)
    ]


def _put(
    value: HostValue, spec: jax.ShapeDtypeStruct | None, devices: Sequence[Device] | None, like: jax.Array | None
) -> jax.Array:
    aval = value.aval
    if spec is not None and value.has_dtype(spec.dtype):
        aval = ShapedArray(value.shape, spec.dtype)
    if spec is not None and spec.sharding is not None and spec.shape == value.shape:  # another one is refused later
        return value.put(aval, spec.sharding, True)
    if devices:
        return value.put(aval, replicated_over((*devices,)), True)
    if like is None:
        return value.put_by_default()
    sharding = like.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return value.put(aval, sharding, like.committed)
