"""Functions and specs as bytes, for another process of the same group or for a copy in this one.

Devices are written as ids and looked up when they are read, so that meshes and shardings come back equal. Equal ones
are written once, in a table in front of the object, which refers to them by number. No state is kept between calls, so
serialization is reentrant and thread-safe.

Unpickling executes code, so only bytes made by this group of processes are read: they carry an authentication code
made with the group's key.
"""

import contextvars
import functools
import hmac
import io
import pickle
import secrets
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from partjit._jax.arrays import shareable
from partjit._jax.dispatch import PjitFunction
from partjit._jax.processes import DistributedRuntimeClient, distributed_client, of_the_first
from partjit._jax.shardings import DeviceList
from partjit.checks import require, require_flag
from partjit.colocated.runtime.failures import add_note
from partjit.colocated.standard_objects import is_importable, reduced_standard_object
from partjit.colocated.uncopyable import uncopyable_parts
from partjit.mesh import Mesh
from partjit.pickling import device_of

try:
    import cloudpickle as _cloudpickle
except ImportError:  # needed to serialize, not to import
    _cloudpickle = None

__all__ = ["copied", "deserialize", "serialize"]

_CODE_BYTES = 32
_KEY_NAME = "partjit/serialization_key"

_Value = TypeVar("_Value")
_Reference = tuple[str, Any]
"""A persistent id: ("device", (platform, id)), ("entry", number in the table), ("variable" or "compiled",
(process, id, name)) for a context variable or a compiled function, or ("class", id) in a copy for this process."""

_variables: dict[int, contextvars.ContextVar[object]] = {}
_compiled: "weakref.WeakValueDictionary[int, PjitFunction | jax.stages.Compiled]" = weakref.WeakValueDictionary()
_classes: "weakref.WeakValueDictionary[int, type]" = weakref.WeakValueDictionary()
_process = secrets.token_hex(8)

_COMPILED = (PjitFunction, jax.stages.Compiled)
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, tuple, list, dict, types.CodeType, types.FunctionType})


def serialize(obj: object) -> bytes:
    """Serializes an object: functions and their captured values by value, modules by reference.

    Args:
        obj: anything that cloudpickle supports; devices, meshes, shardings, device lists, arrays and keys in it.

    Raises:
        ModuleNotFoundError: cloudpickle is not installed.
        ValueError: an array is not fully addressable.
        TypeError, pickle.PicklingError: a part cannot be copied, a lock for example; a note names it.

    Example:
        >>> sharding = jax.sharding.NamedSharding(Mesh(jax.devices(), "x"), jax.sharding.PartitionSpec("x"))
        >>> deserialize(serialize(sharding)) == sharding
        True
    """
    return _signed(obj, None)


def _signed(obj: object, own: Sequence[type] | None) -> bytes:
    try:
        payload = _payload(obj, own)
    except Exception as error:
        parts = uncopyable_parts(obj, functools.partial(_is_copyable, own=own))
        if parts:
            add_note(error, f"this cannot be copied: {parts}. Make it inside of the function, or keep it in a module")
        raise
    return hmac.digest(_group_key(), payload, "sha256") + payload


def _payload(obj: object, own: Sequence[type] | None) -> bytes:
    body = io.BytesIO()
    pickler = _pickler_class()(body, {}, own)
    pickler.dump(obj)
    # An entry refers only to earlier entries: those that it needs were added first.
    return pickle.dumps((pickler.entries, body.getvalue()))


def _is_copyable(obj: object, own: Sequence[type] | None) -> bool:
    try:
        _payload(obj, own)
    except Exception:
        return False
    return True


def deserialize(data: bytes, *, authenticate: bool = True) -> Any:
    """The object in bytes from `serialize`.

    Args:
        data: the bytes.
        authenticate: reject bytes not made by this group of processes. Without, whoever made them can run code here.

    Raises:
        TypeError: `data` is not bytes.
        ValueError: the bytes are from elsewhere, or name a device that does not exist here.
        ModuleNotFoundError: cloudpickle is not installed.
    """
    _require_cloudpickle()
    require("deserialize", "data", data, bytes | bytearray | memoryview, "the bytes that serialize made")
    authenticate = require_flag("deserialize", "authenticate", authenticate)
    code, payload = bytes(data[:_CODE_BYTES]), bytes(data[_CODE_BYTES:])
    if authenticate and not hmac.compare_digest(code, hmac.digest(_group_key(), payload, "sha256")):
        raise ValueError(
            "deserialize: the bytes of data were not made by this group of processes, or were altered. Reading them "
            "would run what they say; if you know where they come from, pass authenticate=False"
        )
    entries, body = pickle.loads(payload)
    table: list[object] = []
    for entry in entries:
        table.append(_Unpickler(io.BytesIO(entry), table).load())
    return _Unpickler(io.BytesIO(body), table).load()


def copied(obj: _Value, what: str, own: Sequence[type] = ()) -> _Value:
    """An object as another host would receive it, but that classes stay the same.

    Args:
        obj: the object.
        what: what a note of an error says that are copied.
        own: the classes that are copied, where they cannot be imported: the copy has methods of its own.
    """
    try:
        data = _signed(obj, own)
    except Exception as error:
        add_note(error, f"{what} are copied for its host")
        raise
    return deserialize(data)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, table: list[object]) -> None:
        super().__init__(file)
        self._readers = {
            "entry": table.__getitem__,
            "device": lambda what: device_of(*what),
            "variable": _variable,
            "compiled": _compiled_function,
            "class": _classes.__getitem__,
        }

    def persistent_load(self, pid: _Reference) -> object:
        kind, what = pid
        return self._readers[kind](what)


