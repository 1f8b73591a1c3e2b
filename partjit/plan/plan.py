"""The plan of a program with colocated calls, as users see it: its data, how it is shown, what was compiled of it."""

import collections
import dataclasses
import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from partjit import lazy
from partjit.plan.ir.nodes import Branch, ColocatedCall, Fragment, Loop, Transfer
from partjit.plan.ir.plan import PlanData
from partjit.plan.ir.walk import walk
from partjit.plan.show.folding import shortened
from partjit.plan.show.source import emit
from partjit.render.numbers import counted

if TYPE_CHECKING:
    import networkx as nx

    from partjit.plan.show import graph, pictures
    from partjit.plan.show.graph import Costs
else:  # a program runs without a picture of it, and these import networkx
    graph, pictures = lazy.module("partjit.plan.show.graph"), lazy.module("partjit.plan.show.pictures")

__all__ = ["Plan"]

T = TypeVar("T")


class Made:
    """What was made of a plan: it lives as long as the plan does."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}
        self._lock = threading.RLock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was made for a key, made now if that was not done before."""
        with self._lock:
            if key not in self._made:
                self._made[key] = make()
            return self._made[key]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan(PlanData):
    """What a program with colocated calls does when it is called.

    Attributes:
        made: besides those of `PlanData`, its fragments lowered and compiled, and the functions that run it.

    `print(plan)` shows the Python function that runs, what repeats in a long one once; `source` is all of it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from partjit import colocated, pjit
        >>> show = colocated.colocated_python(print, out_specs_fn=lambda x: None, stream="log")
        >>> @pjit
        ... def step(x):
        ...     show(jnp.sum(x))
        ...     return 2 * x
        >>> print(step.plan(jnp.ones(8)))
        def step(x):
            out, x1 = fragment_0(x)  # 2 equations
            del x
            print(x1)  # on a thread, stream log
            del x1
            return (out,)
    """

    made: Made = dataclasses.field(init=False, repr=False, default_factory=Made)

    @property
    def source(self) -> str:
        """The Python function that runs."""
        return emit(self)

    @property
    def graph(self) -> "nx.DiGraph":
        """The graph: nodes by name with their `node`, and edges with their `kind` ("data" or "order"), `values` and
        `nbytes`. The program's arguments and results are the nodes "arguments" and "results".
        """
        return graph.as_graph(self)

    def critical_path(self, costs: "Costs | None" = None) -> tuple[tuple[str, ...], float]:
        """The chain of nodes that takes longest, and how long it takes: no schedule can be quicker.

        Args:
            costs: seconds per node: a mapping by name (0 where it says nothing) or a function of the node. Without, the
                number of nodes counts.

        Returns:
            The names of the nodes, and the sum of their costs.

        Raises:
            TypeError: `costs` are neither, or one of them is no number.
        """
        return graph.critical_path(self, costs)

    def to_mermaid(self) -> str:
        """The graph as a Mermaid flowchart: fragments as boxes, calls rounded, order as dotted lines."""
        return graph.to_mermaid(self)

    def to_svg(self, costs: "Costs | None" = None) -> str:
        """The graph as a picture: boxes in rows, what loops and branches hold in them, and edges that go down.

        Edges say how many bytes go along them; dotted ones are an order without data. In a loop, "carried in" stands
        for what an iteration gets from the one before, and "carried on" for what it gives to the next. The picture
        follows the theme of the reader, is the same for the same plan, and shows more where it is pointed at.
        Constants are not in it.

        Args:
            costs: seconds per node, as for `critical_path`, which is then emphasized; each node shows its cost.

        Returns:
            An SVG for a file or a page.

        Raises:
            TypeError: `costs` are neither, or one of them is no number.

        Example:
            >>> import jax.numpy as jnp
            >>> from partjit import pjit
            >>> pjit(lambda x: x + 1).plan(jnp.ones(8)).to_svg()[:4]
            '<svg'
        """
        return pictures.to_svg(self, costs)

    def __copy__(self) -> Self:
        return self  # nothing of it changes

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the plan of {self.name} cannot be pickled: it has functions and compiled programs of this process. Send "
            "`plan.source` or `plan.to_svg()`, which are texts, or call `.plan()` of the function where it is needed"
        )

    def _repr_html_(self) -> str:
        return pictures.to_html(self)

    def __str__(self) -> str:
        return shortened(emit(self, most_names=4).rstrip())

    def __repr__(self) -> str:
        counts = collections.Counter(type(node) for node in walk(self.nodes))
        named = {"fragment": Fragment, "call": ColocatedCall, "transfer": Transfer}
        named |= {name: kind for name, kind in {"loop": Loop, "branch": Branch}.items() if counts[kind]}
        return f"<plan of {self.name}: {', '.join(counted(counts[kind], name) for name, kind in named.items())}>"
