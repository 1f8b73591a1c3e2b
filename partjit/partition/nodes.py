"""The nodes of a plan, and the values that go between them.

What holds plans of its own, as a loop does, is a node as well: it has a name, inputs and outputs like the others.
"""

import dataclasses
from typing import Any

from partjit.colocated.primitive import Callee
from partjit.colocated.streams import Stream

__all__ = ["ColocatedCall", "Fragment", "Node", "Transfer", "Value"]


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


Node = Fragment | ColocatedCall | Transfer
