"""Loops whose calls stand in branches run on the devices to the next call.

A logger in a `cond` is needed once in a hundred iterations. So the device work of an iteration becomes the body of a
`while` of the devices, which ends where a branch with a call is to be taken, or with the loop:

    for each iteration:                        while there are iterations left:
        work                       becomes         do work while no call is needed and there are iterations left
        if needed: call                            if needed: call

The iterations in between cost neither a dispatch nor a look at the predicate.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Var, jaxpr_as_fun

from partjit._jax.jaxprs import Atom, new_var, type_of
from partjit.plan.ir.build import Builder, jaxpr_of, reading, with_loops
from partjit.plan.ir.nodes import Block, Branch, Equation, VarBlock, VarLoop, is_host, variables
from partjit.plan.passes.counting import counted

__all__ = ["run_to_calls"]

V = TypeVar("V")
_State = tuple[jax.Array, list[jax.Array], list[jax.Array]]


def run_to_calls(block: VarBlock) -> VarBlock:
    """Makes the loops of a block run to the next call where nothing on the devices depends on what a call returns."""
    return with_loops(block, lambda loop, before: _run_to_calls(loop, before) if _can_run_on(loop.block) else loop)


def _can_run_on(block: VarBlock) -> bool:
    """Whether all calls of an iteration are in branches that may do without, and the devices need no result of them."""
    hosts = [node for node in block.nodes if is_host(node)]
    if not hosts or not all(isinstance(node, Branch) and not all(_makes_calls(node)) for node in hosts):
        return False
    results = {var for node in hosts for var in node.outputs}
    needed = {*variables(block.outputs), *(var for node in block.nodes for var in variables(node.inputs))}
    passed = [type_of(var).dtype for node in hosts for var in variables(node.inputs)]
    return (
        results.isdisjoint(needed)
        and not any(isinstance(node, Equation) and node.eqn.effects for node in block.nodes)
        and not any(jax.dtypes.issubdtype(dtype, jax.dtypes.extended) for dtype in passed)
    )


def _makes_calls(branch: Branch) -> list[bool]:
    return [any(map(is_host, block.nodes)) for block in branch.blocks]


def _run_to_calls(loop: VarLoop, before: Builder) -> VarLoop:
    """The loop of the host around one that runs on the devices as long as no call is needed."""
    if loop.trip_count is not None and loop.counter is None:
        loop = counted(loop, before)
    block, number = loop.block, len(loop.captured)
    branches = [node for node in block.nodes if isinstance(node, Branch)]
    outside = {*block.inputs[:number], *block.consts}
    passed = [var for node in branches for var in variables(node.inputs) if var not in outside]
    passed = [var for var in dict.fromkeys(passed) if var not in variables(block.outputs)]
    work = tuple(node for node in block.nodes if not isinstance(node, Branch))
    run = jaxpr_as_fun(jaxpr_of(Block(block.inputs, work, (*block.outputs, *passed), block.consts)))

    def has_more(carried: Sequence[jax.Array]) -> jax.Array:
        return carried[0] if loop.trip_count is None else carried[loop.counter or 0] < loop.trip_count

    def run_on(*atoms: jax.Array) -> list[jax.Array]:
        captured, initial = atoms[:number], [*atoms[number:]]

        def iteration(state: _State) -> _State:
            results = run(*captured, *state[1])
            values = _by_variable([*block.inputs[:number], *block.outputs, *passed], [*captured, *results])
            carried, seen = results[: len(initial)], results[len(initial) :]
            return has_more(carried) & ~_needs_call(branches, {**block.consts, **values}), carried, seen

        nothing = [jax.lax.full(type_of(var).shape, 0, type_of(var).dtype) for var in passed]
        state = (jnp.ones((), bool), initial, nothing)
        _, carried, seen = jax.lax.while_loop(lambda state: state[0], iteration, state)
        return [has_more(carried), *carried, *seen]

    inside = Builder(loop.eqn, dict(block.consts))
    again, *results = inside.add(run_on, *block.inputs)
    env = _by_variable([*block.outputs, *passed], results)
    nodes = (*inside.nodes, *(reading(node, env) for node in branches))
    outputs = tuple(results[: len(block.outputs)])
    if loop.trip_count is None:
        return dataclasses.replace(loop, block=Block(block.inputs, nodes, outputs, inside.consts))
    (first,) = before.add(lambda: jnp.ones((), bool))
    flag, result = new_var(type_of(first)), new_var(type_of(first))
    inputs = (*block.inputs[:number], flag, *block.inputs[number:])
    return dataclasses.replace(
        loop,
        inputs=(*loop.captured, first, *loop.initial),
        outputs=(result, *loop.outputs),
        block=Block(inputs, nodes, (again, *outputs), inside.consts),
        trip_count=None,
        is_buffer=(False, *loop.is_buffer),
        counter=None,
    )


def _needs_call(branches: Sequence[Branch], values: Mapping[Var, Any]) -> jax.Array:
    """Whether one of these branches takes a way on which it makes calls."""
    needed = jnp.zeros((), bool)
    for node in branches:
        for k, makes_calls in enumerate(_makes_calls(node)):
            if makes_calls:
                needed |= values[node.inputs[0]] == k
    return needed


def _by_variable(atoms: Iterable[Atom], values: Iterable[V]) -> dict[Var, V]:
    return {atom: value for atom, value in zip(atoms, values, strict=True) if isinstance(atom, Var)}
