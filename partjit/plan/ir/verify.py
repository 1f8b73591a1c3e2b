"""What every plan must satisfy before it runs. A plan that does not is a fault of partjit, and says so."""

import collections
from collections.abc import Sequence
from typing import TypeGuard

from jax.sharding import Sharding

from partjit._jax.jaxprs import type_of
from partjit.colocated.devices import colocated_sharding
from partjit.plan.ir.aliases import other_names
from partjit.plan.ir.calls import Order, orders_of
from partjit.plan.ir.legality import faults_of, refuse
from partjit.plan.ir.nodes import (
    AnyNode,
    Block,
    Branch,
    ColocatedCall,
    Equation,
    Fragment,
    Loop,
    Node,
    Transfer,
    Value,
    VarBlock,
)
from partjit.plan.ir.plan import PlanData
from partjit.plan.ir.walk import blocks_of, walk
from partjit.primitive import sharding_constraint_p

__all__ = ["verify"]


def verify(plan: PlanData, program: VarBlock) -> None:
    """Checks a plan against its program.

    Raises:
        PlanError: it lists everything that is wrong.
    """
    block = Block(plan.inputs, plan.nodes, plan.outputs)
    faults = [
        *faults_of(block, "transferred", {value for value, _ in plan.constants}),
        *_names(plan),
        *_types(plan),
        *_specs_of_calls(plan),
        *_memory(plan.nodes, {*plan.outputs}, {*plan.inputs} - plan.released, {*plan.inputs}, _of_nobody_else(plan)),
        *_results(plan),
        *_aliases(plan.nodes, {*plan.outputs}, _of_nobody_else(plan)),
        *_effects(plan, program),
        *_order(plan, program),
    ]
    refuse(f"the plan of {plan.name}", faults, plan)


def _names(plan: PlanData) -> list[str]:
    """Names are unique."""
    values = {*plan.inputs, *(value for value, _ in plan.constants)}
    nodes = {*walk(plan.nodes)}
    values.update(value for node in nodes for value in node.outputs)
    names = collections.Counter([*(value.name for value in values), *(node.name for node in nodes)])
    return [f"the name {name} is used {count} times" for name, count in names.items() if count > 1]


def _types(plan: PlanData) -> list[str]:
    """What goes into a node and comes out of it has the type that the node says."""
    faults = []
    for node in walk(plan.nodes):
        if isinstance(node, Fragment):
            jaxpr = node.jaxpr.jaxpr
            own = *jaxpr.invars[node.numbers :], *jaxpr.outvars[node.results_before :]
            expected = [*map(type_of, own)]
        elif isinstance(node, ColocatedCall):
            expected = [*node.callee.in_avals, *node.callee.out_avals]
        elif isinstance(node, Transfer):
            expected = [value.aval for value in (*node.outputs, *node.inputs)]
        else:
            expected = [value.aval for value in (*node.inputs, *node.outputs)]
            faults += _same_types(node)
        values = [*node.inputs, *node.outputs]
        if len(expected) != len(values):
            faults.append(f"{node.name} has {len(values)} arguments and results instead of {len(expected)}")
        faults += [
            f"{value.name} is {value.aval.str_short()} and {node.name} has it as {aval.str_short()}"
            for value, aval in zip(values, expected, strict=False)
            if value.aval.shape != aval.shape or value.aval.dtype != aval.dtype
        ]
        if not plan.mesh.empty:
            faults += [
                f"{value.name} goes into {node.name} and it has no sharding"
                for value in node.inputs
                if value.sharding is None and value not in plan.inputs
            ]
    return faults


def _specs_of_calls(plan: PlanData) -> list[str]:
    """Calls get their arguments as their specs say, and shards that they return are those of their specs."""
    faults = []
    for call in plan.calls:
        pairs = [*zip(call.inputs, call.callee.in_shardings, strict=False)]
        if call.callee.returns_shards:
            pairs += zip(call.outputs, call.callee.out_shardings, strict=False)
        faults += [
            f"{value.name} is {value} and the specs of {call.name} say {requested.spec}"
            for value, requested in pairs
            if requested is not None and not _is_sharded_as(value, requested)
        ]
    return faults


