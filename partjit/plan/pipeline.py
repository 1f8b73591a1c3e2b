"""From a program to its plan: open it, cut it, decide where values lie and whose memory may be reused."""

from collections.abc import Sequence
from typing import Any, cast

from jax.sharding import Mesh, NamedSharding

from partjit.colocated.runtime.streams import Stream
from partjit.mesh import auto_twin
from partjit.plan.ir.names import Names
from partjit.plan.ir.nodes import Value
from partjit.plan.ir.verify import verify
from partjit.plan.passes.blocks import Surroundings, program_block
from partjit.plan.passes.donation import donations, may_release
from partjit.plan.passes.flatten import flatten
from partjit.plan.passes.shard_maps import meshes_of_shard_maps
from partjit.plan.plan import Plan

__all__ = ["make_plan"]


def make_plan(
    jaxpr: Any,
    in_shardings: Sequence[Any],
    out_shardings: Sequence[Any],
    donated: Sequence[bool],
    mesh: Mesh,
    name: str,
    paths: Sequence[str],
    result_paths: Sequence[str],
    caller: Stream | None = None,
) -> Plan:
    """The plan of a program.

    Args:
        jaxpr: its closed jaxpr.
        in_shardings, out_shardings: of its arguments and results; UNSPECIFIED where nothing is said.
        donated: for each argument whether the caller gives up its memory.
        mesh: its mesh, maybe empty.
        name: its name.
        paths, result_paths: the key paths of arguments and results.
        caller: see `flatten`.

    Raises:
        ValueError: a call stands where the host cannot make it.
        ShardingError: a call's specs are on other devices than the program.
    """
    mesh = auto_twin(mesh)
    if mesh.empty:  # the arguments may bring one along
        mesh = next((cast(Mesh, s.mesh) for s in in_shardings if isinstance(s, NamedSharding)), mesh)
    if mesh.empty:
        mesh = next(meshes_of_shard_maps(jaxpr), mesh)
    flat = flatten(jaxpr, mesh, caller)
    # Which the plan's source means something else by.
    names = Names("wait", "release", "read", "range", "_")
    constants: dict[Value, Any] = {}
    inputs, block = program_block(
        flat, in_shardings, out_shardings, donated, paths, result_paths, Surroundings(mesh, names, constants)
    )
    released = may_release(inputs, donated, [var.aval for var in flat.outvars])
    plan = Plan(
        name,
        mesh,
        inputs,
        block.outputs,
        tuple(paths),
        donations(block, released, released)[0],
        block.order,
        tuple(constants.items()),
        released,
    )
    verify(plan, flat)
    return plan
