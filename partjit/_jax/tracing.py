"""Tracing functions to jaxprs, and what is being traced."""

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from jax._src import api_util, config, core, tree_util
from jax._src import linear_util as lu
from jax._src.interpreters import ad, batching, partial_eval
from jax._src.mesh import empty_abstract_mesh
from jax.core import AbstractValue, ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, DebugInfo, Primitive
from jax.sharding import AxisType

from partjit._jax.jaxprs import MERGED_JAXPR
from partjit._jax.meshes import SET_MESH_STATES, manual_axes
from partjit._jax.types import PyTree

__all__ = [
    "ShardingTypeError",
    "abstractify",
    "eagerly",
    "has_high_types",
    "is_eager",
    "is_staged",
    "low_jaxpr",
    "name_results",
    "register_to_low",
    "resolve_argnums",
    "retraced",
    "separate_consts",
    "trace_context",
    "trace_state_clean",
    "trace_to_jaxpr",
    "transformed",
    "tree_prefix_errors",
    "type_in_program",
    "typed_like",
    "without_sharding",
]

_pe: Any = partial_eval  # its types differ from version to version

trace_state_clean: Callable[[], bool] = core.trace_state_clean
ShardingTypeError = core.ShardingTypeError
_current_trace, _eager_trace = core.trace_state_strong_ref, core.eval_trace
_set_mesh = SET_MESH_STATES[0]


def is_eager() -> bool:
    """Whether nothing is traced here; as `trace_state_clean`, for calls that take microseconds."""
    return _current_trace.value is _eager_trace or trace_state_clean()


def eagerly() -> AbstractContextManager[object]:
    """A context in which operations are computed, whatever transformation is under way."""
    return core.set_current_trace(_eager_trace)


