"""Loops whose calls stand in branches run on the devices to the next call.

A logger in a `cond` is needed once in a hundred iterations. So the device work of an iteration becomes the body of a
`while` of the devices, which ends where a branch with a call is to be taken, or with the loop:

    for each iteration:                        while there are iterations left:
        work                       becomes         do work while no call is needed and there are iterations left
        if needed: call                            if needed: call

Where the devices need what the call returns, the loop is rotated before, so that the call comes first; the `while` then
takes the ways without calls of its later iterations itself. The iterations in between cost neither a dispatch nor a
look at the predicate. What a call gets is computed where the `while` ends.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Var, jaxpr_as_fun

from partjit._jax.jaxprs import Atom, new_var, type_of
from partjit.plan.ir.build import Builder, jaxpr_of, reading, with_loops
from partjit.plan.ir.nodes import Block, Branch, Equation, VarBlock, VarBranch, VarLoop
from partjit.plan.ir.walk import is_host, variables
from partjit.plan.passes.branch_heads import Heads, heads_of
from partjit.plan.passes.counting import carrying, counted

__all__ = ["run_to_calls", "runs_from_calls"]

V = TypeVar("V")
_State = tuple[jax.Array, list[jax.Array], list[jax.Array]]


def run_to_calls(block: VarBlock) -> VarBlock:
    """Makes loops run to the next call if all their calls are in branches that may do without; they are rotated then.

    If the devices need what a call returns, its branch has to be the only one, and the first node.
    """

    def change(loop: VarLoop, before: Builder) -> VarLoop:
        if loop.on_devices:
            return loop
        if runs_from_calls(loop.block):
            (branch,) = _branches(loop.block)
            known = {*loop.block.inputs, *loop.block.consts}
            return _run_from_call(loop, branch, before) if known.issuperset(variables(branch.inputs)) else loop
        return _run_to_calls(loop, before) if _has_rare_calls(loop.block) else loop

    return with_loops(block, change)


def runs_from_calls(block: VarBlock) -> bool:
    """Whether an iteration can run on without calls once it is rotated, so that the branch with its calls is first."""
    return len(_branches(block)) == 1 and _has_rare_calls(block) and _gives_to_devices(block)


def _has_rare_calls(block: VarBlock) -> bool:
    """Whether all calls of an iteration are in branches that may do without, such that it can run on without them."""
    branches = _branches(block)
    if (
        not branches
        or len(branches) < sum(map(is_host, block.nodes))
        or any(all(map(_calls, b.blocks)) for b in branches)
    ):
        return False
    if len(branches) > 1 and _gives_to_devices(block):
        return False
    stopped_at = [var for branch in branches for var in (*variables(branch.inputs), *branch.outputs)]
    return not any(isinstance(node, Equation) and node.eqn.effects for node in block.nodes) and not any(
        jax.dtypes.issubdtype(type_of(var).dtype, jax.dtypes.extended) for var in stopped_at
    )


def _branches(block: VarBlock) -> list[VarBranch]:
    return [node for node in block.nodes if isinstance(node, Branch)]


def _calls(block: VarBlock) -> bool:
    return any(map(is_host, block.nodes))


def _gives_to_devices(block: VarBlock) -> bool:
    """Whether anything depends on what the branches of a block give."""
    results = {var for branch in _branches(block) for var in branch.outputs}
    needed = {*variables(block.outputs), *(var for node in block.nodes for var in variables(node.inputs))}
    return not results.isdisjoint(needed)


def _run_to_calls(loop: VarLoop, before: Builder) -> VarLoop:
    """The loop of the host around one of the devices, after which calls may be needed."""
    loop = _with_counter(loop, before)
    block, number = loop.block, len(loop.captured)
    branches = _branches(block)
    outside = {*block.inputs[:number], *block.consts}
    passed = [var for branch in branches for var in variables(branch.inputs) if var not in outside]
    passed = [var for var in dict.fromkeys(passed) if var not in variables(block.outputs)]
    work = tuple(node for node in block.nodes if not isinstance(node, Branch))
    run = jaxpr_as_fun(jaxpr_of(Block(block.inputs, work, (*block.outputs, *passed), block.consts)))
    heads = [*map(heads_of, branches)]

    def run_on(*atoms: jax.Array) -> list[jax.Array]:
        captured, initial = atoms[:number], [*atoms[number:]]

        def known(results: Sequence[jax.Array]) -> dict[Atom, Any]:
            own = [*block.inputs[:number], *block.outputs, *passed]
            return {**block.consts, **_by_variable(own, [*captured, *results])}

        def iteration(state: _State) -> _State:
            results = run(*captured, *state[1])
            carried, seen = results[: len(initial)], results[len(initial) :]
            return _has_more(loop, carried) & ~_needs_call(branches, known(results)), carried, seen

        state = (jnp.ones((), bool), initial, _nothing(passed))
        _, carried, seen = jax.lax.while_loop(lambda state: state[0], iteration, state)
        values = known([*carried, *seen])
        return [_has_more(loop, carried), *carried, *seen, *(x for own in heads for x in _computed(own, values))]

    inside = Builder(loop.eqn, dict(block.consts))
    again, *results = inside.add(run_on, *block.inputs)
    env = _by_variable([*block.outputs, *passed, *(var for own in heads for var in own.results)], results)
    nodes = (*inside.nodes, *(reading(own.branch, env) for own in heads))
    return _as_long_as(
        again, loop, Block(block.inputs, nodes, tuple(results[: len(block.outputs)]), inside.consts), before
    )


def _run_from_call(loop: VarLoop, branch: VarBranch, before: Builder) -> VarLoop:
    """The loop of the host around one of the devices, whose first iteration takes what a call has returned."""
    loop = _with_counter(loop, before)
    block, number, end = loop.block, len(loop.captured), len(loop.block.inputs)
    work = tuple(node for node in block.nodes if node is not branch)
    run = jaxpr_as_fun(jaxpr_of(Block((*block.inputs, *branch.outputs), work, block.outputs, block.consts)))
    ways = [
        (lambda *_: _nothing(branch.outputs)) if _calls(inner) else jaxpr_as_fun(jaxpr_of(inner))
        for inner in branch.blocks
    ]
    heads = heads_of(branch)

    def known(atoms: Sequence[jax.Array]) -> dict[Atom, Any]:
        return {**block.consts, **_by_variable(block.inputs, atoms)}

    def run_on(*atoms: jax.Array) -> list[jax.Array]:
        captured, initial, given = atoms[:number], [*atoms[number:end]], [*atoms[end:]]

        def iteration(state: Any) -> Any:
            _, is_first, (carried, given) = state
            values = known([*captured, *carried])
            way = jnp.where(is_first, len(ways), _read(values, branch.inputs[0]))
            read = [_read(values, atom) for atom in branch.captured]
            given = jax.lax.switch(way, [*ways, lambda *_: given], *read)
            carried = run(*captured, *carried, *given)
            goes_on = _has_more(loop, carried) & ~_needs_call([branch], known([*captured, *carried]))
            return goes_on, jnp.zeros((), bool), (carried, given)

        state = (jnp.ones((), bool), jnp.ones((), bool), (initial, given))
        *_, (carried, _) = jax.lax.while_loop(lambda state: state[0], iteration, state)
        return [_has_more(loop, carried), *carried, *_computed(heads, known([*captured, *carried]))]

    inside = Builder(loop.eqn, dict(block.consts))
    again, *results = inside.add(run_on, *block.inputs, *branch.outputs)
    initial = before.add(lambda *atoms: _computed(heads, known(atoms)), *loop.captured, *loop.initial)
    loop = carrying(loop, initial, [new_var(var.aval) for var in heads.results])
    inputs = (*block.inputs, *heads.results)
    block = Block(inputs, (heads.branch, *inside.nodes), tuple(results), inside.consts)
    return _as_long_as(again, loop, block, before)


def _with_counter(loop: VarLoop, before: Builder) -> VarLoop:
    return counted(loop, before) if loop.trip_count is not None and loop.counter is None else loop


def _has_more(loop: VarLoop, carried: Sequence[jax.Array]) -> jax.Array:
    """Whether there is an iteration that begins with these carried values."""
    return carried[0] if loop.trip_count is None else carried[loop.counter or 0] < loop.trip_count


def _computed(heads: Heads, values: Mapping[Any, Any]) -> list[jax.Array]:
    """What heads compute; what their branch captures is among these values."""
    return heads.compute(*(_read(values, atom) for atom in heads.branch.captured[: -len(heads.results) or None]))


def _read(values: Mapping[Any, Any], atom: Atom) -> jax.Array:
    """A literal, or what a variable is among these values."""
    return values[atom] if isinstance(atom, Var) else jnp.asarray(atom.val, type_of(atom).dtype)


def _nothing(variables: Iterable[Var]) -> list[jax.Array]:
    return [jax.lax.full(type_of(var).shape, 0, type_of(var).dtype) for var in variables]


def _as_long_as(again: Atom, loop: VarLoop, block: VarBlock, before: Builder) -> VarLoop:
    """A loop with another block, which runs again as long as a value that it computes says so."""
    if loop.trip_count is None:
        return dataclasses.replace(loop, block=block)
    (first,) = before.add(lambda: jnp.ones((), bool))
    number = len(loop.captured)
    inputs = (*block.inputs[:number], new_var(type_of(first)), *block.inputs[number:])
    return dataclasses.replace(
        loop,
        inputs=(*loop.captured, first, *loop.initial),
        outputs=(new_var(type_of(first)), *loop.outputs),
        block=dataclasses.replace(block, inputs=inputs, outputs=(again, *block.outputs)),
        trip_count=None,
        is_buffer=(False, *loop.is_buffer),
        counter=None,
    )


def _needs_call(branches: Sequence[VarBranch], values: Mapping[Any, Any]) -> jax.Array:
    """Whether one of these branches takes a way on which it makes calls."""
    needed = jnp.zeros((), bool)
    for branch in branches:
        for k, inner in enumerate(branch.blocks):
            if _calls(inner):
                needed |= _read(values, branch.inputs[0]) == k
    return needed


def _by_variable(atoms: Iterable[Atom], values: Iterable[V]) -> dict[Var, V]:
    return {atom: value for atom, value in zip(atoms, values, strict=True) if isinstance(atom, Var)}
