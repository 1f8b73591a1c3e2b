"""`colocated_python`: a Python function that runs on the hosts of its arguments' devices."""

import functools
import types
from collections.abc import Callable
from typing import Any, overload

import jax
from jax.core import Tracer

from partjit._jax.meshes import manual_axes
from partjit._jax.tracing import is_eager, is_staged
from partjit.arguments import name_of, signature_of
from partjit.checks import require, require_callable, unsorted
from partjit.colocated.ir.custom_derivatives import Derivatives, Differentiable
from partjit.colocated.ir.eager import body
from partjit.colocated.ir.tracing import TracedCalls
from partjit.colocated.lookup import find_specialized
from partjit.colocated.runtime.run_ahead import Ahead
from partjit.colocated.runtime.streams import Stream
from partjit.colocated.serialization import deserialize, serialize
from partjit.colocated.specialization import CacheInfo, Layout, Mode, Specialization, SpecializationCache, VmapMethod
from partjit.colocated.specialized import Origin

__all__ = ["ColocatedFunction", "colocated_python"]

_flatten = jax.tree_util.tree_flatten
_is_eager = is_eager


class ColocatedFunction(Differentiable):
    """What `colocated_python` makes of a function; called with arrays, or specialized first.

    Its name, docstring and signature are those of the function.

    Attributes:
        specialization: what is known about its calls.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        origin: Origin,
        specialization: Specialization,
        derivatives: Derivatives | None = None,
    ) -> None:
        require_callable("ColocatedFunction", "fun", fun)
        how = "what colocated_python gives it: call that, or specialize"
        require("ColocatedFunction", "origin", origin, Origin, how)
        require("ColocatedFunction", "specialization", specialization, Specialization, how)
        require("ColocatedFunction", "derivatives", derivatives, Derivatives | None, how)
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._origin = origin
        self.specialization = specialization
        self._cache = SpecializationCache()
        self._ahead = Ahead(specialization.run_ahead) if specialization.run_ahead else None
        self._set_derivatives(derivatives)

    def _set_derivatives(self, derivatives: Derivatives | None) -> None:
        self._derivatives = derivatives
        self._traced = TracedCalls(self._origin, self.specialization, self._cache, self._ahead, derivatives)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, here or on a thread; in a function that is traced, the call becomes part of that."""
        if (not _is_eager() and (is_staged() or manual_axes())) or body.home is not None:
            return self._traced.bind(args, kwargs)
        cache = self._cache
        specialized = cache.last
        if specialized is not None:
            leaves = specialized.in_specs.leaves_of(args, kwargs)
            if leaves is not None:
                cache.hits += 1
                return specialized(args, kwargs, leaves, True)
        try:
            leaves, _ = _flatten((args, kwargs))
        except ValueError as error:
            raise unsorted(error, f"An argument of {self._origin.name}") from None
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return self._traced.bind(args, kwargs)
        specialized = find_specialized(self._origin, self.specialization, cache, self._ahead, args, kwargs)
        return specialized(args, kwargs, leaves, False)

    def specialize(
        self,
        in_specs: Any = None,
        out_specs_fn: Callable[..., Any] | None = None,
        devices: Any = None,
        *,
        out_specs: Any = None,
        mode: Mode | None = None,
        stream: str | Stream | None = None,
        pure: bool | None = None,
        layout: Layout | None = None,
        run_ahead: int | None = None,
        vmap_method: VmapMethod | None = None,
    ) -> "ColocatedFunction":
        """The same function, with more known about its calls. Each item can be given once, in any order.

        Args:
            in_specs: `(args, kwargs)` with a `jax.ShapeDtypeStruct` for each array. A sharding left open may be any.
            out_specs_fn: called with the ShapeDtypeStructs of the arguments, gives `out_specs`; once per kind of
                arguments, in the calling thread.
            devices: devices or a mesh: the function runs on their hosts. Needed if there are no array arguments.
            out_specs: a tree of ShapeDtypeStructs like the result. A sharding left open is a replicated one. Once the
                results are known, calls return before the function has run. None says nothing; that a function
                returns None is said by `out_specs_fn=lambda *args: None`.
            mode: "inline" runs it in the caller; "stream" on a thread; "auto", the default, on a thread until it was
                measured to be cheaper than that, ten times in a row. A function that waits for what its caller does
                after the call must say "stream".
            stream: the name of a stream, or a stream, instead of the calling thread's.
            pure: whether a call does nothing but compute its results. In a program, one that nobody needs is left out,
                and equal ones are made once.
            layout: "global", the default, calls the function with the arrays; "per_shard" once for each device with a
                `jax.Shard` (`data`, `index`, `device`, `replica_id`) for each array, to return shards of its results,
                which the shardings in `out_specs` assemble.
            run_ahead: up to so many calls are made before they are asked for; for functions without arguments.
            vmap_method: what `jax.vmap` makes of a call with batched arguments, as for `jax.pure_callback`.
                "sequential" calls the function once for each example, in order; it is the default, except for a `pure`
                function, which has none. The others call it once, with batched arrays, and it returns its results with
                the batch at axis 0 as well: "expand_dims" gives arguments that are not batched an axis of size 1 there,
                "broadcast_all" repeats them. `in_specs` and `out_specs` are those of a call that is not batched.

        Raises:
            ValueError: an item was given before or is none of its possible values.
            TypeError: an item is of a wrong type.

        Example:
            >>> spec = jax.ShapeDtypeStruct((8,), jax.numpy.float32)
            >>> double = colocated_python(lambda x: 2 * x).specialize(out_specs=spec, stream="io")
            >>> double(jax.numpy.ones(8)).sum()
            Array(16., dtype=float32)
        """
        more = self.specialization.with_items(
            f"{self._origin.name}.specialize",
            in_specs=in_specs,
            out_specs=out_specs,
            out_specs_fn=out_specs_fn,
            devices=devices,
            mode=mode,
            stream=stream,
            pure=pure,
            layout=layout,
            run_ahead=run_ahead,
            vmap_method=vmap_method,
        )
        return ColocatedFunction(self._fun, self._origin, more, self._derivatives)

    def cache_info(self) -> CacheInfo:
        """Calls that found their specialization, calls that did not, and how many there are."""
        return self._cache.info()

    def __repr__(self) -> str:
        return f"<colocated {self._origin.name}>"

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        return self if obj is None else types.MethodType(self, obj)

    def __reduce__(self) -> Any:
        rebuilt, arguments = self._origin.reference or (_rebuilt, ())
        # Rules that call the function refer to it, so it has to be there before them.
        return rebuilt, (*arguments, self._fun, self.specialization), self._derivatives

    def __setstate__(self, derivatives: Derivatives) -> None:
        self._set_derivatives(derivatives)


