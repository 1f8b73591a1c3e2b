"""The plan as a Python function: one line for each thing that the calling thread does.

The names of fragments, calls, transfers and of `wait`, `read`, `know`, `count` and `release` are filled in when the
plan is compiled.
Broken plans are written as well, for the message that says what is wrong with them.
"""

import collections
import keyword
from collections.abc import Collection, Iterator, Sequence

from partjit.plan.ir.integers import computed_by_host
from partjit.plan.ir.names import spelled
from partjit.plan.ir.nodes import Block, Branch, ColocatedCall, Fragment, Loop, Node, Transfer, Value
from partjit.plan.ir.plan import PlanData
from partjit.plan.ir.walk import known_number, walk
from partjit.render.numbers import counted

__all__ = ["emit", "names_of_results", "pending_in_iterations", "said_of_fragment", "waits"]


def emit(plan: PlanData, most_names: int | None = None, *, is_agreed: bool = False) -> str:
    """The source of the function that a plan is.

    Args:
        plan: the plan.
        most_names: lists of names that are longer are cut short, for readers.
        is_agreed: whether `read` gets the name of the loop or branch as well, for processes that have to agree on it.
    """
    return _emitted(plan, _Names(most_names), is_agreed)


def names_of_results(plan: PlanData) -> list[str]:
    """The names of a plan's results in its source; in a loop that carries one, its value so far has that name."""
    names = _Names(None)
    _emitted(plan, names, False)
    return [*map(names.of, plan.outputs)]


def _emitted(plan: PlanData, names: "_Names", is_agreed: bool) -> str:
    lines = [f"def {_identifier(plan)}({names.listed(plan.inputs)}):"]
    kept = {*plan.outputs, *plan.counters, *(value for value, _ in plan.constants)}
    moved = {value for node in walk(plan.nodes) if isinstance(node, Branch) for value in node.given}
    writer = _Writer(names, plan.released - moved, is_agreed)
    lines += _indented([*writer.block(plan.nodes, plan.inputs, kept, set())])
    if plan.counted is not None:
        values = [*(plan.outputs[i] for i in plan.counted.outputs), *plan.counters]
        lines.append(f"    know({names.listed(values)})  # {counted(len(plan.counted.jaxpr.eqns), 'equation')}")
        released = [value for value in plan.counters if value in plan.released]
        lines += [f"    release({names.listed(released)})"] if released else []
    lines.append(f"    return ({names.listed(plan.outputs)}{',' if len(plan.outputs) == 1 else ''})")
    return "\n".join(lines) + "\n"


