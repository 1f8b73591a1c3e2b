"""Which loops, branches and calls become a part of executables.

A logger in a loop needs no cut: the devices hand over its arguments and go on. A function that does not use jax needs
none either: a thread of the devices runs it, and they go on with its results. An executable may make calls of both
kinds, if they are on different streams. The host still makes a call where so much device work could run beside it that
it pays to leave the executable for it.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.extend.core import Literal, Var
from jax.sharding import Mesh, NamedSharding, Sharding

from partjit import lazy
from partjit._jax.arrays import is_laid_out_as_numpy
from partjit._jax.jaxprs import type_of
from partjit.colocated.ir.emission import ANSWERED, PLATFORMS
from partjit.colocated.runtime.streams import Stream
from partjit.devices import platform_of
from partjit.mesh import auto_twin, is_abstract_mesh
from partjit.plan.ir.calls import orders_of
from partjit.plan.ir.nodes import AnyNode, Branch, ColocatedCall, Equation, Loop, VarBlock, VarBranch, VarLoop, VarNode
from partjit.plan.ir.walk import blocks_of, is_host, variables, walk
from partjit.plan.passes.cost import amortizes_leaving, cost_of
from partjit.plan.passes.from_numbers import Numbers, operations_on_numbers
from partjit.plan.passes.in_place import updated_in_place

if TYPE_CHECKING:
    import networkx as nx
else:  # only loops with calls and device work that may run beside them need it
    nx = lazy.module("networkx")

__all__ = [
    "Executables",
    "answered_streams",
    "calls_made",
    "can_be_answered",
    "can_be_kept",
    "choose_emitted",
    "has_answered",
    "have_one_stream_per_object",
    "is_little_to_copy",
    "nbytes",
]

MOST_BYTES_WAITING = 64 * 2**20
"""Of arguments that may wait for their calls: nothing slows the devices down when the calls take longer than they."""

MOST_BYTES_KEPT = 64 * 2**20
"""Of what a fragment is given and does not reuse, so that it is still there if a call fails."""

MOST_BYTES_COPIED = 2**20
"""Of arguments and results of a call that an executable waits for. The host gives and takes them without a copy."""

_BYTES_COPIED_IN_A_CALL = 2**16
"""What is copied in about the time that the host takes longer than the executable of one device to make a call."""

_ITERATIONS_OF_WHILE = 1000


class Executables(NamedTuple):
    """What the executables of a program can do.

    Attributes:
        mesh: that of the program, maybe empty.
        make_calls: whether they can make calls whose results nobody reads.
        wait_for_calls: whether they can make others.
        on_one_cpu: whether they run on a single device, a CPU: there it costs little to dispatch one more, and one that
            makes calls blocks its caller.
        device_count: how many devices run them together.
        numbers: the arguments of the program whose numbers the host knows; none unless its executables run on devices
            of this process.
        donated: the arguments of the program whose memory may be reused; in a block also what is written into it.
    """

    mesh: Mesh
    make_calls: bool
    wait_for_calls: bool
    on_one_cpu: bool = False
    device_count: int = 1
    numbers: Numbers = Numbers()
    donated: frozenset[Var] = frozenset()

    @staticmethod
    def of(
        mesh: Mesh,
        default: Sharding | None,
        numbers: Collection[Var] = (),
        counters: Collection[Var] = (),
        donated: Collection[Var] = (),
    ) -> "Executables":
        """Those of a program.

        Args:
            mesh: its mesh, maybe empty.
            default: the sharding of everything in a program without a mesh; None if its arguments leave it open.
            numbers: those of its arguments that the host has as numbers.
            counters: those that it counts along.
            donated: those whose memory may be reused.
        """
        if is_abstract_mesh(mesh):  # planned as for devices of this process
            devices, platforms = [], {platform_of(mesh) or jax.default_backend()}
        else:
            devices = [*mesh.devices.flat]
            if mesh.empty:
                devices = jax.devices()[:1] if default is None else [*default.device_set]
            platforms = {device.platform for device in devices}
        here = jax.process_index()
        is_here = all(device.process_index == here for device in devices) and not (mesh.empty and len(devices) > 1)
        on_one_cpu = len(devices) == 1 and platforms == {"cpu"}
        known = Numbers(frozenset(numbers), frozenset(counters), not platforms <= ANSWERED) if is_here else Numbers()
        makes, waits = is_here and platforms <= PLATFORMS, is_here and platforms <= ANSWERED
        count = max(len(devices), mesh.size, 1)
        return Executables(mesh, makes, waits, on_one_cpu, count, known, frozenset(donated))


def choose_emitted(block: VarBlock, executables: Executables) -> VarBlock:
    """Marks the loops and branches of a block whose calls their executables can make."""

    def chosen(node: VarNode, read: Set[Var]) -> VarNode:
        if not isinstance(node, Loop | Branch) or node.on_devices or not _can_be_emitted(node, executables):
            return node
        if executables.on_one_cpu and isinstance(node, Branch) and not has_answered(node):
            return node  # the host reads which one is chosen sooner than it is done with such an executable
        if isinstance(node, Branch) and _is_asked_of_one_device(node, block, executables, read):
            return node
        return dataclasses.replace(node, on_devices=True)

    if not executables.make_calls or not any(isinstance(node, Loop | Branch) for node in block.nodes):
        return block
    executables = executables._replace(donated=updated_in_place(block, executables.donated))
    nodes: list[VarNode] = []
    read: set[Var] = set()  # by what the devices do later
    for node in reversed(block.nodes):
        node = chosen(node, read)
        nodes.append(node)
        if not (isinstance(node, ColocatedCall) or (isinstance(node, Branch) and not node.on_devices)):
            read.update(variables(node.inputs))
    return dataclasses.replace(block, nodes=tuple(reversed(nodes)))


def _is_asked_of_one_device(branch: VarBranch, block: VarBlock, executables: Executables, read: Set[Var]) -> bool:
    """Whether the host finds out which block is chosen, or asks one device, rather than all in each execution to call.

    Then the devices run another executable where a block computes something, and one more for what they do with it
    later: to call takes them as long as these two. What the branch reads is a result of their executable: that must not
    be much which nobody else needs, and which it does not give as it is.

    Args:
        branch: a branch with calls.
        block: the block that it is in.
        executables: what executables can do.
        read: what devices read later in the block.
    """
    if not read.isdisjoint(branch.outputs) or not operations_on_numbers(block, [branch], executables.numbers):
        return False
    kept = {*block.inputs, *block.consts, *variables(block.outputs)}
    for inner in branch.blocks:
        captured = zip(inner.inputs, branch.captured, strict=True)
        kept.update(variables(atom for var, atom in captured if var in inner.outputs))
    own = {*variables(branch.captured)} - kept
    return nbytes(type_of(var) for var in own) <= MOST_BYTES_COPIED


def _can_be_emitted(node: VarLoop | VarBranch, executables: Executables) -> bool:
    inside = [*_walk(node)]
    calls = [inner for inner in inside if isinstance(inner, ColocatedCall)]
    if not calls or not have_one_stream_per_object(calls):
        return False
    if any(orders_of(inner) for inner in inside if isinstance(inner, Equation)):
        return False
    answered = answered_streams(node)
    own = [call for call in calls if call.stream in answered]
    others = {call for call in calls if call.stream not in answered}
    if not all(map(_can_be_handed_over, others)) or _bytes_of_arguments(node, others) > MOST_BYTES_WAITING:
        return False
    return not answered or (
        len(answered) == 1
        and (_is_bounded(inside) or _can_be_ended(own, executables))
        and all(can_be_answered(call, executables) for call in own)
        and can_be_kept(atom.aval for atom in node.inputs)
        and _copies_little(node, executables)
        and not any(_could_overlap(inner, executables) for inner in inside if isinstance(inner, Loop | Branch))
    )


def _is_bounded(nodes: Iterable[AnyNode]) -> bool:
    """Whether loops have an end of their own."""
    return all(node.trip_count is not None for node in nodes if isinstance(node, Loop))


def _can_be_ended(calls: Iterable[ColocatedCall[Any, Any]], executables: Executables) -> bool:
    """Whether another thread's call of one of several objects comes in between these, as it may be what ends a loop.

    Of one object it is the promise of its class that it does: most loops over one, such as until it says that it is the
    end, end by themselves.
    """
    methods = {function.lane: function for call in calls if (function := call.callee.definition.function).lane}
    may_wait = len(methods) > 1 and any(method.others_use_jax for method in methods.values())
    return executables.device_count == 1 or not may_wait


def have_one_stream_per_object(calls: Iterable[ColocatedCall[Any, Any]]) -> bool:
    """Whether the calls of each object are on one stream."""
    pairs = {(call.stream, call.callee.definition.function.lane) for call in calls}
    lanes = [lane for _, lane in pairs if lane is not None]
    return len({*lanes}) == len(lanes)


def _walk(node: AnyNode) -> Iterator[AnyNode]:
    return walk([node])


def has_answered(node: AnyNode) -> bool:
    """Whether there are calls in a loop or branch that its executable would have to wait for."""
    return bool(answered_streams(node))


def answered_streams(node: AnyNode) -> frozenset[Stream | None]:
    """The streams of the calls in a loop or branch that its executable would have to wait for.

    It waits for all calls of these streams, so that they keep their order.
    """
    inside = [*_walk(node)]
    given = [block.outputs for inner in inside for block in blocks_of(inner)]
    read = {a for atoms in (*given, *(i.inputs for i in inside)) for a in atoms if not isinstance(a, Literal)}
    calls = [inner for inner in inside if isinstance(inner, ColocatedCall)]
    return frozenset(
        call.stream for call in calls if call.callee.options.mode == "inline" or not read.isdisjoint(call.outputs)
    )


def _can_be_handed_over(call: ColocatedCall[Any, Any]) -> bool:
    options = call.callee.options
    return (
        options.mode != "inline"
        and not options.run_ahead
        and not call.callee.is_pure
        and all(is_laid_out_as_numpy(aval.dtype) for aval in call.callee.in_avals)
    )


def can_be_answered(call: ColocatedCall[Any, Any], executables: Executables) -> bool:
    """Whether an executable can wait for a call."""
    callee = call.callee
    options = callee.options
    avals = (*callee.in_avals, *callee.out_avals)
    shardings = (*callee.in_shardings, *callee.out_shardings)
    return (
        executables.wait_for_calls
        and options.uses_jax is False
        and options.mode != "stream"
        and not options.run_ahead
        and callee.shards is None
        and all(is_laid_out_as_numpy(aval.dtype) for aval in avals)
        and nbytes(avals) <= MOST_BYTES_COPIED
        and all(sharding is None or _is_on(sharding, executables.mesh) for sharding in shardings)
    )


def _is_on(sharding: NamedSharding, mesh: Mesh) -> bool:
    return mesh.size <= 1 or (isinstance(sharding.mesh, Mesh) and auto_twin(sharding.mesh) == mesh)


def _copies_little(node: VarLoop | VarBranch, executables: Executables) -> bool:
    """Whether an executable that waits for calls has soon copied what would be updated in place otherwise."""
    updated = node.initial if isinstance(node, Loop) else node.inputs
    given_up = (var.aval for var in variables(updated) if var in executables.donated)
    return is_little_to_copy(given_up, calls_made(node) * executables.device_count)


def calls_made(node: AnyNode) -> int:
    """How many calls are made in a node, in all blocks of a branch; a `while_loop` has a thousand iterations."""
    inside = sum(calls_made(inner) for block in blocks_of(node) for inner in block.nodes)
    return _times(node) * (inside + isinstance(node, ColocatedCall))


def is_little_to_copy(avals: Iterable[Any], calls: int) -> bool:
    """Whether arrays of these types are copied in less time than devices save that leave no executable for calls.

    Args:
        avals: the types.
        calls: how many are made, each of them counted for each of the devices.
    """
    return nbytes(avals) <= _BYTES_COPIED_IN_A_CALL * calls


def _times(node: AnyNode) -> int:
    if not isinstance(node, Loop):
        return 1
    return _ITERATIONS_OF_WHILE if node.trip_count is None else node.trip_count


def can_be_kept(avals: Iterable[Any]) -> bool:
    """Whether an executable may be given arrays of these types without reusing their memory."""
    return nbytes(avals) <= MOST_BYTES_KEPT


def nbytes(avals: Iterable[Any]) -> int:
    """Bytes of arrays of these types, over all devices."""
    return sum(aval.size * aval.dtype.itemsize for aval in avals)


def _bytes_of_arguments(node: AnyNode, calls: Collection[ColocatedCall[Any, Any]]) -> float:
    """What these of the calls in a node get, in all."""
    if isinstance(node, ColocatedCall):
        return nbytes(node.callee.in_avals) if node in calls else 0
    return _times(node) * sum(_bytes_of_arguments(inner, calls) for block in blocks_of(node) for inner in block.nodes)


def _could_overlap(node: Loop[Any, Any] | Branch[Any, Any], executables: Executables) -> bool:
    """Whether work that amortizes leaving the executable could run on the devices beside a call in a loop or branch.

    That is what neither depends on the call nor the other way round, in an iteration. In a loop it is also what does
    one of these but in no later iteration the other: it could run beside the call of another iteration.
    """
    devices = executables.device_count
    return any(_has_work_beside(block, node if isinstance(node, Loop) else None, devices) for block in node.blocks)


def _has_work_beside(block: VarBlock, loop: Loop[Any, Any] | None, devices: int) -> bool:
    calls = [i for i, inner in enumerate(block.nodes) if is_host(inner)]
    costs = [cost_of(inner.eqn) if isinstance(inner, Equation) else 0.0 for inner in block.nodes]
    if not calls or not amortizes_leaving(sum(costs), devices):
        return False
    graph = _dependences(block, calls)
    near = [{call} | nx.ancestors(graph, call) | nx.descendants(graph, call) for call in calls]
    if loop is not None:
        graph.add_edges_from(_between_iterations(block, loop, calls))
        component = {i: found for found in nx.strongly_connected_components(graph) for i in found}
        near = [found & component[call] for found, call in zip(near, calls, strict=True)]
    return any(amortizes_leaving(sum(c for i, c in enumerate(costs) if i not in found), devices) for found in near)


def _dependences(block: VarBlock, calls: Sequence[int]) -> "nx.DiGraph":
    producer = {var: i for i, node in enumerate(block.nodes) for var in node.outputs}
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(block.nodes)))
    graph.add_edges_from(itertools.pairwise(calls))
    graph.add_edges_from(
        (producer[var], i) for i, node in enumerate(block.nodes) for var in variables(node.inputs) if var in producer
    )
    return graph


def _between_iterations(block: VarBlock, loop: Loop[Any, Any], calls: Sequence[int]) -> Iterator[tuple[int, int]]:
    """From what gives a carried value to what reads it in the next iteration; the predicate is read by all."""
    producer = {var: i for i, node in enumerate(block.nodes) for var in node.outputs}
    readers: dict[Var, list[int]] = {}
    for i, node in enumerate(block.nodes):
        for var in variables(node.inputs):
            readers.setdefault(var, []).append(i)
    yield calls[-1], calls[0]
    for k, (var, out) in enumerate(zip(loop.carried, block.outputs, strict=True)):
        if isinstance(out, Var) and out in producer:
            is_predicate = loop.trip_count is None and not k
            for reader in range(len(block.nodes)) if is_predicate else readers.get(var, ()):
                yield producer[out], reader
