"""Every private name of jax that partjit uses, and every difference between the jax versions it supports.

No other module imports `jax._src`; `make check` sees to that. A gate stands beside its reason, and what is exported has
one signature on every version:

* jax 0.10 keeps a jaxpr and its constants apart (`ClosedJaxpr(jaxpr, consts)`), jax 0.12 merges them: a `Jaxpr` has
  `consts`, and its `.jaxpr` is itself. "Closed jaxpr" below means whichever carries its constants.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import operator
import os
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np


def supported_release(version: str) -> tuple[int, ...]:
    """The numbers of a version of jax that is supported; asked before anything that others may lack is imported.

    Raises:
        ImportError: it says which versions to install.
    """
    release = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not (0, 10, 2) <= release < (0, 13):
        raise ImportError(f"partjit needs jax>=0.10.2,<0.13 but found jax {version}: pip install 'jax>=0.10.2,<0.13'")
    return release


_RELEASE = supported_release(importlib.metadata.version("jax"))

import jax
from jax._src import (
    ad_checkpoint,
    ad_util,
    api_util,
    checkify,
    config,
    core,
    custom_derivatives,
    dtypes,
    effects,
    source_info_util,
    stages,
    tree_util,
)
from jax._src import compilation_cache as _compilation_cache
from jax._src import distributed as _distributed
from jax._src import lib as _lib
from jax._src import linear_util as lu
from jax._src import mesh as mesh_lib
from jax._src import pjit as jax_pjit
from jax._src.array import ArrayImpl
from jax._src.interpreters import ad, batching, mlir, pxla
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import lax as lax_internal
from jax._src.lax.control_flow import conditionals, loops
from jax._src.lib import _jax
from jax._src.lib import utils as xla_utils
from jax._src.lib import xla_client as _xla_client
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import func as func_dialect
from jax._src.lib.mlir.dialects import hlo
from jax._src.named_sharding import NamedSharding
from jax._src.random import prng as _prng
from jax._src.shard_map import eager_rules, shard_map_p
from jax._src.sharding_impls import UNSPECIFIED, GSPMDSharding, UnspecifiedValue, parse_flatten_op_sharding
from jax._src.state import discharge as _discharge
from jax._src.state.types import AbstractRef
from jax._src.util import register_cache, weakref_lru_cache
from jax.sharding import PartitionSpec

__all__ = [
    "EMPTY_MESH",
    "MLIR_BINDINGS",
    "UNSPECIFIED",
    "USE_OF_DONATED_BUFFERS_CRASHES",
    "AbstractRef",
    "ArrayImpl",
    "DeviceAssignmentMismatchError",
    "DeviceList",
    "Effect",
    "GSPMDSharding",
    "HloSharding",
    "InternalFloatingPointError",
    "JitParts",
    "Meshes",
    "OpSharding",
    "PRNGKeyArray",
    "PjitFunction",
    "ThreadSettings",
    "UnspecifiedValue",
    "abstractify",
    "ad",
    "ad_util",
    "alias",
    "ambient",
    "array_of_buffers",
    "aval_of_struct",
    "barrier",
    "batch_jaxpr",
    "batching",
    "buffers_of",
    "called_jaxpr",
    "checked_jaxpr",
    "closed_jaxpr",
    "control_flow_of",
    "copies_of",
    "core",
    "current_source_info",
    "default_device",
    "device_list",
    "device_put",
    "discharge_jaxpr",
    "distributed_client",
    "effects_of",
    "entered",
    "fast_path_data",
    "guard_batching",
    "guard_while_loops",
    "innermost_mesh",
    "is_eager",
    "is_input_effect",
    "is_on_one_host_device",
    "is_profiled",
    "is_rematerialized",
    "is_staged",
    "is_user_file",
    "keep_in_scans",
    "kept_effects",
    "low_jaxpr",
    "lower_call",
    "lower_constraint",
    "lower_constraint_to",
    "lower_opaque",
    "lower_to_computation",
    "make_cpp_function",
    "manual_axes",
    "mismatches_inside",
    "mlir",
    "move_outputs",
    "name_results",
    "nested_name",
    "nested_shardings",
    "new_var",
    "no_compilation_cache",
    "output_shardings",
    "parse_flatten_op_sharding",
    "parts_of_jit",
    "pe",
    "physical_mesh",
    "recheck_for_nans",
    "register_array_type",
    "register_cache",
    "register_checkify",
    "register_dce",
    "register_discharge",
    "register_eager_in_shard_map",
    "register_effect",
    "register_low",
    "register_printing",
    "resolve_argnums",
    "results_are_checked",
    "save_under_checkpoint",
    "scan_counts",
    "separate_consts",
    "shard_constants",
    "shard_map_body",
    "shard_map_p",
    "shareable",
    "source_site",
    "stages",
    "standing_at",
    "to_proto",
    "trace_context",
    "trace_state_clean",
    "trace_to_jaxpr",
    "transpose_jaxpr",
    "tree_prefix_errors",
    "type_and_sharding",
    "type_of_shape",
    "type_over_mesh",
    "type_sharding_and_commitment",
    "varying",
    "varying_axes",
    "weakref_cache",
    "with_key_data",
    "with_weak_type",
    "without_axes",
    "without_mesh",
    "xla_warnings",
]

# Where a value comes from is told in lines of the user's code, not of this package.
source_info_util.register_exclusion(os.path.dirname(os.path.abspath(__file__)) + os.sep)

pe: Any = _partial_eval  # the types of both differ from version to version
discharge: Any = _discharge

ClosedJaxpr: Any = getattr(core, "ClosedJaxpr", None)
MERGED_JAXPR = ClosedJaxpr is None

trace_state_clean = core.trace_state_clean
_current_trace, _eager_trace = core.trace_state_strong_ref, core.eval_trace
InternalFloatingPointError = api_util.InternalFloatingPointError
DeviceAssignmentMismatchError = stages.DeviceAssignmentMismatchError


# jax 0.10 runs a compiled function on an array over several devices whose buffers were donated before, if the call is a
# hot one, and the process dies of a segmentation fault. An array marked as deleted is refused as it should be.
USE_OF_DONATED_BUFFERS_CRASHES = _RELEASE < (0, 11)


# Caches


def weakref_cache(compute: Callable[..., Any]) -> Any:
    """Caches `compute(key, *more)`, weakly in `key` and per jax's trace context; what raised is computed again.

    jax's `weakref_lru_cache` never stores a result under a key whose first computation raised, so that a function whose
    first trace failed would be traced anew at every later call. Here the cache holds cells, which are made without
    fail, and a cell is filled by the first computation that returns.
    """
    cells = weakref_lru_cache(lambda *_: _Cell())

    @functools.wraps(compute)
    def cached(*key: Any) -> Any:
        cell = cells(*key)
        if cell.result is _Cell:
            with cell.lock:
                if cell.result is _Cell:
                    cell.result = compute(*key)
        return cell.result

    cast(Any, cached).evict_weakref = cells.evict_weakref
    return cached


class _Cell:
    def __init__(self) -> None:
        self.result: Any = _Cell  # stands for "none yet"
        self.lock = threading.RLock()


# Meshes


# jax 0.12 moved the states of `jax.set_mesh` from config to mesh.
_mesh_state: Any = mesh_lib if MERGED_JAXPR else config

EMPTY_MESH = mesh_lib.empty_concrete_mesh


def physical_mesh() -> Any:
    """The mesh of the innermost `with mesh:` of this thread, or the empty mesh."""
    return mesh_lib.thread_resources.env.physical_mesh


def innermost_mesh() -> Any:
    """The mesh of the innermost `with mesh:` or `jax.set_mesh` of this thread, or the empty mesh.

    jax keeps the two apart and does not say which came last. Whoever enters a mesh here notes what `jax.set_mesh` had
    set by then: if that has changed since, it was set later. Of a `with` of jax's own mesh nothing is known; it wins.
    """
    entered, set_since = physical_mesh(), mesh_lib.get_concrete_mesh()
    if entered.empty:
        return set_since
    depth, set_before = _entered.notes[-1] if _entered.notes else (0, set_since)
    is_later = depth == len(mesh_lib.thread_resources.stack) and set_since is not set_before and not set_since.empty
    return set_since if is_later else entered


class _Entered(threading.local):
    def __init__(self) -> None:
        self.notes: list[tuple[int, Any]] = []  # depth of jax's stack, and the mesh of jax.set_mesh at the time


_entered = _Entered()


def manual_axes() -> tuple[str, ...]:
    """The mesh axes that are manual here, because the trace is inside a `shard_map`."""
    return mesh_lib.get_abstract_mesh().manual_axes


@contextlib.contextmanager
def entered(mesh: Any) -> Iterator[None]:
    """What `with` of a `jax.sharding.Mesh` does, without its DeprecationWarning."""
    resources = mesh_lib.thread_resources
    resources.stack.append(resources.stack[-1].with_mesh(mesh))
    _entered.notes.append((len(resources.stack), mesh_lib.get_concrete_mesh()))
    _publish_entered_meshes()
    try:
        yield
    finally:
        resources.stack.pop()
        _entered.notes.pop()
        _publish_entered_meshes()


class Meshes:
    """The meshes that are ambient in this thread, in every way, to be so again within a block inside of others."""

    def __init__(self) -> None:
        self._states = [
            (state, state.get_local())
            for state in (_mesh_state.device_context, _mesh_state.abstract_mesh_context_manager)
        ]
        self._stack, self._notes = mesh_lib.thread_resources.stack[1:], [*_entered.notes]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Makes them ambient in the block."""
        resources = mesh_lib.thread_resources
        outer = [(state, state.swap_local(value)) for state, value in self._states]
        outer_stack, outer_notes = resources.stack[1:], _entered.notes
        resources.stack[1:], _entered.notes = self._stack, [*self._notes]
        _publish_entered_meshes()
        try:
            yield
        finally:
            resources.stack[1:], _entered.notes = outer_stack, outer_notes
            _publish_entered_meshes()
            for state, value in outer:
                state.set_local(value)