class _Names:
    """How values are written: by their names, or by those of the values in whose place they come."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self.taken_over: dict[Value, Value] = {}

    def of(self, value: Value) -> str:
        """The name of a value."""
        while value in self.taken_over:
            value = self.taken_over[value]
        return value.name

    def listed(self, values: Sequence[Value]) -> str:
        """The names of values, with commas between."""
        names = [self.of(value) for value in values]
        if self._most is not None and len(names) > self._most:
            names = [*names[: self._most - 2], f"... {len(names) - self._most + 1} more ...", names[-1]]
        return ", ".join(names)

    def assigned(self, values: Sequence[Value]) -> str:
        """The left side of an assignment of a tuple, with the equals sign; nothing if there are no values."""
        if not values:
            return ""
        return f"({self.of(values[0])},) = " if len(values) == 1 else f"{self.listed(values)} = "


def waits(nodes: Sequence[Node], pending: set[Value] | None = None) -> Iterator[tuple[Node, tuple[Value, ...]]]:
    """Each node with the results of calls on threads that it is the first to need there.

    Args:
        nodes: those of a program or block.
        pending: the values from outside that may be such results; afterwards, all values that may be.
    """
    pending = set() if pending is None else pending
    for node in nodes:
        needed: tuple[Value, ...] = ()
        if isinstance(node, Transfer) and node.is_left_to_calls:
            pass
        elif isinstance(node, Fragment | Transfer):  # others wait themselves, where they use it
            needed = tuple(value for value in node.inputs if value in pending)
            pending.difference_update(needed)
        elif isinstance(node, Loop):
            pending |= pending_in_iterations(node, pending)
        elif isinstance(node, Branch):
            for block in node.blocks:
                pending.update(_pending_after(block, pending, node.outputs))
        elif not node.is_inline:
            pending.update(node.outputs)
        yield node, needed


def pending_in_iterations(loop: Loop, pending: set[Value]) -> set[Value]:
    """The carried values of a loop that may be results of calls on threads at the beginning of an iteration."""
    carried = {value for value, first in zip(loop.outputs, loop.initial, strict=False) if first in pending}
    while True:
        grown = carried | _pending_after(loop.block, pending | carried, loop.outputs)
        if grown == carried:
            return carried
        carried = grown


def _pending_after(block: Block, pending: set[Value], outputs: Sequence[Value]) -> set[Value]:
    inside = {*pending}
    for _ in waits(block.nodes, inside):
        pass
    return {value for value, given in zip(outputs, block.outputs, strict=False) if given in inside}


class _Writer:
    """The lines of a plan.

    Args:
        names: how lists of names are written.
        released: the values whose memory the caller gives up.
        is_agreed: see `emit`.
    """

    def __init__(self, names: _Names, released: Collection[Value], is_agreed: bool) -> None:
        self._names = names
        self._released = released
        self._is_agreed = is_agreed

    def block(
        self,
        nodes: Sequence[Node],
        own: Sequence[Value],
        kept: set[Value],
        pending: set[Value],
        carried: Collection[Value] = (),
    ) -> Iterator[str]:
        """The lines of nodes.

        Args:
            nodes: the nodes.
            own: the values from before them that may be forgotten when they are not used any more.
            kept: the values that are used after them.
            pending: the values that may be results of calls on threads.
            carried: those that are kept until the devices go on after the calls that read them, which may fail.
        """
        last_use: dict[Value, Node] = {value: node for node in nodes for value in node.inputs}
        mortal = {*own, *(value for node in nodes for value in node.outputs)} - kept
        dying: dict[Node, list[Value]] = {}
        for value, node in last_use.items():
            if value in mortal:
                dying.setdefault(node, []).append(value)
        self._start_in_place(nodes)
        before = {*pending}
        until_calls_end: list[Value] = []
        for node, needed in waits(nodes, pending):
            for value in needed:
                yield f"{self._names.of(value)} = wait({self._names.of(value)})"
            if not isinstance(node, ColocatedCall | Transfer):
                yield from self._forget(until_calls_end)
                until_calls_end = []
            dead = [v for v in dying.get(node, []) if self._names.of(v) not in map(self._names.of, node.outputs)]
            if isinstance(node, Loop):
                yield from self._loop(node, dead, before)
                dead = [value for value in dead if value not in node.initial]
            elif isinstance(node, Branch):
                yield from self._branch(node, before)
            else:
                call = f"{self._names.assigned(node.outputs)}{node.name}({self._names.listed(node.inputs)})"
                yield f"{call}  # {_comment(node)}"
            before = {*pending}
            if isinstance(node, ColocatedCall | Transfer):  # which brings a call its arguments
                made = {*map(self._names.of, node.outputs)}  # in the place of others
                until_calls_end += [value for value in dead if value in carried]
                until_calls_end = [value for value in until_calls_end if self._names.of(value) not in made]
                dead = [value for value in dead if value not in carried]
            yield from self._forget([*dead, *(v for v in node.outputs if v in mortal and v not in last_use)])

    def _forget(self, dead: Sequence[Value]) -> Iterator[str]:
        released = [value for value in dead if value in self._released]
        if released:
            yield f"release({self._names.listed(released)})"
        if dead:
            yield f"del {self._names.listed(dead)}"

    def _start_in_place(self, nodes: Sequence[Node]) -> None:
        """What a loop starts from has the names of what it carries from the beginning, if it is computed here."""
        computed = {value for node in nodes for value in node.outputs}
        for node in nodes:
            if isinstance(node, Loop):
                pairs = zip(node.initial, node.outputs, strict=False)
                self._names.taken_over.update((first, value) for first, value in pairs if first in computed)

    def _set(self, targets: Sequence[Value], values: Sequence[Value], produced: Collection[Value]) -> Iterator[str]:
        """The lines that give values other names, where they have not got them already."""
        pairs = [(t, v) for t, v in zip(targets, values, strict=False) if self._names.of(t) != self._names.of(v)]
        if pairs:
            targets, values = zip(*pairs, strict=False)
            yield f"{self._names.listed(targets)} = {self._names.listed(values)}"
            yield from self._forget([value for value in dict.fromkeys(values) if value in produced])

    def _loop(self, loop: Loop, dead: Sequence[Value], pending: set[Value]) -> Iterator[str]:
        nodes = loop.block.nodes
        yield from self._set(loop.outputs, loop.initial, dead)
        head = (
            f"while {self._read(loop.outputs[0], loop)}:"
            if loop.trip_count is None
            else f"for _ in range({loop.trip_count}):"
        )
        yield f"{head}  # {loop.name}"
        number = None if self._is_agreed else known_number(loop)
        if number is not None:
            yield f"    count({self._names.of(number)}, _)"
        self._go_on_in_place(loop)
        read = {value for node in nodes for value in node.inputs}
        # Where the arguments are given away, what is carried is all there is after a failure: see `results_so_far`.
        lines = [] if self._released else [*self._forget([value for value in loop.outputs if value not in read])]
        inside = pending | pending_in_iterations(loop, pending)
        carried = loop.outputs if self._released else ()
        lines += self.block(nodes, loop.outputs, {*loop.block.outputs}, inside, carried)
        produced = {value for node in nodes for value in node.outputs}
        yield from _indented([*lines, *self._set(loop.outputs, loop.block.outputs, produced)])

    def _read(self, value: Value, node: Loop | Branch) -> str:
        return f"read({self._names.of(value)}{f', {node.name!r}' if self._is_agreed else ''})"

    def _go_on_in_place(self, loop: Loop) -> None:
        """What is carried on has the name of the carried value that it replaces, if that is not read any more."""
        last_use = {value: i for i, node in enumerate(loop.block.nodes) for value in node.inputs}
        made_at = {
            value: i
            for i, node in enumerate(loop.block.nodes)
            if not isinstance(node, Loop | Branch)  # which may read it in between
            for value in node.outputs
        }
        uses = collections.Counter(loop.block.outputs)
        for carried, value in zip(loop.outputs, loop.block.outputs, strict=False):
            if value in made_at and uses[value] == 1 and last_use.get(carried, -1) <= made_at[value]:
                self._names.taken_over[value] = carried

    def _branch(self, branch: Branch, pending: set[Value]) -> Iterator[str]:
        yield f"match {self._read(branch.inputs[0], branch)}:  # {branch.name}"
        for k, block in enumerate(branch.blocks):
            yield f"    case {k if k + 1 < len(branch.blocks) else '_'}:"
            produced = {value for node in block.nodes for value in node.outputs}
            uses = collections.Counter(block.outputs)
            pairs = zip(block.outputs, branch.outputs, strict=False)
            self._names.taken_over.update((v, out) for v, out in pairs if v in produced and uses[v] == 1)
            lines = [*self.block(block.nodes, (), {*block.outputs}, {*pending})]
            lines += self._set(branch.outputs, block.outputs, produced)
            yield from ("    " + line for line in _indented(lines))


def _indented(lines: Sequence[str]) -> Iterator[str]:
    yield from ("    " + line for line in lines or ["pass"])


def said_of_fragment(fragment: Fragment[Value, Value]) -> str:
    """What is in a fragment, in words."""
    equations = counted(len(fragment.jaxpr.eqns), "equation")
    if fragment.by_one_device:
        return f"{equations}, {'on one device' if computed_by_host(fragment.jaxpr) is None else 'by the host'}"
    names = [*dict.fromkeys(call.callee.name for call in fragment.calls)]
    when = "when it has run" if fragment.gathered else "as it runs"
    return f"{equations}, calls {', '.join(names)} {when}" if names else equations


def _comment(node: Node) -> str:
    if isinstance(node, Fragment):
        return said_of_fragment(node)
    if isinstance(node, ColocatedCall):
        return node.where
    size = f"{sum(value.nbytes for value in node.inputs):,} bytes"
    return f"{size}, by the threads of calls" if isinstance(node, Transfer) and node.is_left_to_calls else size


def _identifier(plan: PlanData) -> str:
    name = spelled(plan.name)
    taken = {
        "wait",
        "release",
        "read",
        "know",
        "count",
        "range",
        "_",
        "__debug__",
    }  # Python allows no other meaning of the last one
    taken.update(node.name for node in walk(plan.nodes))
    taken.update(value.name for value, _ in plan.constants)
    return name if name.isidentifier() and not keyword.iskeyword(name) and name not in taken else f"program_{name}"
