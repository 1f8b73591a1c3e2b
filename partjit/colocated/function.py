"""`colocated_python`: a Python function that runs on the hosts of its arguments' devices."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, Unpack, overload

import jax
from jax.core import Tracer

from partjit._jax.arrays import ArrayImpl
from partjit._jax.meshes import manual_axes
from partjit._jax.processes import group_size
from partjit._jax.threads import has_64_bits
from partjit._jax.tracing import eagerly, is_eager, is_staged
from partjit._jax.types import PyTree, PyTreeDef
from partjit.arguments import name_of, signature_of
from partjit.attempt import telling_others
from partjit.checks import require, require_callable, require_synchronous, unsorted, wrong_type
from partjit.colocated.base import Colocated
from partjit.colocated.cache import CacheInfo, SpecializationCache
from partjit.colocated.definition import Definition, HostFunction, options_of_calls, site_of_definition
from partjit.colocated.ir.custom_derivatives import Derivatives
from partjit.colocated.ir.eager import body
from partjit.colocated.ir.tracing import TracedCalls
from partjit.colocated.isolation.functions import IsolatedFunction
from partjit.colocated.options import OptionArguments, Options, takes_options
from partjit.colocated.runtime.host_arguments import KnownHostArguments, kinds_of
from partjit.colocated.runtime.host_values import is_host_value, is_object, put_arguments
from partjit.colocated.runtime.in_specs import argument_paths
from partjit.colocated.runtime.object_arguments import KnownObjects
from partjit.colocated.runtime.run_ahead import RunAhead
from partjit.colocated.serialization import copied
from partjit.colocated.specialization import Specialization
from partjit.host_objects import HostReference, calling_with
from partjit.signatures import own_signature_of

__all__ = ["ColocatedFunction", "colocated_python"]

_flatten = jax.tree_util.tree_flatten


class ColocatedFunction(Colocated):
    """A function wrapped by `colocated_python`: call it with arrays, or give it more options with `specialize`.

    Its name, docstring and signature are those of the wrapped function.

    Attributes:
        options: the options given so far.
    """

    def __init__(
        self,
        fun: Callable[..., PyTree],
        function: HostFunction,
        options: Options,
        derivatives: Derivatives | None = None,
    ) -> None:
        require_callable("ColocatedFunction", "fun", fun)
        how = "what colocated_python gives it: call that, or specialize"
        require("ColocatedFunction", "function", function, HostFunction, how)
        require("ColocatedFunction", "options", options, Options, how)
        require("ColocatedFunction", "derivatives", derivatives, Derivatives | None, how)
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._name = function.name
        self.options = options
        ahead = RunAhead(options.run_ahead, function.history) if options.run_ahead else None
        self._definition = Definition(function, options_of_calls(function, options), ahead)
        self._cache = SpecializationCache()
        self._set_derivatives(derivatives)

    def _set_derivatives(self, derivatives: Derivatives | None) -> None:
        self._derivatives = derivatives
        self._traced = TracedCalls(self._definition, self._cache, derivatives)

    def _with_options(self, options: Options) -> "ColocatedFunction":
        return ColocatedFunction(self._fun, self._definition.function, options, self._derivatives)

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Calls the function, here or on a thread; while a function is traced, binds the call as an equation."""
        eager = is_eager()
        if (not eager and (is_staged() or manual_axes())) or body.default is not None:
            return self._traced.bind(args, kwargs)
        cache = self._cache
        specialization = cache.last
        if specialization is not None and eager and cache.is_as_last():
            leaves = specialization.in_specs.leaves_of(args, kwargs)
            if leaves is not None:
                cache.hits += 1
                return specialization(args, kwargs, leaves, True)
        if cache.last_with_host_values is not None:
            known, specialization = cache.last_with_host_values
            leaves = known.leaves_of(args, kwargs)
            if leaves is not None:
                cache.hits += 1
                return specialization.call_with_host_arguments(leaves)
        if cache.last_with_objects is not None and eager and cache.is_as_last():
            known, specialization = cache.last_with_objects
            leaves = known.leaves_of(args, kwargs)
            recognized = None if leaves is None else known.recognized(leaves)
            if recognized is not None:
                cache.hits += 1
                return _call_known(known, specialization, *recognized)
        if group_size() > 1 and self._definition.options.is_agreed_on:
            with telling_others(self._name):
                return self._call(args, kwargs, eager)
        return self._call(args, kwargs, eager)

    def _call(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], eager: bool) -> PyTree:
        """Calls the function with arguments that are not recognized at a glance."""
        cache = self._cache
        try:
            leaves, tree = _flatten((args, kwargs))
        except ValueError as error:
            raise unsorted(error, f"An argument of {self._name}") from None
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return self._traced.bind(args, kwargs)
        if not eager:  # what a function computes is no part of the transformation around its call
            with eagerly():
                return self(*args, **kwargs)
        if any(map(is_object, leaves)):
            return self._call_with_objects(args, kwargs, leaves, tree)
        if any(map(is_host_value, leaves)):
            return self._call_with_host_values(args, kwargs, leaves, tree)
        return cache.find(self._definition, args, kwargs)(args, kwargs, leaves, False)

    def _call_with_host_values(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], leaves: Sequence[Any], tree: PyTreeDef
    ) -> PyTree:
        """Calls the function, with arrays in place of the NumPy arrays and numbers among the flat arguments."""
        cache, key = self._cache, (tree, kinds_of(leaves))
        found = cache.with_host_values.get(key)
        recognized = found and found[0].recognized([*leaves])
        if found is not None and recognized is not None:
            cache.hits += 1
            cache.remember_with_host_values(key, *found)
            return found[1].call_with_host_arguments(recognized)
        args, kwargs, arrays, known = self._put(args, kwargs, leaves, tree)
        specialization = cache.find(self._definition, args, kwargs)
        if known is not None:
            cache.remember_with_host_values(key, known, specialization)
        return specialization(args, kwargs, arrays, False)

    def _put(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], leaves: Sequence[Any], tree: PyTreeDef
    ) -> tuple[Sequence[PyTree], Mapping[str, PyTree], Sequence[jax.Array], KnownHostArguments | None]:
        """The arguments with arrays in place of NumPy arrays and numbers, flat as well, and how they became these."""
        options = self.options
        specs = options.in_specs and options.in_specs.leaves
        with self._traced.naming_overflows(leaves, args, kwargs):
            arrays = put_arguments(leaves, specs, options.devices)
        known = KnownHostArguments.of(tree, leaves, arrays, are_devices_given=options.devices is not None)
        return *tree.unflatten(arrays), arrays, known

    def _call_with_objects(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], leaves: Sequence[object], tree: PyTreeDef
    ) -> PyTree:
        """Calls the function, which gets those of the flat arguments as they are that are no arrays."""
        cache, key = self._cache, (has_64_bits(), tree, kinds_of(leaves))
        found = cache.with_objects.get(key)
        recognized = found and found[0].recognized(leaves)
        if found is not None and recognized is not None:
            cache.hits += 1
            cache.remember_with_objects(key, *found)
            return _call_known(*found, *recognized)
        paths = argument_paths(self._definition.function.signature, args, kwargs)
        references = [
            HostReference(self._name, path, is_of_function=True) if is_object(x) else None
            for path, x in zip(paths, leaves, strict=True)
        ]
        objects = {reference: x for reference, x in zip(references, leaves, strict=True) if reference is not None}
        placed = [x if reference is None else reference for reference, x in zip(references, leaves, strict=True)]
        args, kwargs = tree.unflatten(placed)
        if group_size() > 1:
            return calling_with(objects, self, *args, **kwargs)
        own, own_tree = _flatten((args, kwargs))
        host_arguments = None
        if any(map(is_host_value, own)):
            args, kwargs, own, host_arguments = self._put(args, kwargs, own, own_tree)
        specialization = cache.find(self._definition, args, kwargs)
        if {*map(type, own)} <= {ArrayImpl}:  # none is pending or an array of keys
            known = KnownObjects(tree, own_tree, leaves, references, host_arguments)
            cache.remember_with_objects(key, known, specialization)
        return calling_with(objects, specialization, args, kwargs, own, False)

    def discard_ahead(self) -> int:
        """Drops the calls that `run_ahead` has made and the program has not taken.

        Those that have not begun are not made. An object with a `state` is as if the others had not been made, either;
        what an object without one has done for them remains done, and their results are lost.

        Returns:
            How many calls were dropped.

        Example:
            >>> import jax
            >>> numbers = iter(range(100))
            >>> spec = jax.ShapeDtypeStruct((), jax.numpy.int32)
            >>> following = colocated_python(lambda: next(numbers), out_specs=spec, run_ahead=2, devices=jax.devices())
            >>> int(following())
            0
            >>> following.discard_ahead()
            2
        """
        return 0 if self._definition.ahead is None else self._definition.ahead.discard()

    def cache_info(self) -> CacheInfo:
        """The hits, misses and size of the cache of specializations."""
        return self._cache.info()

    def __repr__(self) -> str:
        return f"<colocated {self._name}>"

    def __get__(self, obj: object, owner: type | None = None) -> Self | types.MethodType:
        return self if obj is None else types.MethodType(self, obj)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...], Derivatives | None]:
        rebuilt, arguments = self._definition.function.reference or (_rebuilt, ())
        # Rules may refer to the function that they belong to, so it is rebuilt before they are set.
        return rebuilt, (*arguments, self._fun, self.options), self._derivatives

    def __setstate__(self, derivatives: Derivatives) -> None:
        self._set_derivatives(derivatives)


