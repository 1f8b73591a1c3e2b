"""What a call becomes where jax lowers it: the plan of a program of this package has no call in what jax lowers.

For the analysis of programs it is an operation of which the partitioner knows nothing. In programs that other wrappers
compile, such as `jax.jit`, the executable makes calls without results; on one device it also makes those of functions
that promise not to use jax, and waits for their results. Others are refused, with the wrapper that the user wrote.
The executable of a program over several devices makes a call once, on the first device, with its arguments gathered
there; in a `shard_map` it makes one for each shard.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence

import jax
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.interpreters.mlir import LoweringRuleContext
from jax.sharding import SingleDeviceSharding

from partjit._jax.arrays import is_laid_out_as_numpy
from partjit._jax.compiled_by import compiled_by
from partjit._jax.lowering import (
    lower_constraint_to,
    lower_opaque,
    lower_to_callback,
    mesh_of_shards,
    number_of_devices,
)
from partjit._jax.sources import at_site, source_site
from partjit._jax.tokens import pass_tokens_on
from partjit.colocated.devices import colocated_cpu_devices, colocated_sharding
from partjit.colocated.ir.emission import ANSWERED, PLATFORMS
from partjit.colocated.ir.primitive import Callee, colocated_call_p
from partjit.colocated.ir.shard_map import check_for_each_shard
from partjit.colocated.runtime import threads
from partjit.colocated.runtime.arrivals import effect
from partjit.colocated.runtime.out_spec import OutSpec
from partjit.colocated.runtime.streams import Stream
from partjit.colocated.under_jit import STREAM, AnsweredUnderJit, CallUnderJit, SpecializationUnderJit

__all__ = ["opaque_calls"]

_are_opaque = contextvars.ContextVar("partjit_opaque_calls", default=False)


@contextlib.contextmanager
def opaque_calls() -> Iterator[None]:
    """Allows programs with calls to be lowered in the block, for analysis; they cannot run."""
    outer = _are_opaque.set(True)
    try:
        yield
    finally:
        _are_opaque.reset(outer)


def _lower(ctx: LoweringRuleContext, *args: ir.Value, callee: Callee, stream: Stream | None) -> Sequence[ir.Value]:
    if _are_opaque.get():
        constrained = map(functools.partial(lower_constraint_to, ctx), args, ctx.avals_in, callee.in_shardings)
        results = lower_opaque(ctx, "colocated_call", [*constrained])
        return [*map(functools.partial(lower_constraint_to, ctx), results, ctx.avals_out, callee.out_shardings)]
    if ctx.module_context.lowering_parameters.for_export:
        raise ValueError(
            f"the colocated function {callee.name} cannot be part of an exported program, which cannot contain a "
            "Python function: export the functions between the calls, each by itself"
        )
    reason = _why_not(ctx, callee)
    if reason is not None:
        raise _refusal(ctx, callee, reason)
    if callee.is_pure and not callee.out_avals:
        return []
    specialization = _specialized(callee, stream)
    specialization.prepare()
    threads.start_deferred()
    pass_tokens_on(effect)
    site = source_site(ctx) or callee.definition.function.defined_at
    made = AnsweredUnderJit if callee.out_avals else CallUnderJit
    call = made(specialization, site, mesh_of_shards(ctx))
    return lower_to_callback(ctx, call, args, None if callee.is_pure else effect)


def _why_not(ctx: LoweringRuleContext, callee: Callee) -> str | None:
    """What the executable of another wrapper cannot do that a call needs; None if it can make the call."""
    options, devices = callee.options, number_of_devices(ctx)
    platforms = ctx.module_context.platforms
    if callee.out_avals:
        if options.uses_jax is not False:
            return "cannot wait for what a call returns unless the function promises uses_jax=False"
        if not ANSWERED.issuperset(platforms):
            return f"is compiled for {' and '.join(platforms)}, where it cannot wait for what a call returns"
        if devices > 1:
            return f"is compiled for {devices} devices, which would wait for each other for ever where a call fails"
        if options.mode == "stream":
            return "cannot wait for what a call with mode='stream' returns"
    if options.mode == "inline":
        return "cannot make a call with mode='inline' in its caller"
    if options.run_ahead:
        return f"cannot make calls ahead, as run_ahead={options.run_ahead} says"
    if len(platforms) > 1 or platforms[0] not in PLATFORMS:
        return f"is compiled for {' and '.join(platforms)}, where it cannot call Python"
    if devices > 1 and jax.process_count() > 1:
        return f"is compiled for {devices} devices of {jax.process_count()} processes, all of which would make the call"
    for aval, path in zip(callee.in_avals, callee.paths, strict=True):
        if not is_laid_out_as_numpy(aval.dtype):
            return f"cannot hand {path} over to Python, which is of the type {aval.str_short()}"
    for aval in callee.out_avals:
        if not is_laid_out_as_numpy(aval.dtype):
            return f"cannot take a result of the type {aval.str_short()} from Python"
    try:
        mesh = mesh_of_shards(ctx)
    except NotImplementedError:
        return "cannot call Python in a shard_map that leaves axes of its mesh to the partitioner"
    if mesh is not None:
        check_for_each_shard(callee)
    elif devices > 1 and options.layout == "per_shard" and None in callee.in_shardings:
        return "does not know the shards of arguments that in_specs give no sharding, as layout='per_shard' needs"
    return None


def _refusal(ctx: LoweringRuleContext, callee: Callee, reason: str) -> ValueError:
    wrapper, where = compiled_by()
    if wrapper.startswith(("jax.lax.", "jax.scipy.", "jax.vmap")):
        remedy = f"call {wrapper} in a function that is wrapped with partjit.pjit"
    else:
        remedy = f"wrap the outermost function with partjit.pjit instead of {wrapper}"
    return ValueError(
        f"the colocated function {callee.name} is called in a program of {wrapper}, which {reason}: {remedy}. The call "
        f"of {callee.name} is{at_site(ctx) or ' in an unknown place'}, the program is called at "
        f"{where or 'an unknown place'}"
    )


def _specialized(callee: Callee, stream: Stream | None) -> SpecializationUnderJit:
    devices = colocated_cpu_devices(jax.local_devices()[:1])
    here = SingleDeviceSharding(devices[0])
    shardings = [here if own is None else colocated_sharding(own) for own in callee.in_shardings]
    out_specs = [OutSpec(aval, here, True) for aval in callee.out_avals]
    return callee.specialized(stream or STREAM, shardings, out_specs, devices, SpecializationUnderJit)


mlir.register_lowering(colocated_call_p, _lower, cacheable=False)