def _is_sharded_as(value: Value, requested: Sharding) -> bool:
    """Whether a value has a sharding, on the devices or on their hosts; True if its own is open."""
    here, rank = value.sharding, value.aval.ndim
    return here is None or any(here.is_equivalent_to(s, rank) for s in (requested, colocated_sharding(requested)))


def _same_types(node: Loop[Value, Value] | Branch[Value, Value]) -> list[str]:
    """What the blocks of a node give is what the node gives; a loop starts from such values as well."""
    given = [block.outputs for block in node.blocks]
    if isinstance(node, Loop):
        given.append(node.initial)
    faults = []
    for values in given:
        if len(values) != len(node.outputs):
            faults.append(f"{node.name} is given {len(values)} values instead of {len(node.outputs)}")
        faults += [
            f"{node.name} is given {value.name}: {value}, for {output.name}: {output}"
            for value, output in zip(values, node.outputs, strict=False)
            if (value.aval.shape, value.aval.dtype) != (output.aval.shape, output.aval.dtype)
            or (
                value.sharding is not None
                and output.sharding is not None
                and not value.sharding.is_equivalent_to(output.sharding, value.aval.ndim)
            )
        ]
    return faults


def _of_nobody_else(plan: PlanData) -> set[Value]:
    """The constants of the program and what it has moved, which it gives to nobody."""
    constants = {value for value, _ in plan.constants}
    moves = [node for node in walk(plan.nodes) if isinstance(node, Transfer)]
    return constants.union(*(move.outputs for move in moves))


def _memory(
    nodes: Sequence[Node], kept: set[Value], of_caller: set[Value], outside: set[Value], own: set[Value]
) -> list[str]:
    """What is donated is not used any more, nobody else has it, and it is not a result.

    Args:
        nodes: those of a program or block.
        kept: what it gives.
        of_caller: the values from outside that are not its own to give away.
        outside: all values from outside.
        own: what nobody else has, from outside as well.
    """
    faults = []
    donated: dict[Value, str] = {}
    on_threads: dict[Value, str] = {}
    for node in nodes:
        faults += [f"{node.name} uses {v.name}, donated to {donated[v]}" for v in node.inputs if v in donated]
        if _may_still_read(node):
            on_threads.update((v, node.name) for v, pinned in zip(node.inputs, node.pinned, strict=False) if not pinned)
            faults += [
                f"{node.name} does not pin {value.name}, which the caller has as well"
                for value, pinned in zip(node.inputs, node.pinned, strict=False)
                if not pinned and (value in outside or value in kept) and value not in own
            ]
        given = _given_to(node)
        faults += [f"{node.name} is given {v.name} twice" for v, n in collections.Counter(given).items() if n > 1]
        for value in given:
            donated[value] = node.name
            if value in kept or value in of_caller:
                faults.append(f"{node.name} is given {value.name}, which is not the program's to give")
            if value in on_threads:
                faults.append(f"{node.name} is given {value.name}, which {on_threads[value]} may still read")
        if isinstance(node, Loop):
            faults += [f"{node.name} is given {v.name} and captures it" for v in given if v in node.captured]
            giving = {v for v, flag in zip(node.outputs, node.giving, strict=False) if flag}
            around = {*node.inputs, *node.outputs}
            faults += _memory(node.block.nodes, {*node.block.outputs}, around - giving, around, own)
        elif isinstance(node, Branch):
            for block in node.blocks:
                around = {*node.inputs}
                faults += _memory(block.nodes, {*block.outputs}, around.difference(given), around, own)
    return faults


def _results(plan: PlanData) -> list[str]:
    """No result is an argument, a constant or another result under another name."""
    names = other_names(plan.nodes)
    taken = {*plan.inputs, *(value for value, _ in plan.constants)}
    faults = []
    for output in plan.outputs:
        own = names.get(output, set()) | {output}
        faults += [f"{output.name} may be {value.name}, which others have" for value in own & taken]
        taken |= own
    return faults