@overload
def colocated_python(
    fun: Callable[..., Any],
    *,
    out_specs: Any = ...,
    out_specs_fn: Callable[..., Any] | None = ...,
    in_specs: Any = ...,
    devices: Any = ...,
    mode: Mode | None = ...,
    stream: str | Stream | None = ...,
    pure: bool | None = ...,
    layout: Layout | None = ...,
    run_ahead: int | None = ...,
    vmap_method: VmapMethod | None = ...,
) -> ColocatedFunction: ...
@overload
def colocated_python(
    fun: None = None,
    *,
    out_specs: Any = ...,
    out_specs_fn: Callable[..., Any] | None = ...,
    in_specs: Any = ...,
    devices: Any = ...,
    mode: Mode | None = ...,
    stream: str | Stream | None = ...,
    pure: bool | None = ...,
    layout: Layout | None = ...,
    run_ahead: int | None = ...,
    vmap_method: VmapMethod | None = ...,
) -> Callable[[Callable[..., Any]], ColocatedFunction]: ...


def colocated_python(
    fun: Callable[..., Any] | None = None,
    *,
    out_specs: Any = None,
    out_specs_fn: Callable[..., Any] | None = None,
    in_specs: Any = None,
    devices: Any = None,
    mode: Mode | None = None,
    stream: str | Stream | None = None,
    pure: bool | None = None,
    layout: Layout | None = None,
    run_ahead: int | None = None,
    vmap_method: VmapMethod | None = None,
) -> Any:
    """Makes a function run on the hosts of its arguments' devices, beside what the devices do.

    The function is called with concrete arrays on CPU devices of the hosts, and may do what Python does: read files,
    start threads, use jax and partjit. It must return arrays, in any tree, or None. The first call for arguments of new
    types or shardings runs at once and shows what it returns; later ones, and all of them if `out_specs` or
    `out_specs_fn` say so, return before the function has run, with arrays that wait when they are used. The calls of a
    thread run in their order. What the function raises is raised where a result is used, or by `colocated.wait()`.

    What the function captures is copied at the first call for each kind of arguments, as if it went to another host
    (and anew after `jax.clear_caches()`); modules, and what can be imported from one, are not.

    Args:
        fun: the function; without, a decorator is returned.
        out_specs, out_specs_fn, in_specs, devices, mode, stream, pure, layout, run_ahead, vmap_method: as in
            `ColocatedFunction.specialize`.

    Returns:
        The colocated function, with `specialize` and `cache_info`.

    Raises:
        TypeError: `fun` is not callable.
        ValueError: at a call: an argument or a result is no array, arguments are on different devices, there are none,
            or a result contradicts its specs.

    Example:
        >>> import numpy as np
        >>> @colocated_python
        ... def next_batch(step):
        ...     return jax.numpy.asarray(np.random.default_rng(int(step)).normal(size=4))
        >>> next_batch(jax.numpy.int32(0)).shape
        (4,)

    In a function that is traced for `partjit.pjit` a call becomes an equation of the program, which makes the call each
    time it runs. What it returns must be known then: from `out_specs`, `out_specs_fn` or an earlier call outside.

    The name and the behaviour are those of `jax.experimental.colocated_python`; docs/colocated.md says what differs.
    """
    specialization = Specialization().with_items(
        "colocated_python",
        in_specs=in_specs,
        out_specs=out_specs,
        out_specs_fn=out_specs_fn,
        devices=devices,
        mode=mode,
        stream=stream,
        pure=pure,
        layout=layout,
        run_ahead=run_ahead,
        vmap_method=vmap_method,
    )
    if fun is None:
        return lambda fun: _rebuilt(fun, specialization)
    return _rebuilt(fun, specialization)


def _rebuilt(fun: Callable[..., Any], specialization: Specialization) -> ColocatedFunction:
    require_callable("colocated_python", "fun", fun)
    name = name_of(fun)
    return ColocatedFunction(fun, Origin(name, signature_of(fun), lambda: _copied(fun, name)), specialization)


def _copied(fun: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function as another host would get it."""
    try:
        data = serialize(fun)
    except Exception as error:
        error.add_note(f"{name} and what it captures are copied for its host")
        raise
    return deserialize(data)
