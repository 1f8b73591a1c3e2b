"""Calls that return shards on several processes: what sharding these make up, so that the program reshards the array.

On one process the call itself reshards it. To reshard an array over several processes is a program of all of them,
which all dispatch or none, as they do with fragments.
"""

import dataclasses
from collections.abc import Mapping
from typing import cast

import jax
from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding, Sharding

from partjit._jax.jaxprs import Atom
from partjit.colocated.runtime.shards import sharding_as_arguments
from partjit.plan.ir.nodes import Branch, ColocatedCall, Loop, VarBlock, VarNode
from partjit.plan.ir.walk import with_blocks
from partjit.plan.passes.fragments import replicated

__all__ = ["own_shards"]


def own_shards(block: VarBlock, shardings: Mapping[Var, Sharding | None], mesh: Mesh) -> VarBlock:
    """A block whose calls name the shardings of the arrays that they return shards of; itself if all of them do.

    Args:
        block: a block, and those inside of it.
        shardings: those that were chosen for the arguments of its calls.
        mesh: the mesh of the program.

    Raises:
        ValueError: the arguments of a call leave it open.
    """

    def named(node: VarNode) -> VarNode:
        if isinstance(node, Loop | Branch):
            blocks = [own_shards(inner, shardings, mesh) for inner in node.blocks]
            is_same = all(new is old for new, old in zip(blocks, node.blocks, strict=True))
            return node if is_same else with_blocks(node, blocks)
        if isinstance(node, ColocatedCall) and node.callee.returns_shards and None in node.callee.out_shardings:
            return _named(node, shardings, mesh)
        return node

    nodes = tuple(map(named, block.nodes))
    is_same = all(new is old for new, old in zip(nodes, block.nodes, strict=True))
    return block if is_same else dataclasses.replace(block, nodes=nodes)


def _named(
    call: ColocatedCall[Atom, Var], shardings: Mapping[Var, Sharding | None], mesh: Mesh
) -> ColocatedCall[Atom, Var]:
    callee = call.callee
    chosen = [shardings.get(atom) if isinstance(atom, Var) else None for atom in call.inputs]
    ins = tuple(
        own or cast(NamedSharding, found or replicated(mesh))
        for own, found in zip(callee.in_shardings, chosen, strict=True)
    )
    given = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(callee.in_avals, ins, strict=True)
    ]
    outs = tuple(
        own or cast(NamedSharding, sharding_as_arguments(aval.shape, given, callee.name, i))
        for i, (aval, own) in enumerate(zip(callee.out_avals, callee.out_shardings, strict=True))
    )
    own = callee.derived((ins, outs), lambda: dataclasses.replace(callee, in_shardings=ins, out_shardings=outs))
    return dataclasses.replace(call, callee=own)
