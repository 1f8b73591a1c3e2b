"""The shardings of the values that cross from one node to another: explicit, or what the partitioner would choose.

Deciding for one fragment after the other would miss what comes later: a value that only a later fragment constrains
would be computed on every device. So a block is lowered as a whole, with the calls as operations of which the
partitioner knows nothing, and only its propagation is run. The values at the cut are results of that program, so that
it gives their shardings.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import cast

import jax
from jax.core import ShapedArray
from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from partjit import shardy
from partjit._jax.compiling import DeviceAssignmentMismatchError, lower_to_computation
from partjit._jax.jaxprs import type_of
from partjit._jax.meshes import EMPTY_MESH, under_mesh
from partjit._jax.shardings import (
    UNSPECIFIED,
    MaybeSharding,
    UnspecifiedValue,
    default_device,
    in_memory_of_type,
    or_none,
)
from partjit.colocated.devices import colocated_sharding
from partjit.colocated.ir.eager import DefaultSharding
from partjit.colocated.ir.lowering import opaque_calls
from partjit.devices import check_needs_no_devices, has_devices_of, incompatible_devices
from partjit.mesh import is_abstract_mesh
from partjit.plan.ir.build import jaxpr_of
from partjit.plan.ir.nodes import Block, Branch, ColocatedCall, Loop, VarBlock
from partjit.plan.ir.walk import variables
from partjit.plan.passes.explicit import results_of_hosts
from partjit.plan.passes.forward import origins
from partjit.xla_rewrites import rewrite

__all__ = ["default_sharding", "default_without_mesh", "mesh_or_of_arguments", "propagate"]


def mesh_or_of_arguments(mesh: Mesh, in_shardings: Iterable[MaybeSharding]) -> Mesh:
    """The mesh of a program or, if it has none, the one that its arguments bring along; empty without any."""
    if not mesh.empty:
        return mesh
    return next((cast(Mesh, s.mesh) for s in in_shardings if isinstance(s, NamedSharding)), mesh)


def default_sharding(mesh: Mesh, in_shardings: Iterable[MaybeSharding]) -> DefaultSharding:
    """The default sharding of the values of a program: over its mesh or, without one, where its arguments are."""
    committed = [s for s in in_shardings if not isinstance(s, UnspecifiedValue)] if mesh.empty else []
    mesh = mesh_or_of_arguments(mesh, committed)
    if not mesh.empty:
        return DefaultSharding(NamedSharding(mesh, P()), True)
    for sharding in committed:
        return DefaultSharding(SingleDeviceSharding(next(iter(sharding.device_set))), True)
    device = default_device()
    return DefaultSharding(
        SingleDeviceSharding(device if isinstance(device, jax.Device) else jax.devices(device)[0]), False
    )


def default_without_mesh(mesh: Mesh, in_shardings: Iterable[MaybeSharding]) -> Sharding | None:
    """The sharding of everything in a program without a mesh; None if it has one, or its arguments leave it open."""
    if not mesh.empty:
        return None
    default = default_sharding(mesh, in_shardings)
    is_bound = default.committed or colocated_sharding(default.sharding) != default.sharding
    return default.sharding if is_bound else None


def propagate(
    block: VarBlock,
    crossing: Sequence[Var],
    direct: Mapping[Var, Sharding | None],
    in_shardings: Sequence[MaybeSharding],
    out_shardings: Sequence[MaybeSharding],
    mesh: Mesh,
    default: Sharding | None,
) -> dict[Var, Sharding | None]:
    """The sharding of each argument and of each variable that crosses from one node to another.

    Args:
        block: the block before it is cut.
        crossing: the variables that some node reads from outside after the cut.
        direct: the results that are a call's as they are, with the sharding in which they leave, or None.
        in_shardings, out_shardings: what is known of arguments and results, UNSPECIFIED where nothing is.
        mesh: the mesh, maybe empty.
        default: the sharding of everything if there is no mesh.
    """
    crossing = [*dict.fromkeys([*crossing, *results_of_hosts(block)])]
    if mesh.empty:
        own = zip(block.inputs, map(or_none, in_shardings), strict=True)
        return {**{var: default and in_memory_of_type(default, type_of(var)) for var in crossing}, **dict(own)}
    shardings: dict[Var, Sharding | None] = {**_explicit(block, direct, mesh)}
    inputs = {*block.inputs}
    unknown = [var for var in crossing if var not in shardings and var not in inputs]
    is_open = [isinstance(sharding, UnspecifiedValue) for sharding in in_shardings]
    read = {*crossing}
    if unknown or any(var in read for var, flag in zip(block.inputs, is_open, strict=True) if flag):
        ins, chosen = _chosen(block, in_shardings, out_shardings, mesh, unknown)
        shardings.update(zip(unknown, chosen, strict=True))
        in_shardings = [new if flag else old for old, new, flag in zip(in_shardings, ins, is_open, strict=True)]
    shardings.update(zip(block.inputs, map(or_none, in_shardings), strict=True))
    _spell_alike(block, shardings, {*unknown})
    _agree_on_carried(block, shardings)
    return shardings


def _explicit(block: VarBlock, direct: Mapping[Var, Sharding | None], mesh: Mesh) -> dict[Var, Sharding]:
    """What results of the program that are a call's, and the specs of calls, say."""
    shardings = {var: sharding for var, sharding in direct.items() if sharding is not None}
    for node in block.nodes:
        if isinstance(node, ColocatedCall):
            for var, sharding in zip(node.outputs, node.callee.out_shardings, strict=True):
                # What an earlier call outside of programs returned may have been elsewhere.
                if sharding is not None and _is_over(sharding, mesh):
                    shardings.setdefault(var, sharding)
            for var, sharding in zip(node.inputs, node.callee.in_shardings, strict=True):
                if sharding is not None and isinstance(var, Var):
                    shardings.setdefault(var, sharding)
    return shardings