def _publish_entered_meshes() -> None:
    resources = mesh_lib.thread_resources
    resources.env = resources.stack[-1]
    # This is part of the key of every cache of jax's. It has to tell which mesh is innermost, so unlike jax's it names
    # empty meshes, which shadow others, and what `jax.set_mesh` had set when a mesh was entered.
    set_before = {depth: mesh for depth, mesh in _entered.notes if not mesh.empty}
    config.mesh_context_manager.set_local(
        tuple(
            (env.physical_mesh, set_before[depth]) if depth in set_before else env.physical_mesh
            for depth, env in enumerate(resources.stack[1:], start=2)
        )
    )


@contextlib.contextmanager
def ambient(mesh: Any) -> Iterator[None]:
    """Makes `mesh` the answer to every way of asking: `with mesh:`, `jax.set_mesh` and the abstract mesh."""
    # The states are set directly: jax's own context managers refuse a mesh of another size than the one set before.
    outer = _mesh_state.device_context.swap_local(mesh)
    outer_abstract = _mesh_state.abstract_mesh_context_manager.swap_local(mesh.abstract_mesh)
    try:
        with entered(mesh):
            yield
    finally:
        _mesh_state.abstract_mesh_context_manager.set_local(outer_abstract)
        _mesh_state.device_context.set_local(outer)


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Makes no mesh ambient where `jax.set_mesh` or a `shard_map` has made one so: it is wrong for a single device."""
    if mesh_lib.get_concrete_mesh().empty and mesh_lib.get_abstract_mesh().empty:
        yield
    else:
        with ambient(EMPTY_MESH):
            yield


# Tracing


def default_device() -> Any:
    """What `jax_default_device` is here: a device, the name of a platform or None (a private reader: jax 0.10.2 has the
    public attribute, but not in its types).
    """
    return config.default_device.value


def is_eager() -> bool:
    """Whether nothing is traced here; as `trace_state_clean`, for calls that take microseconds."""
    return _current_trace.value is _eager_trace or trace_state_clean()


def is_staged() -> bool:
    """Whether what is called here becomes part of a jaxpr: an eager `jax.grad` transforms, and calls at once."""
    trace: Any = _current_trace.value
    while trace is not None and not isinstance(trace, pe.DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def abstractify(x: Any) -> Any:
    """The abstract value of an array, scalar, ShapeDtypeStruct or abstract value; TypeError for anything else.

    Outside a `shard_map` the sharding is left out of the type: it is what the partitioner decides, and a type with an
    Explicit mesh in it would not be the type of the same program under the Auto twin.
    """
    aval = core.shaped_abstractify(x)
    if isinstance(aval, core.ShapedArray) and not manual_axes():
        return core.ShapedArray(aval.shape, aval.dtype, aval.weak_type, memory_space=aval.memory_space)
    return aval


def resolve_argnums(fun: Callable, signature: Any, donate: tuple, static: tuple) -> tuple:
    """Completes (numbers, names) pairs of donated and of static arguments from the signature, and checks them."""
    return api_util.resolve_argnums(fun, signature, *donate, *static)


def trace_to_jaxpr(
    fun: Callable,
    avals: Sequence[Any],
    *,
    source: str,
    arg_names: tuple[str, ...],
    result_paths: Callable[[], tuple[str, ...]] | None = None,
) -> Any:
    """The closed jaxpr of a function of flat arguments with flat results, whose paths are known once it was called."""
    debug_info = core.DebugInfo("pjit", source, arg_names, result_paths)
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(lu.wrap_init(fun, debug_info=debug_info), list(avals))
    return jaxpr.with_consts(consts) if MERGED_JAXPR else ClosedJaxpr(jaxpr, consts)


def low_jaxpr(jaxpr: Any) -> Any:
    """A closed jaxpr as it can be lowered.

    jax 0.12 has equations with rules of their own for transformations (`jnp.nonzero`, `jnp.searchsorted`), which become
    those that they are made of when all transformations are done.
    """
    return pe.lower_jaxpr2(jaxpr) if MERGED_JAXPR and jaxpr.is_high else jaxpr


def register_low(primitive: Any, rule: Callable) -> None:
    """Registers what an equation becomes whose jaxpr has equations that `low_jaxpr` is for."""
    if MERGED_JAXPR:
        primitive.to_lojax = rule


def name_results(jaxpr: Any, paths: tuple[str, ...]) -> None:
    """Names the results of a fresh jaxpr; they are known only after tracing, and show in the lowered program."""
    jaxpr.jaxpr._debug_info = jaxpr.jaxpr.debug_info._replace(result_paths=paths)


def separate_consts(jaxpr: Any) -> tuple[Any, list[Any]]:
    """Turns constants that must be arguments (tracers of an outer trace, refs) into leading arguments."""
    if any(isinstance(const, core.Tracer | core.Ref) for const in jaxpr.consts):
        jaxpr, consts = pe.separate_consts(jaxpr)
        return jaxpr, list(consts)
    return jaxpr, []


def effects_of(jaxpr: Any) -> Any:
    """The effects of a jaxpr, those on its inputs by position."""
    return core.positional_effects(jaxpr)


def kept_effects(jaxpr: Any) -> bool:
    """Whether the jaxpr has effects that partial evaluation must keep even where nobody reads a result."""
    return bool(core.effects.partial_eval_kept_effects.filter_in(jaxpr.effects))


def source_site(source_info: Any) -> tuple[str, int, str] | None:
    """File, line and function of the user's code that an equation comes from, if that is known."""
    frame = source_info_util.user_frame(source_info.traceback)
    return None if frame is None else (frame.file_name, frame.start_line, frame.function_name.rpartition(".")[2])


