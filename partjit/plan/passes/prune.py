"""What nothing needs is left out, and equal pure calls become one."""

from jax.extend.core import Var

from partjit._jax.jaxprs import Atom
from partjit.plan.ir.build import live, reading, rebuilt
from partjit.plan.ir.nodes import ColocatedCall, VarBlock, VarNode

__all__ = ["merge", "prune"]


def prune(block: VarBlock) -> VarBlock:
    """Leaves out nodes without effects that nothing needs."""
    return rebuilt(block, live(block.outputs, block.nodes)[0])


def merge(block: VarBlock) -> VarBlock:
    """Makes one of pure calls of the same function with the same arguments."""
    if sum(isinstance(node, ColocatedCall) and node.callee.is_pure for node in block.nodes) < 2:
        return block
    env: dict[Var, Atom] = {}
    made: dict[tuple[object, ...], VarNode] = {}
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
