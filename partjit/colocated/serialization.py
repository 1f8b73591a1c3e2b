"""Functions and specs as bytes, for another process of the same group or for a copy in this one.

What belongs to a process, its devices, is written as ids and looked up when it is read, so that meshes and shardings
come back equal. Equal ones are written once: they stand in a table before the object, and the object refers to them by
their number. Nothing is kept between calls, so that serializing may call itself and threads do not meet.

Reading runs what was written, so only bytes that this group of processes made are read: they carry an authentication
code with a key that only the group has.
"""

import contextvars
import functools
import hmac
import io
import pickle
import secrets
import sys
import types
import weakref
from typing import Any, ClassVar

import jax
import numpy as np
from jax.core import Tracer

from partjit._jax.arrays import shareable
from partjit._jax.dispatch import PjitFunction
from partjit._jax.processes import distributed_client
from partjit._jax.shardings import DeviceList
from partjit.checks import require, require_flag
from partjit.colocated.uncopyable import uncopyable_parts
from partjit.mesh import Mesh

try:
    import cloudpickle as _cloudpickle
except ImportError:  # needed to serialize, not to import
    _cloudpickle = None

__all__ = ["copied", "deserialize", "serialize"]

_CODE_BYTES = 32
_KEY_NAME = "partjit/serialization_key"

_Reference = tuple[str, Any]
"""How a pickle refers to something outside of it: a device by ("device", (platform, id)), an entry of the table by
("entry", number), a context variable or a compiled function by ("variable" or "compiled", (process, id, name))."""

_variables: dict[int, contextvars.ContextVar[Any]] = {}
_compiled: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_process = secrets.token_hex(8)

_COMPILED = (PjitFunction, jax.stages.Compiled)


def serialize(obj: Any) -> bytes:
    """An object as bytes: functions and what they capture by value, modules by reference.

    Args:
        obj: anything cloudpickle knows, with devices, meshes, shardings, device lists, arrays and keys anywhere in it.

    Raises:
        ModuleNotFoundError: cloudpickle is not installed.
        ValueError: an array is not wholly on the devices of this process.
        TypeError, pickle.PicklingError: something in it cannot be copied, a lock for example; a note says what.

    Example:
        >>> sharding = jax.sharding.NamedSharding(Mesh(jax.devices(), "x"), jax.sharding.PartitionSpec("x"))
        >>> deserialize(serialize(sharding)) == sharding
        True
    """
    try:
        payload = _payload(obj)
    except Exception as error:
        parts = uncopyable_parts(obj, _is_copyable)
        if parts:
            error.add_note(f"this cannot be copied: {parts}. Make it inside of the function, or keep it in a module")
        raise
    return hmac.digest(_group_key(), payload, "sha256") + payload


def _payload(obj: Any) -> bytes:
    body = io.BytesIO()
    pickler = _pickler_class()(body, {})
    pickler.dump(obj)
    # An entry may refer to entries before it, never to later ones: those it needs were entered first.
    return pickle.dumps((pickler.entries, body.getvalue()))


def _is_copyable(obj: Any) -> bool:
    try:
        _payload(obj)
    except Exception:
        return False
    return True


def deserialize(data: bytes, *, authenticate: bool = True) -> Any:
    """The object that `serialize` made bytes of.

    Args:
        data: the bytes.
        authenticate: refuse bytes that this group of processes did not make. Without, whoever made them runs code here.

    Raises:
        TypeError: `data` is no bytes.
        ValueError: the bytes are from elsewhere, or name a device that is not there.
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
    table: list[Any] = []
    for entry in entries:
        table.append(_Unpickler(io.BytesIO(entry), table).load())
    return _Unpickler(io.BytesIO(body), table).load()


def copied(obj: Any, what: str) -> Any:
    """An object as another host would get it; what is raised about it has a note that says `what` is copied."""
    try:
        data = serialize(obj)
    except Exception as error:
        error.add_note(f"{what} are copied for its host")
        raise
    return deserialize(data)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, table: list[Any]) -> None:
        super().__init__(file)
        self._table = table

    def persistent_load(self, pid: _Reference) -> Any:
        kind, what = pid
        readers: dict[str, Any] = {"device": _device, "variable": _variable, "compiled": _compiled_function}
        return self._table[what] if kind == "entry" else readers[kind](what)


@functools.cache
def _pickler_class() -> Any:
    """Cloudpickle's pickler with references; made when it is first needed, since cloudpickle may be missing."""
    cloudpickle: Any = _require_cloudpickle()

    class Pickler(cloudpickle.Pickler):
        once: ClassVar[tuple[type, ...]] = (jax.sharding.Mesh, jax.sharding.Sharding, DeviceList)

        def __init__(self, file: io.BytesIO, numbers: dict[Any, int], entries: list[bytes] | None = None) -> None:
            super().__init__(file)
            self.numbers = numbers
            self.entries = [] if entries is None else entries
            self.inside: Any = None  # the entry that is being written: it must not refer to itself

        def persistent_id(self, obj: Any) -> _Reference | None:
            if isinstance(obj, jax.Device):
                return "device", (obj.platform, obj.id)
            if isinstance(obj, contextvars.ContextVar):
                # Its values travel with the context of a call, so it must stay the same variable.
                _variables[id(obj)] = obj
                return "variable", (_process, id(obj), obj.name)
            if isinstance(obj, _COMPILED) and not _is_importable(obj):
                _compiled[id(obj)] = obj  # with all that it has compiled
                return "compiled", (_process, id(obj), getattr(obj, "__qualname__", repr(obj)))
            if not isinstance(obj, self.once) or obj is self.inside:
                return None
            if obj not in self.numbers:
                file = io.BytesIO()
                pickler = Pickler(file, self.numbers, self.entries)
                pickler.inside = obj
                pickler.dump(obj)
                self.entries.append(file.getvalue())
                self.numbers[obj] = len(self.entries) - 1
            return "entry", self.numbers[obj]

        def reducer_override(self, obj: Any) -> Any:
            if obj is jax.Array:
                # jax calls it `jaxlib._jax.Array` on Python 3.11, where nothing has that name: cloudpickle would take
                # the class for one made in a function and write all that is in it.
                return "Array"
            if type(obj) is jax.custom_vjp:
                return _new, (jax.custom_vjp,), vars(obj)  # its own __new__ wants the function, on jax 0.10
            if isinstance(obj, DeviceList):
                return _device_list, ([*obj],)
            if isinstance(obj, Mesh):
                return type(obj), (obj.devices, obj.axis_names, obj.axis_types)
            if isinstance(obj, jax.sharding.Mesh):
                return jax.sharding.Mesh, (obj.devices, obj.axis_names, obj.axis_types)
            if isinstance(obj, jax.sharding.NamedSharding):
                return _named_sharding, (obj.mesh, obj.spec, obj.memory_kind)
            if isinstance(obj, jax.sharding.SingleDeviceSharding):
                (device,) = obj.device_set
                return _single_device_sharding, (device, obj.memory_kind)
            if isinstance(obj, jax.Array) and not isinstance(obj, Tracer):
                return _reduced_array(obj)
            return super().reducer_override(obj)

    return Pickler