def _aliases(nodes: Sequence[Node], kept: set[Value], own: set[Value]) -> list[str]:
    """Of two names of one array neither is donated before the other's last use, and both are pinned if one leaves.

    A loop or branch may give a value as it is under the name of a result. The arguments are those of `_memory`.
    """
    names = other_names(nodes)
    aliases: dict[Value, set[Value]] = {}
    for value, others in names.items():
        for other in others:
            aliases.setdefault(value, set()).add(other)
            aliases.setdefault(other, set()).add(value)
    leaving = {other for value in kept for other in names.get(value, ())} - own
    donated: set[Value] = set()
    faults = []
    for node in nodes:
        if isinstance(node, Fragment):
            donated.update(_given_to(node))
        faults += [
            f"{node.name} uses {value.name}, which may be {other.name}, donated to it or before"
            for value in node.inputs
            for other in aliases.get(value, set()) & donated
        ]
        if _may_still_read(node):
            faults += [
                f"{node.name} does not pin {value.name}, which leaves under another name"
                for value, pinned in zip(node.inputs, node.pinned, strict=False)
                if not pinned and value in leaving
            ]
        for block in blocks_of(node):
            faults += _aliases(block.nodes, {*block.outputs}, own)
    faults += [f"{v.name} may be {w.name}, which was donated" for v in kept for w in aliases.get(v, set()) & donated]
    return faults


def _may_still_read(node: Node) -> TypeGuard[ColocatedCall[Value, Value] | Transfer]:
    """Whether another thread may read what a node is given while the calling thread goes on."""
    return (
        node.is_left_to_calls if isinstance(node, Transfer) else isinstance(node, ColocatedCall) and not node.is_inline
    )


def _given_to(node: Node) -> list[Value]:
    """What a node may give away: nothing else reads it afterwards."""
    if isinstance(node, Fragment):
        return [value for value, flag in zip(node.inputs, node.donated, strict=False) if flag]
    if isinstance(node, Loop):
        return [value for value, flag in zip(node.initial, node.giving, strict=False) if flag]
    return [*node.given] if isinstance(node, Branch) else []


def _effects(plan: PlanData, program: VarBlock) -> list[str]:
    """Every call that must be made is made once, and every equation is in one fragment."""
    nodes = [*walk(program.nodes)]
    calls = collections.Counter(id(node.callee) for node in nodes if isinstance(node, ColocatedCall))
    in_plan = collections.Counter(id(call.callee) for call in plan.calls)
    faults = []
    if calls != in_plan:
        faults.append(f"the program makes {calls.total()} calls and the plan {in_plan.total()}")
    own = collections.Counter(node.eqn.primitive.name for node in nodes if isinstance(node, Equation))
    fragments = [node for node in walk(plan.nodes, into_fragments=True) if isinstance(node, Fragment)]
    compiled = collections.Counter(
        eqn.primitive.name for fragment in fragments if not fragment.calls for eqn in fragment.jaxpr.eqns
    )
    missing, more = own - compiled, compiled - own
    del more[sharding_constraint_p.name]  # which calls request
    if missing or more:
        faults.append(
            f"the program has {own.total()} equations for the devices and the plan {compiled.total()}: it lacks "
            f"{dict(missing)} and has {dict(more)} too many"
        )
    return faults


def _order(plan: PlanData, program: VarBlock) -> list[str]:
    """The calls of a stream or object are in program order; an order edge never points backwards."""
    blocks = [(plan.nodes, plan.order), *((b.nodes, b.order) for node in walk(plan.nodes) for b in blocks_of(node))]
    faults = []
    for nodes, order in blocks:
        position = {node.name: i for i, node in enumerate(nodes)}
        faults += [f"{a} must come before {b}" for a, b in order if not position.get(a, 0) < position.get(b, 0)]
    if _in_order(program.nodes) != _in_order(plan.nodes):
        faults.append("the calls of a stream or object are not in program order")
    return faults


def _in_order(nodes: Sequence[AnyNode]) -> dict[Order, list[int]]:
    """The calls of each stream and object, as the ids of their callees."""
    found: dict[Order, list[int]] = {}
    for node in walk(nodes, into_fragments=True):
        if isinstance(node, ColocatedCall):
            for order in orders_of(node):
                found.setdefault(order, []).append(id(node.callee))
    return found
