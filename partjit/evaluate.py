"""Equations of programs on arrays, outside of a trace: what `pjit_p` and `sharding_constraint_p` then do.

An eager `jax.grad` or `jax.vmap` of a program comes here, for each of the programs that the transformation makes of it.
As in a call of a function, C++ finds what was compiled for arguments like these.
"""

import functools
import operator
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.typing import ArrayLike

from partjit import lazy
from partjit._jax.caches import weakref_cache
from partjit._jax.compiling import MeshExecutable, move_outputs, shard_constants
from partjit._jax.dispatch import (
    USE_OF_DONATED_BUFFERS_CRASHES,
    FastPath,
    InternalFloatingPointError,
    fast_path_data,
    make_cpp_function,
    recheck_for_nans,
)
from partjit._jax.layouts import in_default_layouts
from partjit._jax.tracing import abstractify
from partjit.arguments import Function
from partjit.calls import is_program_with_calls
from partjit.compile import lower
from partjit.mesh import has_explicit_axes
from partjit.nan_sources import evaluated
from partjit.placement import misplaced, reshard
from partjit.primitive import device_witness, pjit_p, sharding_constraint_p, shardings_of
from partjit.structs import with_devices_of
from partjit.unconstrained import with_free_dimensions_settled
from partjit.validate import check_specs, raise_mismatches

if TYPE_CHECKING:
    from partjit.colocated.agreement import arguments
    from partjit.plan.run import program as plans
else:  # a program without calls does without
    arguments = lazy.module("partjit.colocated.agreement.arguments")
    plans = lazy.module("partjit.plan.run.program")

__all__ = ["are_pending", "dispatched", "function_of", "run_equation"]


_OTHERS = ("in_specs", "out_specs", "mesh", "donated_invars", "name", "keep_unused", "agree", "witness")
"""The parameters of an equation besides its jaxpr."""

_others_of = operator.itemgetter(*_OTHERS)


def run_equation(values: Sequence[object], **params: Any) -> tuple[list[jax.Array], MeshExecutable, list[jax.Array]]:
    """Compiles and runs an equation: its results, its executable, and the constants that this takes first."""
    lowering = lower(values, **params)
    executable = lowering.compile()
    if has_explicit_axes(params["mesh"]):
        move_outputs(executable, params["mesh"], params["jaxpr"].out_avals)
    consts = shard_constants(lowering, executable)
    return executable.unsafe_call(*consts, *values), executable, consts


def are_pending(values: Sequence[object]) -> bool:
    """Whether calls, which other processes make as well, still compute some of these."""
    module = sys.modules.get("partjit.colocated.runtime.pending")  # otherwise there is none
    return module is not None and module.PendingArray in map(type, values) and jax.process_count() > 1


@pjit_p.def_impl
def _evaluate(*values: object, **params: Any) -> Sequence[jax.Array]:
    mesh = with_devices_of(values, params["mesh"])
    if mesh is not params["mesh"]:  # what was traced without devices is evaluated
        params = params | {"mesh": mesh, "witness": device_witness(mesh)}
    params = with_free_dimensions_settled(values, params)
    if is_program_with_calls(params["jaxpr"]):
        plan = plans.plan_of(values, **params)
        with plans.failing_everywhere(plan):
            run = plans.runnable_of(plan, values, params["mesh"])
            return [*run(plans.placing_of(plan, values, params["mesh"]).apply(values), None)]
    if are_pending(values):
        values = (*arguments.agreed_values(values, params["mesh"], params["name"]),)
    return dispatched(values, params)


def dispatched(values: Sequence[object], params: dict[str, Any]) -> Sequence[jax.Array]:
    """The results of an equation without calls, which C++ runs if it has run it for arguments like these."""
    if USE_OF_DONATED_BUFFERS_CRASHES and any(params["donated_invars"]):
        return _compiled_and_run(values, params)[0]
    return _dispatching(params["jaxpr"], *_others_of(params))(*values)


@weakref_cache
def _dispatching(jaxpr: ClosedJaxpr, *others: Any) -> Function:
    """The C++ function that dispatches an equation; it does not keep the jaxpr."""
    reference, params = weakref.ref(jaxpr), dict(zip(_OTHERS, others, strict=True))

    def cache_miss(*values: object) -> tuple[Sequence[jax.Array], FastPath | None, bool]:
        return (*_compiled_and_run(values, {**params, "jaxpr": reference()}), False)

    function = make_cpp_function(function_of(jaxpr), params["name"], cache_miss, ((), ()), ())
    # Where jax looks for the function when a result has a NaN.
    function._fun = lambda *args: evaluated(cast(ClosedJaxpr, reference()), *args)
    return function


def _compiled_and_run(values: Sequence[object], params: dict[str, Any]) -> tuple[Sequence[jax.Array], FastPath | None]:
    """The results of an equation whose arguments are put where it wants them, and its fast path, if they were there."""
    shardings = shardings_of(params["in_specs"], params["mesh"])
    moved = misplaced(values, shardings)
    laid_out, are_others = in_default_layouts(reshard(values, shardings, moved))
    try:
        outs, executable, consts = run_equation(laid_out, **params)
    except InternalFloatingPointError as error:
        recheck_for_nans(error, functools.partial(evaluated, params["jaxpr"]), values, {})
        raise
    out_tree = jax.tree.structure((0,) * len(outs))
    if moved or are_others:
        return tuple(outs), None
    return tuple(outs), fast_path_data(executable, out_tree, values, outs, params["jaxpr"], consts)


def function_of(jaxpr: ClosedJaxpr) -> Function:
    """A new function that evaluates a jaxpr and does not keep it; C++ finds a compiled program by its identity."""
    reference = weakref.ref(jaxpr)
    return lambda *args: jaxpr_as_fun(cast(ClosedJaxpr, reference()))(*args)


@sharding_constraint_p.def_impl
def _constrain(x: ArrayLike, **params: Any) -> jax.Array:
    """Reshards an array outside of programs; with unconstrained dimensions XLA chooses, in a program of its own."""
    what, aval = "with_sharding_constraint arguments", abstractify(x)
    mismatches = check_specs(what, ["x"], [aval], [params["spec"]], params["mesh"])
    raise_mismatches(mismatches, "with_sharding_constraint", params["mesh"])
    if are_pending([x]):
        (x,) = cast(Sequence[ArrayLike], arguments.agreed_values([x], params["mesh"], "with_sharding_constraint"))
    if not params["spec"].unconstrained_dims:
        return jax.device_put(x, params["spec"].named_sharding(params["mesh"]))
    with jax.disable_jit(False):  # under which this would call itself
        return jax.jit(lambda x: sharding_constraint_p.bind(x, **params))(x)
