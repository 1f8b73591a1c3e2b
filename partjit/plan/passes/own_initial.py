"""Copies of what loops start from, where something else has it as well: iterations donate it."""

import collections
import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Var

from partjit.plan.ir.build import Builder, rebuilt
from partjit.plan.ir.nodes import Block, Loop, is_host, variables

__all__ = ["own_initial_values"]


def own_initial_values(block: Block) -> Block:
    """Copies the initial values of loops that are not computed for them alone."""
    if not any(isinstance(node, Loop) for node in block.nodes):
        return block
    uses = collections.Counter(variables([*block.outputs, *(atom for node in block.nodes for atom in node.inputs)]))
    single = {var for node in block.nodes if not is_host(node) for var in node.outputs if uses[var] == 1}
    consts = dict(block.consts)
    nodes: list[Any] = []
    for node in block.nodes:
        if isinstance(node, Loop):
            copies = Builder(node.eqn, consts)
            initial = [
                atom if isinstance(atom, Var) and atom in single else copies.add(jnp.copy, atom)[0]
                for atom in node.initial
            ]
            nodes += copies.nodes
            node = dataclasses.replace(node, inputs=(*node.captured, *initial))
        nodes.append(node)
    return rebuilt(dataclasses.replace(block, consts=consts), nodes)
