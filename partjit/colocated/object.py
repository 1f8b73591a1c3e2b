"""`colocated_python_class`: objects that live on the hosts of devices."""

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Self, TypeVar, Unpack, overload

from partjit._jax.types import PyTree
from partjit.checks import require, require_flag, require_synchronous, wrong_type
from partjit.colocated.base import Colocated
from partjit.colocated.definition import HostFunction, site_of_definition
from partjit.colocated.function import ColocatedFunction
from partjit.colocated.ir.custom_derivatives import Derivatives
from partjit.colocated.options import Devices, Isolate, ObjectOptions, Options, takes_options
from partjit.colocated.runtime import arrivals, failures, scheduler
from partjit.colocated.runtime.failures import call_site
from partjit.colocated.runtime.instances import Instance, instances
from partjit.colocated.runtime.streams import current_stream
from partjit.signatures import method_signature_of, misfit, own_signature_of
from partjit.structures import similar

__all__ = ["colocated_python_class"]

_METHODS_ALONE = "{a} colocated object has methods alone here, and its data on the hosts: {verb} them in a method"
_Found = TypeVar("_Found")
_handles: "weakref.WeakValueDictionary[int, _Handle]" = weakref.WeakValueDictionary()


class _Method(Colocated):
    """A method of a colocated class, with the options of all instances that have none of their own.

    The rules of its derivatives do not take `self`.
    """

    def __init__(
        self, name: str, fun: Callable[..., PyTree], options: Options, derivatives: Derivatives | None = None
    ) -> None:
        functools.update_wrapper(self, fun)
        self._name = name
        self._fun = fun
        self.options = options
        self._derivatives = derivatives

    def _with_options(self, options: Options) -> "_Method":
        return _Method(self._name, self._fun, options, self._derivatives)

    def _set_derivatives(self, derivatives: Derivatives | None) -> None:
        self._derivatives = derivatives

    def __get__(self, handle: "_Handle | None", owner: type | None = None) -> Colocated:
        return self if handle is None else self._bound(handle)

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if not args or not isinstance(args[0], _Handle):
            cls = self._fun.__qualname__.rpartition(".")[0].rpartition(".")[2]
            raise TypeError(
                f"{cls}.{self._name} is a method of a colocated class: call it on one of its objects, "
                f"{cls}(...).{self._name}(...)"
            )
        return self._bound(args[0])(*args[1:], **kwargs)

    def _bound(self, handle: "_Handle") -> ColocatedFunction:
        key = self, self._derivatives
        bound = handle._colocated_methods.get(key)
        if bound is None:
            bound = handle._colocated_methods.setdefault(key, self._bind(handle._colocated_instance))
        return bound

    def __repr__(self) -> str:
        return f"<colocated method {self._fun.__qualname__}>"

    def _bind(self, instance: Instance) -> ColocatedFunction:
        signature = method_signature_of(instance.cls, self._name)
        name = f"{instance.name}.{self._name}"
        require_synchronous("a method of a colocated class", name, self._fun)
        reference = (_method_of, (instance.number, instance.name, self._name))
        function = HostFunction(
            name,
            signature,
            method_signature_of(instance.cls, self._name, own_signature_of),
            lambda: instance.method(self._name),
            site_of_definition(self._fun, name),
            instance.lane,
            instance.history,
            instance.shows_state(self._name),
            instance.uses_jax,
            reference,
        )
        return ColocatedFunction(self._fun, function, self.options, self._derivatives)


