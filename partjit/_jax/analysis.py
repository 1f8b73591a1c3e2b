"""Programs lowered to be looked at: to the module that jax would compile, without what only compiling it needs.

jax looks through a program for devices and memories, three times, and verifies its module, twice. For a step of 24
layers that is a quarter of the time of lowering it.

Source: `lower_sharding_computation` and `lower_jaxpr_to_module` of jax.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from jax._src import core, dispatch, effects, xla_bridge
from jax._src.compute_on import compute_on_p
from jax._src.dispatch import device_put_p
from jax._src.interpreters import mlir
from jax._src.pjit import jit_p, sharding_constraint_p
from jax._src.shard_map import shard_map_p
from jax._src.sharding_impls import GSPMDSharding
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.passmanager import PassManager
from jax.interpreters.mlir import LoweringParameters, ModuleContext, ShardingContext
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding

from partjit._jax.quick_lowering import lowered_quickly
from partjit._jax.shardings import MaybeSharding, UnspecifiedValue
from partjit._jax.versions import RELEASE

__all__ = ["lower_for_analysis"]


def lower_for_analysis(
    jaxpr: ClosedJaxpr,
    name: str,
    in_shardings: Sequence[MaybeSharding],
    out_shardings: Sequence[MaybeSharding],
    mesh: Mesh | AbstractMesh,
) -> ir.Module | None:
    """The module of a program over the devices of a mesh.

    Args:
        jaxpr: the closed jaxpr; it keeps the arguments that it does not use.
        name: the name of the program.
        in_shardings, out_shardings: one sharding or UNSPECIFIED per argument and per result.
        mesh: the mesh, of several devices.

    Returns:
        The module; None where anything may be elsewhere than on this mesh, in the memory of its devices, and where the
        mesh has none: jax has to lower the program, or to refuse it.
    """
    if isinstance(mesh, AbstractMesh):
        return None
    if not (_are_on(mesh, (*in_shardings, *out_shardings)) and _has_no_types(jaxpr) and _has_plain_effects(jaxpr)):
        return None
    if not _is_plain(jaxpr, mesh):
        return None
    devices = tuple(mesh.devices.flat)
    client: Any = devices[0].client
    platform = xla_bridge.canonicalize_platform(getattr(client, "_raw_platform", client.platform))
    context = ModuleContext(
        platforms=(platform,),
        backend=client,
        axis_context=ShardingContext(mesh.size, None, None),
        keepalives=[],
        channel_iterator=itertools.count(mlir.COLLECTIVE_CHANNEL_ID + 1),
        host_callbacks=[],
        lowering_parameters=LoweringParameters(),
    )
    replicated = GSPMDSharding.get_replicated(devices)
    arguments = [
        replicated if isinstance(s, UnspecifiedValue) and isinstance(aval, core.ShapedArray) and not aval.ndim else s
        for s, aval in zip(in_shardings, jaxpr.in_avals, strict=True)
    ]
    types: dict[str, Any] = {"in_avals": jaxpr.in_avals}
    if RELEASE >= (0, 11):
        types["out_avals"] = jaxpr.out_avals
    with context.context, ir.Location.unknown(context.context):
        mlir.lower_jaxpr_to_fun(
            context,
            f"pjit({name})",
            lowered_quickly(jaxpr),
            [],
            num_const_args=0,
            main_function=True,
            arg_shardings=[*map(_known, arguments)],
            result_shardings=[*map(_known, out_shardings)],
            **types,
        )
        lifting = PassManager.parse("builtin.module(sdy-lift-inlined-meshes)")
        lifting.enable_verifier(False)
        lifting.run(context.module.operation)
    return context.module


def _known(sharding: MaybeSharding) -> Sharding | None:
    return None if isinstance(sharding, UnspecifiedValue) else sharding


def _are_on(mesh: Mesh, shardings: Iterable[object]) -> bool:
    """Whether shardings are of a mesh, and in the memory that its devices compute in, as far as they are specified."""
    kinds = {None, mesh.devices.flat[0].default_memory().kind}
    return all(
        isinstance(s, UnspecifiedValue) or (isinstance(s, NamedSharding) and s.mesh == mesh and s.memory_kind in kinds)
        for s in {*shardings}
    )


def _has_no_types(jaxpr: ClosedJaxpr) -> bool:
    """Whether all arguments and results are arrays whose types do not say how they are sharded."""
    return all(
        isinstance(aval, core.ShapedArray) and AxisType.Explicit not in aval.sharding.mesh.axis_types
        for aval in (*jaxpr.in_avals, *jaxpr.out_avals)
    )


def _has_plain_effects(jaxpr: ClosedJaxpr) -> bool:
    """Whether no effect of a program gets tokens, is removed before, as that of refs, or is refused."""
    return not (
        effects.ordered_effects.filter_in(jaxpr.effects) or effects.lowerable_effects.filter_not_in(jaxpr.effects)
    )


def _is_plain(jaxpr: ClosedJaxpr | Jaxpr, mesh: Mesh) -> bool:
    """Whether a program needs nothing of what lowering it for analysis leaves out."""
    for eqn in jaxpr.eqns:
        primitive, params = eqn.primitive, eqn.params
        if primitive in _MAY_BE_ELSEWHERE and not _is_on(mesh, primitive, params):
            return False
        if primitive in dispatch.prim_requires_devices_during_lowering:
            return False
        for value in params.values():
            if isinstance(value, _MAY_HAVE_JAXPRS):
                for inner in value if isinstance(value, tuple) else (value,):
                    if isinstance(inner, _JAXPRS) and not _is_plain(inner, mesh):
                        return False
    return True


_JAXPRS = (ClosedJaxpr, Jaxpr)
_MAY_HAVE_JAXPRS = (*_JAXPRS, tuple)
_MAY_BE_ELSEWHERE = {sharding_constraint_p, jit_p, shard_map_p, device_put_p, compute_on_p}


def _is_on(mesh: Mesh, primitive: Primitive, params: dict[str, Any]) -> bool:
    """Whether an equation that may be elsewhere is on a mesh."""
    if primitive is shard_map_p:
        return bool(params["mesh"] == mesh)
    if primitive is sharding_constraint_p:
        return _are_on(mesh, [params["sharding"]])
    if primitive is jit_p:
        return _are_on(mesh, (*params["in_shardings"], *params["out_shardings"]))
    if primitive is device_put_p:
        return _are_on(mesh, [device for device in params["devices"] if device is not None])
    return False
