"""What every plan must satisfy before it runs. A plan that does not is a fault of partjit, and says so."""

import collections
from typing import Any

from partjit.colocated.primitive import colocated_call_p
from partjit.partition.cut import lanes_of
from partjit.partition.emit import waits
from partjit.partition.flatten import Flat
from partjit.partition.nodes import ColocatedCall, Fragment, Value
from partjit.partition.plan import Plan

__all__ = ["PlanError", "verify"]


class PlanError(AssertionError):
    """A plan is broken: this is a fault of partjit, not of the program."""


def verify(plan: Plan, flat: Flat) -> None:
    """Checks a plan against its program.

    Raises:
        PlanError: it lists everything that is wrong.
    """
    faults = [*_definitions(plan), *_types(plan), *_memory(plan), *_effects(plan, flat), *_order(plan, flat)]
    if faults:
        raise PlanError(
            f"the plan of {plan.name} is broken, which is a fault of partjit. Please report it with the program.\n"
            + "\n".join(f"  {fault}" for fault in faults)
            + f"\n{plan}"
        )


def _definitions(plan: Plan) -> list[str]:
    """Each value is defined once, and before it is used; names are unique."""
    faults = []
    defined = {*plan.inputs, *(value for value, _ in plan.constants)}
    for node in plan.nodes:
        faults += [f"{node.name} uses {value.name} before it is there" for value in node.inputs if value not in defined]
        faults += [
            f"{value.name} is defined a second time by {node.name}" for value in node.outputs if value in defined
        ]
        defined.update(node.outputs)
    faults += [f"the result {value.name} is never defined" for value in plan.outputs if value not in defined]
    names = collections.Counter([*(value.name for value in defined), *(node.name for node in plan.nodes)])
    return faults + [f"the name {name} is used {count} times" for name, count in names.items() if count > 1]


def _types(plan: Plan) -> list[str]:
    """What goes into a node and comes out of it has the type that the node says."""
    faults = []
    for node in plan.nodes:
        if isinstance(node, Fragment):
            expected = [*node.jaxpr.in_avals, *node.jaxpr.out_avals]
        elif isinstance(node, ColocatedCall):
            expected = [*node.callee.in_avals, *node.callee.out_avals]
        else:
            expected = [value.aval for value in (*node.outputs, *node.inputs)]
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
                f"{value.name} goes into {node.name} and nothing says where it lies"
                for value in node.inputs
                if value.sharding is None and value not in plan.inputs
            ]
    return faults


def _memory(plan: Plan) -> list[str]:
    """What is donated is not used any more, nobody else has it, and it is not a result."""
    faults = []
    donated: dict[Value, str] = {}
    on_threads: dict[Value, str] = {}
    kept = {*plan.outputs}
    of_caller = {*plan.inputs} - plan.released
    for node, needed in waits(plan.nodes):
        del needed
        faults += [f"{node.name} uses {v.name}, donated to {donated[v]}" for v in node.inputs if v in donated]
        if isinstance(node, ColocatedCall) and not node.is_inline:
            on_threads.update((v, node.name) for v, held in zip(node.inputs, node.held, strict=False) if not held)
            faults += [
                f"{node.name} does not hold {value.name}, which the caller has as well"
                for value, held in zip(node.inputs, node.held, strict=False)
                if not held and (value in plan.inputs or value in kept)
            ]
        if isinstance(node, Fragment):
            for value, flag in zip(node.inputs, node.donated, strict=False):
                if flag:
                    donated[value] = node.name
                    if value in kept or value in of_caller:
                        faults.append(f"{node.name} is given {value.name}, which is not the program's to give")
                    if value in on_threads:
                        faults.append(f"{node.name} is given {value.name}, which {on_threads[value]} may still read")
    return faults


def _effects(plan: Plan, flat: Flat) -> list[str]:
    """Every call that must be made is made once, and every equation is in one fragment."""
    in_program = collections.Counter(id(eqn.params["callee"]) for eqn in flat.eqns if eqn.primitive is colocated_call_p)
    in_plan = collections.Counter(id(call.callee) for call in plan.calls)
    faults = []
    if in_program != in_plan:
        faults.append(f"the program makes {in_program.total()} calls and the plan {in_plan.total()}")
    outside = sum(eqn.primitive is not colocated_call_p for eqn in flat.eqns)
    inside = sum(len(fragment.jaxpr.eqns) for fragment in plan.fragments)
    if inside != outside:
        faults.append(f"the program has {outside} equations for the devices and the plan {inside}")
    return faults


def _order(plan: Plan, flat: Flat) -> list[str]:
    """The calls of a lane are in program order; an order edge never points backwards."""
    position = {node.name: i for i, node in enumerate(plan.nodes)}
    faults = [f"{a} must come before {b}" for a, b in plan.order if not position.get(a, 0) < position.get(b, 0)]
    expected: dict[Any, list[int]] = {}
    for eqn in flat.eqns:
        if eqn.primitive is colocated_call_p and not eqn.params["callee"].is_pure:
            for lane in lanes_of(eqn):
                expected.setdefault(lane, []).append(id(eqn.params["callee"]))
    planned: dict[Any, list[int]] = {}
    for call in plan.calls:
        if not call.callee.is_pure:
            lanes = [("stream", call.stream), ("object", call.callee.origin.lane)]
            for lane in lanes if call.callee.origin.lane is not None else lanes[:1]:
                planned.setdefault(lane, []).append(id(call.callee))
    if expected != planned:
        faults.append("the calls of a stream or object are not in program order")
    return faults
