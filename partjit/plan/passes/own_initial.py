"""Copies of what loops of the host start from, where something else has it as well: iterations donate it."""

import collections
import dataclasses

import jax.numpy as jnp
from jax.extend.core import Var

from partjit.plan.ir.build import Builder, with_loops
from partjit.plan.ir.nodes import Loop, VarBlock, VarLoop, is_host, variables

__all__ = ["own_initial_values"]


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
