"""Which arguments of calls are pinned: those that the caller of the program has as well, and may donate meanwhile.

So are those of moves that are left to calls. What has been moved to the hosts is the program's own, which gives none of
it away.
"""

import dataclasses
from collections.abc import Collection, Iterator

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
    nodes: list[Node] = []
    for node in block.nodes:
        if isinstance(node, ColocatedCall) or (isinstance(node, Transfer) and node.is_left_to_calls):
            node = dataclasses.replace(node, pinned=tuple(value in of_caller for value in node.inputs))
        elif isinstance(node, Loop | Branch):
            node = with_blocks(node, [_pinned(inner, own) for inner in node.blocks])
            # What it gives may be the caller's under another name.
            of_caller.update(output for output, values in _aliases(node) if not values.isdisjoint(of_caller))
        nodes.append(node)
    return dataclasses.replace(block, nodes=tuple(nodes))


def _aliases(node: Loop[Value, Value] | Branch[Value, Value]) -> Iterator[tuple[Value, set[Value]]]:
    """Each output with the values from outside that it may be under another name: nothing is copied on the way out.

    What a loop starts from is copied. Its carried values may change places, so they are not distinguished.
    """
    if isinstance(node, Loop):
        found = set().union(*(_names_of(value, node.block) for value in node.block.outputs))
        yield from ((output, found.difference(node.outputs)) for output in node.outputs)
    else:
        for k, output in enumerate(node.outputs):
            yield output, set().union(*(_names_of(block.outputs[k], block) for block in node.blocks))


def _names_of(value: Value, block: ValueBlock) -> set[Value]:
    """The value, or what it may be if a loop or branch of the block gives it."""
    for node in block.nodes:
        if value in node.outputs:
            return dict(_aliases(node))[value] if isinstance(node, Loop | Branch) else set()
    return {value}