class _Handle:
    """The user's reference to a colocated object.

    Bound methods are kept on the handle, not in a global table: their derivative rules may refer to the handle, and a
    cycle of objects is collected while a table entry would live on.
    """

    _colocated_instance: Instance
    _colocated_methods: dict[tuple[_Method, Derivatives | None], ColocatedFunction]

    def close(self) -> None:
        """Waits for earlier calls of the object, calls its `close()` if it has one, and destroys it.

        Earlier calls are also those of the programs that this thread has started. Later method calls fail. For
        `concurrent` objects, only calls made by this thread are waited for.

        Raises:
            Exception: what `close()` of the object raised; else the first failure of its calls that nobody has seen,
                except of those of `concurrent` objects, or what the constructor raised.
        """
        _end(self._colocated_instance, "close", self._colocated_instance.close)
        _raise_unseen(self._colocated_instance)

    def __enter__(self) -> Self:
        instance = self._colocated_instance
        if instance.is_context_manager:
            name = f"{instance.name}.__enter__"
            scheduler.run_in_lanes(name, call_site(), current_stream(), [instance.lane], instance.enter)
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, *__: object) -> None:
        instance = self._colocated_instance
        _end(instance, "__exit__", functools.partial(instance.leave, error))
        if error is None:  # which says more than what its calls raised
            _raise_unseen(instance)

    def __getattr__(self, name: str) -> NoReturn:
        missing = f"{type(self).__name__!r} object has no attribute {name!r}"
        methods = [other for other in dir(type(self)) if isinstance(getattr(type(self), other), Colocated)]
        meant = similar(name, methods)
        if meant is not None:  # without the object, of which a traceback would say the same
            what = f"{missing}: did you mean {meant!r}? {_METHODS_ALONE.format(a='A', verb='return')}"
            raise AttributeError(what, name=name)
        raise AttributeError(f"{missing}: {_METHODS_ALONE.format(a='a', verb='return')}", name=name, obj=self)

    def __setattr__(self, name: str, value: object) -> None:
        if not isinstance(value, Colocated) and not name.startswith("_colocated_"):
            raise AttributeError(
                f"{type(self).__name__}.{name} cannot be set: {_METHODS_ALONE.format(a='a', verb='set')}",
                name=name,
                obj=self,
            )
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[int, str]]:
        return _handle_of, (self._colocated_instance.number, self._colocated_instance.name)

    def __repr__(self) -> str:
        return f"<colocated {self._colocated_instance.name} object>"


def _end(instance: Instance, name: str, action: Callable[[], None]) -> None:
    arrivals.settle(None)
    lanes = [current_stream(), instance.lane]
    scheduler.run_in_lanes(f"{instance.name}.{name}", call_site(), current_stream(), lanes, action)


def _raise_unseen(instance: Instance) -> None:
    lane, error = instance.lane, instance.error
    failures.raise_unseen(
        lambda failure: (lane is not None and lane in failure.lanes) or (error is not None and failure.error is error)
    )


def _handle_of(number: int, name: str) -> _Handle:
    return _present(_handles.get(number), name)


def _method_of(number: int, name: str, method: str, fun: Callable[..., PyTree], options: Options) -> ColocatedFunction:
    return _Method(method, fun, options)._bind(_present(instances.get(number), name))


def _present(found: _Found | None, name: str) -> _Found:
    if found is None:
        raise ValueError(
            f"this colocated {name} object is not one of this process, or is gone: send its class, and construct an "
            "object here"
        )
    return found


@overload
def colocated_python_class(
    cls: type,
    *,
    concurrent: bool = ...,
    state: tuple[str, str] | None = ...,
    devices: Devices | None = ...,
    isolate: Isolate | None = ...,
    **options: Unpack[ObjectOptions],
) -> type[Any]: ...
@overload
def colocated_python_class(
    cls: None = None,
    *,
    concurrent: bool = ...,
    state: tuple[str, str] | None = ...,
    devices: Devices | None = ...,
    isolate: Isolate | None = ...,
    **options: Unpack[ObjectOptions],
) -> Callable[[type], type[Any]]: ...