@overload
def colocated_python(fun: Callable[..., PyTree], **options: Unpack[OptionArguments]) -> ColocatedFunction: ...
@overload
def colocated_python(
    fun: None = None, **options: Unpack[OptionArguments]
) -> Callable[[Callable[..., PyTree]], ColocatedFunction]: ...


@takes_options
def colocated_python(
    fun: Callable[..., PyTree] | None = None, **options: Unpack[OptionArguments]
) -> ColocatedFunction | Callable[[Callable[..., PyTree]], ColocatedFunction]:
    """Makes a function run on the hosts of its arguments' devices, asynchronously to the devices.

    The function is called with concrete arrays on CPU devices of the hosts, and with other arguments as they are;
    lists, dicts and other pytrees are rebuilt from their leaves, so that what it appends to them is lost. It may do
    anything: read files, start threads, use jax and partjit. It must return arrays, in any tree, or None.
    Without `out_specs` and `out_specs_fn`, the first call with arguments of new types or shardings runs in the caller,
    which shows what the function returns. All other calls return before the function has run, with arrays that wait
    when their values are used. Calls of one thread run in program order. An exception of the function is raised where a
    result is used, or by `colocated.wait()`.

    Captured values are copied at the first call for each set of argument types and shardings, and in programs for each
    place of a call, as if the function were sent to another host (and again after `jax.clear_caches()`). So state that
    calls share belongs in an object: see `colocated_python_class`. Modules, and what can be imported from them, are not
    copied.

    Args:
        fun: the function; without one, a decorator is returned.
        **options: `out_specs`, `out_specs_fn`, `in_specs`, `devices`, `mode`, `stream`, `pure`, `layout`, `run_ahead`
            and `vmap_method`, as in `ColocatedFunction.specialize`; `isolate="process"` runs the function in a worker
            process without jax, with NumPy arrays as arguments: docs/isolation.md.

    Returns:
        The colocated function, with `specialize` and `cache_info`.

    Raises:
        TypeError: `fun` is not callable.
        WorkerDiedError: on a call: its worker process died.
        ValueError: on a call: a result is not an array, or an argument is the type of one; the arguments are on
            different devices, no devices are known, or a result contradicts its specs.

    Example:
        >>> import numpy as np
        >>> @colocated_python
        ... def next_batch(step):
        ...     return jax.numpy.asarray(np.random.default_rng(int(step)).normal(size=4))
        >>> next_batch(jax.numpy.int32(0)).shape
        (4,)

    While a function is traced for `partjit.pjit`, a call becomes an equation of the program, which makes the call each
    time it runs. Its results must be known then, from `out_specs`, `out_specs_fn`, an earlier call outside or, if it
    returns nothing, its annotation `-> None`. Under `jax.jit` and other wrappers calls without results work.

    Name and behaviour follow `jax.experimental.colocated_python`; docs/colocated.md lists the differences.
    """
    given = Options().adding("colocated_python", **options)
    return (lambda fun: _rebuilt(fun, given)) if fun is None else _rebuilt(fun, given)


