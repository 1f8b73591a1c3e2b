"""Calls in loops of executables: the devices hand over the arguments of several iterations at once.

To call Python takes a device longer than a small iteration. So the arguments are written to stacks, which are handed
over when they are full, and at the end of the loop. The calls are made as before, each with its own, only later: by no
more than the devices take for a few small iterations.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partjit.calls import is_unpredictable
from partjit.colocated.ir.emission import emit_call
from partjit.colocated.runtime.gathered import GatheredCall, GatheredCalls
from partjit.colocated.runtime.handed_over import HandedOver
from partjit.plan.ir.nodes import ColocatedCall, Fragment, Loop, Node, Value
from partjit.plan.ir.walk import blocks_of, walk

__all__ = ["Gathering", "Gatherings", "Stacks", "are_returned", "calls_at_once", "cost_of_nodes", "gathered_calls"]

MOST_ITERATIONS = 32
"""Whose calls are handed over at once: more saves next to nothing."""

FEWEST_ITERATIONS = 8
"""Whose calls are handed over at once, unless the loop has no more: to write stacks costs as much as fewer save."""

MOST_WORK = 1e7
"""Elementary operations, after which whoever watches the calls wants to see one: a CPU takes milliseconds for them."""

MOST_BYTES = 2**18
"""Of what is handed over at once. To hand over more takes longer than to call Python."""

MOST_WORK_UNTIL_RETURN = 1e8
"""As `MOST_WORK`, of an executable that returns what its calls get: the host makes them when all of it has run."""


def calls_at_once(loop: Loop[Value, Value], *, on_cpu: bool) -> int:
    """How many iterations of a loop of the devices hand over the arguments of their calls at once; 1 if each its own.

    Args:
        loop: the loop, whose calls nobody waits for.
        on_cpu: whether it runs on CPUs. Others finish in each iteration what comes before a condition.
    """
    own = [node for node in loop.block.nodes if isinstance(node, ColocatedCall)]
    inside = [*walk(loop.block.nodes)]
    if not own or len(own) < sum(isinstance(node, ColocatedCall) for node in inside):
        return 1
    if _are_unpredictable(inside):
        return 1
    stacked, _ = _operands(loop, own)
    most = min(
        MOST_ITERATIONS,
        MOST_WORK // max(cost_of_nodes(loop.block.nodes), 1),
        MOST_BYTES // max(sum(value.nbytes for value in stacked), 1),
        MOST_ITERATIONS if loop.trip_count is None else loop.trip_count,
    )
    if most < min(FEWEST_ITERATIONS, loop.trip_count or FEWEST_ITERATIONS) or not (on_cpu or loop.trip_count == most):
        return 1
    return int(most)


def are_returned(nodes: Sequence[Node]) -> bool:
    """Whether an executable made of these returns what all of its calls get, if they get anything."""
    calls = [node for node in walk(nodes) if isinstance(node, ColocatedCall)]
    loops = [node for node in nodes if isinstance(node, Loop)]
    of_all_iterations = [
        inner
        for loop in loops
        for inner in loop.block.nodes
        if isinstance(inner, ColocatedCall) and 1 < inner.at_once == loop.trip_count
    ]
    is_brief = cost_of_nodes(nodes) <= MOST_WORK_UNTIL_RETURN and not _are_unpredictable(walk(nodes))
    return len(of_all_iterations) == len(calls) and any(call.inputs for call in calls) and is_brief


def _are_unpredictable(nodes: Iterable[Node]) -> bool:
    """Whether something takes long, waits for a call, fails or prints: it is to find those made that come before it."""
    return any(isinstance(node, Fragment) and is_unpredictable(node.jaxpr.jaxpr) for node in nodes)


def cost_of_nodes(nodes: Sequence[Node]) -> float:
    """An estimate of what nodes cost, in elementary operations; a loop that may end at any time has one iteration."""
    return sum(map(_cost, nodes))


def _cost(node: Node) -> float:
    if isinstance(node, Fragment):
        return node.cost
    times = (node.trip_count or 1) if isinstance(node, Loop) else 1
    return times * sum(cost_of_nodes(block.nodes) for block in blocks_of(node))


def _operands(
    loop: Loop[Value, Value], calls: Sequence[ColocatedCall[Value, Value]]
) -> tuple[Sequence[Value], Sequence[Value]]:
    """What calls get that may differ between iterations, and what may not."""
    changing = {*loop.outputs, *(value for node in loop.block.nodes for value in node.outputs)}
    given = [*dict.fromkeys(value for call in calls for value in call.inputs)]
    return [value for value in given if value in changing], [value for value in given if value not in changing]


Stacks: TypeAlias = tuple[jax.Array, Sequence[jax.Array]]
"""How many iterations the stacks have something of, and the stacks."""


@dataclasses.dataclass(frozen=True, eq=False)
class Gathering:
    """The calls of a loop whose arguments are handed over at once.

    Attributes:
        loop: the loop.
        mesh: the mesh, maybe empty.
    """

    loop: Loop[Value, Value]
    mesh: Mesh
    calls: Sequence[ColocatedCall[Value, Value]] = dataclasses.field(init=False)
    iterations: int = dataclasses.field(init=False)
    stacked: Sequence[Value] = dataclasses.field(init=False)
    others: Sequence[Value] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        calls = [node for node in self.loop.block.nodes if isinstance(node, ColocatedCall)]
        stacked, others = _operands(self.loop, calls)
        own = {"calls": calls, "iterations": calls[0].at_once, "stacked": stacked, "others": others}
        for name, value in own.items():
            object.__setattr__(self, name, value)

    @property
    def values(self) -> Sequence[Value]:
        """What the executable returns, if it returns what its calls get."""
        stacks = (Value(value.name, self._stack_of(value), _stacked(value.sharding)) for value in self.stacked)
        return [*stacks, *self.others]

    @property
    def handed_over(self) -> HandedOver:
        """Which devices hand over what."""
        avals = [value.aval for value in self.values]
        shardings = [value.sharding for value in self.values]
        return HandedOver.of([ShapedArray((), jnp.dtype(jnp.int32)), *avals], [None, *shardings], self.mesh)

    @property
    def is_repeated(self) -> bool:
        """Whether the loop may have more iterations than are handed over at once."""
        return self.loop.trip_count != self.iterations

    def taken_apart(self, position: Mapping[ColocatedCall[Value, Value], int]) -> GatheredCalls:
        """What the host makes of it, given the position of each call among those of the executable."""
        operand = {value: k for k, value in enumerate((*self.stacked, *self.others))}
        calls = [GatheredCall(position[call], tuple(operand[v] for v in call.inputs)) for call in self.calls]
        return GatheredCalls(tuple(calls), self.iterations, len(self.stacked), len(self.others), self.is_repeated)

    # The rest writes operations, in a function being traced.

    def nothing(self) -> Stacks:
        """The state before the loop."""
        stacks = [jnp.zeros((self.iterations, *value.aval.shape), value.aval.dtype) for value in self.stacked]
        return jnp.int32(0), [*map(self._constrained, self.stacked, stacks)]

    def add(
        self, state: Stacks, env: Mapping[Value, jax.Array], numbers: jax.Array, which: int
    ) -> tuple[Stacks, jax.Array]:
        """Adds what the calls of an iteration get, and hands all over when the stacks are full.

        Args:
            state: the state so far.
            env: the values in the iteration.
            numbers: those of the execution and of the next call in it.
            which: the position of these calls, as the executable knows it.

        Returns:
            The state and the numbers after it.
        """
        count, stacks = state
        values = [env[value] for value in self.stacked]
        if any(value.aval.shape for value in self.stacked):
            # XLA for CPUs updates x in place in `x.at[1:].set(x[:-1])[None]`, also where it reads what it has updated.
            values = jax.lax.optimization_barrier(values)
        stacks = [
            self._constrained(value, jax.lax.dynamic_update_index_in_dim(stack, own, count, 0))
            for value, own, stack in zip(self.stacked, values, stacks, strict=True)
        ]
        count += 1
        if not self.is_repeated:
            return (count, stacks), numbers

        def emit() -> tuple[jax.Array, jax.Array]:
            return jnp.int32(0), self.hand_over((count, stacks), env, numbers, which)

        count, numbers = jax.lax.cond(count == self.iterations, emit, lambda: (count, numbers))
        return (count, stacks), numbers

    def hand_over(self, state: Stacks, env: Mapping[Value, jax.Array], numbers: jax.Array, which: int) -> jax.Array:
        """Hands over what has been added since it was last handed over; arguments as of `add`.

        Returns:
            The numbers after it.
        """
        count, _ = state
        emit_call(numbers, [count, *self.operands(state, env)], self.handed_over, which)
        return numbers + jnp.stack([jnp.int32(0), count * len(self.calls)])

    def operands(self, state: Stacks, env: Mapping[Value, jax.Array]) -> list[jax.Array]:
        """What the calls get: the stacks, and what is the same in all iterations."""
        _, stacks = state
        return [*stacks, *(env[value] for value in self.others)]

    def _stack_of(self, value: Value) -> ShapedArray:
        return value.aval.update(shape=(self.iterations, *value.aval.shape))

    def _constrained(self, value: Value, stack: jax.Array) -> jax.Array:
        sharding = _stacked(value.sharding)
        return stack if sharding is None or self.mesh.size <= 1 else jax.lax.with_sharding_constraint(stack, sharding)


class Gatherings:
    """The gathered calls of an executable.

    Args:
        nodes: what it is made of.
        mesh: the mesh, maybe empty.
        number_of_calls: how many calls it has.
    """

    def __init__(self, nodes: Sequence[Node], mesh: Mesh, number_of_calls: int) -> None:
        self._all = [Gathering(loop, mesh) for loop in _loops_with_gathered_calls(nodes)]
        self._first = number_of_calls

    def __iter__(self) -> Iterator[Gathering]:
        return iter(self._all)

    def of(self, loop: Loop[Value, Value]) -> tuple[Gathering, int] | None:
        """That of a loop and its position, as the executable knows it: after those of all calls."""
        found = ((own, self._first + k) for k, own in enumerate(self._all) if own.loop is loop)
        return next(found, None)


def gathered_calls(fragment: Fragment[Value, Value], mesh: Mesh) -> Sequence[GatheredCalls]:
    """Those of a fragment, in the order of their positions, as the executable knows these: after those of all calls."""
    position = {call: k for k, call in enumerate(fragment.calls)}
    return [own.taken_apart(position) for own in Gatherings(fragment.nodes, mesh, len(position))]


def _loops_with_gathered_calls(nodes: Sequence[Node]) -> Iterator[Loop[Value, Value]]:
    for node in walk(nodes):
        if isinstance(node, Loop) and any(
            isinstance(inner, ColocatedCall) and inner.at_once > 1 for inner in node.block.nodes
        ):
            yield node


def _stacked(sharding: object) -> NamedSharding | None:
    """The sharding of a stack of values that are sharded so."""
    return (
        NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
        if isinstance(sharding, NamedSharding)
        else None
    )
