"""Whose memory may be reused: an array's last reader takes it over, if a result fits and nobody else has it."""

import collections
import dataclasses
import operator
from collections.abc import Collection, Sequence

from jax.core import ShapedArray

from partjit.plan.ir.aliases import other_names
from partjit.plan.ir.nodes import Branch, ColocatedCall, Fragment, Loop, Node, Value, ValueBlock
from partjit.plan.ir.walk import with_blocks
from partjit.primitive import keep_where

__all__ = ["donations", "kept_by_branches", "may_release", "shared_by_branches"]


def may_release(inputs: Sequence[Value], donated: Sequence[bool], results: Sequence[ShapedArray]) -> frozenset[Value]:
    """The donated arguments whose memory a result of the whole program could take over."""
    free = collections.Counter((aval.shape, aval.dtype) for aval in results)
    released = set()
    for value, flag in zip(inputs, donated, strict=True):
        kind = (value.aval.shape, value.aval.dtype)
        if flag and free[kind]:
            free[kind] -= 1
            released.add(value)
    return frozenset(released)


def donations(
    block: ValueBlock, giving: Collection[Value], released: Collection[Value] = ()
) -> tuple[ValueBlock, tuple[bool, ...]]:
    """The block, in which each fragment reuses the memory of values that die there.

    Args:
        block: the block.
        giving: the values from outside whose memory may be reused.
        released: those among them that are deleted if it is not.

    Returns:
        The block; and for each output of the block whether nobody else has it.
    """
    readers: dict[Value, list[Node]] = {}
    for node in block.nodes:
        for value in node.inputs:
            readers.setdefault(value, []).append(node)
    shared = shared_by_branches(block)
    own = {*giving}
    results = {*block.outputs}
    nodes: list[Node] = []
    for node in block.nodes:
        dying = [value for value in dict.fromkeys(node.inputs) if value in own and value not in results | shared]
        # A call on a thread may still run; results of calls may be kept by the functions that returned them.
        dying = [v for v in dying if readers[v][-1] is node and all(_is_over(reader) for reader in readers[v])]
        if isinstance(node, Fragment):
            node = _with_donated(node, dying)
            own.update(node.outputs)
        elif isinstance(node, Loop):
            node = _with_given(node)
            own.update(keep_where(node.outputs, node.giving))
        elif isinstance(node, Branch):
            node, owned = _with_moved(node, dying)
            own.update(keep_where(node.outputs, owned))
        nodes.append(node)
    given = {v for node in nodes if isinstance(node, Fragment) for v in keep_where(node.inputs, node.donated)}
    nodes = [_with_distinct(node, given.union(released), results) for node in nodes]
    uses = collections.Counter(block.outputs)
    owned = tuple(value in own and value not in shared and uses[value] == 1 for value in block.outputs)
    return dataclasses.replace(block, nodes=tuple(nodes)), owned


def shared_by_branches(block: ValueBlock) -> set[Value]:
    """The values that are read after a loop or branch that may give them as they are, while its result is still needed.

    Then two names are one array. Where it ends with the branch, the result takes its place.
    """
    last = {value: i for i, node in enumerate(block.nodes) for value in node.inputs}
    last.update(dict.fromkeys(block.outputs, len(block.nodes)))
    made = {value: i for i, node in enumerate(block.nodes) for value in node.outputs}
    shared: set[Value] = set()
    for result, names in other_names(block.nodes).items():
        end = last.get(result, made[result])
        shared.update(value for value in names if made[result] < last.get(value, -1) <= end)
    return shared


def kept_by_branches(block: ValueBlock) -> set[Value]:
    """The values that are last read by a loop or branch that may give them as they are, and that are not given to it.

    A call on a thread may still read them, so they are not the branch's to reuse. Its result lives on in their memory.
    """
    last = {value: node for node in block.nodes for value in node.inputs}
    maker = {value: node for node in block.nodes for value in node.outputs}
    kept: set[Value] = set()
    for result, names in other_names(block.nodes).items():
        node = maker[result]
        kept.update(v for v in names if last.get(v) is node and not (isinstance(node, Branch) and v in node.given))
    return kept


def _with_donated(fragment: Fragment[Value, Value], dying: Collection[Value]) -> Fragment[Value, Value]:
    # What it is given remains, should a call fail; and one device has not got the memory of all.
    free = [] if fragment.waits_for_calls or fragment.by_one_device else [*fragment.outputs]
    flags = []
    for value in fragment.inputs:
        result = next((result for result in free if _fits(value, result)), None)
        flags.append(result is not None and value in dying)
        if result is not None and flags[-1]:
            free.remove(result)
    return dataclasses.replace(fragment, donated=tuple(flags))


def _with_given(loop: Loop[Value, Value]) -> Loop[Value, Value]:
    """The loop; an iteration may donate the carried values that none, and no function called in one, keeps."""
    giving = (True,) * len(loop.outputs)  # what it starts from is its own
    while True:
        block, owned = donations(loop.block, keep_where(loop.outputs, giving))
        kept = tuple(map(operator.and_, giving, owned))
        if kept == giving:
            return with_blocks(loop, [block], giving=giving)
        giving = kept


def _with_moved(branch: Branch[Value, Value], dying: Collection[Value]) -> tuple[Node, tuple[bool, ...]]:
    """The branch, which may give away or return what dies there; and which of its outputs nobody else has."""
    made = [donations(block, dying) for block in branch.blocks]
    owned = tuple(all(flags) for flags in zip(*(flags for _, flags in made), strict=True))
    return with_blocks(branch, [block for block, _ in made], given=tuple(dying)), owned


def _with_distinct(node: Node, given: set[Value], results: set[Value]) -> Node:
    """The call with the results that must not be its arguments: what leaves, and what others would give away."""
    if not isinstance(node, ColocatedCall) or not node.is_inline:
        return node
    kinds = {(value.aval.shape, value.aval.dtype) for value in node.inputs if value in given}
    distinct = (
        i for i, value in enumerate(node.outputs) if value in results or (value.aval.shape, value.aval.dtype) in kinds
    )
    return dataclasses.replace(node, distinct=tuple(distinct))


def _fits(value: Value, result: Value) -> bool:
    own, other = value.aval, result.aval
    if (own.shape, own.dtype, own.memory_space) != (other.shape, other.dtype, other.memory_space):
        return False
    given, wanted = value.sharding, result.sharding
    return wanted is None or (given is not None and given.is_equivalent_to(wanted, own.ndim))


def _is_over(node: Node) -> bool:
    # Calls inside of a loop or branch pin what they read from outside.
    return isinstance(node, Fragment | Loop | Branch) or (isinstance(node, ColocatedCall) and node.is_inline)
