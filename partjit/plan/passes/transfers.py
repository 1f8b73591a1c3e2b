"""Moves between accelerators and the CPU devices of their hosts, each as early as its values are there.

To move an array from a GPU to its host waits until it is computed. So what calls on threads alone read is moved by
these threads, while the calling thread goes on.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence

from jax.sharding import Sharding

from partjit.colocated.devices import colocated_sharding
from partjit.plan.ir.names import Names
from partjit.plan.ir.nodes import Branch, ColocatedCall, Fragment, Loop, Node, Transfer, Value, ValueBlock
from partjit.plan.ir.walk import walk, with_blocks
from partjit.plan.passes.bind import Bound, captured_by

__all__ = ["transfers"]


def transfers(bound: Bound, names: Names, default: Sharding | None, *, is_left_to_calls: bool) -> Bound:
    """Adds the moves of a program.

    Args:
        bound: the program.
        names: of nodes and values.
        default: the sharding of values of which nothing else says it, or None.
        is_left_to_calls: whether calls on threads may move what they alone read.
    """
    if is_left_to_calls:
        calls = (node for node in walk(bound.block.nodes) if isinstance(node, ColocatedCall))
        read_here = {value for call in calls if call.is_inline or call.is_before_inline for value in call.inputs}
    else:
        read_here = None
    return dataclasses.replace(bound, block=_Moves(bound, names, default, read_here, None).of_block(bound.block))


class _Moves:
    """The moves of one block. A value is moved once in each direction; one from outside, in the block around it.

    Args:
        bound, names, default: as of `transfers`.
        read_here: what calls read that the calling thread makes; None if it moves everything.
        outer: the moves of the block around this one.

    Attributes:
        hoisted: moves for this block that are to be made in the one around it, before it.
    """

    def __init__(
        self,
        bound: Bound,
        names: Names,
        default: Sharding | None,
        read_here: Collection[Value] | None,
        outer: "_Moves | None",
    ) -> None:
        self._bound = bound
        self._read_here = read_here
        self._names = names
        self._default = default
        self._outer = outer
        self._own: set[Value] = set()
        self._moved: dict[str, dict[Value, Value]] = {"hosts": {}, "devices": {}}
        self.hoisted: list[Node] = []

    def of_block(self, block: ValueBlock, carried: Sequence[Value] = ()) -> ValueBlock:
        """A block with its moves."""
        self._own = {*carried, *(value for node in block.nodes for value in node.outputs)}
        nodes: list[Node] = []
        for node in block.nodes:
            if isinstance(node, Loop | Branch):
                before, node = self._nested(node)
                nodes += before
            elif isinstance(node, Fragment | ColocatedCall):
                where = "hosts" if isinstance(node, ColocatedCall) else "devices"
                nodes += self._to(where, node.inputs)
                moved = self._moved[where]
                node = dataclasses.replace(node, inputs=tuple(moved.get(value, value) for value in node.inputs))
            nodes.append(node)
        outputs = block.outputs
        if self._outer is not None:  # results of calls in it that leave it are moved by their threads
            nodes += self._to("devices", [value for value in outputs if value not in self._own])
            outputs = tuple(self._moved["devices"].get(value, value) for value in outputs)
        return dataclasses.replace(block, nodes=tuple(nodes), outputs=outputs)

    def _nested(self, node: Loop[Value, Value] | Branch[Value, Value]) -> tuple[list[Node], Node]:
        carried = node.outputs if isinstance(node, Loop) else ()
        inner = [_Moves(self._bound, self._names, self._default, self._read_here, self) for _ in node.blocks]
        blocks = [moves.of_block(block, carried) for moves, block in zip(inner, node.blocks, strict=True)]
        captured = captured_by(blocks, carried, self._bound.constants)
        before = [hoisted for moves in inner for hoisted in moves.hoisted]
        if not isinstance(node, Loop):
            return before, with_blocks(node, blocks, inputs=(node.inputs[0], *captured))
        before += self._to("devices", node.initial)
        initial = (self._moved["devices"].get(value, value) for value in node.initial)
        return before, with_blocks(node, blocks, inputs=(*captured, *initial))

    def _to(self, where: str, values: Sequence[Value]) -> Iterator[Node]:
        """The transfers of those values that are not there yet, if there are any."""
        known = self._moved[where]
        moves: dict[bool, dict[Value, Value]] = {False: {}, True: {}}
        for value in values:
            if value in known:
                continue
            if self._outer is not None and value not in self._own:
                self.hoisted += self._outer._to(where, [value])
                known[value] = self._outer._moved[where].get(value, value)
            elif (there := self._sharding(where, value)) is not None:
                is_left = where == "hosts" and self._read_here is not None and value not in self._read_here
                known[value] = Value(self._names.take(f"{value.name}_{where}"), value.aval, there)
                moves[is_left][value] = known[value]
        for is_left, moved in moves.items():
            if moved:
                yield Transfer(tuple(moved), tuple(moved.values()), self._names.take(f"to_{where}"), is_left)

    def _sharding(self, where: str, value: Value) -> Sharding | None:
        """The sharding of a value once it is moved; None if it need not be."""
        if where == "devices":
            return self._bound.on_devices.get(value)
        here = value.sharding or self._default
        host = None if here is None else colocated_sharding(here)
        return None if host == here else host
