"""Loops, branches and calls that were chosen for it become executables that make these calls.

What is around them is compiled together with them.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh
from jax.typing import ArrayLike

from partjit._jax.arrays import with_weak_type
from partjit._jax.meshes import without_mesh
from partjit._jax.tracing import without_sharding
from partjit.colocated.ir.emission import emit_answered, emit_beside, emit_call, emit_end
from partjit.colocated.runtime.handed_over import HandedOver, Returned
from partjit.colocated.runtime.streams import Stream
from partjit.plan.ir.nodes import Branch, ColocatedCall, Fragment, Loop, Node, Value, ValueBlock
from partjit.plan.ir.walk import blocks_of, walk, with_blocks
from partjit.plan.passes.bind import Bound
from partjit.plan.passes.gather import Gatherings, Stacks, are_returned, calls_at_once, cost_of_nodes
from partjit.plan.passes.together import Devices, is_chosen, runs

__all__ = ["emit", "handed_over", "returned"]

_State: TypeAlias = tuple[jax.Array, Sequence[jax.Array]]
"""The number of the execution and how many calls there were, in one array; and values.

If it waits for calls, those that it does not wait for are counted by themselves, behind the others.
"""


def emit(bound: Bound, mesh: Mesh, *, on_cpus: bool, on_one_cpu: bool, donated: Sequence[bool]) -> Bound:
    """Makes fragments of what was chosen in a program, and of the fragments next to it.

    Args:
        bound: the program.
        mesh: its mesh, maybe empty.
        on_cpus, on_one_cpu: whether it runs on CPUs only, and on a single device besides.
        donated: for each argument whether its memory may be reused.
    """
    if not any(is_chosen(node) for node in walk(bound.block.nodes)):
        return bound
    given_up = {value for value, is_donated in zip(bound.block.inputs, donated, strict=True) if is_donated}
    devices = Devices(mesh.size > 1 or on_one_cpu, on_cpus, on_one_cpu, max(mesh.size, 1), given_up)
    return dataclasses.replace(bound, block=_emitted(bound.block, bound.constants, mesh, devices))


def _emitted(block: ValueBlock, constants: Mapping[Value, ArrayLike], mesh: Mesh, devices: Devices) -> ValueBlock:
    nodes: list[Node] = []
    names: dict[str, str] = {}
    position = {node: i for i, node in enumerate(block.nodes)}
    for kind, run in runs(block.nodes, devices):
        if kind is None:
            nodes += (_with_emitted(node, constants, mesh, devices) for node in run)
            continue
        after = block.nodes[position[run[-1]] + 1 :]
        needed = {*block.outputs, *(value for node in after for value in node.inputs)}
        made = _fragment(run, needed, constants, mesh, devices, kind[0])
        names.update((node.name, made.name) for node in run)
        nodes.append(made)
    pairs = ((names.get(a, a), names.get(b, b)) for a, b in block.order)
    order = tuple(dict.fromkeys((a, b) for a, b in pairs if a != b))
    return dataclasses.replace(block, nodes=tuple(nodes), order=order)


def _with_emitted(node: Node, constants: Mapping[Value, ArrayLike], mesh: Mesh, devices: Devices) -> Node:
    if not isinstance(node, Loop | Branch):
        return node
    carried = node.carried if isinstance(node, Loop) else ()
    devices = devices._replace(reused={*carried})
    return with_blocks(node, [_emitted(block, constants, mesh, devices) for block in node.blocks])


def _fragment(
    nodes: Sequence[Node],
    needed: Collection[Value],
    constants: Mapping[Value, ArrayLike],
    mesh: Mesh,
    devices: Devices,
    answered: Collection[Stream | None],
) -> Fragment[Value, Value]:
    """The fragment that nodes become which follow each other.

    Args:
        nodes: the nodes.
        needed: what is read after them.
        constants: the values that never change.
        mesh: the mesh, maybe empty.
        devices: those of the program.
        answered: the streams of the calls that it waits for.
    """
    nodes = [_with_emitted_calls(node, answered, devices) for node in nodes]
    returns = are_returned(nodes)
    nodes = [*map(_with_returned_calls, nodes)] if returns else nodes
    own = {value for node in nodes for value in node.outputs}
    inputs = dict.fromkeys(value for node in nodes for value in node.inputs if value not in own | constants.keys())
    outputs = tuple(value for node in nodes for value in node.outputs if value in needed)
    calls = [node for node in walk(nodes) if isinstance(node, ColocatedCall)]
    read = {value for node in walk(nodes) for value in node.inputs}
    read.update(value for node in walk(nodes) for block in blocks_of(node) for value in block.outputs)
    own_constants = {value: constant for value, constant in constants.items() if value in read}

    gatherings = Gatherings(nodes, mesh, len(calls))
    returned = tuple(value for gathering in gatherings for value in gathering.values) if returns else ()

    def run(writer: _Writer, arrays: Sequence[jax.Array], numbers: jax.Array) -> _State:
        env = {value: jnp.asarray(constant, value.aval.dtype) for value, constant in own_constants.items()}
        env.update(zip(inputs, arrays, strict=True))
        numbers = writer.run(nodes, env, numbers)
        return numbers, [env[value] for value in outputs]

    def calling(execution: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        no_calls = [jnp.int32(0)] * (2 if answered else 1)
        numbers, results = run(_Writer(gatherings, calls, mesh), arrays, jnp.stack([execution, *no_calls]))
        if not answered:
            emit_end(numbers, mesh)
        return [numbers, *results]

    def returning(*arrays: jax.Array) -> list[jax.Array]:
        gathered: list[jax.Array] = []
        _, results = run(_Writer(gatherings, calls, mesh, gathered), arrays, jnp.zeros(2, jnp.int32))
        return [*gathered, *results]

    avals = [without_sharding(value.aval) for value in inputs]
    with without_mesh():
        if returns:
            jaxpr = jax.make_jaxpr(returning)(*avals)
        else:
            jaxpr = jax.make_jaxpr(calling)(jax.ShapeDtypeStruct((), jnp.int32), *avals)
    name = next(node.name for node in nodes if not isinstance(node, Fragment))
    return Fragment(
        jaxpr,
        tuple(inputs),
        outputs,
        cost_of_nodes(nodes),
        donated=(False,) * len(inputs),
        nodes=tuple(nodes),
        calls=tuple(calls),
        gathered=returned,
        name=name,
    )


def _with_emitted_calls(node: Node, answered: Collection[Stream | None], devices: Devices, at_once: int = 1) -> Node:
    if isinstance(node, ColocatedCall):
        return dataclasses.replace(node, is_emitted=True, is_answered=node.stream in answered, at_once=at_once)
    if not isinstance(node, Loop | Branch):
        return node
    many = calls_at_once(node, on_cpu=devices.are_cpus) if isinstance(node, Loop) and not answered else 1
    nodes = [[_with_emitted_calls(inner, answered, devices, many) for inner in block.nodes] for block in node.blocks]
    return with_blocks(node, [dataclasses.replace(b, nodes=tuple(n)) for b, n in zip(node.blocks, nodes, strict=True)])


def _with_returned_calls(node: Node) -> Node:
    if isinstance(node, ColocatedCall):
        return dataclasses.replace(node, is_returned=True)
    if not isinstance(node, Loop):
        return node
    nodes = tuple(map(_with_returned_calls, node.block.nodes))
    return with_blocks(node, [dataclasses.replace(node.block, nodes=nodes)])


def handed_over(call: ColocatedCall[Value, Value], mesh: Mesh) -> HandedOver:
    """Which devices hand over what of the arguments of a call."""
    return HandedOver.of([value.aval for value in call.inputs], [value.sharding for value in call.inputs], mesh)


def returned(call: ColocatedCall[Value, Value], mesh: Mesh) -> Returned:
    """Which devices get what of the results of a call."""
    return Returned.of([value.aval for value in call.outputs], [value.sharding for value in call.outputs], mesh)


class _Writer:
    """Nodes as operations on the devices, in a function being traced.

    Args:
        gatherings: those of its calls that are handed over for several iterations at once.
        calls: all of its calls.
        mesh: the mesh, maybe empty.
        returned: gets what its calls get, if it does not hand that over but returns it.
    """

    def __init__(
        self,
        gatherings: Gatherings,
        calls: Sequence[ColocatedCall[Value, Value]],
        mesh: Mesh,
        returned: list[jax.Array] | None = None,
    ) -> None:
        self._gatherings = gatherings
        self._position = {call: k for k, call in enumerate(calls)}
        self._waits = any(call.is_answered for call in calls)
        self._mesh = mesh
        self._returned = returned

    def run(self, nodes: Sequence[Node], env: dict[Value, jax.Array], numbers: jax.Array) -> jax.Array:
        """Runs nodes on the values of an environment, and adds theirs.

        Args:
            nodes: the nodes.
            env: what there is.
            numbers: that of the execution, and how many calls there were before, in one array.

        Returns:
            The same after them.
        """
        for node in nodes:
            if isinstance(node, Fragment):
                results: Sequence[jax.Array] = jaxpr_as_fun(node.jaxpr)(*(env[value] for value in node.inputs))
            elif isinstance(node, ColocatedCall):
                if node.at_once > 1:
                    continue  # the loop hands it over
                numbers, results = self._call(node, [env[value] for value in node.inputs], numbers)
            elif isinstance(node, Loop):
                numbers, results = self._loop(node, env, numbers)
            else:
                assert isinstance(node, Branch)  # transfers are made later
                numbers, results = self._branch(node, env, numbers)
            env.update(zip(node.outputs, results, strict=False))
        return numbers

    def _call(self, call: ColocatedCall[Value, Value], arrays: Sequence[jax.Array], numbers: jax.Array) -> _State:
        given, which = handed_over(call, self._mesh), self._position[call]
        if not call.is_answered and self._waits:
            return emit_beside(numbers, arrays, given, which), ()
        if not call.is_answered:
            emit_call(numbers, arrays, given, which)
            return numbers + jnp.array([0, 1], jnp.int32), ()  # nobody reads its results
        avals = [value.aval for value in call.outputs]
        back = returned(call, self._mesh)
        numbers, results = emit_answered(numbers, arrays, given, back, avals, which)
        return numbers, [with_weak_type(x, a.weak_type) for x, a in zip(results, avals, strict=True)]

    def _block(self, block: ValueBlock, env: Mapping[Value, jax.Array], numbers: jax.Array) -> _State:
        inside = {**env}
        numbers = self.run(block.nodes, inside, numbers)
        return numbers, [inside[value] for value in block.outputs]

    def _loop(self, loop: Loop[Value, Value], env: Mapping[Value, jax.Array], numbers: jax.Array) -> _State:
        gathering, which = self._gatherings.of(loop) or (None, 0)

        def iteration(state: tuple[_State, Stacks | None]) -> tuple[_State, Stacks | None]:
            (numbers, carried), gathered = state
            inside = {**env, **dict(zip(loop.outputs, carried, strict=True))}
            numbers = self.run(loop.block.nodes, inside, numbers)
            if gathering is not None and gathered is not None:
                gathered, numbers = gathering.add(gathered, inside, numbers, which)
            return (numbers, [inside[value] for value in loop.block.outputs]), gathered

        gathered = None if gathering is None else gathering.nothing()
        state: tuple[_State, Stacks | None] = (numbers, [env[value] for value in loop.initial]), gathered
        if loop.trip_count is None:
            state = jax.lax.while_loop(lambda state: state[0][1][0], iteration, state)
        else:
            state = jax.lax.fori_loop(0, loop.trip_count, lambda _, state: iteration(state), state)
        (numbers, carried), gathered = state
        if gathering is None or gathered is None:
            return numbers, carried
        if self._returned is None:
            numbers = gathering.hand_over(gathered, env, numbers, which)
        else:
            self._returned += gathering.operands(gathered, env)
        return numbers, carried

    def _branch(self, branch: Branch[Value, Value], env: Mapping[Value, jax.Array], numbers: jax.Array) -> _State:
        def way(block: ValueBlock) -> Callable[[jax.Array], _State]:
            def run(numbers: jax.Array) -> _State:
                return self._block(block, env, numbers)

            return run

        index = jax.lax.convert_element_type(env[branch.inputs[0]], jnp.int32)
        return jax.lax.switch(index, [*map(way, branch.blocks)], numbers)
