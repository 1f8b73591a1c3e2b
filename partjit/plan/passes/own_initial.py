"""What loops of the host start from: copied where something else has it as well, since iterations donate it."""

import collections
import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding

from partjit.plan.ir.build import Builder, with_loops
from partjit.plan.ir.nodes import Loop, VarBlock, VarLoop
from partjit.plan.ir.walk import is_host, variables
from partjit.spec import ParsedPartitionSpec

__all__ = ["own_initial_values", "reshard_initial_values"]


def own_initial_values(block: VarBlock) -> VarBlock:
    """Copies the initial values of loops that are not computed for them alone."""
    if not any(isinstance(node, Loop) for node in block.nodes):
        return block
    uses = collections.Counter(variables([*block.outputs, *(atom for node in block.nodes for atom in node.inputs)]))
    on_devices = {*block.inputs, *(var for node in block.nodes if not is_host(node) for var in node.outputs)}
    single = {var for node in block.nodes if not is_host(node) for var in node.outputs if uses[var] == 1}

    def copy(loop: VarLoop, before: Builder) -> VarLoop:
        kept = on_devices if loop.on_devices else single
        initial = [
            atom if isinstance(atom, Var) and atom in kept else before.add(jnp.copy, atom)[0] for atom in loop.initial
        ]
        return dataclasses.replace(loop, inputs=(*loop.captured, *initial))

    return with_loops(block, copy)


def reshard_initial_values(block: VarBlock, shardings: Mapping[Var, NamedSharding], mesh: Mesh) -> VarBlock:
    """Constrains those initial values of loops that need another sharding than they have to these shardings."""

    def constrain(loop: VarLoop, before: Builder) -> VarLoop:
        initial = [
            before.constrain(atom, ParsedPartitionSpec.from_user_input(shardings[atom], "a loop"), mesh)
            if isinstance(atom, Var) and atom in shardings
            else atom
            for atom in loop.initial
        ]
        return dataclasses.replace(loop, inputs=(*loop.captured, *initial))

    return with_loops(block, constrain)
