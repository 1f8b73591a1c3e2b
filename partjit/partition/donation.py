"""Whose memory may be reused: an array's last reader takes it over, if a result fits and nobody else has it."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from partjit.partition.plan import ColocatedCall, Fragment, Node, Plan, Value

__all__ = ["donations", "may_release"]


def may_release(inputs: Sequence[Value], donated: Sequence[bool], results: Sequence[Any]) -> frozenset[Value]:
    """The donated arguments whose memory a result of the whole program could take over."""
    free = collections.Counter((aval.shape, aval.dtype) for aval in results)
    released = set()
    for value, flag in zip(inputs, donated, strict=True):
        kind = (value.aval.shape, value.aval.dtype)
        if flag and free[kind]:
            free[kind] -= 1
            released.add(value)
    return frozenset(released)


def donations(plan: Plan) -> Plan:
    """The plan in which each fragment reuses the memory of arguments that die there."""
    readers: dict[Value, list[Node]] = {}
    for node in plan.nodes:
        for value in node.inputs:
            readers.setdefault(value, []).append(node)
    own = {value for fragment in plan.fragments for value in fragment.outputs} - {*plan.outputs}
    giving = own | plan.released
    results = {*plan.outputs}

    def dies_in(value: Value, fragment: Fragment) -> bool:
        return (
            value in giving
            and readers[value][-1] is fragment
            # A call on a thread may still run; results of calls may be kept by the functions that returned them.
            and all(isinstance(node, Fragment) or _is_over(node) for node in readers[value])
        )

    def with_donations(fragment: Fragment) -> Fragment:
        free = [*fragment.outputs]
        flags = []
        for value in fragment.inputs:
            result = next((result for result in free if _fits(value, result)), None)
            flags.append(result is not None and dies_in(value, fragment))
            if result is not None and flags[-1]:
                free.remove(result)
        return dataclasses.replace(fragment, donated=tuple(flags))

    nodes = [with_donations(node) if isinstance(node, Fragment) else node for node in plan.nodes]
    given = {
        value
        for node in nodes
        if isinstance(node, Fragment)
        for value, flag in zip(node.inputs, node.donated, strict=True)
        if flag
    }
    nodes = [_with_apart(node, given | plan.released, results) for node in nodes]
    return dataclasses.replace(plan, nodes=tuple(nodes))


def _with_apart(node: Node, given: set[Value], results: set[Value]) -> Node:
    """The call with the results that must not be its arguments: what leaves, and what others would give away."""
    if not isinstance(node, ColocatedCall) or not node.is_inline:
        return node
    kinds = {(value.aval.shape, value.aval.dtype) for value in node.inputs if value in given}
    apart = (
        i for i, value in enumerate(node.outputs) if value in results or (value.aval.shape, value.aval.dtype) in kinds
    )
    return dataclasses.replace(node, apart=tuple(apart))


def _fits(value: Value, result: Value) -> bool:
    same_type = value.aval.shape == result.aval.shape and value.aval.dtype == result.aval.dtype
    return same_type and (result.sharding is None or result.sharding == value.sharding)


def _is_over(node: Node) -> bool:
    return isinstance(node, ColocatedCall) and node.is_inline