def _rebuilt(fun: Callable[..., PyTree], options: Options) -> ColocatedFunction:
    require_callable("colocated_python", "fun", fun)
    _require_no_class(fun)
    name = name_of(fun)
    require_synchronous("colocated_python: fun", name, fun)
    signature = signature_of(fun)
    made = fun
    while isinstance(made, functools.partial):
        made = made.func
    if signature is not None and isinstance(made, type):  # whose constructor returns None, and whose calls do not
        signature = signature.replace(return_annotation=inspect.Signature.empty)

    def load() -> Callable[..., PyTree]:
        if options.isolate is not None:
            return IsolatedFunction(fun, name, signature)
        return copied(fun, f"{name} and what it captures")

    return ColocatedFunction(
        fun, HostFunction(name, signature, own_signature_of(fun), load, site_of_definition(fun, name)), options
    )


def _require_no_class(fun: Callable[..., PyTree]) -> None:
    """Raises TypeError for a class whose calls return objects that are neither arrays nor trees."""
    if (
        isinstance(fun, type)
        and type(fun).__call__ is type.__call__
        and fun.__new__ is object.__new__  # numbers and what may return anything have their own
        and not jax.tree_util.default_registry.is_node(fun)
    ):
        raise wrong_type(
            "colocated_python",
            "fun",
            fun,
            "a function",
            "its objects are no arrays, which a colocated function has to return. colocated_python_class makes them "
            "live on the hosts, with methods that are colocated functions",
        )


def _call_known(
    known: KnownObjects, specialization: Specialization, leaves: Sequence[Any], objects: Mapping[HostReference, object]
) -> PyTree:
    """Calls a function with what `KnownObjects.recognized` returned."""
    if known.host_arguments is not None:
        return calling_with(objects, specialization.call_with_host_arguments, leaves)
    args, kwargs = known.tree.unflatten(leaves)
    return calling_with(objects, specialization, args, kwargs, leaves, True)
