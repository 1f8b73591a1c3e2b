"""Lowering equations to MLIR."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from jax._src import callback, core, pjit
from jax._src.interpreters import mlir
from jax._src.lib.mlir.dialects import func, hlo
from jax._src.sharding_impls import ShardingContext, SPMDAxisContext
from jax.core import AbstractValue, ShapedArray
from jax.extend.core import ClosedJaxpr, Effect
from jax.extend.mlir import ir
from jax.interpreters.mlir import LoweringRuleContext
from jax.sharding import PartitionSpec, Sharding

from partjit._jax.jaxprs import MERGED_JAXPR

__all__ = [
    "add_manual_axes",
    "as_bytecode",
    "custom_call",
    "from_bytecode",
    "lower_call",
    "lower_constraint",
    "lower_constraint_to",
    "lower_opaque",
    "lower_to_callback",
    "mesh_of_shards",
    "number_of_devices",
]

add_manual_axes = mlir.add_manual_axes
custom_call = mlir.custom_call
_flatten_ir = mlir.ir_tree_registry.flatten


def lower_call(
    ctx: LoweringRuleContext,
    args: Sequence[ir.Value],
    *,
    jaxpr: ClosedJaxpr,
    name: str,
    in_shardings: Sequence[Sharding | None],
    out_shardings: Sequence[Sharding | None],
) -> Sequence[ir.Value]:
    """Lowers a nested program to a call of an MLIR function of its own, shared by equal nested programs.

    Source: `_pjit_lowering` of jax.
    """
    module = ctx.module_context
    key = ("pjit", name, jaxpr, tuple(in_shardings), tuple(out_shardings))
    lowered = module.cached_primitive_lowerings.get(key)
    effects = [effect for effect in jaxpr.effects if core.effects.ordered_effects.contains(effect)]
    consts = core.jaxpr_const_args(jaxpr.jaxpr)
    if lowered is None:
        # jax 0.12 asks for the types of the results.
        types_of_results: dict[str, Any] = {"out_avals": jaxpr.out_avals} if MERGED_JAXPR else {}
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
            **types_of_results,
        )
        module.cached_primitive_lowerings[key] = lowered
    const_values, _ = _flatten_ir(
        [mlir.ir_constants(const, const_lowering=ctx.const_lowering, aval=aval) for const, aval in consts]
    )
    tokens_in = [ctx.tokens_in.get(effect) for effect in effects]
    flat_args, _ = _flatten_ir((*ctx.dim_var_values, *tokens_in, *const_values, *args))
    types = [mlir.token_type()] * len(effects) + [mlir.aval_to_ir_types(module, a) for a in ctx.avals_out]
    flat_types, results_tree = _flatten_ir(types)
    call = func.CallOp(flat_types, ir.FlatSymbolRefAttr.get(lowered.name.value), flat_args)
    tokens_and_results = results_tree.unflatten(call.results)
    if effects:
        ctx.set_tokens_out(
            ctx.tokens_in.update_tokens(mlir.TokenSet(dict(zip(effects, tokens_and_results, strict=False))))
        )
    return tokens_and_results[len(effects) :]


def lower_opaque(ctx: LoweringRuleContext, name: str, args: Sequence[ir.Value]) -> Sequence[ir.Value]:
    """Lowers an equation to an operation of which the partitioner knows nothing; it can never be run.

    A result of the type of an argument is taken to be sharded as that is.
    """
    types = [mlir.aval_to_ir_type(ctx.module_context, aval) for aval in ctx.avals_out]
    call = mlir.custom_call("partjit." + name, result_types=types, operands=[*args], has_side_effect=True)
    results, free = [*call.results], [*args]
    for k, result in enumerate(results):
        like = next((arg for arg in free if arg.type == result.type), None)
        if like is not None:
            free.remove(like)
            (results[k],) = hlo.OptimizationBarrierOp([like]).results
    ctx.set_tokens_out(ctx.tokens_in)
    return results


def mesh_of_shards(ctx: LoweringRuleContext) -> Mapping[str, int] | None:
    """The axes of the mesh in whose `shard_map` an equation is, and their sizes; None outside of any.

    Raises:
        NotImplementedError: axes of the mesh are left to the partitioner.
    """
    context = ctx.module_context.axis_context
    if isinstance(context, ShardingContext):
        return None
    if not isinstance(context, SPMDAxisContext) or context.manual_axes != {*context.mesh.axis_names}:
        raise NotImplementedError("axes of the mesh are left to the partitioner")
    return context.mesh.shape


def number_of_devices(ctx: LoweringRuleContext) -> int:
    """How many devices a program is compiled for."""
    context = ctx.module_context.axis_context
    return context.num_devices if isinstance(context, ShardingContext) else context.mesh.size


def lower_to_callback(
    ctx: LoweringRuleContext,
    function: Callable[..., Sequence[np.ndarray]],
    args: Sequence[ir.Value],
    effect: Effect | None,
) -> Sequence[ir.Value]:
    """The results of a call of a Python function, in the order of an effect, if it has one, in a lowering rule.

    In a `shard_map` each device calls it, with the number of the device and its shards. Elsewhere the first device
    does, with the arguments gathered there, and the results are there.

    Source: `io_callback_lowering` of jax.
    """
    avals = [*ctx.avals_in]
    if mesh_of_shards(ctx) is not None:
        avals, args = [ShapedArray((), "uint32"), *avals], [hlo.partition_id(), *args]
    sharding: Any = callback._callback_op_sharding(ctx.module_context.axis_context, None, ctx.avals_out)
    results, token, _ = callback.emit_python_callback(
        ctx.replace(avals_in=avals),
        function,
        None if effect is None else ctx.tokens_in.get(effect),
        [*args],
        cast(Sequence[ShapedArray], avals),
        cast(Sequence[ShapedArray], ctx.avals_out),
        has_side_effect=True,
        returns_token=effect is not None,
        sharding=sharding,
    )
    if effect is not None:
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({effect: token})))
    return cast(Sequence[ir.Value], results)


def lower_constraint(
    ctx: LoweringRuleContext, x: ir.Value, sharding: Sharding, unconstrained_dims: frozenset[int]
) -> Sequence[ir.Value]:
    """Lowers a sharding constraint as jax lowers its own; binding that one would look at the ambient mesh again."""
    # jax adds the axes that the type names to those of the constraint; ours names them all.
    (aval,) = cast(Sequence[ShapedArray], ctx.avals_in)
    bare = [aval.update(sharding=aval.sharding.update(spec=PartitionSpec(*[None] * aval.ndim)))]
    return pjit._sharding_constraint_hlo_lowering(
        ctx.replace(avals_in=bare, avals_out=bare),
        x,
        sharding=sharding,
        layout=None,
        context_mesh=None,
        unconstrained_dims=unconstrained_dims,
    )


def lower_constraint_to(
    ctx: LoweringRuleContext, x: ir.Value, aval: AbstractValue, sharding: Sharding | None
) -> ir.Value:
    """Lowers a constraint of one argument or result of an equation that is being lowered, if it has a sharding."""
    if sharding is None:
        return x
    (lowered,) = lower_constraint(ctx.replace(avals_in=[aval], avals_out=[aval]), x, sharding, frozenset())
    return lowered


def as_bytecode(module: Any) -> bytes:
    """A module as bytes, with its locations."""
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


def from_bytecode(bytecode: bytes) -> ir.Module:
    """The module of such bytes, in a context of its own with the dialects that jax lowers to."""
    with mlir.make_ir_context() as context:
        return ir.Module.parse(bytecode, context)