# Whether the code of a file is the user's, neither jax's nor of this package nor of another that is excluded.
is_user_file: Callable[[str], bool] = source_info_util.is_user_filename


def trace_context() -> Any:
    """Everything that the result of a trace in this thread depends on, apart from the function and its arguments."""
    # The context knows the shape of what `jax.set_mesh` has set, not its devices.
    return config.trace_context(), mesh_lib.get_concrete_mesh()


def current_source_info() -> Any:
    """Where in the user's program the current equation comes from."""
    return source_info_util.current()


def standing_at(source_info: Any) -> Any:
    """Lets equations that are traced in the block come from there.

    jax notes what called it only up to the loop whose body is traced, so that a body of our own comes from nowhere.
    """
    return source_info_util.user_context(source_info.traceback)


def batch_jaxpr(jaxpr: Any, axis_data: Any, batched_in: Sequence[bool]) -> tuple[Any, Sequence[bool]]:
    """The jaxpr of the function batched at dimension 0, and which outputs are batched."""
    return batching.batch_jaxpr(jaxpr, axis_data, tuple(batched_in), instantiate=False)


def transpose_jaxpr(jaxpr: Any, in_tree: Any, in_avals: tuple[Any, ...]) -> tuple[Any, Any]:
    """The jaxpr that maps (residuals, output cotangents) to input cotangents, flat, and the tree of its results."""
    out_tree = None

    def transposed(*flat: Any) -> list[Any]:
        nonlocal out_tree
        primals, cts_in = in_tree.unflatten(flat)
        # jax 0.10 gets the type of a scan's stacked result wrong if its cotangent is zero: what has none goes first.
        nonzero = [type(ct) is not ad.Zero for ct in cts_in]
        live, _ = pe.dce_jaxpr(jaxpr.jaxpr, nonzero, instantiate=True)
        cts_live = [ct for ct, is_live in zip(cts_in, nonzero, strict=True) if is_live]
        cts_out = ad.backward_pass(live, False, jaxpr.consts, primals, cts_live)
        flat_out, out_tree = tree_util.tree_flatten(cts_out)
        return flat_out

    source = jaxpr.jaxpr.debug_info.func_src_info
    return trace_to_jaxpr(transposed, in_avals, source=source, arg_names=("",) * len(in_avals)), out_tree


def discharge_jaxpr(ctx: Any, jaxpr: Any) -> Any:
    """The jaxpr with its refs turned into values that are passed in and out."""
    if MERGED_JAXPR:  # the context says whether memory spaces are to be stripped as well
        return discharge.discharge_state(jaxpr, strip_memory_space=ctx.strip_memory_space)
    return discharge.discharge_state(jaxpr)


def checked_jaxpr(ctx: Any, jaxpr: Any, enabled_errors: Any, err_tree: Any, in_avals: tuple) -> tuple[Any, Any]:
    """The jaxpr that carries checkify's error along, and the tree of its (error, results)."""
    context = (ctx,) if MERGED_JAXPR else ()  # jax 0.12 passes a context through all of checkify
    checked, out_tree, _ = checkify.jaxpr_to_checkify_jaxpr(*context, jaxpr, enabled_errors, err_tree, *in_avals)
    return checked, out_tree


# Jaxprs, taken apart and put together


def new_var(aval: Any) -> Any:
    """A fresh variable of a jaxpr."""
    make: Any = core.Var
    return make(aval)


def closed_jaxpr(invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any], consts: dict[Any, Any]) -> Any:
    """A closed jaxpr of equations.

    Args:
        invars, outvars: its arguments and results.
        eqns: its equations, in an order in which they can be evaluated.
        consts: the values of the variables that are constants.
    """
    positions = {var: i for i, var in enumerate((*consts, *invars))}
    joined = {effect for eqn in eqns for effect in eqn.effects}
    kept = {e for e in joined if not isinstance(e, effects.JaxprInputEffect) or e.input in positions}
    info = core.DebugInfo("pjit", "fragment", ("",) * len(invars), ("",) * len(outvars))
    if MERGED_JAXPR:
        merged: Any = core.Jaxpr
        return merged([*consts], [*invars], [*outvars], [*eqns], kept, info, consts=[*consts.values()])
    open_jaxpr = core.Jaxpr([*consts], [*invars], [*outvars], [*eqns], kept, info)
    return ClosedJaxpr(open_jaxpr, [*consts.values()])


_CLOSED_CALLS = {
    jax_pjit.jit_p: "jaxpr",
    custom_derivatives.custom_jvp_call_p: "call_jaxpr",
    custom_derivatives.custom_vjp_call_p: "call_jaxpr",
    ad_checkpoint.remat_p: "jaxpr",
    core.closed_call_p: "call_jaxpr",
}


def called_jaxpr(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    """The open jaxpr and the constants of what one of jax's equations calls exactly once; None for other equations.

    These are nested `jax.jit`, functions with custom derivatives, and `jax.checkpoint`.
    """
    name = _CLOSED_CALLS.get(eqn.primitive)
    if name is None:
        return None
    jaxpr = eqn.params[name]
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())  # that of `jax.checkpoint` is an open one


def is_rematerialized(eqn: Any) -> bool:
    """Whether an equation is one of `jax.checkpoint` that computes anew what was computed before."""
    return eqn.primitive is ad_checkpoint.remat_p and bool(eqn.params["differentiated"] and eqn.params["prevent_cse"])


