"""Arguments that are deleted already, or would be by the donation of others, are refused before a plan makes a call.

jax refuses them when it dispatches what reads them. By then a call before that would have taken a batch that the user
still needs, or have logged a step that is not made.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from partjit._jax.arrays import ArrayImpl
from partjit.plan.ir.nodes import Fragment, Node, Value
from partjit.plan.ir.plan import PlanData
from partjit.plan.ir.walk import blocks_of, walk
from partjit.plan.plan import Plan

__all__ = ["read_after_calls", "refusing_deleted", "refusing_shared"]


def read_after_calls(plan: Plan) -> frozenset[Value]:
    """The arguments of a plan that nothing reads before it may have made a call."""
    first: set[Value] = set()
    for node in plan.nodes:
        if not isinstance(node, Fragment):
            break
        first.update(node.inputs)
        if node.calls:
            break
    return frozenset(_read(plan.nodes).intersection(plan.inputs) - first)


def _read(nodes: Sequence[Node]) -> set[Value]:
    read: set[Value] = set()
    for node in walk(nodes):
        read.update(node.inputs, *(block.outputs for block in blocks_of(node)))
    return read


def refusing_shared(
    execute: Callable[..., Sequence[Any]], plan: Plan, sharding_of: Callable[[Value], Sharding]
) -> Callable[..., Sequence[Any]]:
    """The function of a plan that raises if an array is two of its arguments and donated as one before it read both.

    Args:
        execute: the function.
        plan: the plan.
        sharding_of: the sharding of a value of the plan.
    """
    if not plan.released:
        return execute
    paths = dict(zip(plan.inputs, plan.paths, strict=True))
    last = {value: i for i, node in enumerate(plan.nodes) for value in _read([node])}
    last.update(dict.fromkeys(plan.outputs, len(plan.nodes)))

    def refuse(args: Sequence[Any]) -> None:
        same: dict[int, list[Value]] = {}
        for value, arg in zip(plan.inputs, args, strict=True):
            if isinstance(arg, jax.Array) and _is_taken_itself(arg, sharding_of(value)):
                same.setdefault(id(arg), []).append(value)
        for donated, other in (pair for group in same.values() for pair in itertools.permutations(group, 2)):
            # It is given away where it is read for the last time.
            if donated in plan.released and other in last and last[other] >= last.get(donated, -1):
                path, kind = paths[donated], donated.aval.str_short()
                raise RuntimeError(
                    f"{path} and {paths[other]} of {plan.name} are one array, of type {kind}, and {path} is donated: "
                    "pass a copy of it, or do not donate it"
                )

    def execute_unless_shared(*args: Any) -> Sequence[Any]:
        # Not by `id`: Python 3.12 audits that, and it takes many times as long if there is an audit hook.
        if len({*map(object.__hash__, args)}) < len(args):
            refuse(args)
        return execute(*args)

    return execute_unless_shared


def _is_taken_itself(arg: jax.Array, sharding: Sharding) -> bool:
    """Whether the dispatch takes an array itself for a sharding, if only on some devices; of others it makes copies."""
    is_replicated = sharding.is_fully_replicated and arg.sharding.is_fully_replicated
    is_there = is_replicated and arg.sharding.device_set <= sharding.device_set
    return is_there or arg.sharding.is_equivalent_to(sharding, arg.ndim)


def refusing_deleted(
    execute: Callable[..., Sequence[Any]], plan: Plan, data: PlanData, late: frozenset[Value]
) -> Callable[..., Sequence[Any]]:
    """The function of a plan, or of the rest of it, that raises before it makes a call if some arguments are deleted.

    Args:
        execute: the function.
        plan: the plan.
        data: what it is a function of.
        late: the arguments to look at, of those of the plan; not those that are NumPy arrays or numbers.
    """
    positions = [i for i, value in enumerate(data.inputs) if value in late]
    if not positions:
        return execute
    paths = dict(zip(plan.inputs, plan.paths, strict=True))
    pick = operator.itemgetter(*positions)
    is_one = len(positions) == 1

    def execute_if_intact(*args: Any) -> Sequence[Any]:
        for arg in (pick(args),) if is_one else pick(args):
            if arg.is_deleted() if type(arg) is ArrayImpl else _is_deleted(arg):
                i = next(i for i in positions if args[i] is arg)
                raise RuntimeError(
                    f"{paths[data.inputs[i]]} of {plan.name} was deleted, or donated to an earlier call: pass what "
                    f"that call returned in its place. Array has been deleted with type {arg.aval.str_short()}"
                )
        return execute(*args)

    return execute_if_intact


def _is_deleted(arg: Any) -> bool:
    return isinstance(arg, jax.Array) and arg.is_deleted()
