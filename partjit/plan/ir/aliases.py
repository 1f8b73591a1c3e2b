"""Which values may be one array under several names: what loops and branches give is not copied on the way out."""

from collections.abc import Iterable, Sequence

from partjit.plan.ir.nodes import Loop, Node, Value, ValueBlock
from partjit.plan.ir.walk import blocks_of

__all__ = ["other_names"]


def other_names(nodes: Iterable[Node]) -> dict[Value, set[Value]]:
    """For each result of a loop or branch the other values that it may be, of those that were there before.

    What a loop starts from is copied. A plan that is being verified may lack some values.
    """
    found: dict[Value, set[Value]] = {}
    for node in nodes:
        blocks = blocks_of(node)
        if not blocks:
            continue
        given = [{*()}.union(*names) for names in zip(*map(_names_of_outputs, blocks), strict=False)]
        if isinstance(node, Loop):
            given = _after_iterations(node.outputs, given)
        for output, names in zip(node.outputs, given, strict=False):
            found[output] = names.union(*(found.get(name, ()) for name in names))
    return found


def _after_iterations(carried: Sequence[Value], given: Sequence[set[Value]]) -> list[set[Value]]:
    """For each carried value what it may be from outside; `given` are those of one iteration, which may swap them."""
    found = dict(zip(carried, given, strict=False))
    before: dict[Value, set[Value]] = {}
    while found != before:
        before = found
        found = {value: names.union(*(before.get(name, ()) for name in names)) for value, names in before.items()}
    return [names.difference(carried) for names in found.values()]


def _names_of_outputs(block: ValueBlock) -> list[set[Value]]:
    """For each result of a block the values from outside that it may be."""
    names = other_names(block.nodes)
    made = {value for node in block.nodes for value in node.outputs}
    return [names.get(value, {value}) - made for value in block.outputs]
