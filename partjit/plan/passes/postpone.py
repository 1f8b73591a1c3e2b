"""Calls that nothing waits for: they come after the fragment that takes what they read, if that is donated."""

from collections.abc import Collection, Mapping, Sequence

from jax.extend.core import Var

from partjit.plan.ir.nodes import ColocatedCall, Group, VarNode
from partjit.plan.ir.walk import is_host, variables

__all__ = ["postponed"]


def postponed(nodes: Sequence[VarNode], position: Mapping[VarNode, int], donated: Collection[Var]) -> list[VarNode]:
    """The nodes; calls that nothing waits for come after the group that takes what they read, if that is donated.

    That fragment can return copies of them. Otherwise each would have to be copied by itself.
    """
    moved = [*nodes]
    last_reader = {var: node for node in nodes if isinstance(node, Group) for var in node.inputs if var in donated}
    read = {var for node in nodes for var in variables(node.inputs)}
    for node in nodes:
        if not isinstance(node, ColocatedCall) or node.is_inline or not read.isdisjoint(node.outputs):
            continue
        targets = [last_reader[var] for var in variables(node.inputs) if var in last_reader]
        if not targets:
            continue
        here, there = moved.index(node), max(moved.index(target) for target in targets)
        # Never behind a call that comes after it in the program: should that fail, it would not be made at all.
        hopped = [other for other in moved[here + 1 : there] if is_host(other)]
        if here < there and all(position[other] < position[node] for other in hopped):
            moved.insert(there + 1, node)
            moved.pop(here)
    return moved
