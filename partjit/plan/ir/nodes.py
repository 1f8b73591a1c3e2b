"""The nodes of a program with colocated calls, and the blocks that they form.

A program is a `Block` from the first pass to the last. What goes between its nodes are variables of jax until the
program is cut and partitioned, and `Value`s afterwards, which have a name and a sharding. Loops and branches have
blocks of their own, whose inputs are what is given to them: while these are variables, a block reads nothing else.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import JaxprEqn, Var

from partjit.colocated.ir.primitive import Callee
from partjit.colocated.runtime.streams import Stream

__all__ = [
    "AnyNode",
    "Block",
    "Branch",
    "ColocatedCall",
    "Equation",
    "Forward",
    "Fragment",
    "Group",
    "Loop",
    "Node",
    "Transfer",
    "Value",
    "blocks_of",
    "is_host",
    "variables",
    "walk",
]


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """An array that goes from one node to others.

    Attributes:
        name: its name in the plan's source.
        aval: its type.
        sharding: its sharding; None if that is left to the executables: in a program without a mesh, or in the
            arguments and results of a program whose specs leave it open.
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


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Equation:
    """An equation of the jaxpr.

    Attributes:
        eqn: the equation.
    """

    eqn: JaxprEqn

    @property
    def inputs(self) -> Sequence[Any]:
        """The variables and literals it reads."""
        return self.eqn.invars

    @property
    def outputs(self) -> Sequence[Any]:
        """The variables it computes."""
        return self.eqn.outvars


