"""Loops and branches whose calls give nothing to the devices become executables that make these calls.

A logger in a loop needs no cut: the devices hand over its arguments and go on. What is around such a loop or branch is
compiled together with it.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Var, jaxpr_as_fun
from jax.sharding import Mesh, Sharding
from jax.typing import ArrayLike

from partjit._jax.jaxprs import Atom
from partjit._jax.meshes import without_mesh
from partjit.colocated.ir.emission import PLATFORMS, emit_call, emit_end
from partjit.colocated.runtime.handed_over import HandedOver
from partjit.plan.ir.calls import orders_of
from partjit.plan.ir.nodes import (
    AnyNode,
    Branch,
    ColocatedCall,
    Equation,
    Fragment,
    Loop,
    Node,
    Value,
    ValueBlock,
    VarBlock,
    VarBranch,
    VarLoop,
    VarNode,
    blocks_of,
    variables,
    walk,
    with_blocks,
)
from partjit.plan.passes.bind import Bound

__all__ = ["can_emit", "choose_emitted", "emit", "handed_over"]

MOST_BYTES_WAITING = 64 * 2**20
"""Of arguments that may wait for their calls: nothing slows the devices down when the calls take longer than they."""

_ITERATIONS_OF_WHILE = 1000

_State: TypeAlias = tuple[jax.Array, Sequence[jax.Array]]
"""How many calls there were, and values."""


def can_emit(mesh: Mesh, default: Sharding | None) -> bool:
    """Whether the executables of a program can make calls.

    Args:
        mesh: its mesh, maybe empty.
        default: the sharding of everything in a program without a mesh; None if its arguments leave it open.
    """
    if mesh.empty:
        devices = jax.devices()[:1] if default is None else [*default.device_set]
        return len(devices) == 1 and devices[0].platform in PLATFORMS
    here = jax.process_index()
    return all(device.platform in PLATFORMS and device.process_index == here for device in mesh.devices.flat)


def choose_emitted(block: VarBlock) -> VarBlock:
    """Marks the loops and branches of a block whose calls their executables can make."""

    def chosen(node: VarNode) -> VarNode:
        if isinstance(node, Loop | Branch) and not node.on_devices and _can_be_emitted(node):
            return dataclasses.replace(node, on_devices=True)
        return node

    if not any(isinstance(node, Loop | Branch) for node in block.nodes):
        return block
    return dataclasses.replace(block, nodes=tuple(map(chosen, block.nodes)))


def _can_be_emitted(node: VarLoop | VarBranch) -> bool:
    inside = [*walk(inner for block in node.blocks for inner in block.nodes)]
    calls = [inner for inner in inside if isinstance(inner, ColocatedCall)]
    blocks = [block for inner in (node, *inside) for block in blocks_of(inner)]
    read = {*variables(a for inner in inside for a in inner.inputs), *variables(a for b in blocks for a in b.outputs)}
    return (
        len({call.stream for call in calls}) == 1
        and len({lane for call in calls if (lane := call.callee.definition.function.lane) is not None}) <= 1
        and all(_can_be_handed_over(call) and read.isdisjoint(call.outputs) for call in calls)
        and not any(orders_of(inner) for inner in inside if isinstance(inner, Equation))
        and _bytes_of_arguments(node) <= MOST_BYTES_WAITING
    )


def _can_be_handed_over(call: ColocatedCall[Atom, Var]) -> bool:
    options = call.callee.options
    return (
        options.mode != "inline"
        and not options.run_ahead
        and not call.callee.is_pure
        and all(_is_of_numpy(aval.dtype) for aval in call.callee.in_avals)
    )


def _is_of_numpy(dtype: Any) -> bool:
    """Whether NumPy arrays of it are laid out in memory as those of the devices."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return False
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits >= 8
    return not jnp.issubdtype(dtype, jnp.integer) or jnp.iinfo(dtype).bits >= 8


def _bytes_of_arguments(node: AnyNode) -> float:
    """What the calls in a node get, in all."""
    if isinstance(node, ColocatedCall):
        return sum(aval.size * aval.dtype.itemsize for aval in node.callee.in_avals)
    times = 1
    if isinstance(node, Loop):
        times = _ITERATIONS_OF_WHILE if node.trip_count is None else node.trip_count
    return times * sum(_bytes_of_arguments(inner) for block in blocks_of(node) for inner in block.nodes)


def emit(bound: Bound, mesh: Mesh) -> Bound:
    """Makes fragments of the marked loops and branches of a program, and of the fragments next to them.

    Args:
        bound: the program.
        mesh: its mesh, maybe empty.
    """
    if not any(isinstance(node, Loop | Branch) and node.on_devices for node in walk(bound.block.nodes)):
        return bound
    return dataclasses.replace(bound, block=_emitted(bound.block, bound.constants, mesh))


def _emitted(block: ValueBlock, constants: Mapping[Value, ArrayLike], mesh: Mesh) -> ValueBlock:
    nodes: list[Node] = []
    names: dict[str, str] = {}
    for together, found in itertools.groupby(block.nodes, _runs_on_devices):
        run = [*found]
        if together and any(not isinstance(node, Fragment) for node in run):
            after = block.nodes[block.nodes.index(run[-1]) + 1 :]
            needed = {*block.outputs, *(value for node in after for value in node.inputs)}
            made = _fragment(run, needed, constants, mesh)
            names.update((node.name, made.name) for node in run)
            nodes.append(made)
        else:
            nodes += (_with_emitted(node, constants, mesh) for node in run)
    pairs = ((names.get(a, a), names.get(b, b)) for a, b in block.order)
    order = tuple(dict.fromkeys((a, b) for a, b in pairs if a != b))
    return dataclasses.replace(block, nodes=tuple(nodes), order=order)