def is_staged() -> bool:
    """Whether what is called here becomes part of a jaxpr: an eager `jax.grad` transforms, and calls at once."""
    trace: Any = _current_trace.value
    while trace is not None and not isinstance(trace, _pe.DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def transformed(value: object) -> object:
    """What eager transformations compute with in the place of a tracer of theirs; anything else as it is.

    An eager `jax.vmap` has the whole array, an eager `jax.grad` the primal value.
    """
    while isinstance(value, ad.JVPTracer | ad.LinearizeTracer | batching.BatchTracer):
        value = value.val if isinstance(value, batching.BatchTracer) else value.primal
    return value


def trace_context() -> tuple[Hashable, Hashable]:
    """Everything that the result of a trace in this thread depends on, apart from the function and its arguments."""
    # The context knows the shape of what `jax.set_mesh` has set, not its devices.
    return config.trace_context(), _set_mesh.value


def abstractify(x: object) -> Any:
    """The abstract value of an array, scalar, ShapeDtypeStruct or abstract value; TypeError for anything else.

    Outside a `shard_map` the sharding is left out of the type: it is what the partitioner decides, and a type with an
    Explicit mesh in it would not be the type of the same program under the Auto twin.
    """
    aval = core.shaped_abstractify(x)
    if not isinstance(aval, ShapedArray):
        return aval
    mesh = aval.sharding.mesh
    if mesh is empty_abstract_mesh or mesh.empty or manual_axes():
        return aval
    return without_sharding(aval)


@functools.lru_cache(maxsize=1024)
def without_sharding(aval: ShapedArray) -> ShapedArray:
    """A type that does not say how its values are sharded, but still in which memory they are."""
    return ShapedArray(aval.shape, aval.dtype, aval.weak_type, memory_space=aval.memory_space)


def type_in_program(x: object) -> Any:
    """The type of a value of the function that is traced: with its sharding over Explicit axes."""
    aval = core.shaped_abstractify(x)
    is_typed = isinstance(aval, ShapedArray) and AxisType.Explicit in aval.sharding.mesh.axis_types
    return aval if is_typed else abstractify(aval)


def typed_like(aval: Any, like: AbstractValue) -> Any:
    """The abstract value with the sharding that is part of the type `like`."""
    if isinstance(aval, ShapedArray) and isinstance(like, ShapedArray) and aval.sharding != like.sharding:
        return aval.update(sharding=like.sharding)
    return aval


def resolve_argnums(fun: Callable, signature: inspect.Signature | None, donate: tuple, static: tuple) -> tuple:
    """Completes (numbers, names) pairs of donated and of static arguments from the signature, and checks them."""
    return api_util.resolve_argnums(fun, signature, *donate, *static)


def tree_prefix_errors(prefix: PyTree, tree: PyTree) -> list[Callable[[str], ValueError]]:
    """Where `prefix` is no tree prefix of `tree`, as functions from the prefix's name to an error."""
    return tree_util.prefix_errors(prefix, tree)


def trace_to_jaxpr(
    fun: Callable,
    avals: Sequence[AbstractValue],
    *,
    source: str,
    arg_names: tuple[str, ...],
    result_paths: Callable[[], tuple[str, ...]] | None = None,
) -> ClosedJaxpr:
    """The closed jaxpr of a function of flat arguments with flat results, whose paths are known once it was called."""
    debug_info = DebugInfo("pjit", source, arg_names, result_paths)
    jaxpr, _, consts = _pe.trace_to_jaxpr_dynamic(lu.wrap_init(fun, debug_info=debug_info), list(avals))
    return jaxpr.with_consts(consts) if MERGED_JAXPR else ClosedJaxpr(jaxpr, consts)


def retraced(jaxpr: ClosedJaxpr, fun: Callable) -> ClosedJaxpr:
    """The jaxpr of a function of the arguments of `jaxpr` that evaluates it, with the names that its arguments have."""
    info = jaxpr.jaxpr.debug_info
    names = tuple(info.arg_names or ("",) * len(jaxpr.in_avals))
    paths = info.result_paths if isinstance(info.result_paths, tuple) else ()
    return trace_to_jaxpr(
        fun, jaxpr.in_avals, source=info.func_src_info, arg_names=names, result_paths=lambda: tuple(paths)
    )


def name_results(jaxpr: ClosedJaxpr, paths: tuple[str, ...]) -> None:
    """Names the results of a fresh jaxpr; they are known only after tracing, and show in the lowered program."""
    jaxpr.jaxpr._debug_info = jaxpr.jaxpr.debug_info._replace(result_paths=paths)


def named_like(jaxpr: ClosedJaxpr, other: ClosedJaxpr) -> ClosedJaxpr:
    """A fresh jaxpr, whose arguments and results get the names of those of another one."""
    jaxpr.jaxpr._debug_info = other.jaxpr.debug_info
    return jaxpr


def separate_consts(jaxpr: ClosedJaxpr) -> tuple[ClosedJaxpr, list[object]]:
    """Turns constants that must be arguments (tracers of an outer trace, refs) into leading arguments."""
    if any(isinstance(const, Tracer | core.Ref) for const in jaxpr.consts):
        jaxpr, consts = _pe.separate_consts(jaxpr)
        return jaxpr, list(consts)
    return jaxpr, []


def low_jaxpr(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """A closed jaxpr as it can be lowered.

    jax 0.12 has equations with rules of their own for transformations (`jnp.nonzero`, `jnp.searchsorted`), which become
    those that they are made of when all transformations are done.
    """
    return _pe.lower_jaxpr2(jaxpr) if MERGED_JAXPR and jaxpr.is_high else jaxpr


def has_high_types(jaxpr: ClosedJaxpr) -> bool:
    """Whether a jaxpr can only be lowered with its values: arguments or results are of types that users define.

    jax 0.10 lowers no equation of theirs by itself either.
    """
    if not MERGED_JAXPR:
        return bool(jaxpr.jaxpr.is_high)
    return any(aval.is_high for aval in (*jaxpr.in_avals, *jaxpr.out_avals))


def refuse_high_types(jaxpr: ClosedJaxpr, name: str, what: str) -> None:
    """Raises TypeError for a program whose arguments or results have types that users define.

    Args:
        jaxpr: the program.
        name: its name.
        what: what cannot be done with it, such as `"lowered"`.
    """
    if not has_high_types(jaxpr):
        return
    types = (aval for aval in (*jaxpr.in_avals, *jaxpr.out_avals) if not isinstance(aval, ShapedArray))
    kinds = ", ".join(dict.fromkeys(type(aval).__name__ for aval in types)) or "a hijax primitive"
    raise TypeError(
        f"{name} cannot be {what}: jax expands values of hijax types ({kinds}) when a program is called. Call it, "
        f"lower jax.jit({name}), or give it the arrays of these values"
    )


def register_to_low(primitive: Primitive, rule: Callable) -> None:
    """Registers what an equation becomes whose jaxpr has equations that `low_jaxpr` is for."""
    if MERGED_JAXPR:
        primitive.to_lojax = rule