@functools.cache
def _pickler_class() -> Any:
    """Cloudpickle's pickler with persistent ids; defined on first use, since cloudpickle may be missing."""
    cloudpickle = _require_cloudpickle()

    class Pickler(cloudpickle.Pickler):
        once: ClassVar[tuple[type, ...]] = (jax.sharding.Mesh, Sharding, DeviceList)

        def __init__(
            self,
            file: io.BytesIO,
            numbers: dict[object, int],
            own: Sequence[type] | None,
            entries: list[bytes] | None = None,
        ) -> None:
            super().__init__(file)
            self.numbers = numbers
            self.own = own  # the classes to copy; None for all that cannot be imported
            self.entries = [] if entries is None else entries
            self.inside: object = None  # the entry being written, which must not refer to itself

        def persistent_id(self, obj: Any) -> _Reference | None:
            if type(obj) in _PLAIN:  # as most objects in a function are
                return None
            if self.own is not None and isinstance(obj, type) and obj not in self.own:
                _classes[id(obj)] = obj
                return "class", id(obj)
            if isinstance(obj, jax.Device):
                return "device", (obj.platform, obj.id)
            if isinstance(obj, contextvars.ContextVar):
                # Its values travel in the context of a call, so it must remain the same variable.
                _variables[id(obj)] = obj
                return "variable", (_process, id(obj), obj.name)
            if isinstance(obj, _COMPILED) and not is_importable(obj):
                _compiled[id(obj)] = obj  # with all that it has compiled
                return "compiled", (_process, id(obj), getattr(obj, "__qualname__", repr(obj)))
            if not isinstance(obj, self.once) or obj is self.inside:
                return None
            if obj not in self.numbers:
                file = io.BytesIO()
                pickler = Pickler(file, self.numbers, self.own, self.entries)
                pickler.inside = obj
                pickler.dump(obj)
                self.entries.append(file.getvalue())
                self.numbers[obj] = len(self.entries) - 1
            return "entry", self.numbers[obj]

        def reducer_override(self, obj: Any) -> str | tuple[object, ...]:
            if obj is jax.Array:
                # On Python 3.11 its qualified name is `jaxlib._jax.Array`, which cannot be imported: cloudpickle would
                # take it for a local class and pickle it by value.
                return "Array"
            if type(obj) is jax.custom_vjp:  # on jax 0.10, its __new__ takes the function
                return _new, (jax.custom_vjp,), vars(obj)
            if isinstance(obj, DeviceList):
                return DeviceList, ((*obj,),)
            if isinstance(obj, jax.sharding.Mesh):
                kind = type(obj) if isinstance(obj, Mesh) else jax.sharding.Mesh
                return kind, (obj.devices, obj.axis_names, obj.axis_types)
            if isinstance(obj, NamedSharding):
                return functools.partial(NamedSharding, memory_kind=obj.memory_kind), (obj.mesh, obj.spec)
            if isinstance(obj, SingleDeviceSharding):
                return functools.partial(SingleDeviceSharding, memory_kind=obj.memory_kind), (*obj.device_set,)
            if isinstance(obj, jax.Array) and not isinstance(obj, Tracer):
                return _reduced_array(obj)
            reduced = reduced_standard_object(self, obj) or super().reducer_override(obj)
            if self.own is not None and isinstance(obj, type) and isinstance(reduced, tuple):
                # Cloudpickle finds a class of this process again by a mark, and would set methods of the original.
                function, (*given, _, extra), *state = reduced
                return function, (*given, secrets.token_hex(16), extra), *state
            return reduced

    return Pickler


def _new(cls: type[_Value]) -> _Value:
    return object.__new__(cls)


def _reduced_array(array: jax.Array) -> tuple[Callable[..., jax.Array], tuple[object, ...]]:
    if not array.is_fully_addressable:
        raise ValueError(
            f"serialize: an array {array.aval.str_short()} is not fully addressable by this process: pass it as an "
            "argument instead of capturing it"
        )
    shareable(array)
    sharding = array.sharding if array.committed else None
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        impl = jax.random.key_impl(array)
        return _key, (np.asarray(jax.random.key_data(array)), impl, sharding)
    return _array, (np.asarray(array), sharding)


def _array(value: np.ndarray, sharding: Sharding | None) -> jax.Array:
    return jax.numpy.asarray(value) if sharding is None else jax.device_put(value, sharding)


def _key(data: np.ndarray, impl: Any, sharding: Sharding | None) -> jax.Array:
    key = jax.random.wrap_key_data(jax.numpy.asarray(data), impl=impl)
    return key if sharding is None else jax.device_put(key, sharding)


def _variable(reference: tuple[str, int, str]) -> contextvars.ContextVar[object]:
    process, number, name = reference
    if process != _process:
        raise ValueError(f"the context variable {name!r} belongs to another process: hold it in a module")
    return _variables[number]


def _compiled_function(reference: tuple[str, int, str]) -> PjitFunction | jax.stages.Compiled:
    process, number, name = reference
    if process != _process or number not in _compiled:
        raise ValueError(f"the compiled function {name} belongs to another process, or is gone: hold it in a module")
    return _compiled[number]


_own_key = secrets.token_bytes(_CODE_BYTES)


def _group_key() -> bytes:
    """The key shared by the processes of this group; a single process has its own."""
    client = distributed_client()
    return _own_key if client is None else _shared_key(client)


@functools.cache
def _shared_key(client: DistributedRuntimeClient) -> bytes:
    return bytes.fromhex(of_the_first(client, _KEY_NAME, secrets.token_hex(_CODE_BYTES)))


def _require_cloudpickle() -> types.ModuleType:
    if _cloudpickle is None:
        raise ModuleNotFoundError(
            "serializing functions needs cloudpickle: pip install cloudpickle", name="cloudpickle"
        )
    return _cloudpickle