def barrier(atoms: Sequence[Any], outvars: Sequence[Any], like: Any) -> Any:
    """An equation that passes values on, and lets nothing behind it be merged with what is before it."""
    primitive = lax_internal.optimization_barrier_p
    return core.new_jaxpr_eqn([*atoms], [*outvars], primitive, {}, set(), like.source_info, like.ctx)


def control_flow_of(eqn: Any) -> str | None:
    """Which kind of loop or branch one of jax's equations is: "scan", "while" or "cond"; None for other equations."""
    return eqn.primitive.name if eqn.primitive in (loops.scan_p, loops.while_p, conditionals.cond_p) else None


class JitParts(NamedTuple):
    """What `jax.jit` knows of a traced call.

    Attributes:
        in_shardings, out_shardings: of arguments and results; UNSPECIFIED where the partitioner chooses.
        donated: for each argument whether its memory may be reused.
        paths: the key paths of the arguments.
    """

    in_shardings: tuple[Any, ...]
    out_shardings: tuple[Any, ...]
    donated: tuple[bool, ...]
    paths: tuple[str, ...]


def parts_of_jit(traced: Any) -> JitParts:
    """What is known of what `jax.jit(...).trace(...)` returned (private readers: its stages do not tell)."""
    params = traced._params
    in_shardings = tuple(
        (meta.sharding if meta.committed and meta.sharding is not None else UNSPECIFIED)
        if isinstance(sharding, UnspecifiedValue)
        else sharding
        for sharding, meta in zip(params["in_shardings"], traced._meta_tys_flat, strict=True)
    )
    info = traced.jaxpr.jaxpr.debug_info
    count = len(in_shardings)
    names = info.arg_names if info.arg_names and len(info.arg_names) == count else ("",) * count
    paths = tuple(name or f"argument[{i}]" for i, name in enumerate(names))
    return JitParts(in_shardings, tuple(params["out_shardings"]), tuple(params["donated_invars"]), paths)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many of the arguments of a scan are constants and how many are carried; the rest are stacks of slices.

    jax 0.12 says it with trees that are flat here.
    """
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carries, _ = map(list, eqn.params["ft_in"].update(eqn.invars).unpack())
    return len(consts), len(carries)


def is_input_effect(effect: Any) -> bool:
    """Whether an effect is on one of the arguments, by its number."""
    return isinstance(effect, effects.JaxprInputEffect)


def nested_shardings(eqn: Any) -> tuple[Sequence[Any], Sequence[Any]] | None:
    """The shardings of arguments and results that a nested `jax.jit` asks for, UNSPECIFIED where it does not."""
    if eqn.primitive is not jax_pjit.jit_p:
        return None
    return eqn.params["in_shardings"], eqn.params["out_shardings"]


def nested_name(source_info: Any, outer: Any) -> Any:
    """The source information of an equation that is taken out of a nested jaxpr: names are relative to that."""
    return source_info.replace(name_stack=outer.name_stack + source_info.name_stack)


# Bodies of shard_map


def varying(aval: Any) -> Any:
    """The type of a value of which each shard has its own, if a `shard_map` is traced here; elsewhere the same type."""
    mesh = mesh_lib.get_abstract_mesh()
    if not mesh.manual_axes:
        return aval
    # Where `check_vma` is False, types do not say over which axes values vary.
    axes = frozenset(mesh.manual_axes if config._check_vma.value else ())
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * aval.ndim))
    return aval.update(sharding=sharding, manual_axis_type=core.ManualAxisType(varying=axes))


def varying_axes(aval: Any) -> frozenset[str]:
    """The axes along which the type of a value in a `shard_map` allows it to differ between shards."""
    return aval.mat.vur


def type_of_shape(aval: Any, shape: tuple[int, ...]) -> Any:
    """The type of a value in a `shard_map` in another shape."""
    spec = PartitionSpec(*[None] * len(shape))
    return aval.update(shape=shape, sharding=aval.sharding.update(spec=spec))


def type_over_mesh(aval: Any, shape: tuple[int, ...]) -> Any:
    """The type, outside of a `shard_map`, of an array of that shape whose shards are values of it."""
    return core.ShapedArray(shape, aval.dtype, aval.weak_type, memory_space=aval.memory_space)


def shard_map_body(eqn: Any) -> Any:
    """The body of a `shard_map` as a closed jaxpr; jax 0.10 has it as an open one, without constants."""
    jaxpr = eqn.params["jaxpr"]
    return jaxpr if MERGED_JAXPR else ClosedJaxpr(jaxpr, [])


def register_eager_in_shard_map(primitive: Any, rule: Callable) -> None:
    """Registers `rule(mesh, *values, axes, **params) -> results` for a `shard_map` that runs operation by operation.

    The axes are those that it is over. Values and results have one dimension more in front, whose slices are what the
    shards have: all of them or, where `check_vma` is True, those along the axes along which the value varies.
    """

    def evaluate(*args: Any, **params: Any) -> Any:
        axes = manual_axes()
        with core.eval_context(), without_mesh():
            return rule(*args, axes=axes, **params)

    eager_rules[primitive] = evaluate


def without_axes(effects: Any) -> set[Any]:
    """Effects without those that only say of which axes of the mesh an equation is."""
    return {effect for effect in effects if not isinstance(effect, core.NamedAxisEffect)}


# Effects

Effect = effects.Effect


def register_effect(effect_type: Any) -> None:
    """Lets equations with an unordered effect stand wherever calls can stand, and keeps partial evaluation from losing
    them.
    """
    for registry in (
        effects.control_flow_allowed_effects,
        effects.custom_derivatives_allowed_effects,
        effects.remat_allowed_effects,
        effects.lowerable_effects,
        effects.partial_eval_kept_effects,
    ):
        registry.add_type(effect_type)


# Rules whose signature differs


def register_dce(primitive: Any, rule: Callable) -> None:
    """Registers `rule(used_outputs, eqn, dce) -> (used_inputs, eqn | None)`.

    `dce(closed_jaxpr, used_outputs) -> (closed_jaxpr, used_inputs)` and `dce.has_effects(eqn)`: jax 0.12 also says
    which inputs anybody reads afterwards, and both depend on it.
    """
    if MERGED_JAXPR:
        pe.dce_rules[primitive] = lambda used, live, eqn: rule(used, eqn, _Dce(tuple(live)))
    else:
        pe.dce_rules[primitive] = lambda used, eqn: rule(used, eqn, _Dce(None))


class _Dce:
    def __init__(self, live_inputs: tuple[bool, ...] | None) -> None:
        self._live_inputs = live_inputs

    def __call__(self, jaxpr: Any, used_outputs: tuple[bool, ...]) -> tuple[Any, list[bool]]:
        if self._live_inputs is not None:
            tokens = [v.aval is core.abstract_token for v in jaxpr.invars]
            return pe.dce_jaxpr(jaxpr, used_outputs, instantiate=tokens, live_inputs=self._live_inputs)
        return _dce_closed_jaxpr(jaxpr, used_outputs)

    def has_effects(self, eqn: Any) -> bool:
        return pe.has_effects(eqn) if self._live_inputs is None else pe.has_effects(eqn, self._live_inputs)


@weakref_cache
def _dce_closed_jaxpr(jaxpr: Any, used_outputs: tuple[bool, ...]) -> tuple[Any, list[bool]]:
    # Cached, so that the same dead code gives the same jaxpr and what is compiled for it is found again.
    live, used_inputs = pe.dce_jaxpr(jaxpr.jaxpr, used_outputs)
    return ClosedJaxpr(live, jaxpr.consts), used_inputs


def register_discharge(primitive: Any, rule: Callable) -> None:
    """Registers `rule(ctx, in_avals, *args, **params) -> (new values of the refs, results)`."""

    @discharge.register_discharge_rule(primitive)
    def _(*args: Any, **params: Any) -> Any:
        if MERGED_JAXPR:
            ctx, *values = args
            return rule(ctx, ctx.in_avals, *values, **params)
        in_avals, _, *values = args
        return rule(None, in_avals, *values, **params)


def register_checkify(primitive: Any, rule: Callable) -> None:
    """Registers `rule(ctx, error, enabled_errors, *args, **params) -> (error, results)`."""
    checkify.error_checks[primitive] = rule if MERGED_JAXPR else lambda *args, **kw: rule(None, *args, **kw)


def register_printing(primitive: Any, shown: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Prints equations of `primitive` in jaxprs with the parameters `shown` returns, in that order."""

    def rule(eqn: Any, context: Any, settings: Any) -> Any:
        params = shown(eqn.params)
        jaxpr = eqn.params.get("jaxpr")
        if jaxpr is not None and (jaxpr if MERGED_JAXPR else jaxpr.jaxpr) not in context.shared_jaxprs:
            context.suggest_same_var_names(jaxpr.jaxpr.invars, eqn.invars)
            context.suggest_same_var_names(jaxpr.jaxpr.outvars, eqn.outvars)
        return core._pp_eqn(eqn.replace(params=params), context, settings, params=list(params))

    core.pp_eqn_rules[primitive] = rule


