"""The nodes of a program with colocated calls, and the blocks that they form.

A program is a `Block` from the first pass to the last. What goes between its nodes are variables of jax until the
program is cut and partitioned, and `Value`s afterwards, which have a name and a sharding. Loops and branches have
blocks of their own, whose inputs are what is given to them: while these are variables, a block reads nothing else.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var
from jax.sharding import Sharding
from jax.typing import ArrayLike

from partjit._jax.jaxprs import Atom
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
    "ValueBlock",
    "VarBlock",
    "VarBranch",
    "VarLoop",
    "VarNode",
]

R = TypeVar("R", covariant=True)  # what nodes read: atoms of jax, then values
D = TypeVar("D", covariant=True)  # what they define: variables of jax, then values
N = TypeVar("N", covariant=True)


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
    aval: ShapedArray
    sharding: Sharding | None

    @property
    def nbytes(self) -> int:
        """Bytes of the array, over all devices."""
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
    def inputs(self) -> Sequence[Atom]:
        """The variables and literals it reads."""
        return self.eqn.invars

    @property
    def outputs(self) -> Sequence[Var]:
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

    inputs: tuple[Atom]
    outputs: tuple[Var]


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Nodes that are compiled together: a fragment whose arguments and results are not settled.

    Attributes:
        nodes: equations, and forwarded results.
        inputs: the variables it reads from outside, in the order of their first use.
        cost, by_one_device: see `Fragment`.
    """

    nodes: tuple[Equation | Forward, ...]
    inputs: tuple[Var, ...]
    cost: float
    by_one_device: bool = False

    @property
    def outputs(self) -> Sequence[Var]:
        """The variables it computes."""
        return [var for node in self.nodes for var in node.outputs]


@dataclasses.dataclass(frozen=True, eq=False)
class Fragment(Generic[R, D]):
    """A piece of the jaxpr that is compiled as one XLA program.

    Attributes:
        jaxpr: the closed jaxpr of `inputs` to `outputs`.
        inputs, outputs, name: its arguments and results, and its name in the plan's source.
        cost: an estimate of its FLOPs, over all devices.
        donated: for each input whether the executable may reuse its memory.
        nodes: what it is made of, if there are calls among them: it makes these as it runs. Its jaxpr then takes the
            number of the execution before the inputs, and gives the number of calls made before the outputs.
        calls: these calls, also those in loops and branches.
        gathered: what the calls get, of all iterations of their loops, if its jaxpr gives that before the outputs, and
            takes no number: the host then makes the calls.
        by_one_device: whether the host computes it, of what are numbers, or the first device of the mesh alone does.
    """

    jaxpr: ClosedJaxpr
    inputs: tuple[R, ...]
    outputs: tuple[D, ...]
    cost: float
    donated: tuple[bool, ...] = ()
    nodes: tuple["Node", ...] = ()
    calls: "tuple[ColocatedCall[Value, Value], ...]" = ()
    gathered: tuple[Value, ...] = ()
    name: str = ""
    by_one_device: bool = False

    @property
    def waits_for_calls(self) -> bool:
        """Whether its executable waits for the calls that it makes."""
        return any(call.is_answered for call in self.calls)

    @property
    def numbers(self) -> int:
        """How many arguments of its jaxpr precede its inputs: one if it makes calls as it runs."""
        return int(bool(self.nodes) and not self.gathered)

    @property
    def results_before(self) -> int:
        """How many results of its jaxpr precede its outputs."""
        return len(self.gathered) or self.numbers

    @property
    def donated_arguments(self) -> tuple[bool, ...]:
        """For each argument of its jaxpr whether the executable may reuse its memory."""
        return (*(False for _ in range(self.numbers)), *self.donated)


@dataclasses.dataclass(frozen=True, eq=False)
class ColocatedCall(Generic[R, D]):
    """A call of Python on the hosts.

    Attributes:
        eqn: the equation of `colocated_call_p` that it was traced as.
        inputs, outputs, name: its arguments and results, and its name in the plan's source.
        callee: the function and what is known of it.
        stream: the stream that the program put it on; None where that of the caller is meant.
        is_inline: whether the calling thread runs it itself, because nothing could overlap with it.
        is_before_inline: whether the calling thread runs it, as an inline call after it has to wait for its end. Its
            results and failures are those of a call on a thread.
        is_emitted: whether an executable makes it as it runs.
        is_answered: whether that executable waits for it, so that the thread of a device runs it.
        at_once: the arguments of how many iterations of its loop the executable hands over at once.
        is_returned: whether the executable returns these, and the host makes the calls when it has run.
        pinned: for each input whether it is kept intact against its owner, who may donate it while the call runs.
        distinct: the positions of results of an inline call that have to be arrays of their own, whatever it returns.
        site: file, line and function of the call in the user's code.
    """

    eqn: JaxprEqn
    inputs: tuple[R, ...]
    outputs: tuple[D, ...]
    callee: Callee
    stream: Stream | None
    is_inline: bool = False
    is_before_inline: bool = False
    is_emitted: bool = False
    is_answered: bool = False
    at_once: int = 1
    is_returned: bool = False
    pinned: tuple[bool, ...] = ()
    distinct: tuple[int, ...] = ()
    site: tuple[str, int, str] = ("<unknown>", 0, "")
    name: str = ""

    @property
    def where(self) -> str:
        """Where it runs, in words."""
        stream = "the caller's stream" if self.stream is None else f"stream {self.stream.name or 'without a name'}"
        if self.is_answered:
            return f"in its executable, {stream}"
        if self.is_emitted:
            many = f", {self.at_once} iterations at once" if self.at_once > 1 else ""
            return f"{'when its executable has run' if self.is_returned else 'as its executable runs'}{many}, {stream}"
        return f"inline, {stream}" if self.is_inline or self.is_before_inline else f"on a thread, {stream}"


