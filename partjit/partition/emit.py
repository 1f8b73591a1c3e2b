"""The plan as a Python function: one line for each thing that the calling thread does.

The names of fragments, calls, transfers and of `wait` and `release` are filled in when the plan is compiled.
"""

import keyword
from collections.abc import Iterator, Sequence
from typing import Any

from partjit.partition.names import spelled
from partjit.partition.nodes import ColocatedCall, Fragment, Node, Value

__all__ = ["emit", "waits"]


def emit(plan: Any, most_names: int | None = None) -> str:
    """The source of the function that a plan is.

    Args:
        plan: a `Plan`.
        most_names: lists of names that are longer are cut short, for readers.
    """
    names = _Names(most_names)
    lines = [f"def {_identifier(plan)}({names.listed(plan.inputs)}):"]
    lines += [f"    {line}" for line in _body(plan, names)]
    return "\n".join(lines) + "\n"


class _Names:
    def __init__(self, most: int | None) -> None:
        self._most = most

    def listed(self, values: Sequence[Value]) -> str:
        """The names of values, with commas between."""
        names = [value.name for value in values]
        if self._most is not None and len(names) > self._most:
            names = [*names[: self._most - 2], f"... {len(names) - self._most + 1} more ...", names[-1]]
        return ", ".join(names)

    def assigned(self, values: Sequence[Value]) -> str:
        """The left side of an assignment of a tuple, with the equals sign; nothing if there are no values."""
        if not values:
            return ""
        return f"({values[0].name},) = " if len(values) == 1 else f"{self.listed(values)} = "


def waits(nodes: Sequence[Node]) -> Iterator[tuple[Node, tuple[Value, ...]]]:
    """Each node with the results of calls on threads that it is the first to need there."""
    pending: set[Value] = set()
    for node in nodes:
        needed: tuple[Value, ...] = ()
        if not isinstance(node, ColocatedCall):  # which waits itself, where it runs
            needed = tuple(value for value in node.inputs if value in pending)
            pending.difference_update(needed)
        elif not node.is_inline:
            pending.update(node.outputs)
        yield node, needed


def _body(plan: Any, names: _Names) -> Iterator[str]:
    last_use: dict[Value, Node] = {value: node for node in plan.nodes for value in node.inputs}
    kept = {*plan.outputs, *(value for value, _ in plan.constants)}
    dying: dict[Node, list[Value]] = {}
    for value, node in last_use.items():
        if value not in kept:
            dying.setdefault(node, []).append(value)
    for node, needed in waits(plan.nodes):
        for value in needed:
            yield f"{value.name} = wait({value.name})"
        call = f"{names.assigned(node.outputs)}{node.name}({names.listed(node.inputs)})"
        yield f"{call}  # {_comment(node)}"
        dead = dying.get(node, []) + [value for value in node.outputs if value not in last_use and value not in kept]
        released = [value for value in dead if value in plan.released]
        if released:
            yield f"release({names.listed(released)})"
        if dead:
            yield f"del {names.listed(dead)}"
    yield f"return ({names.listed(plan.outputs)}{',' if len(plan.outputs) == 1 else ''})"


def _comment(node: Node) -> str:
    if isinstance(node, Fragment):
        return f"{len(node.jaxpr.eqns)} equation{'' if len(node.jaxpr.eqns) == 1 else 's'}"
    if isinstance(node, ColocatedCall):
        return node.where
    return f"{sum(value.nbytes for value in node.inputs):,} bytes"


def _identifier(plan: Any) -> str:
    name = spelled(plan.name)
    taken = {"wait", "release", "__debug__"}  # Python allows no other meaning of the last one
    taken.update(node.name for node in plan.nodes)
    taken.update(value.name for value, _ in plan.constants)
    return name if name.isidentifier() and not keyword.iskeyword(name) and name not in taken else f"program_{name}"