# Loops and branches with equations that must be evaluated as often as the program says

Find = Callable[[Sequence[Any]], Sequence[Any]]
"""Gives, of some jaxprs, the equations inside of them that a rule has to be careful with."""

Refuse = Callable[[str, Sequence[Any]], None]
"""Raises for such equations in a loop or branch of a kind."""


def guard_batching(find: Find, refuse: Refuse) -> None:
    """Has `refuse` called where a batched predicate would make jax evaluate equations that `find` finds for all
    examples: both branches of a `cond`, and the body of a `while_loop` for examples that are done.
    """
    batchers = batching.fancy_primitive_batchers
    batch_cond, batch_while = batchers[conditionals.cond_p], batchers[loops.while_p]

    def guarded_cond(axis_data: Any, args: Any, dims: Any, **params: Any) -> Any:
        # What depends on the platform is asked for anew, and not for each example.
        if dims[0] is not None and "branches_platforms" not in params:
            found = find(params["branches"])
            if found:
                refuse("cond", found)
        return batch_cond(axis_data, args, dims, **params)

    def guarded_while(axis_data: Any, args: Any, dims: Any, **params: Any) -> Any:
        found = find([params["cond_jaxpr"], params["body_jaxpr"]])
        if found and _predicate_is_batched(axis_data, dims, **params):
            refuse("while_loop", found)
        return batch_while(axis_data, args, dims, **params)

    batchers[conditionals.cond_p], batchers[loops.while_p] = guarded_cond, guarded_while


def _predicate_is_batched(
    axis_data: Any, dims: Any, *, cond_nconsts: int, cond_jaxpr: Any, body_nconsts: int, body_jaxpr: Any
) -> bool:
    is_batched = [dim is not None for dim in dims]
    of_body, carry = is_batched[cond_nconsts:][:body_nconsts], is_batched[cond_nconsts + body_nconsts :]
    grown = None
    while carry != grown:  # what the body makes of a batched value is carried to its next turn
        _, out = batch_jaxpr(body_jaxpr, axis_data, [*of_body, *carry])
        grown, carry = carry, [*map(operator.or_, carry, out)]
    _, (predicate,) = batch_jaxpr(cond_jaxpr, axis_data, [*is_batched[:cond_nconsts], *carry])
    return bool(predicate)


def guard_while_loops(find: Find, refuse: Refuse) -> None:
    """Has partial evaluation leave alone what it would evaluate twice: of a `while_loop` it computes the known results
    now and all of it again for the others, and under `jax.checkpoint` all of it again in any case.
    """
    whole, custom = pe.custom_partial_eval_rules, pe.partial_eval_jaxpr_custom_rules
    evaluate, evaluate_custom = whole[loops.while_p], custom[loops.while_p]

    def jaxprs(params: Any) -> list[Any]:
        return [params["cond_jaxpr"], params["body_jaxpr"]]

    def guarded(trace: Any, *tracers: Any, **params: Any) -> Any:
        if not all(tracer.is_known() for tracer in tracers):
            found = find(jaxprs(params))
            if found:
                refuse("while_loop", found)
        return evaluate(trace, *tracers, **params)

    def guarded_custom(saveable: Any, unknown: Any, available: Any, eqn: Any) -> Any:
        found = find(jaxprs(eqn.params))
        if not found:
            return evaluate_custom(saveable, unknown, available, eqn)
        if any(unknown):
            refuse("while_loop", found)
        return eqn, None, [False] * len(eqn.outvars), [False] * len(eqn.outvars), []

    whole[loops.while_p], custom[loops.while_p] = guarded, guarded_custom


def keep_in_scans(is_kept: Callable[[Any], bool]) -> None:
    """Keeps equations where they are in a `scan` that is differentiated: jax moves what depends on no turn out of it,
    and evaluates it once, whatever its effects.
    """

    def kept(jaxpr: Any) -> Any:
        if not any(map(is_kept, jaxpr.jaxpr.eqns)):
            return jaxpr
        eqns = [
            eqn.replace(primitive=_staged_p, params={"eqn": eqn}) if is_kept(eqn) else eqn for eqn in jaxpr.jaxpr.eqns
        ]
        return jaxpr.replace(eqns=eqns) if MERGED_JAXPR else jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(eqns=eqns))

    def hoist(jaxpr: Any, *args: Any) -> Any:
        return loops_module._scan_known_hoisting(kept(jaxpr), *args)

    def split(jaxpr: Any, *args: Any) -> Any:
        return pe.partial_eval_jaxpr_nounits(kept(jaxpr), *args)

    # jax's own rules, with another function in the one place where they move equations.
    loops_module: Any = loops
    splitting = types.SimpleNamespace(**{**vars(pe), "partial_eval_jaxpr_nounits": split})
    for table, replaced in (
        (ad.primitive_linearizations, {"_scan_known_hoisting": hoist}),
        (pe.custom_partial_eval_rules, {"_scan_known_hoisting": hoist}),
        (pe.partial_eval_jaxpr_custom_rules, {"pe": splitting}),
    ):
        table[loops.scan_p] = _with_globals(table[loops.scan_p], replaced)