def _spell_alike(block: VarBlock, shardings: dict[Var, Sharding | None], chosen: Collection[Var]) -> None:
    """Spells the shardings of a result of a branch and of what it may be as it is alike, as a spec of the user does.

    The partitioner says P("data") for P("data", None), and nothing of axes of size 1.
    """
    for node in reversed(block.nodes):
        if not isinstance(node, Branch):
            continue
        for result, given in zip(node.outputs, origins(node), strict=True):
            for var in [var for var in shardings if var in given]:  # a set has another order in each process
                own, wanted = shardings.get(var), shardings.get(result)
                if own is None or wanted is None or not own.is_equivalent_to(wanted, type_of(var).ndim):
                    continue
                if var in chosen:
                    shardings[var] = wanted
                elif result in chosen:
                    shardings[result] = own


def _is_over(sharding: Sharding, mesh: Mesh) -> bool:
    own = sharding.mesh if isinstance(sharding, NamedSharding) else EMPTY_MESH
    if is_abstract_mesh(mesh) or is_abstract_mesh(own):
        return has_devices_of(cast(Mesh, own), mesh)
    return sharding.device_set == {*mesh.devices.flat}


def _agree_on_carried(block: VarBlock, shardings: dict[Var, Sharding | None]) -> None:
    """Gives what a loop starts from the sharding of its results.

    A stack is not partitioned between its slices, even if it leaves so: each is written by all devices.
    """
    for node in block.nodes:
        if isinstance(node, Loop):
            for initial, result, is_buffer in zip(variables(node.initial), node.outputs, node.is_buffer, strict=True):
                sharding = shardings[result]
                if is_buffer and isinstance(sharding, NamedSharding) and sharding.spec:
                    sharding = sharding.update(spec=P(None, *sharding.spec[1:]))
                shardings[initial] = shardings[result] = sharding


def _chosen(
    block: VarBlock,
    in_shardings: Sequence[MaybeSharding],
    out_shardings: Sequence[MaybeSharding],
    mesh: Mesh,
    cut: Sequence[Var],
) -> tuple[list[NamedSharding], list[NamedSharding]]:
    """The shardings over the mesh that the partitioner chooses for the arguments, and for the values at the cut."""
    if mesh.size == 1:
        ins, chosen = ([_sharding(None, type_of(var), mesh) for var in own] for own in (block.inputs, cut))
        return ins, chosen
    results = (*out_shardings, *[UNSPECIFIED] * len(cut))
    with opaque_calls(), under_mesh(mesh):
        jaxpr = jaxpr_of(Block(block.inputs, block.nodes, (*block.outputs, *cut), block.consts))
        name, donated = "whole_program", [False] * len(in_shardings)
        check_needs_no_devices(jaxpr, name, mesh)
        try:
            computation = lower_to_computation(
                jaxpr, name, in_shardings, results, donated, keep_unused=True, context_mesh=mesh
            )
        except DeviceAssignmentMismatchError as error:
            raise incompatible_devices(error, name, jaxpr, in_shardings, results) from None
    module = computation.stablehlo()
    rewrite(module)
    shardy.propagate_interface(module)
    shardings = shardy.Shardings(module)
    arguments, found = shardings.of_arguments(), shardings.of_results()
    own, last = len(arguments) - len(in_shardings), len(found) - len(cut)  # tokens and constants come first
    return (
        [_sharding(layout, type_of(var), mesh) for layout, var in zip(arguments[own:], block.inputs, strict=True)],
        [_sharding(layout, type_of(var), mesh) for layout, var in zip(found[last:], cut, strict=True)],
    )


def _sharding(layout: shardy.TensorSharding | None, aval: ShapedArray, mesh: Mesh) -> NamedSharding:
    if layout is None or not layout.is_of_whole_axes:
        return in_memory_of_type(NamedSharding(mesh, P()), aval)
    entries: list[str | tuple[str, ...] | None] = []
    for dim, size in zip(layout.axes, aval.shape, strict=False):  # a key has one dimension more on the device
        parts = 1
        kept = []
        for axis in dim:  # the partitioner would pad, an array cannot
            parts *= mesh.shape[axis]
            if size % parts:
                break
            kept.append(axis)
        entries.append(kept[0] if len(kept) == 1 else tuple(kept) or None)
    while entries and entries[-1] is None:
        entries.pop()
    return in_memory_of_type(NamedSharding(mesh, P(*entries)), aval)
