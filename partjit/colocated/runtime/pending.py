"""The pending result of a colocated call: an array whose value comes later.

Only what needs the value waits. What follows from the specs (shape, dtype, sharding) and queries of the state
(`is_ready`, `repr`) do not.
"""

import copy
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.experimental.layout import Format
from jax.sharding import Sharding

from partjit._jax.arrays import ArrayImpl, PRNGKeyArray, is_computed, register_array_type, shareable
from partjit._jax.types import Device
from partjit.colocated.runtime import scheduler
from partjit.colocated.runtime.call import Call
from partjit.colocated.runtime.failures import Failure, PoisonedError

__all__ = ["OnDemand", "PendingArray", "require_array", "settled", "values_of", "when_received"]


class OnDemand:
    """A value that is made when it is first used."""

    __slots__ = ("__weakref__",)

    @property
    def source(self) -> jax.Array | None:
        """An array that it is made of and that may still be computed, if there is one."""
        return None

    @property
    def number(self) -> bool | int | float | None:
        """The value as a Python number, if it is one; whoever wants no more than that needs no array."""
        return None

    def __call__(self) -> jax.Array:
        """The value; several threads may call this, the values of all but one of which are dropped."""
        raise NotImplementedError


class PendingArray(jax.Array):
    """A `jax.Array` that is the result of a colocated call.

    It is accepted wherever an array is. Using its value waits for the call and raises what the call raised.
    """

    __slots__ = (
        "__weakref__",
        "_aval",
        "_call",
        "_failure",
        "_is_committed",
        "_is_deleted",
        "_on_demand",
        "_own_sharding",
        "_received",
        "_then",
    )

    def __init__(self, call: Call | None, aval: ShapedArray, sharding: Sharding, committed: bool) -> None:
        self._call = call
        self._aval = aval
        self._own_sharding = sharding
        self._is_committed = committed
        self._received: Any = None
        self._on_demand: OnDemand | None = None
        self._is_deleted = False
        self._failure: Failure | None = None
        self._then: list[Callable[[jax.Array], None]] = []

    @staticmethod
    def made_by(on_demand: OnDemand, aval: ShapedArray, sharding: Sharding, committed: bool) -> "PendingArray":
        """An array that is made when more than its number is used."""
        array = PendingArray(None, aval, sharding, committed)
        array._on_demand = on_demand
        return array

    @staticmethod
    def of(value: jax.Array) -> "PendingArray":
        """The result of a call that has ended."""
        array = PendingArray(None, value.aval, value.sharding, value.committed)
        array._received = shareable(value)
        return array

    @staticmethod
    def failed(failure: Failure, aval: ShapedArray, sharding: Sharding, committed: bool) -> "PendingArray":
        """The result of a call that has failed."""
        array = PendingArray(None, aval, sharding, committed)
        array._failure = failure
        return array

    def receive(self, value: jax.Array | OnDemand) -> None:
        """Sets the value and runs the actions that wait for it."""
        # This order takes the place of a lock, which an interrupt could leave locked: an action added once the value is
        # visible is run by the thread that adds it, one added before is run here, and only then is the call dropped.
        if isinstance(value, OnDemand):
            self._on_demand = value
        else:
            self._received = shareable(value)
        while self._then:
            try:
                action = self._then.pop(0)
            except IndexError:  # the thread that added it has taken it back
                break
            action(self._present())
        self._call = None

    def receive_failure(self, failure: Failure) -> None:
        """Sets the failure, unless the value or a failure was set before."""
        if self._call is not None:
            self._received, self._on_demand, self._failure, self._then = None, None, failure, []
            self._call = None

    def _present(self) -> Any:
        """The value, if it is there."""
        on_demand = self._on_demand
        if on_demand is not None:
            self._received = shareable(on_demand())
            self._on_demand = None
        return self._received

    def value(self) -> jax.Array:
        """The array; waits until the call has ended.

        Raises:
            Exception: what the call raised.
        """
        self._join()
        if self._failure is not None:
            self._failure.raise_()
        try:
            return self._present()
        except PoisonedError as error:  # it is made of the result of a call that failed
            failure = error.failure
        return failure.raise_()

    def _value_of_attribute(self) -> jax.Array:
        """As `value`, where an AttributeError would say that this is no array, or that it has no such attribute."""
        try:
            return self.value()
        except AttributeError as error:
            raise RuntimeError(
                f"the colocated call raised AttributeError, which here would say that its result has no such "
                f"attribute: {error}"
            ) from error

    def value_for_call(self) -> jax.Array:
        """As `value`, for a call that has this array as an argument: its failure is passed on, not raised.

        Raises:
            PoisonedError: the call failed.
        """
        self._join()
        if self._failure is not None:
            raise PoisonedError(self._failure)
        return self._present()

    def ends_within(self, seconds: float) -> bool:
        """Whether its call has ended, or does within so many seconds."""
        call = self._call
        return call is None or scheduler.join(call, time.monotonic() + seconds)

    def _join(self) -> None:
        call = self._call
        if call is not None:
            scheduler.join(call)
            if self._call is not None:
                raise RuntimeError(f"the thread that ran the colocated call of {call.name!r} was killed")

    # Known from the specs, as are those in `_KNOWN`

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.size * self.itemsize

    @property
    def committed(self) -> bool:
        """Whether it is committed to its devices."""
        value = self._present()
        return self._is_committed if value is None else value.committed

    @property
    def _committed(self) -> bool:  # the name that jax reads
        return self.committed

    @property
    def format(self) -> Format:
        """Its sharding and, once the value is there, its layout in memory."""
        value = self._present()
        return Format(None, self._own_sharding) if value is None else value.format

    def devices(self) -> set[Device]:
        """Its devices."""
        return self.sharding.device_set

    def __len__(self) -> int:
        if not self._aval.shape:
            raise TypeError("len() of unsized object")
        return self._aval.shape[0]

    # State

    @property
    def has_value(self) -> bool:
        """Whether the call has succeeded."""
        return self._call is None and self._failure is None

    def is_ready(self) -> bool:
        """Whether using the value would not wait."""
        if self._call is not None:
            return False
        on_demand = self._on_demand
        computed = self._received if on_demand is None else on_demand.source
        return computed is None or computed.is_deleted() or is_computed(computed)

    def is_deleted(self) -> bool:
        """Whether it was deleted or donated."""
        return self._is_deleted or (self._received is not None and self._received.is_deleted())

    def block_until_ready(self) -> jax.Array:
        """The array, once it is computed."""
        self._join()
        on_demand = self._on_demand
        if on_demand is None:
            return self._value_of_attribute().block_until_ready()
        if on_demand.source is not None:
            on_demand.source.block_until_ready()
        return self

    def copy_to_host_async(self) -> None:
        """Starts the copy as soon as the value is there."""
        when_received(self, lambda value: None if value.is_deleted() else value.copy_to_host_async())

    def delete(self) -> None:
        """Frees the memory as soon as the value is there; calls that already have the array keep it."""
        self._is_deleted = True
        when_received(self, lambda value: value.delete())

    def __repr__(self) -> str:
        value = self._present()
        if value is not None and not value.is_deleted() and is_computed(value):
            return repr(value)
        state = "deleted" if self.is_deleted() else "pending"
        if self._failure is not None:
            state = f"failed: {self._failure}"
        return f"PendingArray({self._aval.str_short()}, {self.sharding}, {state})"

    def __int__(self) -> int:
        number = self._number()
        return int(self.value()) if number is None else int(number)

    def __float__(self) -> float:
        number = self._number()
        return float(self.value()) if number is None else float(number)

    def __bool__(self) -> bool:
        number = self._number()
        return bool(self.value()) if number is None else bool(number)

    def __index__(self) -> int:
        number = self._number()
        return number if type(number) is int else operator.index(self.value())

    def item(self, *args: int) -> bool | int | float | complex:
        """The only element, or that at an index, as a Python number."""
        number = self._number()
        return self.value().item(*args) if number is None or args else number

    def __array__(self, dtype: Any = None, context: object = None, copy: bool | None = None) -> np.ndarray:
        value = self.value() if self._number() is None else self._numpy()
        return np.asarray(value, dtype, copy=copy)

    def __buffer__(self, flags: int) -> memoryview:  # which NumPy asks for first, from Python 3.12 on
        value: Any = self.value() if self._number() is None else self._numpy()
        return value.__buffer__(flags)

    def _numpy(self) -> np.ndarray:
        array = np.array(self._number(), self._aval.dtype)
        array.flags.writeable = False  # as of any array
        return array

    def _number(self) -> bool | int | float | None:
        if self._call is not None:
            self._join()
        on_demand = self._on_demand
        return None if on_demand is None else on_demand.number

    def __str__(self) -> str:
        return str(self.value())

    def __reduce__(self) -> str | tuple[object, ...]:
        return self.value().__reduce__()

    def __deepcopy__(self, memo: dict[int, object]) -> jax.Array:
        return copy.deepcopy(self.value(), memo)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_KEYS and jax.dtypes.issubdtype(self.dtype, jax.dtypes.prng_key):
            return getattr(self.value(), name)
        raise AttributeError(f"a jax.Array has no attribute {name!r}", name=name, obj=self)