def _with_globals(function: Any, replaced: dict[str, Any]) -> Any:
    """A copy of a function that sees other things under some of its global names."""
    assert {*replaced} <= {*function.__code__.co_names}
    namespace = {**function.__globals__, **replaced}
    copy = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_staged_p = core.Primitive("staged")
_staged_p.multiple_results = True


def _stage(trace: Any, *tracers: Any, eqn: Any) -> list[Any]:
    """Partial evaluation puts `eqn` into the unknown half, even if all of its arguments are known."""
    tracers = tuple(map(trace.instantiate_const, tracers))
    outs = [pe.JaxprTracer(trace, pe.PartialVal.unknown(var.aval), None) for var in eqn.outvars]
    source = source_info_util.current().replace(name_stack=trace._current_truncated_name_stack())
    positions = {
        effect.replace(input=eqn.invars.index(effect.input)) if isinstance(effect, effects.JaxprInputEffect) else effect
        for effect in eqn.effects
    }
    recipe = pe.new_eqn_recipe(trace, tracers, outs, eqn.primitive, eqn.params, positions, source)
    for out in outs:
        out.recipe = recipe
    trace.effect_handles.append(pe.EffectHandle(tracers, recipe))
    return outs


pe.custom_partial_eval_rules[_staged_p] = _stage


IsSaved = Callable[[Any, dict[str, Any]], bool]
"""Whether the results of an equation, given by its primitive and parameters, have to be saved."""


def save_under_checkpoint(is_saved: IsSaved) -> None:
    """Has `jax.checkpoint` save the results of equations, whatever its policy."""
    evaluate = pe.custom_partial_eval_rules[ad_checkpoint.remat_p]

    def saving(trace: Any, *tracers: Any, jaxpr: Any, policy: Any, **params: Any) -> Any:
        if is_saved(ad_checkpoint.remat_p, {"jaxpr": jaxpr}) and not isinstance(policy, _Saving):
            policy = _Saving(policy or ad_checkpoint.nothing_saveable, is_saved)
        return evaluate(trace, *tracers, jaxpr=jaxpr, policy=policy, **params)

    pe.custom_partial_eval_rules[ad_checkpoint.remat_p] = saving


@dataclasses.dataclass(frozen=True, repr=False)
class _Saving:
    """A policy that saves what has to be saved, and otherwise does as another one says."""

    policy: Any
    is_saved: IsSaved

    def __repr__(self) -> str:
        return repr(self.policy)

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        return self.is_saved(primitive, params) or self.policy(primitive, *avals, **params)


# Lowering and compiling


def lower_to_computation(
    jaxpr: Any,
    name: str,
    in_shardings: Any,
    out_shardings: Any,
    donated: Any,
    platforms: tuple[str, ...] | None = None,
    parameters: Any = None,
    **options: Any,
) -> Any:
    """Lowers a closed jaxpr to a program over all devices of its shardings, a `jax.stages.Lowering`.

    Args:
        jaxpr: the closed jaxpr.
        name: the name of the program.
        in_shardings, out_shardings: one sharding or UNSPECIFIED per argument and per result.
        donated: one flag per argument.
        platforms, parameters: what `jax.export` asks for.
        options: `keep_unused`, `context_mesh` (decides the devices where no sharding does).
    """
    return pxla.lower_sharding_computation(
        jaxpr,
        "pjit",
        name,
        tuple(in_shardings),
        tuple(out_shardings),
        (None,) * len(in_shardings),
        (None,) * len(out_shardings),
        tuple(donated),
        compiler_options_kvs=(),
        lowering_platforms=platforms,
        lowering_parameters=mlir.LoweringParameters() if parameters is None else parameters,
        pgle_profiler=None,
        **options,
    )


def mismatches_inside(error: Exception) -> list[tuple[str, list[int]]]:
    """What is on other devices than the rest of a program, and on which, besides arguments and results."""
    (mismatches,) = error.args
    found = []
    for mismatch in mismatches:
        if mismatch.m_type in (stages.MismatchType.ARG_SHARDING, stages.MismatchType.OUT_SHARDING):
            continue
        what = "the mesh" if mismatch.m_type is stages.MismatchType.CONTEXT_DEVICES else "something"
        if mismatch.source_info is not None:
            site = source_info_util.summarize(mismatch.source_info.source_info)
            what = f"the {mismatch.source_info.eqn_name}{site and f' at {site}'}"
        found.append((what, [device.id for device in mismatch.da]))
    return found


def shard_constants(computation: Any, executable: Any) -> list[Any]:
    """The constants of a lowered program, placed as its executable wants them; they come before the arguments."""
    return executable.shard_const_args(computation.const_args)


def move_outputs(executable: Any, mesh: Any) -> None:
    """Lets an executable return its outputs on `mesh`, which has the devices and names of theirs but other axis types.

    Where the partitioner chose the sharding of an output, jax has no way to know that the user's mesh is meant. Only
    the Python objects are changed; the same bytes come out.
    """
    shardings = tuple(
        sharding.update(mesh=mesh)
        if isinstance(sharding, NamedSharding) and sharding.mesh.shape == mesh.shape
        else sharding
        for sharding in executable._out_shardings
    )
    if shardings != tuple(executable._out_shardings):
        avals = [core.update_aval_with_sharding(a, s) for a, s in zip(executable.out_avals, shardings, strict=True)]
        unloaded = executable._unloaded_executable
        executable._out_shardings = unloaded.output_shardings = shardings
        executable.out_avals = unloaded.output_avals = avals
        executable._unsafe_call = None  # built from these when next asked for


def output_shardings(executable: Any) -> Sequence[Any]:
    """Where the results of an executable lie."""
    return executable._out_shardings


def lower_call(
    ctx: Any, args: Sequence[Any], *, jaxpr: Any, name: str, in_shardings: Sequence[Any], out_shardings: Sequence[Any]
) -> Sequence[Any]:
    """Lowers a nested program to a call of an MLIR function of its own, shared by equal nested programs.

    Source: `_pjit_lowering` of jax.
    """
    module = ctx.module_context
    key = ("pjit", name, jaxpr, tuple(in_shardings), tuple(out_shardings))
    lowered = module.cached_primitive_lowerings.get(key)
    effects = [effect for effect in jaxpr.effects if core.effects.ordered_effects.contains(effect)]
    consts = core.jaxpr_const_args(jaxpr.jaxpr)
    if lowered is None:
        unsharded_consts = [None] * len(consts)
        lowered = mlir.lower_jaxpr_to_fun(
            module,
            name,
            jaxpr,
            effects,
            num_const_args=len(consts),
            in_avals=(*(aval for _, aval in consts), *jaxpr.in_avals),
            arg_shardings=[*unsharded_consts, *in_shardings],
            result_shardings=list(out_shardings),
            # Sharding attributes on the arguments of an inner function are lost on the way to HLO; annotation
            # operations inside of it are not.
            use_sharding_annotations=False,
            # jax 0.12 asks for the types of the results.
            **({"out_avals": jaxpr.out_avals} if MERGED_JAXPR else {}),
        )
        module.cached_primitive_lowerings[key] = lowered
    const_values, _ = _flatten_ir(
        [mlir.ir_constants(const, const_lowering=ctx.const_lowering, aval=aval) for const, aval in consts]
    )
    tokens_in = [ctx.tokens_in.get(effect) for effect in effects]
    flat_args, _ = _flatten_ir((*ctx.dim_var_values, *tokens_in, *const_values, *args))
    types = [mlir.token_type()] * len(effects) + [mlir.aval_to_ir_types(module, a) for a in ctx.avals_out]
    flat_types, results_tree = _flatten_ir(types)
    call = func_dialect.CallOp(flat_types, ir.FlatSymbolRefAttr.get(lowered.name.value), flat_args)
    tokens_and_results = results_tree.unflatten(call.results)
    if effects:
        ctx.set_tokens_out(
            ctx.tokens_in.update_tokens(mlir.TokenSet(dict(zip(effects, tokens_and_results, strict=False))))
        )
    return tokens_and_results[len(effects) :]


