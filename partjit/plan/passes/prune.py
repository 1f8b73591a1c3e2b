"""What nothing needs is left out, and equal pure calls become one."""

from typing import Any

from jax.extend.core import Var

from partjit.plan.ir.build import live, reading, rebuilt
from partjit.plan.ir.nodes import AnyNode, Block, ColocatedCall

__all__ = ["merge", "prune"]


def prune(block: Block) -> Block:
    """Leaves out nodes without effects that nothing needs."""
    return rebuilt(block, live(block.outputs, block.nodes)[0])


def merge(block: Block) -> Block:
    """Makes one of pure calls of the same function with the same arguments."""
    if sum(isinstance(node, ColocatedCall) and node.callee.is_pure for node in block.nodes) < 2:
        return block
    env: dict[Any, Any] = {}
    made: dict[Any, AnyNode] = {}
    kept = []
    for node in block.nodes:
        node = reading(node, env)
        if isinstance(node, ColocatedCall) and node.callee.is_pure:
            key = (node.callee, *(a if isinstance(a, Var) else (a.aval, repr(a.val)) for a in node.inputs))
            first = made.setdefault(key, node)
            if first is not node:
                env.update(zip(node.outputs, first.outputs, strict=True))
                continue
        kept.append(node)
    return rebuilt(block, kept, env)