def _runs_on_devices(node: Node) -> bool:
    return isinstance(node, Fragment) or (isinstance(node, Loop | Branch) and node.on_devices)


def _with_emitted(node: Node, constants: Mapping[Value, ArrayLike], mesh: Mesh) -> Node:
    if not isinstance(node, Loop | Branch):
        return node
    return with_blocks(node, [_emitted(block, constants, mesh) for block in node.blocks])


def _fragment(
    nodes: Sequence[Node], needed: Collection[Value], constants: Mapping[Value, ArrayLike], mesh: Mesh
) -> Fragment[Value, Value]:
    """The fragment that nodes become which follow each other; `needed` is what is read after them."""
    nodes = [*map(_with_emitted_calls, nodes)]
    own = {value for node in nodes for value in node.outputs}
    inputs = dict.fromkeys(value for node in nodes for value in node.inputs if value not in own | constants.keys())
    outputs = tuple(value for node in nodes for value in node.outputs if value in needed)
    calls = [node for node in walk(nodes) if isinstance(node, ColocatedCall)]

    def program(execution: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        writer = _Writer(execution, calls, mesh)
        env = {value: jnp.asarray(constant, value.aval.dtype) for value, constant in constants.items()}
        env.update(zip(inputs, arrays, strict=True))
        number = writer.run(nodes, env, jnp.int32(0))
        emit_end(execution, number, mesh)
        return [number, *(env[value] for value in outputs)]

    with without_mesh():
        jaxpr = jax.make_jaxpr(program)(jax.ShapeDtypeStruct((), jnp.int32), *map(_struct_of, inputs))
    name = next(node.name for node in nodes if not isinstance(node, Fragment))
    cost = sum(map(_cost, nodes))
    return Fragment(jaxpr, tuple(inputs), outputs, cost, (False,) * len(inputs), tuple(nodes), name)


def _with_emitted_calls(node: Node) -> Node:
    if isinstance(node, Loop | Branch):
        blocks = [dataclasses.replace(b, nodes=tuple(map(_with_emitted_calls, b.nodes))) for b in node.blocks]
        return with_blocks(node, blocks)
    return dataclasses.replace(node, is_emitted=True) if isinstance(node, ColocatedCall) else node


def _struct_of(value: Value) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype, weak_type=value.aval.weak_type)


def _cost(node: Node) -> float:
    if isinstance(node, Fragment):
        return node.cost
    times = (node.trip_count or 1) if isinstance(node, Loop) else 1
    return times * sum(_cost(inner) for block in blocks_of(node) for inner in block.nodes)


def handed_over(call: ColocatedCall[Value, Value], mesh: Mesh) -> HandedOver:
    """Which devices hand over what of the arguments of a call."""
    return HandedOver.of([value.aval for value in call.inputs], [value.sharding for value in call.inputs], mesh)


class _Writer:
    """Nodes as operations on the devices, in a function being traced.

    Args:
        execution: the number of the execution.
        calls: all calls of the executable.
        mesh: the mesh, maybe empty.
    """

    def __init__(self, execution: jax.Array, calls: Sequence[ColocatedCall[Value, Value]], mesh: Mesh) -> None:
        self._execution = execution
        self._position = {call: k for k, call in enumerate(calls)}
        self._mesh = mesh

    def run(self, nodes: Sequence[Node], env: dict[Value, jax.Array], number: jax.Array) -> jax.Array:
        """Runs nodes on the values of an environment, and adds theirs.

        Args:
            nodes: the nodes.
            env: what there is.
            number: how many calls there were before.

        Returns:
            How many calls there were.
        """
        for node in nodes:
            if isinstance(node, Fragment):
                results: Sequence[jax.Array] = jaxpr_as_fun(node.jaxpr)(*(env[value] for value in node.inputs))
            elif isinstance(node, ColocatedCall):
                self._emit(node, [env[value] for value in node.inputs], number)
                number, results = number + jnp.int32(1), ()
            elif isinstance(node, Loop):
                number, results = self._loop(node, env, number)
            else:
                assert isinstance(node, Branch)  # transfers are made later
                number, results = self._branch(node, env, number)
            env.update(zip(node.outputs, results, strict=False))  # nobody reads those of calls
        return number

    def _emit(self, call: ColocatedCall[Value, Value], arrays: Sequence[jax.Array], number: jax.Array) -> None:
        emit_call(self._execution, number, arrays, handed_over(call, self._mesh), self._position[call])

    def _block(self, block: ValueBlock, env: Mapping[Value, jax.Array], number: jax.Array) -> _State:
        inside = {**env}
        number = self.run(block.nodes, inside, number)
        return number, [inside[value] for value in block.outputs]

    def _loop(self, loop: Loop[Value, Value], env: Mapping[Value, jax.Array], number: jax.Array) -> _State:
        def iteration(state: _State) -> _State:
            number, carried = state
            return self._block(loop.block, {**env, **dict(zip(loop.outputs, carried, strict=True))}, number)

        state: _State = number, [env[value] for value in loop.initial]
        if loop.trip_count is None:
            return jax.lax.while_loop(lambda state: state[1][0], iteration, state)
        return jax.lax.fori_loop(0, loop.trip_count, lambda _, state: iteration(state), state)

    def _branch(self, branch: Branch[Value, Value], env: Mapping[Value, jax.Array], number: jax.Array) -> _State:
        def way(block: ValueBlock) -> Callable[[jax.Array], _State]:
            def run(number: jax.Array) -> _State:
                return self._block(block, env, number)

            return run

        index = jax.lax.convert_element_type(env[branch.inputs[0]], jnp.int32)
        return jax.lax.switch(index, [*map(way, branch.blocks)], number)