_ARRAY_TYPES = frozenset({ArrayImpl, PRNGKeyArray, PendingArray})


def require_array(value: object, path: Callable[[], str]) -> None:
    """Raises ValueError unless `value` is a concrete array; NumPy arrays and numbers have been converted."""
    if type(value) in _ARRAY_TYPES or (isinstance(value, jax.Array) and not isinstance(value, Tracer)):
        return
    raise ValueError(
        f"colocated_python only supports jax.Array as input and output, but got {type(value)} at {path()}. NumPy "
        "arrays and numbers are converted, if jax has their dtype; other objects are taken, but not returned"
    )


def values_of(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays, each pending one replaced by its value; waits for them."""
    return [array.value() if type(array) is PendingArray else array for array in arrays]


def settled(array: PendingArray) -> jax.Array:
    """The value in place of an array whose call has succeeded: jax recognizes its type, and dispatches it in C++.

    Over several processes it stays pending, so that all of them have one or none has.
    """
    is_there = array.has_value and array._on_demand is None and jax.process_count() == 1
    return array._received if is_there else array


def when_received(array: PendingArray, action: Callable[[jax.Array], None]) -> None:
    """Runs an action on the value as soon as it is there, before any other use; never if the call fails."""
    array._then.append(action)
    if array._call is None or array._received is not None or array._on_demand is not None:
        try:
            array._then.remove(action)
        except ValueError:  # it is already running
            return
        value = array._present()
        if value is not None:
            action(value)


def _forwarding(name: str, attribute: object) -> object:
    if isinstance(attribute, int):
        return attribute
    if not callable(attribute):
        return property(lambda self: getattr(self._value_of_attribute(), name))

    def method(self: PendingArray, *args: object, **kwargs: object) -> object:
        return getattr(self.value(), name)(*args, **kwargs)

    method.__name__ = name
    return method


# `leaves_of` recognizes plain arrays by this attribute, so it is not forwarded.
_OF_PLAIN_ARRAYS = {"_sharding"}
_OF_KEYS = {"_impl", "_base_array", "_consts"}
_OF_CLASSES = {*dir(type("Plain", (), {})), "__annotations__", "__slots__", "__del__", "__release_buffer__"}
_COMPARISONS = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__format__"}


_KNOWN = {
    **{name: f"_aval.{name}" for name in ("shape", "dtype", "ndim", "size", "weak_type")},
    **{name: f"_own_sharding.{name}" for name in ("is_fully_addressable", "is_fully_replicated")},
    "aval": "_aval",
    "sharding": "_own_sharding",
    "itemsize": "_aval.dtype.itemsize",
}
"""Attributes that follow from the specs, and where to read them."""


for _name, _path in _KNOWN.items():
    setattr(PendingArray, _name, property(operator.attrgetter(_path), doc=getattr(ArrayImpl, _name).__doc__))
for _name in {*dir(ArrayImpl)} - {*vars(PendingArray)} - (_OF_CLASSES - _COMPARISONS) - _OF_PLAIN_ARRAYS:
    setattr(PendingArray, _name, _forwarding(_name, getattr(ArrayImpl, _name)))
register_array_type(PendingArray, PendingArray.value)
