"""`colocated_python_class`: objects that live on the hosts of devices."""

import contextlib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from partjit.arguments import signature_of
from partjit.checks import require, require_flag
from partjit.colocated import calls, workers
from partjit.colocated.call import Lane
from partjit.colocated.derivatives import Derivatives, Differentiable
from partjit.colocated.failures import call_site
from partjit.colocated.function import ColocatedFunction
from partjit.colocated.interrupts import is_interrupt
from partjit.colocated.serialization import deserialize, serialize
from partjit.colocated.specialization import Mode, Specialization
from partjit.colocated.specialized import Origin
from partjit.colocated.streams import Stream, current_stream

__all__ = ["colocated_python_class", "destroy_all"]

_numbers = itertools.count()
_handles: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_instances: "weakref.WeakValueDictionary[int, _Instance]" = weakref.WeakValueDictionary()


class _Instance:
    """One object on this host, from its construction by the first call to its destruction after the last one.

    The calls that were not run yet refer to it, as does the handle. When nobody does any more, the object goes.

    Attributes:
        lane: the order of its calls; None if they may overlap.
        name: the name of the class.
        number: tells it apart in this process.
    """

    def __init__(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any], concurrent: bool) -> None:
        self.lane = None if concurrent else Lane()
        self.name = cls.__name__
        self.number = next(_numbers)
        self._recipe: Callable[[], Any] = functools.partial(cls, *args, **kwargs)
        self._box: list[Any] = []  # with the only reference to the object, to drop it from elsewhere
        self._error: Exception | None = None
        self._is_closed = False
        self._life = Lane()  # no lock: the constructor and `close` may make calls, and wait for them
        workers.start_deferred()
        weakref.finalize(self, _destroy_later, self._box).atexit = False
        _instances[self.number] = self

    def object(self) -> Any:
        """The object, constructed when it is needed for the first time.

        Raises:
            Exception: what the constructor raised, every time.
            RuntimeError: it was closed.
        """
        if not self._is_closed:
            with contextlib.suppress(IndexError):  # there is none yet, or no more
                return self._box[0]
            if self._life in calls.entered_lanes():
                raise RuntimeError(
                    f"deadlock: the constructor of {self.name} calls a method of the object that it constructs, which "
                    "can only run when the constructor has ended. Call the plain method of `self` instead"
                )
        return self._in_life("__init__", self._construct)

    def _construct(self) -> Any:
        if self._is_closed:
            raise RuntimeError(f"this {self.name} was closed")
        if self._error is not None:
            raise self._error
        if not self._box:
            try:
                self._box.append(self._copied_recipe()())
            except Exception as error:
                if not is_interrupt(error):  # which says nothing about the constructor
                    self._error = error
                raise
        return self._box[0]

    def _copied_recipe(self) -> Callable[[], Any]:
        try:
            data = serialize(self._recipe)
        except Exception as error:
            error.add_note(f"{self.name} and the arguments of its constructor are copied for its host")
            raise
        return deserialize(data)

    def method(self, name: str) -> Callable[..., Any]:
        """A method of the object; looked up when it is called, so that it does not keep the object."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(self.object(), name)(*args, **kwargs)

        return call

    def close(self) -> None:
        """Closes the object, if there is one, and destroys it."""
        self._in_life("close", self._close)

    def _close(self) -> None:
        self._is_closed = True
        closing = getattr(self._box[0], "close", None) if self._box else None
        try:
            if closing is not None:
                closing()
        finally:
            closing = None
            self._box.clear()

    def _in_life(self, name: str, action: Callable[[], Any]) -> Any:
        return calls.run_in_lanes(f"{self.name}.{name}", call_site(), current_stream(), [self._life], action)

    def destroy(self) -> None:
        """Destroys the object, if there is one."""
        self._box.clear()


def _destroy_later(box: list[Any]) -> None:
    if box:
        workers.run_later(lambda: workers.start(box.clear))


def destroy_all() -> None:
    """Destroys the objects that are left, at exit."""
    for instance in [*_instances.values()]:
        instance.destroy()


class _Method(Differentiable):
    """A method of a colocated class: what is said of it holds for all instances that do not say otherwise.

    The rules of its derivatives are those of a function without `self`.
    """

    def __init__(
        self,
        name: str,
        fun: Callable[..., Any],
        specialization: Specialization,
        derivatives: Derivatives | None = None,
    ) -> None:
        functools.update_wrapper(self, fun)
        self._name = name
        self._fun = fun
        self._specialization = specialization
        self._derivatives = derivatives

    def _set_derivatives(self, derivatives: Derivatives) -> None:
        self._derivatives = derivatives

    def __get__(self, handle: Any, owner: type | None = None) -> Any:
        if handle is None:
            return self
        key = self, self._derivatives
        bound = handle._colocated_methods.get(key)
        if bound is None:
            bound = handle._colocated_methods.setdefault(key, self._bind(handle._colocated_instance))
        return bound

    def __call__(self, handle: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.__get__(handle)(*args, **kwargs)

    def specialize(self, *args: Any, **kwargs: Any) -> "_Method":
        """The same method with more known about its calls; see `ColocatedFunction.specialize`.

        It can be assigned to the class, or called with an instance.
        """
        more = ColocatedFunction(self._fun, _unbound(self._name), self._specialization).specialize(*args, **kwargs)
        return _Method(self._name, self._fun, more.specialization, self._derivatives)

    def __repr__(self) -> str:
        return f"<colocated method {self._fun.__qualname__}>"

    def _bind(self, instance: _Instance) -> ColocatedFunction:
        signature = signature_of(self._fun)
        if signature is not None and "self" in signature.parameters:
            parameters = [p for name, p in signature.parameters.items() if name != "self"]
            signature = signature.replace(parameters=parameters)
        name = f"{instance.name}.{self._name}"
        reference = (_method_of, (instance.number, instance.name, self._name))
        origin = Origin(name, signature, lambda: instance.method(self._name), instance.lane, reference)
        return ColocatedFunction(self._fun, origin, self._specialization, self._derivatives)


def _unbound(name: str) -> Origin:
    def target() -> Any:
        raise TypeError(f"{name} is a method: call it with an object")

    return Origin(name, None, target)


class _Handle:
    """What the user holds of a colocated object.

    It has its methods, whose rules of differentiation may refer to it: what refers to nothing but itself goes.
    """

    _colocated_instance: _Instance
    _colocated_methods: dict[Any, ColocatedFunction]

    def close(self) -> None:
        """Waits for the calls of the object made before, calls its `close()` if it has one, and destroys it.

        A later call of a method fails. Of `concurrent` objects only the calls of this thread are waited for.
        """
        instance = self._colocated_instance
        lanes = [current_stream(), instance.lane]
        calls.run_in_lanes(f"{instance.name}.close", call_site(), current_stream(), lanes, instance.close)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return _handle_of, (self._colocated_instance.number, self._colocated_instance.name)

    def __repr__(self) -> str:
        return f"<colocated {self._colocated_instance.name} object>"


def _handle_of(number: int, name: str) -> Any:
    return _present(_handles.get(number), name)


def _method_of(number: int, name: str, method: str, fun: Callable[..., Any], specialization: Specialization) -> Any:
    return _Method(method, fun, specialization)._bind(_present(_instances.get(number), name))


def _present(found: Any, name: str) -> Any:
    if found is None:
        raise ValueError(f"this colocated {name} object is not one of this process, or is gone")
    return found


@overload
def colocated_python_class(
    cls: type,
    *,
    concurrent: bool = ...,
    devices: Any = ...,
    mode: Mode | None = ...,
    stream: str | Stream | None = ...,
) -> type[Any]: ...
@overload
def colocated_python_class(
    cls: None = None,
    *,
    concurrent: bool = ...,
    devices: Any = ...,
    mode: Mode | None = ...,
    stream: str | Stream | None = ...,
) -> Callable[[type], type[Any]]: ...


def colocated_python_class(
    cls: type | None = None,
    *,
    concurrent: bool = False,
    devices: Any = None,
    mode: Mode | None = None,
    stream: str | Stream | None = None,
) -> Any:
    """Makes the objects of a class live on the hosts of devices; their methods are colocated functions.

    An object is constructed by the first call of a method, once per host process, from copies of the class and of the
    constructor's arguments. Its methods share its state, run one at a time in the order of their calls, also across
    threads, and are specialized for all objects (`Class.method = Class.method.specialize(...)`) or for one
    (`obj.method = obj.method.specialize(...)`). When the last reference to it is gone and its calls have ended, it is
    destroyed; `close()`, or leaving a `with` block, does so at a time of the user's choosing.

    Args:
        cls: the class; without, a decorator is returned. Its plain functions are exposed, inherited ones as well; its
            data is not.
        concurrent: whether its methods may overlap.
        devices, mode, stream: of every method, as in `ColocatedFunction.specialize`.

    Returns:
        A class with the constructor of `cls`.

    Raises:
        TypeError: `cls` is no class.
        Exception: at a call: what the constructor raised; it is attempted once.

    Example:
        >>> import jax.numpy as jnp
        >>> @colocated_python_class
        ... class Counter:
        ...     def __init__(self, start):
        ...         self.count = start
        ...     def add(self, x):
        ...         self.count += int(x)
        ...         return jnp.asarray(self.count)
        >>> counter = Counter(10)
        >>> _ = counter.add(jnp.int32(1))
        >>> int(counter.add(jnp.int32(2)))
        13

    The name and the behaviour are those of `jax.experimental.colocated_python`; docs/colocated.md says what differs.
    """
    concurrent = require_flag("colocated_python_class", "concurrent", concurrent)
    specialization = Specialization().with_items("colocated_python_class", devices=devices, mode=mode, stream=stream)
    if cls is None:
        return lambda cls: _handle_class(cls, concurrent, specialization)
    return _handle_class(cls, concurrent, specialization)


def _handle_class(cls: type, concurrent: bool, specialization: Specialization) -> type[Any]:
    require("colocated_python_class", "cls", cls, type, "a class")
    if issubclass(cls, _Handle):
        raise TypeError(
            f"{cls.__name__} is, or inherits from, a colocated class: derive it from the plain class instead"
        )

    @functools.wraps(cls.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self._colocated_instance = _Instance(cls, args, kwargs, concurrent)
        self._colocated_methods = {}
        _handles[self._colocated_instance.number] = self

    members: dict[str, Any] = {
        name: _Method(name, member, specialization)
        for name in dir(cls)
        if inspect.isfunction(member := getattr(cls, name)) and _is_exposed(name)
    }
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (_Handle,), {**members, **names, "__init__": __init__})


def _is_exposed(name: str) -> bool:
    # Python calls other special methods itself, with what is no array; and closing is what the handle does.
    return name == "__call__" or (name != "close" and not (name.startswith("__") and name.endswith("__")))