def _new(cls: type) -> Any:
    return object.__new__(cls)


def _named_sharding(mesh: Any, spec: Any, memory_kind: str | None) -> Any:
    return jax.sharding.NamedSharding(mesh, spec, memory_kind=memory_kind)


def _single_device_sharding(device: Any, memory_kind: str | None) -> Any:
    return jax.sharding.SingleDeviceSharding(device, memory_kind=memory_kind)


def _device_list(devices: list[Any]) -> Any:
    return DeviceList(tuple(devices))


def _reduced_array(array: jax.Array) -> Any:
    if not array.is_fully_addressable:
        raise ValueError(
            f"serialize: an array {array.aval.str_short()} is not wholly on the devices of this process: pass it as an "
            "argument instead of capturing it"
        )
    shareable(array)
    sharding = array.sharding if array.committed else None
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        impl = jax.random.key_impl(array)
        return _key, (np.asarray(jax.random.key_data(array)), impl, sharding)
    return _array, (np.asarray(array), sharding)


def _array(value: np.ndarray, sharding: Any) -> jax.Array:
    return jax.numpy.asarray(value) if sharding is None else jax.device_put(value, sharding)


def _key(data: np.ndarray, impl: Any, sharding: Any) -> jax.Array:
    key = jax.random.wrap_key_data(jax.numpy.asarray(data), impl=impl)
    return key if sharding is None else jax.device_put(key, sharding)


def _variable(reference: tuple[str, int, str]) -> contextvars.ContextVar[Any]:
    process, number, name = reference
    if process != _process:
        raise ValueError(f"the context variable {name!r} belongs to another process: hold it in a module")
    return _variables[number]


def _is_importable(function: Any) -> bool:
    # What wraps a functools.partial or an object with __call__ has no qualified name, unless somebody gave it one.
    qualname = getattr(function, "__qualname__", None)
    if qualname is None:
        return False
    found: Any = sys.modules.get(function.__module__)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found is function


def _compiled_function(reference: tuple[str, int, str]) -> Any:
    process, number, name = reference
    if process != _process or number not in _compiled:
        raise ValueError(f"the compiled function {name} belongs to another process, or is gone: hold it in a module")
    return _compiled[number]


def _device(reference: tuple[str, int]) -> Any:
    platform, number = reference
    for device in jax.devices(platform):
        if device.id == number:
            return device
    raise ValueError(
        f"Invalid device ID {number}: the {platform} devices here are {[device.id for device in jax.devices(platform)]}"
    )


_own_key = secrets.token_bytes(_CODE_BYTES)


def _group_key() -> bytes:
    """The key that the processes of this group share; a process alone has one of its own."""
    return _own_key if distributed_client() is None else _shared_key()


@functools.cache
def _shared_key() -> bytes:
    client = distributed_client()
    if jax.process_index() == 0:
        client.key_value_set(_KEY_NAME, secrets.token_hex(_CODE_BYTES))
    return bytes.fromhex(client.blocking_key_value_get(_KEY_NAME, 60_000))


def _require_cloudpickle() -> types.ModuleType:
    if _cloudpickle is None:
        raise ModuleNotFoundError(
            "serializing functions needs cloudpickle: pip install cloudpickle", name="cloudpickle"
        )
    return _cloudpickle