@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
    """A result of a block that none of its equations computes: a fragment returns what it is given.

    It is an argument, a constant, a result that leaves a second time, or a call's result under another sharding.

    Attributes:
        inputs: the variable or literal.
        outputs: the variable of the result.
    """

    inputs: tuple[Any]
    outputs: tuple[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Nodes that are compiled together: a fragment whose arguments and results are not settled.

    Attributes:
        nodes: equations, and forwarded results.
        inputs: the variables it reads from outside, in the order of their first use.
        cost: see `Fragment`.
    """

    nodes: tuple[Equation | Forward, ...]
    inputs: tuple[Any, ...]
    cost: float

    @property
    def outputs(self) -> Sequence[Any]:
        """The variables it computes."""
        return [var for node in self.nodes for var in node.outputs]


@dataclasses.dataclass(frozen=True, eq=False)
class Fragment:
    """A piece of the jaxpr that is compiled as one XLA program.

    Attributes:
        jaxpr: the closed jaxpr of `inputs` to `outputs`.
        inputs, outputs: its arguments and results.
        cost: an estimate of its work, in elementary operations of the whole program.
        donated: for each input whether the executable may reuse its memory.
        name: its name in the plan's source.
    """

    jaxpr: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    cost: float
    donated: tuple[bool, ...] = ()
    name: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class ColocatedCall:
    """A call of Python on the hosts.

    Attributes:
        eqn: the equation of `colocated_call_p` that it was traced as.
        inputs, outputs: its arguments and results.
        callee: the function and what is known of it.
        stream: the stream that the program put it on; None where that of the caller is meant.
        is_inline: whether the calling thread runs it itself, because nothing could overlap with it.
        pinned: for each input whether it is kept intact against its owner, who may donate it while the call runs.
        distinct: the positions of results of an inline call that have to be arrays of their own, whatever it returns.
        site: file, line and function of the call in the user's code.
        name: its name in the plan's source.
    """

    eqn: JaxprEqn
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    callee: Callee
    stream: Stream | None
    is_inline: bool = False
    pinned: tuple[bool, ...] = ()
    distinct: tuple[int, ...] = ()
    site: tuple[str, int, str] = ("<unknown>", 0, "")
    name: str = ""

    @property
    def where(self) -> str:
        """Where it runs, in words."""
        stream = "the caller's stream" if self.stream is None else f"stream {self.stream.name or 'without a name'}"
        return f"inline, {stream}" if self.is_inline else f"on a thread, {stream}"


@dataclasses.dataclass(frozen=True, eq=False)
class Transfer:
    """A move of arrays between accelerators and the CPU devices of their hosts.

    Attributes:
        inputs, outputs: the arrays before and after.
        name: its name in the plan's source.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    name: str


N = TypeVar("N")


@dataclasses.dataclass(frozen=True, eq=False)
class Block(Generic[N]):
    """The nodes of a program, of one iteration of a loop, or of a branch.

    Attributes:
        inputs: its arguments. Those of an iteration are what the loop captures and then what it carries.
        nodes: in an order in which they can run; after the cut, that in which the calling thread takes them up.
        outputs: its results. Those of an iteration are carried to the next one.
        consts: the variables that are constants, with their values.
        order: pairs of names of which the second may only begin when the first has ended.
    """

    inputs: tuple[Any, ...]
    nodes: tuple[N, ...]
    outputs: tuple[Any, ...]
    consts: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    order: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of_jaxpr(cls, jaxpr: Any) -> "Block[Equation]":
        """The block of a closed jaxpr, unchanged."""
        inner = jaxpr.jaxpr
        consts = dict(zip(inner.constvars, jaxpr.consts, strict=True))
        return Block(tuple(inner.invars), tuple(map(Equation, inner.eqns)), tuple(inner.outvars), consts)


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """A loop that the calling thread drives.

    Attributes:
        inputs: what its iterations capture from outside, and then the values it starts from.
        outputs: the carried values: in each iteration what the one before gave, after the last one the results.
        block: an iteration, whose outputs are the carried values of the next one.
        trip_count: how many iterations there are; None if there is one as long as the first carried value is true.
        eqn: the equation that it was traced as.
        is_buffer: for each carried value whether it is a stack that each iteration writes a slice of.
        counter: which carried value is the number of the iteration; None if none is.
        giving: for each carried value whether its memory may be reused in an iteration.
        name: its name in the plan.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    block: Block
    trip_count: int | None
    eqn: JaxprEqn
    is_buffer: tuple[bool, ...]
    counter: int | None = None
    giving: tuple[bool, ...] = ()
    name: str = ""

    @property
    def initial(self) -> tuple[Any, ...]:
        """The carried values of the first iteration."""
        return self.inputs[len(self.inputs) - len(self.outputs) :]

    @property
    def captured(self) -> tuple[Any, ...]:
        """What its iterations read from outside."""
        return self.inputs[: len(self.inputs) - len(self.outputs)]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Its iteration."""
        return (self.block,)

    @property
    def carried(self) -> tuple[Any, ...]:
        """The inputs of an iteration that are carried."""
        return self.block.inputs[len(self.captured) :]


@dataclasses.dataclass(frozen=True, eq=False)
class Branch:
    """A choice that the calling thread makes.

    Attributes:
        inputs: the number of the block to run, and then what is captured from outside.
        outputs: what the block that ran gives.
        blocks: what there is to choose from.
        eqn: the equation that it was traced as.
        given: the inputs whose memory may be reused by the block that runs, or that it may give as its own.
        name: its name in the plan.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    blocks: tuple[Block, ...]
    eqn: JaxprEqn
    given: tuple[Value, ...] = ()
    name: str = ""

    @property
    def captured(self) -> tuple[Any, ...]:
        """What its blocks read from outside."""
        return self.inputs[1:]


Node = Fragment | ColocatedCall | Transfer | Loop | Branch
"""A node of a plan."""

AnyNode = Node | Equation | Forward | Group
"""A node at any stage of a program."""


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The variables among variables and literals."""
    return [atom for atom in atoms if isinstance(atom, Var)]


def is_host(node: AnyNode) -> bool:
    """Whether the host makes or drives it: a call, or a loop or branch with calls."""
    return isinstance(node, ColocatedCall | Loop | Branch)


def blocks_of(node: AnyNode) -> Sequence[Block]:
    """The blocks of a loop or branch; none for other nodes."""
    return node.blocks if isinstance(node, Loop | Branch) else ()


def walk(nodes: Sequence[AnyNode]) -> Iterator[Any]:
    """All nodes, those in loops and branches among them, each after the node that contains it."""
    for node in nodes:
        yield node
        for block in blocks_of(node):
            yield from walk(block.nodes)
