"""Loops and branches with colocated calls in them become such that the host drives.

Everything that can be is an equation of the devices: the slice that an iteration reads, the slice that it writes, the
number of the iteration, the predicate. A loop then is a block from carried values to carried values.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Var
from jax.ref import AbstractRef
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from partjit._jax.arrays import with_weak_type
from partjit._jax.jaxprs import Atom, control_flow_kind, new_var, scan_counts, type_of
from partjit._jax.rules import with_values_of_refs
from partjit._jax.shardings import memory_of_type
from partjit.calls import makes_calls
from partjit.plan.ir.build import Builder, expanded, live, read, reading, rebuilt
from partjit.plan.ir.nodes import Block, Branch, Equation, Loop, VarBlock, VarLoop
from partjit.plan.ir.walk import variables
from partjit.plan.passes.from_numbers import Numbers, with_own_predicates
from partjit.plan.passes.own_initial import own_initial_values
from partjit.plan.passes.progressions import Progression, progressions
from partjit.primitive import keep_where
from partjit.spec import ParsedPartitionSpec

__all__ = ["control_flow"]

T = TypeVar("T")


def control_flow(block: VarBlock, mesh: Mesh, structured: Callable[..., VarBlock]) -> VarBlock:
    """Makes nodes of the loops and branches with calls in them.

    Args:
        block: a block.
        mesh: that of the program, maybe empty.
        structured: what all passes up to this one, and those that follow it, make of a closed jaxpr; `carried` says
            which of its arguments an iteration carries, and `counted` which the host knows.
    """
    makers = {var: node.eqn for node in block.nodes if isinstance(node, Equation) for var in node.outputs}

    def expand(out: Builder, used: Sequence[bool]) -> dict[Var, Atom]:
        kind, params = control_flow_kind(out.like), out.like.params
        if any(isinstance(type_of(atom), AbstractRef) for atom in out.like.invars):
            return with_values(out)
        if kind == "scan":
            num_consts, num_carry = scan_counts(out.like)
            counted = progressions(out.like, makers, out.consts)
            body = structured(params["jaxpr"], carried=slice(num_consts, num_consts + num_carry), counted=counted)
            return _scan(body, counted, used, mesh, out)
        if kind == "while":
            body = structured(params["body_jaxpr"], carried=slice(params["body_nconsts"], None))
            return _while(structured(params["cond_jaxpr"]), body, used, out)
        return _branch([structured(branch) for branch in params["branches"]], out)

    def with_values(out: Builder) -> dict[Var, Atom]:
        """The host, which has no refs, drives a loop or branch of their values."""
        eqn = out.like
        jaxpr = with_values_of_refs(eqn)
        given = [*dict.fromkeys(variables(eqn.invars))]
        results = out.inline(control_flow(Block.of_jaxpr(jaxpr), mesh, structured), given)
        return dict(zip(eqn.outvars, results, strict=True))

    return expanded(block, _makes_calls, expand)


def _makes_calls(eqn: JaxprEqn) -> bool:
    return control_flow_kind(eqn) is not None and makes_calls(eqn)


# Each of these adds to a builder what takes the place of its equation, and gives what its results are.


def _scan(
    body: VarBlock, counted: Mapping[int, Progression], used: Sequence[bool], mesh: Mesh, out: Builder
) -> dict[Var, Atom]:
    """What is `counted` of the arguments of its iterations is not carried: it follows from their numbers."""
    eqn = out.like
    num_consts, num_carry = scan_counts(eqn)
    length = eqn.params["length"]
    consts, carries, stacks = _split(eqn.invars, num_consts, num_carry)
    _, own_carries, own_slices = _split(body.inputs, num_consts, num_carry)
    slices = body.outputs[num_carry:]
    wanted = [k for k in range(len(slices)) if used[num_carry + k]]

    def empty(k: int) -> Atom:
        aval = type_of(slices[k])

        def zeros() -> jax.Array:
            stack = with_weak_type(jax.lax.full((length, *aval.shape), 0, aval.dtype), aval.weak_type)
            return stack if memory_of_type(aval) is None else jax.device_put(stack, aval.memory_space)

        (buffer,) = out.add(zeros)
        return buffer

    def write(buffer: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
        return with_weak_type(jax.lax.dynamic_update_index_in_dim(buffer, value, i, 0), buffer.weak_type)

    if not length:
        results = [*carries, *(empty(k) if k in wanted else None for k in range(len(slices)))]
        return {var: atom for var, atom in zip(eqn.outvars, results, strict=True) if atom is not None}
    kept = [k for k in range(num_carry) if num_consts + k not in counted]
    sliced = [k for k in range(len(stacks)) if num_consts + num_carry + k not in counted]
    carries, own_carries = ([own[k] for k in kept] for own in (carries, own_carries))
    stacks, own_slices = ([own[k] for k in sliced] for own in (stacks, own_slices))
    iteration = Builder(eqn)
    number = _type_of_number(body, counted)
    (first,) = out.add(lambda: with_weak_type(jax.lax.full((), 0, number.dtype), number.weak_type))
    i = new_var(number)
    position = iteration.add(lambda i: length - 1 - i, i)[0] if eqn.params["reverse"] else i
    own_stacks = [new_var(stack.aval) for stack in stacks]
    read_slices = [
        iteration.add(lambda s, i: jax.lax.dynamic_index_in_dim(s, i, 0, keepdims=False), stack, position)[0]
        for _, stack in zip(own_slices, own_stacks, strict=True)
    ]
    outer = [new_var(var.aval) for var in (*body.inputs[:num_consts], *own_carries)]
    given = iter((*outer, *read_slices))
    integers = {k: _in_iteration(i, own, type_of(body.inputs[k]), iteration) for k, own in counted.items()}
    values = iteration.inline(body, [integers[k] if k in integers else next(given) for k in range(len(body.inputs))])
    buffers = [new_var(_stacked(type_of(slices[k]), length)) for k in wanted]
    written = [
        iteration.add(write, buffer, values[num_carry + k], position)[0]
        for k, buffer in zip(wanted, buffers, strict=True)
    ]
    (following,) = iteration.add(lambda i: i + 1, i)
    results = tuple(new_var(var.aval) for var in (i, *own_carries, *buffers))
    carried = Block(
        (*outer[:num_consts], *own_stacks, i, *outer[num_consts:], *buffers),
        tuple(iteration.nodes),
        (following, *(values[k] for k in kept), *written),
        iteration.consts,
    )
    carried = with_own_predicates(carried, Numbers(counters=frozenset([i] if counted else [])))
    captured = (*consts, *(_replicated_slices(stack, mesh, out) for stack in stacks))
    initial = (first, *carries, *(_replicated_slices(empty(k), mesh, out) for k in wanted))
    is_buffer = (False,) * (1 + len(kept)) + (True,) * len(wanted)
    of_carries, of_buffers = results[1 : 1 + len(kept)], results[1 + len(kept) :]
    unchanged = _add_loop(
        Loop((*captured, *initial), results, carried, length, eqn, is_buffer, 0),
        {*keep_where(of_carries, [used[k] for k in kept]), *of_buffers},
        out,
    )
    found: dict[Var, Atom] = {eqn.outvars[num_carry + k]: var for k, var in zip(wanted, of_buffers, strict=True)}
    found.update((eqn.outvars[k], unchanged.get(var, var)) for k, var in zip(kept, of_carries, strict=True))
    for k in range(num_carry):
        if used[k] and num_consts + k in counted:
            last = functools.partial(counted[num_consts + k].in_iteration(type_of(eqn.outvars[k])), jnp.int32(length))
            (found[eqn.outvars[k]],) = out.add(last)
    return found


def _type_of_number(body: VarBlock, counted: Mapping[int, Progression]) -> ShapedArray:
    """The type of the number of an iteration: that of what is the same, which calls then get as it is."""
    same = [type_of(body.inputs[k]) for k, own in counted.items() if own == Progression(0, 1)]
    return next((aval for aval in same if aval.dtype == np.int32), ShapedArray((), np.dtype(np.int32)))


def _in_iteration(i: Var, own: Progression, aval: ShapedArray, iteration: Builder) -> Atom:
    number = type_of(i)
    is_number = own == Progression(0, 1) and (aval.dtype, aval.weak_type) == (number.dtype, number.weak_type)
    return i if is_number else iteration.add(own.in_iteration(aval), i)[0]


def _while(predicate: VarBlock, body: VarBlock, used: Sequence[bool], out: Builder) -> dict[Var, Atom]:
    """Whether there is another iteration is computed at the end of each, and before the first one."""
    eqn = out.like
    of_predicate, of_body, initial = _split(eqn.invars, eqn.params["cond_nconsts"], eqn.params["body_nconsts"])
    (first,) = out.inline(predicate, [*of_predicate, *initial])
    if not isinstance(first, Var):  # it is known beforehand
        value = first.val
        (first,) = out.add(lambda: jax.lax.full((), value, jnp.bool_))
    iteration = Builder(eqn)
    inputs = [new_var(atom.aval) for atom in (*of_predicate, *of_body, first, *initial)]
    own_predicate, own_body, (_, *own) = _split(inputs, len(of_predicate), len(of_body))
    following = iteration.inline(body, [*own_body, *own])
    (more,) = iteration.inline(predicate, [*own_predicate, *following])
    results = tuple(new_var(atom.aval) for atom in (first, *initial))
    block = Block(tuple(inputs), tuple(iteration.nodes), (more, *following), iteration.consts)
    unchanged = _add_loop(
        Loop((*of_predicate, *of_body, first, *initial), results, block, None, eqn, (False,) * len(results)),
        {*keep_where(results[1:], used)},
        out,
    )
    return {var: unchanged.get(result, result) for var, result in zip(eqn.outvars, results[1:], strict=True)}


def _branch(branches: Sequence[VarBlock], out: Builder) -> dict[Var, Atom]:
    eqn = out.like
    index, *operands = eqn.invars
    if not isinstance(index, Var):
        taken = out.inline(branches[int(index.val)], operands)
        return dict(zip(eqn.outvars, _as_weak_as(eqn.outvars, taken, out), strict=True))
    results = tuple(new_var(var.aval) for var in eqn.outvars)
    captured = [*dict.fromkeys(variables(operands))]
    blocks = []
    for branch in branches:
        inside = Builder(eqn)
        own = {atom: new_var(atom.aval) for atom in captured}
        outputs = _as_weak_as(eqn.outvars, inside.inline(branch, [read(own, atom) for atom in operands]), inside)
        blocks.append(Block(tuple(own.values()), tuple(inside.nodes), tuple(outputs), inside.consts))
    unchanged = [_given_by_all(k, captured, blocks) for k in range(len(results))]
    changed = [atom is None for atom in unchanged]
    blocks = [dataclasses.replace(block, outputs=keep_where(block.outputs, changed)) for block in blocks]
    out.nodes.append(Branch((index, *captured), keep_where(results, changed), tuple(blocks), eqn))
    return {
        var: result if atom is None else atom for var, result, atom in zip(eqn.outvars, results, unchanged, strict=True)
    }


def _as_weak_as(wanted: Sequence[Var], atoms: Sequence[Atom], out: Builder) -> list[Atom]:
    """Values with the weak types of variables: a result of a branch is weakly typed if it is in all of them."""
    weak = [type_of(var).weak_type for var in wanted]
    return [
        atom if type_of(atom).weak_type == flag else out.add(functools.partial(with_weak_type, weak_type=flag), atom)[0]
        for atom, flag in zip(atoms, weak, strict=True)
    ]


def _given_by_all(k: int, captured: Sequence[Var], blocks: Sequence[VarBlock]) -> Var | None:
    """What every branch gives as its result `k` as it is; None if they do not."""
    first, *others = [read(dict(zip(block.inputs, captured, strict=True)), block.outputs[k]) for block in blocks]
    return first if isinstance(first, Var) and first in captured and all(atom is first for atom in others) else None


def _split(items: Sequence[T], first: int, second: int) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
    return items[:first], items[first : first + second], items[first + second :]


def _stacked(aval: ShapedArray, length: int) -> ShapedArray:
    return aval.update(shape=(length, *aval.shape))


def _replicated_slices(stack: Atom, mesh: Mesh, out: Builder) -> Atom:
    """A stack that is not partitioned between its slices: the iterations take one after the other."""
    if mesh.empty or mesh.size == 1:
        return stack
    spec = P(None, *[P.UNCONSTRAINED] * (type_of(stack).ndim - 1))
    parsed = ParsedPartitionSpec.from_user_input(spec, "a stack of slices", allow_unconstrained_dims=True)
    return out.constrain(stack, parsed, mesh)


# The loop itself


def _add_loop(loop: VarLoop, used: set[Var], out: Builder) -> dict[Var, Atom]:
    """Adds a loop of which only these results are needed; gives what the others are that no iteration changes."""
    loop, unchanged = _without_unchanged(_with_own_constants(loop, out.consts), out.consts)
    out.nodes.append(_needed(loop, used))
    return unchanged


def _with_own_constants(loop: VarLoop, constants: dict[Var, ArrayLike]) -> VarLoop:
    """With literals and constants from outside in the block itself, and nothing captured twice.

    A loop in it that starts from what is a constant now gets a copy: in that place there has to be a variable.
    """
    env: dict[Var, Atom] = {}
    consts = dict(loop.block.consts)
    captured: dict[Var, Var] = {}
    for var, atom in zip(loop.block.inputs, loop.captured, strict=False):
        if not isinstance(atom, Var):
            env[var] = atom
        elif atom in constants:
            consts[var] = constants[atom]
        elif captured.setdefault(atom, var) is not var:
            env[var] = captured[atom]
    nodes = [reading(node, env) for node in loop.block.nodes]
    block = dataclasses.replace(loop.block, inputs=(*captured.values(), *loop.carried), consts=consts)
    block = own_initial_values(rebuilt(block, nodes, env))
    return dataclasses.replace(loop, block=block, inputs=(*captured, *loop.initial))


def _without_unchanged(loop: VarLoop, constants: dict[Var, ArrayLike]) -> tuple[VarLoop, dict[Var, Atom]]:
    """With carried values that no iteration changes captured instead; also what they are after the loop."""
    changed = [var is not following for var, following in zip(loop.carried, loop.block.outputs, strict=True)]
    changed[0] |= loop.trip_count is None  # the predicate
    if all(changed):
        return loop, {}
    same = [not flag for flag in changed]
    captured = (*loop.captured, *keep_where(loop.initial, same))
    own = (*loop.block.inputs[: len(loop.captured)], *keep_where(loop.carried, same))
    unchanged = dict(zip(keep_where(loop.outputs, same), keep_where(loop.initial, same), strict=True))
    return _with_own_constants(_only(loop, changed, captured, own), constants), unchanged


def _needed(loop: VarLoop, used: set[Var]) -> VarLoop:
    """Without carried values that nothing needs, inside or after it."""
    block = loop.block
    needed = [var in used for var in loop.outputs]
    needed[0] |= loop.trip_count is None
    while True:
        nodes, read_inside = live(keep_where(block.outputs, needed), block.nodes)
        grown = [flag or var in read_inside for flag, var in zip(needed, loop.carried, strict=True)]
        if grown == needed:
            break
        needed = grown
    pairs = [(var, atom) for var, atom in zip(block.inputs, loop.captured, strict=False) if var in read_inside]
    loop = dataclasses.replace(loop, block=dataclasses.replace(block, nodes=tuple(nodes)))
    return _only(loop, needed, tuple(atom for _, atom in pairs), tuple(var for var, _ in pairs))


def _only(loop: VarLoop, flags: Sequence[bool], captured: Sequence[Atom], own: Sequence[Var]) -> VarLoop:
    """A loop with some of its carried values, and with other captured ones, which are its block's `own`."""
    block = dataclasses.replace(
        loop.block, inputs=(*own, *keep_where(loop.carried, flags)), outputs=keep_where(loop.block.outputs, flags)
    )
    is_counted = loop.counter is not None and flags[loop.counter]
    return dataclasses.replace(
        loop,
        inputs=(*captured, *keep_where(loop.initial, flags)),
        outputs=keep_where(loop.outputs, flags),
        block=block,
        is_buffer=keep_where(loop.is_buffer, flags),
        counter=sum(flags[: loop.counter]) if is_counted else None,
    )
