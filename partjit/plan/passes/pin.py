"""Which arguments of calls are pinned: those that the caller of the program has as well, and may donate meanwhile.

So are those of moves that are left to calls. What has been moved to the hosts is the program's own, which gives none of
it away.
"""

import dataclasses
from collections.abc import Collection

from partjit.plan.ir.aliases import other_names
from partjit.plan.ir.nodes import Branch, ColocatedCall, Loop, Node, Transfer, Value, ValueBlock
from partjit.plan.ir.walk import walk, with_blocks

__all__ = ["pin"]


def pin(block: ValueBlock, constants: Collection[Value]) -> ValueBlock:
    """Pins the arguments and results of a block where calls read them; those of a nested one are what is around it."""
    moves = [node for node in walk(block.nodes) if isinstance(node, Transfer)]
    return _pinned(block, {*constants, *(value for move in moves for value in move.outputs)})


def _pinned(block: ValueBlock, own: Collection[Value]) -> ValueBlock:
    """The block; `own` are the values from outside that nobody gives away."""
    made = {value for node in block.nodes for value in node.outputs}
    read = {value for node in block.nodes for value in node.inputs}
    of_caller = {*block.inputs, *block.outputs, *(read - made)}.difference(own)
    names = other_names(block.nodes)
    for value, others in names.items():  # what a loop or branch gives may be the caller's under another name
        if not others.isdisjoint(of_caller):
            of_caller.add(value)
    # So may what leaves be something that a loop or branch gives as it is.
    of_caller.update(*(names.get(value, ()) for value in block.outputs))
    of_caller.difference_update(own)
    nodes: list[Node] = []
    for node in block.nodes:
        if isinstance(node, ColocatedCall) or (isinstance(node, Transfer) and node.is_left_to_calls):
            node = dataclasses.replace(node, pinned=tuple(value in of_caller for value in node.inputs))
        elif isinstance(node, Loop | Branch):
            node = with_blocks(node, [_pinned(inner, own) for inner in node.blocks])
        nodes.append(node)
    return dataclasses.replace(block, nodes=tuple(nodes))
