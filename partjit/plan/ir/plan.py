"""The data of a plan: what is dispatched, called and moved, in which order.

A plan is a directed graph. Its nodes are fragments (pieces of the jaxpr that are compiled), colocated calls, transfers,
and loops and branches that hold such nodes; values go along its edges, and nodes that must keep an order have an edge
without a value. The nodes are kept in the order in which the calling thread takes them up, which is a function of the
program alone.
"""

import dataclasses

from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh
from jax.typing import ArrayLike

from partjit.plan.ir.nodes import ColocatedCall, Fragment, Node, Transfer, Value
from partjit.plan.ir.walk import walk

__all__ = ["Counted", "PlanData"]


@dataclasses.dataclass(frozen=True, eq=False)
class Counted:
    """Integers among the results of a program that the host computes as well, from those among the arguments.

    Attributes:
        jaxpr: the closed jaxpr of the ones from the others.
        inputs, outputs: the positions of these arguments and results.
    """

    jaxpr: ClosedJaxpr
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class PlanData:
    """What a program with colocated calls does when it is called.

    Attributes:
        name: the program's.
        mesh: the mesh its shardings refer to; empty if there is none.
        inputs, outputs: its flat arguments and results; a result may be an input of the plan or a call's result.
        paths: the key path of each argument, in terms of the user's function.
        nodes: in the order in which they are taken up; loops and branches hold more of them.
        order: pairs of names of nodes of which the second may only begin when the first has ended.
        constants: arguments of calls that are the same for all executions.
        released: the inputs whose memory the caller gives up, and that a result could take over.
        agree: whether its processes agree before each fragment, or else only before the first execution; "ahead" if
            they need not wait for that where a fragment takes nothing away.
        counted: what the host counts along, to know which branch the next execution chooses; None if nothing.
        in_host_thread: whether the calling thread, which waits for one executable after another, runs them itself.
        makes_brief_calls: whether it makes brief calls at once, which it need not wait for.
    """

    name: str
    mesh: Mesh
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    paths: tuple[str, ...]
    nodes: tuple[Node, ...]
    order: tuple[tuple[str, str], ...]
    constants: tuple[tuple[Value, ArrayLike], ...]
    released: frozenset[Value]
    agree: bool | str = True
    counted: Counted | None = None
    in_host_thread: bool = False
    makes_brief_calls: bool = False

    @property
    def counters(self) -> tuple[Value, ...]:
        """The inputs that the host counts along."""
        return () if self.counted is None else tuple(self.inputs[i] for i in self.counted.inputs)

    @property
    def fragments(self) -> tuple[Fragment[Value, Value], ...]:
        """The pieces that are compiled, in the order of their dispatch; those in loops and branches as well."""
        return tuple(node for node in walk(self.nodes) if isinstance(node, Fragment))

    @property
    def calls(self) -> tuple[ColocatedCall[Value, Value], ...]:
        """The colocated calls, in the order in which they are made; those in loops, branches and fragments as well."""
        return tuple(node for node in walk(self.nodes, into_fragments=True) if isinstance(node, ColocatedCall))

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The moves between accelerators and hosts."""
        return tuple(node for node in walk(self.nodes) if isinstance(node, Transfer))
