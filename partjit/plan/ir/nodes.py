"""The nodes of a plan, and the values that go between them.

Loops and branches hold blocks of nodes of their own, which use the values around them as well.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from partjit.colocated.ir.primitive import Callee
from partjit.colocated.runtime.streams import Stream

__all__ = ["Block", "Branch", "ColocatedCall", "Fragment", "Loop", "Node", "Transfer", "Value", "aliases", "walk"]


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """An array that goes from one node to others.

    Attributes:
        name: its name in the plan's source.
        aval: its type.
        sharding: where it lies; None if that is left to the executables: in a program without a mesh, or in the
            arguments and results of a program whose specs say nothing.
    """

    name: str
    aval: Any
    sharding: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.aval.size * self.aval.dtype.itemsize

    def __str__(self) -> str:
        spec = getattr(self.sharding, "spec", None)
        where = "" if spec is None else " " + str(spec).replace("PartitionSpec", "P")
        return f"{self.aval.str_short()}{where}"


@dataclasses.dataclass(frozen=True, eq=False)
class Fragment:
    """A piece of the jaxpr that is compiled as one XLA program.

    Attributes:
        name: its name in the plan's source.
        jaxpr: the closed jaxpr of `inputs` to `outputs`.
        inputs, outputs: its arguments and results.
        donated: for each input whether the executable may reuse its memory.
        cost: an estimate of its work, in elementary operations of the whole program.
    """

    name: str
    jaxpr: Any
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    donated: tuple[bool, ...]
    cost: float


@dataclasses.dataclass(frozen=True, eq=False)
class ColocatedCall:
    """A call of Python on the hosts.

    Attributes:
        name: its name in the plan's source.
        callee: the function and what is known of it.
        stream: the stream that the program put it on; None where that of the caller is meant.
        inputs, outputs: its arguments and results.
        is_inline: whether the calling thread runs it itself, because nothing could overlap with it.
        held: for each input whether it is kept intact against its owner, who may give it away while the call runs.
        site: file, line and function of the call in the user's code.
        apart: the positions of results of an inline call that have to be arrays of their own, whatever it returns.
    """

    name: str
    callee: Callee
    stream: Stream | None
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    is_inline: bool
    held: tuple[bool, ...]
    site: tuple[str, int, str]
    apart: tuple[int, ...] = ()

    @property
    def where(self) -> str:
        """Where it runs, in words."""
        stream = "the caller's stream" if self.stream is None else f"stream {self.stream.name or 'without a name'}"
        return f"inline, {stream}" if self.is_inline else f"on a thread, {stream}"


@dataclasses.dataclass(frozen=True, eq=False)
class Transfer:
    """A move of arrays between accelerators and the CPU devices of their hosts.

    Attributes:
        name: its name in the plan's source.
        inputs, outputs: the arrays before and after.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """The nodes of one turn or branch.

    Attributes:
        nodes: in the order in which they are taken up.
        outputs: what it gives: values of its own, of its loop, or from outside.
        order: pairs of names of which the second may only begin when the first has ended.
    """

    nodes: "tuple[Node, ...]"
    outputs: tuple[Value, ...]
    order: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """A loop that the calling thread drives.

    Attributes:
        name: its name in the plan.
        inputs: what its turns read from outside, and then the values it starts from.
        outputs: the carried values: in each turn they are what the one before gave, after the last one its results.
        block: a turn, whose outputs are the carried values of the next one.
        turns: how many there are; None if there is one as long as the first carried value is true.
        giving: for each carried value whether its memory may be reused in a turn.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    block: Block
    turns: int | None
    giving: tuple[bool, ...] = ()

    @property
    def initial(self) -> tuple[Value, ...]:
        """The carried values of the first turn."""
        return self.inputs[len(self.inputs) - len(self.outputs) :]

    @property
    def captured(self) -> tuple[Value, ...]:
        """What its turns read from outside."""
        return self.inputs[: len(self.inputs) - len(self.outputs)]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Its turn."""
        return (self.block,)


@dataclasses.dataclass(frozen=True, eq=False)
class Branch:
    """A choice that the calling thread makes.

    Attributes:
        name: its name in the plan.
        inputs: the number of the block to run, and then what the blocks read from outside.
        outputs: what the block that ran gives.
        blocks: what there is to choose from.
        given: the inputs whose memory may be reused by the block that runs, or that it may give as its own.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    blocks: tuple[Block, ...]
    given: tuple[Value, ...] = ()


Node = Fragment | ColocatedCall | Transfer | Loop | Branch


def walk(nodes: Sequence[Node]) -> Iterator[Node]:
    """All nodes, those in loops and branches among them, each after what it stands in."""
    for node in nodes:
        yield node
        if isinstance(node, Loop | Branch):
            for block in node.blocks:
                yield from walk(block.nodes)


def aliases(node: Loop | Branch) -> Iterator[tuple[Value, set[Value]]]:
    """Each output with the values from outside that it may be under another name: nothing is copied on the way out.

    What a loop starts from is copied. Its carried values may change places, so they are not distinguished.
    """
    if isinstance(node, Loop):
        found = set().union(*(_names_of(value, node.block) for value in node.block.outputs))
        yield from ((output, found.difference(node.outputs)) for output in node.outputs)
    else:
        for k, output in enumerate(node.outputs):
            yield output, set().union(*(_names_of(block.outputs[k], block) for block in node.blocks))


def _names_of(value: Value, block: Block) -> set[Value]:
    """The value, or what it may be if a loop or branch of the block gives it."""
    for node in block.nodes:
        if value in node.outputs:
            return dict(aliases(node))[value] if isinstance(node, Loop | Branch) else set()
    return {value}