def lower_opaque(ctx: Any, name: str, args: Sequence[Any]) -> Sequence[Any]:
    """Lowers an equation to an operation of which the partitioner knows nothing; it can never be run.

    A result of the type of an argument is taken to lie as that does.
    """
    types = [mlir.aval_to_ir_type(ctx.module_context, aval) for aval in ctx.avals_out]
    call = mlir.custom_call("partjit." + name, result_types=types, operands=[*args], has_side_effect=True)
    results, free = [*call.results], [*args]
    for k, result in enumerate(results):
        like = next((arg for arg in free if arg.type == result.type), None)
        if like is not None:
            free.remove(like)
            (results[k],) = hlo.OptimizationBarrierOp([like]).results
    return results


def lower_constraint(ctx: Any, x: Any, sharding: Any, unconstrained_dims: frozenset[int]) -> Any:
    """Lowers a sharding constraint as jax lowers its own; binding that one would look at the ambient mesh again."""
    # jax adds the axes that the type names to those of the constraint; ours names them all.
    (aval,) = ctx.avals_in
    bare = [aval.update(sharding=aval.sharding.update(spec=PartitionSpec(*[None] * aval.ndim)))]
    return jax_pjit._sharding_constraint_hlo_lowering(
        ctx.replace(avals_in=bare, avals_out=bare),
        x,
        sharding=sharding,
        layout=None,
        context_mesh=None,
        unconstrained_dims=unconstrained_dims,
    )


def lower_constraint_to(ctx: Any, x: Any, aval: Any, sharding: Any) -> Any:
    """Lowers a constraint of one argument or result of an equation that is being lowered."""
    lowered = lower_constraint(ctx.replace(avals_in=[aval], avals_out=[aval]), x, sharding, frozenset())
    return lowered[0] if isinstance(lowered, Sequence) else lowered


def _flatten_ir(values: Any) -> Any:
    return mlir.ir_tree_registry.flatten(values)


# Shardings as XLA has them

DeviceList = _xla_client.DeviceList
OpSharding = _xla_client.OpSharding
HloSharding = _xla_client.HloSharding


def to_proto(sharding: Any) -> Any:
    """The OpSharding that an OpSharding, HloSharding or GSPMDSharding is; None for anything else."""
    if isinstance(sharding, OpSharding):
        return sharding
    if isinstance(sharding, GSPMDSharding):
        sharding = sharding._hlo_sharding
    return sharding.to_proto() if isinstance(sharding, HloSharding) else None


@contextlib.contextmanager
def xla_warnings() -> Iterator[int]:
    """Has XLA write its warnings in the block; gives the level below which it writes nothing otherwise.

    The levels are 0 information, 1 warnings, 2 errors, 3 what ends the process. Nothing says which one holds: it is
    taken to be jax's own setting, or else what the environment says, which counts when jax is imported.
    """
    named = {"DEBUG": 0, "INFO": 0, "WARN": 1, "WARNING": 1, "ERROR": 2, "FATAL": 3, "CRITICAL": 3}
    environment = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "")
    level = named.get(cast(Any, config).config.jax_logging_level, int(environment) if environment.isdigit() else 0)
    if level <= 1:
        yield level
        return
    xla_utils.absl_set_min_log_level(1)
    try:
        yield level
    finally:
        xla_utils.absl_set_min_log_level(level)


# What a process needs in order to run Shardy's passes without jax: the package of the bindings (`jax.extend.mlir`
# imports all of jax, which takes twice as long), the module in it that registers the passes, and for each dialect that
# jax lowers to the function that registers it.
MLIR_BINDINGS: dict[str, Any] = {
    "bindings": "jaxlib.mlir",
    "passes": "_mlir_libs._jax_mlir_ext",
    "dialects": {
        **dict.fromkeys(("sdy", "mpmd", "stablehlo", "chlo"), "register_dialect"),
        "mhlo": "register_mhlo_dialect",
    },
}


# Processes


def distributed_client() -> Any:
    """The client of the service that the processes of a group share, or None for a process alone."""
    return _distributed.global_state.client


# Dispatch


def make_cpp_function(fun: Callable, name: str, cache_miss: Callable, static: tuple, key: Any) -> Any:
    """The C++ function that runs a compiled program without a Python frame.

    Args:
        fun: the user's function; called as it is under `jax.disable_jit`.
        name: its name.
        cache_miss: `(*args, **kwargs) -> (results, fast path data or None, whether to forget it)`,
            called for every new signature.
        static: the static arguments' (numbers, names).
        key: what tells functions made of the same `fun` apart: all of them share one cache.
    """
    jit_key = pxla.JitGlobalCppCacheKeys(in_shardings_leaves=(key,))
    registry = tree_util.dispatch_registry
    return _jax.pjit(name, fun, cache_miss, *static, jit_key, registry, pxla.cc_shard_arg, _cpp_cache)


# jax's own caches hold 8192 entries as well; this one is never shared with them.
_cpp_cache = _jax.PjitFunctionCache(capacity=8192)


def fast_path_data(executable: Any, out_tree: Any, args: Any, outs: Any, jaxpr: Any, consts: Any) -> Any:
    """What the C++ function needs to run `executable` by itself, or None where it cannot (effects, refs)."""
    return jax_pjit._get_fastpath_data(executable, out_tree, args, outs, jaxpr.effects, jaxpr.consts, None, consts)


def results_are_checked() -> bool:
    """Whether results are checked for NaNs or infinities: finding where they come from needs all arguments again."""
    return config.debug_nans.value or config.debug_infs.value


def recheck_for_nans(error: Exception, fun: Callable, args: Any, kwargs: Any) -> None:
    """Runs `fun` operation by operation to raise FloatingPointError where the first NaN comes from."""
    api_util.maybe_recursive_nan_check(error, fun, args, kwargs)


def tree_prefix_errors(prefix: Any, tree: Any) -> list[Callable[[str], ValueError]]:
    """Where `prefix` is no tree prefix of `tree`, as functions from the prefix's name to an error."""
    return tree_util.prefix_errors(prefix, tree)


# Profiling