@takes_options
def colocated_python_class(
    cls: type | None = None,
    *,
    concurrent: bool = False,
    state: tuple[str, str] | None = None,
    devices: Devices | None = None,
    isolate: Isolate | None = None,
    **options: Unpack[ObjectOptions],
) -> type[Any] | Callable[[type], type[Any]]:
    """Makes the objects of a class live on the hosts of devices; their methods become colocated functions.

    An object is constructed by the first call of a method, once per host process, from copies of the class and the
    constructor's arguments. Methods share its state and run one at a time in call order, across threads as well. They
    are specialized for all objects (`Class.method = Class.method.specialize(...)`) or for one
    (`obj.method = obj.method.specialize(...)`). An object is destroyed once its last reference is gone and its calls
    have ended, or explicitly by `close()` or the end of a `with` block.

    Args:
        cls: the class; without one, a decorator is returned. Its functions are exposed, inherited ones, class methods
            and static methods included; its data is not.
        concurrent: whether methods may overlap.
        state: the names of two methods: one returns the state of the object, not to be changed afterwards, the other
            takes it and sets it. Then methods with `run_ahead` do not show: another method sees the state that the
            program has consumed. Without `state` it raises RuntimeError where that is another than the object's.
        devices: of every method, as in `ColocatedFunction.specialize`.
        isolate: "process" makes each object live in a worker process of its own, without jax: docs/isolation.md.
        **options: `arrays`, `mode` and `stream` of every method, as in `ColocatedFunction.specialize`.

    Returns:
        A class with the constructor of `cls`.

    Raises:
        TypeError: `cls` is not a class, or `state` not two names; when an object is made: the constructor does not take
            these arguments.
        ValueError: `cls` has no method of a name in `state`, or methods may overlap, so that there is no state to save.
        Exception: on a call: what the constructor raised; it is attempted once.
        WorkerDiedError: on a call: the worker process of the object has died, and its state is lost.

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

    Name and behaviour follow `jax.experimental.colocated_python`; docs/colocated.md lists the differences.
    """
    concurrent = require_flag("colocated_python_class", "concurrent", concurrent)
    if state is not None:
        state = _require_names(state, concurrent)
    given = Options().adding("colocated_python_class", devices=devices, isolate=isolate, **options)
    if concurrent and isolate is not None:
        raise ValueError("colocated_python_class: the methods of an object in a worker process cannot be concurrent")

    def handle_class(cls: type) -> type[_Handle]:
        return _handle_class(cls, concurrent, state, given)

    return handle_class if cls is None else handle_class(cls)


def _require_names(state: tuple[str, str], concurrent: bool) -> tuple[str, str]:
    if type(state) not in (tuple, list) or [*map(type, state)] != [str, str]:
        what = "the names of the methods that return and set the state of the object, such as ('save', 'restore')"
        raise wrong_type("colocated_python_class", "state", state, what)
    if concurrent:
        raise ValueError("colocated_python_class: the methods of a concurrent object may overlap: there is no state")
    save, restore = state
    return save, restore


def _handle_class(cls: type, concurrent: bool, state: tuple[str, str] | None, options: Options) -> type[_Handle]:
    require("colocated_python_class", "cls", cls, type, "a class")
    for name in state or ():
        if not callable(getattr(cls, name, None)):
            raise ValueError(f"colocated_python_class: state names {name!r}, but {cls.__name__} has no such method")
    if issubclass(cls, _Handle):
        raise TypeError(
            f"{cls.__name__} is, or inherits from, a colocated class: derive it from the plain class instead"
        )

    # A class of `__main__` is pickled with the functions and globals that it uses: this one uses nothing of a process.
    @functools.wraps(cls.__init__)
    def __init__(self: _Handle, *args: object, **kwargs: object) -> None:
        _construct(self, cls, args, kwargs, concurrent, state, options)

    members = {
        name: _Method(name, member, options)
        for name in dir(cls)
        if _is_function(member := getattr(cls, name)) and _is_exposed(name)
    }
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (_Handle,), {**members, **names, "__init__": __init__})


def _construct(
    handle: _Handle,
    cls: type,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    concurrent: bool,
    state: tuple[str, str] | None,
    options: Options,
) -> None:
    problem = misfit(cls.__name__, own_signature_of(cls), args, kwargs)
    if problem is not None:  # which would be raised by the first call of a method
        raise TypeError(problem)
    is_isolated, uses_jax = options.isolate is not None, options.uses_jax is not False
    handle._colocated_instance = Instance(cls, args, kwargs, concurrent, state, is_isolated, uses_jax=uses_jax)
    handle._colocated_methods = {}
    _handles[handle._colocated_instance.number] = handle


def _is_function(member: object) -> bool:
    """Whether the attribute of a class is a method of its objects: a function, or one that is bound to the class."""
    return inspect.isfunction(member) or (inspect.ismethod(member) and isinstance(member.__self__, type))


def _is_exposed(name: str) -> bool:
    # Python itself calls other special methods, with arguments that are not arrays; `close` is the handle's.
    return name == "__call__" or (name != "close" and not (name.startswith("__") and name.endswith("__")))