@dataclasses.dataclass(frozen=True, eq=False)
class Transfer:
    """A move of arrays between accelerators and the CPU devices of their hosts.

    Attributes:
        inputs, outputs, name: the arrays before and after, and its name in the plan's source.
        is_left_to_calls: whether the threads of the calls that read them move them, each when one of these needs it.
        pinned: for each input whether it is kept intact against its owner until then.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    name: str
    is_left_to_calls: bool = False
    pinned: tuple[bool, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Block(Generic[N, R, D]):
    """The nodes of a program, of one iteration of a loop, or of a branch.

    Attributes:
        inputs: its arguments. Those of an iteration are what the loop captures and then what it carries.
        nodes: in an order in which they can run; after the cut, that in which the calling thread takes them up.
        outputs: its results. Those of an iteration are carried to the next one.
        consts: the variables that are constants, with their values.
        order: pairs of names of which the second may only begin when the first has ended.
    """

    inputs: tuple[D, ...]
    nodes: tuple[N, ...]
    outputs: tuple[R, ...]
    consts: Mapping[Var, ArrayLike] = dataclasses.field(default_factory=dict)
    order: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of_jaxpr(jaxpr: ClosedJaxpr) -> "Block[Equation, Atom, Var]":
        """The block of a closed jaxpr, unchanged."""
        inner = jaxpr.jaxpr
        consts = dict(zip(inner.constvars, jaxpr.consts, strict=True))
        return Block(tuple(inner.invars), tuple(map(Equation, inner.eqns)), tuple(inner.outvars), consts)


@dataclasses.dataclass(frozen=True, eq=False)
class Loop(Generic[R, D]):
    """A loop that the calling thread drives.

    Attributes:
        inputs: what its iterations capture from outside, and then the values it starts from.
        outputs: the carried values: in each iteration what the one before gave, after the last one the results.
        block: an iteration, whose outputs are the carried values of the next one.
        trip_count: how many iterations there are; None if there is one as long as the first carried value is true.
        eqn: the equation that it was traced as.
        is_buffer: for each carried value whether it is a stack that each iteration writes a slice of.
        counter: which carried value is the number of the iteration; None if none is.
        on_devices: whether the devices run it, and its calls are made by their executable.
        giving: for each carried value whether its memory may be reused in an iteration.
        name: its name in the plan.
    """

    inputs: tuple[R, ...]
    outputs: tuple[D, ...]
    block: Block[Any, R, D]
    trip_count: int | None
    eqn: JaxprEqn
    is_buffer: tuple[bool, ...]
    counter: int | None = None
    on_devices: bool = False
    giving: tuple[bool, ...] = ()
    name: str = ""

    @property
    def initial(self) -> tuple[R, ...]:
        """The carried values of the first iteration."""
        return self.inputs[len(self.inputs) - len(self.outputs) :]

    @property
    def captured(self) -> tuple[R, ...]:
        """What its iterations read from outside."""
        return self.inputs[: len(self.inputs) - len(self.outputs)]

    @property
    def blocks(self) -> tuple[Block[Any, R, D], ...]:
        """Its iteration."""
        return (self.block,)

    @property
    def carried(self) -> tuple[D, ...]:
        """The inputs of an iteration that are carried."""
        return self.block.inputs[len(self.captured) :]


@dataclasses.dataclass(frozen=True, eq=False)
class Branch(Generic[R, D]):
    """A choice that the calling thread makes.

    Attributes:
        inputs: the number of the block to run, and then what is captured from outside.
        outputs: what the block that ran gives.
        blocks: what there is to choose from.
        eqn: the equation that it was traced as.
        on_devices: whether the devices make it, and the calls in it are made by their executable.
        given: the inputs whose memory may be reused by the block that runs, or that it may give as its own.
        name: its name in the plan.
    """

    inputs: tuple[R, ...]
    outputs: tuple[D, ...]
    blocks: tuple[Block[Any, R, D], ...]
    eqn: JaxprEqn
    on_devices: bool = False
    given: tuple[Value, ...] = ()
    name: str = ""

    @property
    def captured(self) -> tuple[R, ...]:
        """What its blocks read from outside."""
        return self.inputs[1:]


Node: TypeAlias = (
    Fragment[Value, Value] | ColocatedCall[Value, Value] | Transfer | Loop[Value, Value] | Branch[Value, Value]
)
"""A node of a plan."""

VarNode: TypeAlias = (
    Equation | Forward | Group | Fragment[Atom, Var] | ColocatedCall[Atom, Var] | Loop[Atom, Var] | Branch[Atom, Var]
)
"""A node of a program before its variables become values."""

AnyNode: TypeAlias = Node | VarNode
"""A node at any stage of a program."""

VarBlock: TypeAlias = Block[VarNode, Atom, Var]
VarLoop: TypeAlias = Loop[Atom, Var]
VarBranch: TypeAlias = Branch[Atom, Var]
ValueBlock: TypeAlias = Block[Node, Value, Value]
