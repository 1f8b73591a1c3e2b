"""Loops, branches and calls that were chosen for it become executables that make these calls.

What is around them is compiled together with them.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.ref import AbstractRef
from jax.sharding import Mesh
from jax.typing import ArrayLike

from partjit._jax.arrays import with_weak_type
from partjit._jax.meshes import without_mesh
from partjit.colocated.ir.emission import emit_answered, emit_call, emit_end
from partjit.colocated.runtime.handed_over import HandedOver, Returned
from partjit.plan.ir.nodes import Branch, ColocatedCall, Fragment, Loop, Node, Value, ValueBlock
from partjit.plan.ir.walk import blocks_of, walk, with_blocks
from partjit.plan.passes.bind import Bound
from partjit.plan.passes.choose_emitted import can_be_kept, has_answered, have_one_stream_per_object, is_little_to_copy
from partjit.plan.passes.cost import amortizes_leaving, is_run_at_once
from partjit.plan.passes.gather import Gatherings, Stacks, are_returned, calls_at_once, cost_of_nodes

__all__ = ["emit", "handed_over", "returned"]

_Kind: TypeAlias = tuple[bool, Sequence[ColocatedCall[Value, Value]]]
"""Whether an executable waits for its calls, and these."""


class _Devices(NamedTuple):
    """The devices of a program.

    Attributes:
        wait_in_vain: whether they would wait for calls before all of their work, which are in no loop or branch.
        are_cpus: whether all are CPUs.
        are_one_cpu: whether there is one only, a CPU.
        count: how many there are.
        reused: what a block is given whose memory they may reuse.
    """

    wait_in_vain: bool
    are_cpus: bool
    are_one_cpu: bool
    count: int
    reused: Collection[Value]


_State: TypeAlias = tuple[jax.Array, Sequence[jax.Array]]
"""The number of the execution and how many calls there were, in one array; and values."""


def emit(bound: Bound, mesh: Mesh, *, on_cpus: bool, on_one_cpu: bool, donated: Sequence[bool]) -> Bound:
    """Makes fragments of what was chosen in a program, and of the fragments next to it.

    Args:
        bound: the program.
        mesh: its mesh, maybe empty.
        on_cpus, on_one_cpu: whether it runs on CPUs only, and on a single device besides.
        donated: for each argument whether its memory may be reused.
    """
    if not any(_is_chosen(node) for node in walk(bound.block.nodes)):
        return bound
    given_up = {value for value, is_donated in zip(bound.block.inputs, donated, strict=True) if is_donated}
    devices = _Devices(mesh.size > 1 or on_one_cpu, on_cpus, on_one_cpu, max(mesh.size, 1), given_up)
    return dataclasses.replace(bound, block=_emitted(bound.block, bound.constants, mesh, devices))


def _is_chosen(node: Node) -> bool:
    """Whether a node is to be a part of an executable."""
    return node.is_emitted if isinstance(node, ColocatedCall) else isinstance(node, Loop | Branch) and node.on_devices


def _kind(node: Node) -> _Kind | None:
    """What calls there are in a node that is to be a part of an executable; None for a fragment."""
    calls = [inner for inner in walk([node]) if isinstance(inner, ColocatedCall)]
    return (isinstance(node, ColocatedCall) or has_answered(node), calls) if calls else None


def _together(kind: _Kind | None, other: _Kind | None) -> _Kind | None:
    """The kind of an executable with the calls of both; None if there is none."""
    if kind is None or other is None:
        return kind or other
    waits, calls = kind[0], [*kind[1], *other[1]]
    are_alike = have_one_stream_per_object(calls) and (not waits or len({call.stream for call in calls}) == 1)
    return (waits, calls) if waits == other[0] and are_alike else None


def _emitted(block: ValueBlock, constants: Mapping[Value, ArrayLike], mesh: Mesh, devices: _Devices) -> ValueBlock:
    nodes: list[Node] = []
    names: dict[str, str] = {}
    position = {node: i for i, node in enumerate(block.nodes)}
    for kind, run in _runs(block.nodes, devices):
        if kind is None:
            nodes += (_with_emitted(node, constants, mesh, devices) for node in run)
            continue
        after = block.nodes[position[run[-1]] + 1 :]
        needed = {*block.outputs, *(value for node in after for value in node.inputs)}
        made = _fragment(run, needed, constants, mesh, devices, waits=kind[0])
        names.update((node.name, made.name) for node in run)
        nodes.append(made)
    pairs = ((names.get(a, a), names.get(b, b)) for a, b in block.order)
    order = tuple(dict.fromkeys((a, b) for a, b in pairs if a != b))
    return dataclasses.replace(block, nodes=tuple(nodes), order=order)


def _runs(nodes: Sequence[Node], devices: _Devices) -> Iterator[tuple[_Kind | None, Sequence[Node]]]:
    """Pieces of nodes, each with the kind of the executable that is made of it; None if none makes calls.

    Args:
        nodes: the nodes.
        devices: those of the program.
    """
    kind: _Kind | None = None
    run: list[Node] = []
    for node in nodes:
        joins = _is_chosen(node) or (isinstance(node, Fragment) and not _has_refs(node))
        own = _kind(node) if joins else None
        together = _together(kind, own)
        if run and (not joins or (together is None and own is not None)):
            yield from _settled(kind, run, devices)
            kind, run, together = None, [], own
        if joins:
            kind = together
            run.append(node)
        else:
            yield None, [node]
    if run:
        yield from _settled(kind, run, devices)


def _has_refs(fragment: Fragment[Value, Value]) -> bool:
    """Whether it is given refs: an executable consumes their memory, which would be lost if a call in it failed."""
    return any(isinstance(value.aval, AbstractRef) for value in fragment.inputs)


def _settled(
    kind: _Kind | None, run: Sequence[Node], devices: _Devices
) -> Iterator[tuple[_Kind | None, Sequence[Node]]]:
    """A piece of nodes that follow each other; single calls in it are the host's after all where that is cheaper.

    If the rest is expensive, the host does something else while the devices work, and they reuse the memory of large
    arrays. If it is so cheap that a CPU computes it in the host's own thread, that goes from one to the next in less
    time than an executable takes to call it. A call before all of the rest takes no dispatch of its own, and several
    devices would have to meet for it; on one CPU, an executable that makes calls keeps its caller waiting.
    """
    first = _calls_before_work(run) if devices.wait_in_vain else 0
    if first:
        yield None, [*map(_by_the_host, run[:first])]
        yield from _runs(run[first:], devices)
        return
    if any(isinstance(node, ColocatedCall) for node in run):
        own = {value for node in run for value in node.outputs}
        given = {value for node in run for value in node.inputs} - own
        costs = [node.cost for node in run if isinstance(node, Fragment)]
        is_settled = amortizes_leaving(sum(costs)) or (devices.are_one_cpu and all(map(is_run_at_once, costs)))
        calls = sum(isinstance(node, ColocatedCall) for node in run)
        copied = (value.aval for value in given.intersection(devices.reused))
        copies_much = not is_little_to_copy(copied, calls * devices.count)
        if is_settled or copies_much or not can_be_kept(value.aval for value in given):
            yield from _runs([_by_the_host(node) for node in run], devices)
            return
    yield kind, run


def _calls_before_work(run: Sequence[Node]) -> int:
    """How many calls come before anything else."""
    return next((i for i, node in enumerate(run) if not isinstance(node, ColocatedCall)), len(run))


def _by_the_host(node: Node) -> Node:
    return dataclasses.replace(node, is_emitted=False) if isinstance(node, ColocatedCall) else node


def _with_emitted(node: Node, constants: Mapping[Value, ArrayLike], mesh: Mesh, devices: _Devices) -> Node:
    if not isinstance(node, Loop | Branch):
        return node
    carried = node.carried if isinstance(node, Loop) else ()
    devices = devices._replace(wait_in_vain=False, reused={*carried})
    return with_blocks(node, [_emitted(block, constants, mesh, devices) for block in node.blocks])


def _fragment(
    nodes: Sequence[Node],
    needed: Collection[Value],
    constants: Mapping[Value, ArrayLike],
    mesh: Mesh,
    devices: _Devices,
    *,
    waits: bool,
) -> Fragment[Value, Value]:
    """The fragment that nodes become which follow each other.

    Args:
        nodes: the nodes.
        needed: what is read after them.
        constants: the values that never change.
        mesh: the mesh, maybe empty.
        devices: those of the program.
        waits: whether it waits for its calls.
    """
    nodes = [_with_emitted_calls(node, waits, devices) for node in nodes]
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
        numbers, results = run(_Writer(gatherings, calls, mesh), arrays, jnp.stack([execution, jnp.int32(0)]))
        if not waits:
            emit_end(numbers, mesh)
        return [numbers, *results]

    def returning(*arrays: jax.Array) -> list[jax.Array]:
        gathered: list[jax.Array] = []
        _, results = run(_Writer(gatherings, calls, mesh, gathered), arrays, jnp.zeros(2, jnp.int32))
        return [*gathered, *results]

    structs = [*map(_struct_of, inputs)]
    with without_mesh():
        if returns:
            jaxpr = jax.make_jaxpr(returning)(*structs)
        else:
            jaxpr = jax.make_jaxpr(calling)(jax.ShapeDtypeStruct((), jnp.int32), *structs)
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


def _with_emitted_calls(node: Node, waits: bool, devices: _Devices, at_once: int = 1) -> Node:
    if isinstance(node, ColocatedCall):
        return dataclasses.replace(node, is_emitted=True, is_answered=waits, at_once=at_once)
    if not isinstance(node, Loop | Branch):
        return node
    many = calls_at_once(node, on_cpu=devices.are_cpus) if isinstance(node, Loop) and not waits else 1
    nodes = [[_with_emitted_calls(inner, waits, devices, many) for inner in block.nodes] for block in node.blocks]
    return with_blocks(node, [dataclasses.replace(b, nodes=tuple(n)) for b, n in zip(node.blocks, nodes, strict=True)])


def _with_returned_calls(node: Node) -> Node:
    if isinstance(node, ColocatedCall):
        return dataclasses.replace(node, is_returned=True)
    if not isinstance(node, Loop):
        return node
    nodes = tuple(map(_with_returned_calls, node.block.nodes))
    return with_blocks(node, [dataclasses.replace(node.block, nodes=nodes)])


def _struct_of(value: Value) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype, weak_type=value.aval.weak_type)


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