is_profiled: Callable[[], bool] = cast(Any, _lib)._profiler.TraceMe.is_enabled

# Arrays

PRNGKeyArray = _prng.PRNGKeyArray
PjitFunction: Any = _jax.PjitFunction


# Where every microsecond counts: the public properties of these are Python functions. Only plain arrays have them all.
type_and_sharding = operator.attrgetter("aval", "_sharding")
type_sharding_and_commitment = operator.attrgetter("aval", "_sharding", "_committed")


def device_list(sharding: Any) -> Any:
    """The devices of a sharding in their order, as one hashable value."""
    return sharding._internal_device_list


# jax 0.10 lists the single-device arrays of an array when they are first asked for, with Python in between: whoever
# asks at the same time gets a part of the list, or fills it as well, and then every device is in it twice for good.
_BUFFERS_ARE_LISTED_IN_STEPS = _RELEASE < (0, 12)
_listing = threading.RLock()  # a finalizer may come in between


def shareable(value: Any) -> Any:
    """The value itself; if it is an array, several threads may use it at once from now on."""
    if _BUFFERS_ARE_LISTED_IN_STEPS:
        array = value._base_array if type(value) is PRNGKeyArray else value
        if type(array) is ArrayImpl:
            with _listing:
                _ = array._arrays
    return value


def device_put(values: Any, shardings: Any) -> Any:
    """What `jax.device_put` does, for arrays that other threads may move or use here at the same time."""
    return jax.device_put(jax.tree.map(shareable, values) if _BUFFERS_ARE_LISTED_IN_STEPS else values, shardings)


def buffers_of(array: Any) -> Sequence[Any]:
    """The arrays that an array has on the devices of this process, one each."""
    return shareable(array)._arrays


def array_of_buffers(like: Any, buffers: Sequence[Any]) -> Any:
    """An array of the type and sharding of `like` out of one array per device of this process."""
    return ArrayImpl(like.aval, like.sharding, list(buffers), committed=like._committed, _skip_checks=True)


def is_on_one_host_device(array: Any) -> bool:
    """Whether an array lies on a single device, a CPU."""
    arrays = buffers_of(array)
    return len(arrays) == 1 and arrays[0].platform() == "cpu"


def copies_of(array: Any, sharding: Any, devices: Sequence[Any]) -> Any:
    """An array on a single device, on each of these; where that is the same memory, it is not copied.

    `jax.device_put` does the same, and takes a few times as long to find out what it has to do.
    """
    if len(devices) == 1 and array.sharding.device_set == sharding.device_set:
        return ArrayImpl(array.aval, sharding, buffers_of(array), committed=True, _skip_checks=True)
    return pxla.batched_device_put(array.aval, sharding, [np.asarray(shareable(array))] * len(devices), devices)


def alias(capsule: Any, device: Any) -> Any:
    """The memory of a DLPack capsule as an array on a CPU device; the public way knows no device but the first."""
    return _jax.dlpack_managed_tensor_to_buffer(capsule, device, None)


def with_key_data(key: Any, data: Any) -> Any:
    """A typed PRNG key array of the implementation of `key`; the public way runs a program."""
    return PRNGKeyArray(key._impl, data)


def with_weak_type(array: Any, weak_type: bool) -> Any:
    """The same array with another weak type; the public conversion only makes types strong."""
    return lax_internal._convert_element_type(array, array.dtype, weak_type=weak_type)


def aval_of_struct(spec: Any) -> Any:
    """The abstract value of a ShapeDtypeStruct, the sharding left out."""
    return core.ShapedArray(spec.shape, spec.dtype, getattr(spec, "weak_type", False))


def register_array_type(array_type: type, value_of: Callable[[Any], Any]) -> None:
    """Makes jax accept `array_type` wherever it accepts an array.

    Args:
        array_type: a subclass of `jax.Array`, with its `aval`.
        value_of: the array it stands for; called where jax needs its buffers.
    """

    def shard_args(xs: Any, shardings: Any, layouts: Any, copy_semantics: Any) -> Any:
        return pxla.shard_args(shardings, layouts, copy_semantics, [value_of(x) for x in xs])

    core.pytype_aval_mappings[array_type] = lambda x: core.update_aval_with_sharding(x.aval, x.sharding)
    dtypes.register_canonicalize_value_handler(array_type, None)
    pxla.shard_arg_handlers[array_type] = shard_args
    mlir.register_constant_handler(
        array_type, lambda val, aval: mlir.get_constant_handler(ArrayImpl)(value_of(val), aval)
    )
    ad_util.raw_jaxval_adders[array_type] = ad_util.raw_jaxval_adders[ArrayImpl]


# Threads


class ThreadSettings:
    """What jax keeps per thread, taken from one thread to be applied in another.

    That is what its settings' context managers set (`enable_x64`, `default_device`, transfer guards, ...), what
    `jax.set_mesh` set and the meshes entered. What belongs to a trace under way is left out.
    """

    __slots__ = ("_meshes", "_notes", "_outer", "_outer_meshes", "_values")

    def __init__(self) -> None:
        self._values = [
            (state, value) for state in _thread_states if (value := state.get_local()) is not config.config_ext.unset
        ]
        stack = mesh_lib.thread_resources.stack
        self._meshes = stack[1:] if len(stack) > 1 else []
        self._notes = [*_entered.notes]

    # A generator would turn a StopIteration of the user's into another exception.
    def __enter__(self) -> None:
        """Applies them to this thread."""
        resources = mesh_lib.thread_resources
        self._outer = [state.swap_local(value) for state, value in self._values]
        for state, value in self._values:
            _tell_thread(state, value)
        self._outer_meshes = resources.stack[1:], _entered.notes
        resources.stack[1:], _entered.notes = self._meshes, self._notes
        resources.env = resources.stack[-1]

    def __exit__(self, *_: object) -> None:
        resources = mesh_lib.thread_resources
        resources.stack[1:], _entered.notes = self._outer_meshes
        resources.env = resources.stack[-1]
        for (state, _), value in zip(self._values, self._outer, strict=True):
            state.set_local(value)
            _tell_thread(state, None if value is config.config_ext.unset else value)


def _tell_thread(state: Any, value: Any) -> None:
    """Some settings are kept a second time by the runtime, per thread as well."""
    hook = getattr(state, "_update_thread_local_hook", None)
    if hook is not None:
        hook(value)


def _settings_per_thread() -> list[Any]:
    found = [*vars(config).values(), _mesh_state.device_context, _mesh_state.abstract_mesh_context_manager]
    found += getattr(config, "config_states", {}).values()
    return [*{id(state): state for state in found if isinstance(state, config.config_ext.Config)}.values()]


_thread_states = _settings_per_thread()


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Has XLA compile what is compiled in the block, also where users keep compiled programs in files.

    Programs that other threads compile meanwhile may miss that cache as well.
    """
    # jax asks once whether there is a cache, and remembers the answer until it is reset.
    _compilation_cache.reset_cache()
    try:
        with config.enable_compilation_cache(False):
            yield
    finally:
        _compilation_cache.reset_cache()
