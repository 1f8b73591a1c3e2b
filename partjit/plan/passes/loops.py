"""From jax's loops and branches with colocated calls in them to those that the host drives.

Everything that can be is said in equations of the devices: the slice that a turn takes, the slice that it writes, the
number of the turn, the predicate. A loop is then a body from carried values to carried values. It is turned so that
what comes before the first call that the devices wait for stands at the end of the turn before, where it is compiled
together with what comes after the last one:

    for each turn:  head; call; tail      becomes      head; for each turn:  call; tail and the next head

The first head is then a part of what stands before the loop.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var, jaxpr_as_fun
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from partjit._jax.jaxprs import new_var, scan_counts
from partjit.plan.ir.control_flow import branch_p, is_host, loop_p
from partjit.plan.ir.flat import Equations, Flat, live, renamed, variables
from partjit.plan.passes.cut import WORTH_A_DISPATCH, head_of
from partjit.primitive import device_witness, sharding_constraint_p
from partjit.spec import ParsedPartitionSpec

__all__ = ["add_branch", "add_scan", "add_while", "own_initial_values"]


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A loop being made.

    Attributes:
        body: a program of the captured and then the carried values.
        captured: the values from outside that each turn reads.
        initial: the carried values of the first turn.
        outvars: the variables of the carried values after the last one.
        turns: how many there are; None if it runs while the first carried value is true.
        is_buffer: for each carried value whether each turn writes a slice of it.
        counter: the variable of a carried value that counts the turns; it may not be carried any more.
    """

    body: Flat
    captured: tuple[Any, ...]
    initial: tuple[Any, ...]
    outvars: tuple[Any, ...]
    turns: int | None
    is_buffer: tuple[bool, ...]
    counter: Any = None

    @property
    def params(self) -> tuple[Any, ...]:
        """The variables of the carried values in a turn."""
        return self.body.invars[len(self.captured) :]


# From jax's equations


def add_scan(eqn: Any, body: Flat, used: Sequence[bool], mesh: Mesh, out: Equations) -> dict[Any, Any]:
    """Adds a scan.

    Args:
        eqn: its equation.
        body: what one turn does.
        used: which of its results are needed.
        mesh: that of the program, maybe empty.
        out: what is added to.

    Returns:
        What the variables of the results are.
    """
    num_consts, num_carry = scan_counts(eqn)
    length = eqn.params["length"]
    consts, carries, stacks = _split(eqn.invars, num_consts, num_carry)
    own_consts, own_carries, own_slices = _split(body.invars, num_consts, num_carry)
    slices = body.outvars[num_carry:]
    wanted = [k for k in range(len(slices)) if used[num_carry + k]]

    def empty(k: int) -> Any:
        aval = slices[k].aval
        (buffer,) = out.add(lambda: jax.lax.full((length, *aval.shape), 0, aval.dtype))
        return buffer

    if not length:
        results = [*carries, *(empty(k) if k in wanted else None for k in range(len(slices)))]
        return {var: atom for var, atom in zip(eqn.outvars, results, strict=True) if atom is not None}
    turn = Equations(eqn)
    (first,) = out.add(lambda: jax.lax.full((), 0, jnp.int32))
    i = new_var(first.aval)
    position = turn.add(lambda i: length - 1 - i, i)[0] if eqn.params["reverse"] else i
    read = {}
    own_stacks = [new_var(stack.aval) for stack in stacks]
    for var, stack in zip(own_slices, own_stacks, strict=True):
        (read[var],) = turn.add(lambda s, i: jax.lax.dynamic_index_in_dim(s, i, 0, keepdims=False), stack, position)
    outer = (*own_consts, *own_carries)
    inner = dataclasses.replace(body, invars=(*outer, *own_slices))
    values = turn.inline(inner, [*outer, *read.values()])
    buffers = [new_var(_stacked(slices[k].aval, length)) for k in wanted]
    written = [
        turn.add(
            lambda s, x, i: jax.lax.dynamic_update_index_in_dim(s, x, i, 0), buffer, values[num_carry + k], position
        )[0]
        for k, buffer in zip(wanted, buffers, strict=True)
    ]
    (following,) = turn.add(lambda i: i + 1, i)
    invars = (*own_consts, *own_stacks, i, *own_carries, *buffers)
    outvars = (following, *values[:num_carry], *written)
    results = tuple(new_var(var.aval) for var in (i, *own_carries, *buffers))
    unchanged = _add_loop(
        _Loop(
            Flat(invars, outvars, tuple(turn.eqns), turn.consts),
            (*consts, *(_whole(stack, mesh, out) for stack in stacks)),
            (first, *carries, *(_whole(empty(k), mesh, out) for k in wanted)),
            results,
            length,
            (False,) * (1 + num_carry) + (True,) * len(wanted),
            i,
        ),
        {var for var, flag in zip(results[1 : 1 + num_carry], used, strict=False) if flag}
        | {*results[1 + num_carry :]},
        out,
    )
    of_stacks = {eqn.outvars[num_carry + k]: var for k, var in zip(wanted, results[1 + num_carry :], strict=True)}
    of_carries = zip(eqn.outvars[:num_carry], results[1 : 1 + num_carry], strict=True)
    return of_stacks | {var: unchanged.get(result, result) for var, result in of_carries}


def add_while(eqn: Any, predicate: Flat, body: Flat, used: Sequence[bool], out: Equations) -> dict[Any, Any]:
    """Adds a `while_loop`: whether there is another turn is computed at the end of each, and before the first one.

    Args, Returns: as for `add_scan`.
    """
    of_predicate, of_body, initial = _split(eqn.invars, eqn.params["cond_nconsts"], eqn.params["body_nconsts"])
    (first,) = out.inline(predicate, [*of_predicate, *initial])
    if not isinstance(first, Var):  # it is known beforehand
        (first,) = out.add(lambda: jax.lax.full((), first.val, jnp.bool_))
    turn = Equations(eqn)
    invars = [new_var(atom.aval) for atom in (*of_predicate, *of_body, first, *initial)]
    own_predicate, own_body, (_, *own) = _split(invars, len(of_predicate), len(of_body))
    following = turn.inline(body, [*own_body, *own])
    (more,) = turn.inline(predicate, [*own_predicate, *following])
    results = tuple(new_var(atom.aval) for atom in (first, *initial))
    unchanged = _add_loop(
        _Loop(
            Flat(tuple(invars), (more, *following), tuple(turn.eqns), turn.consts),
            (*of_predicate, *of_body),
            (first, *initial),
            results,
            None,
            (False,) * len(results),
        ),
        {var for var, flag in zip(results[1:], used, strict=True) if flag},
        out,
    )
    return {var: unchanged.get(result, result) for var, result in zip(eqn.outvars, results[1:], strict=True)}


def add_branch(eqn: Any, branches: Sequence[Flat], out: Equations) -> dict[Any, Any]:
    """Adds a `cond` or `switch`.

    Args:
        eqn: its equation.
        branches: what each branch does.
        out: what is added to.

    Returns:
        What the variables of the results are.
    """
    index, *operands = eqn.invars
    if not isinstance(index, Var):
        return dict(zip(eqn.outvars, out.inline(branches[int(index.val)], operands), strict=True))
    results = [new_var(var.aval) for var in eqn.outvars]
    captured = [*dict.fromkeys(variables(operands))]
    jaxprs = []
    for branch in branches:
        inside = Equations(eqn)
        own = {atom: new_var(atom.aval) for atom in captured}
        outvars = inside.inline(branch, [own[atom] if isinstance(atom, Var) else atom for atom in operands])
        jaxprs.append(Flat(tuple(own.values()), tuple(outvars), tuple(inside.eqns), inside.consts).jaxpr)
    out.bind(branch_p, [index, *captured], results, {"branches": tuple(jaxprs)})
    return dict(zip(eqn.outvars, results, strict=True))


def _split(items: Sequence[Any], first: int, second: int) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    return items[:first], items[first : first + second], items[first + second :]


def _stacked(aval: Any, length: int) -> Any:
    return aval.update(shape=(length, *aval.shape), weak_type=False)


def _whole(stack: Any, mesh: Mesh, out: Equations) -> Any:
    """A stack of which every device has all slices, or its part of each: the turns take one after the other."""
    if mesh.empty or mesh.size == 1:
        return stack
    spec = P(None, *[P.UNCONSTRAINED] * (stack.aval.ndim - 1))
    parsed = ParsedPartitionSpec.from_user_input(spec, "a stack of slices", allow_unconstrained_dims=True)
    params = {"spec": parsed, "mesh": mesh, "witness": device_witness(mesh)}
    constrained = new_var(stack.aval)
    out.bind(sharding_constraint_p, [stack], [constrained], params)
    return constrained


# The loop itself


def _add_loop(loop: _Loop, used: set[Any], out: Equations) -> dict[Any, Any]:
    """Adds a loop of which only these results are needed; gives what the others are that no turn changes."""
    loop, unchanged = _without_unchanged(_with_own_constants(loop, out.consts), out.consts)
    loop = _turned(_needed(loop, used), out)
    params = {
        "body": loop.body.jaxpr,
        "captured": len(loop.captured),
        "turns": loop.turns,
        "is_buffer": loop.is_buffer,
    }
    out.bind(loop_p, [*loop.captured, *loop.initial], loop.outvars, params)
    return unchanged


def _with_own_constants(loop: _Loop, constants: dict[Any, Any]) -> _Loop:
    """With literals and constants from outside in the body itself, and nothing captured twice."""
    env: dict[Any, Any] = {}
    consts = dict(loop.body.consts)
    captured: dict[Any, Any] = {}
    for var, atom in zip(loop.body.invars, loop.captured, strict=False):
        if not isinstance(atom, Var):
            env[var] = atom
        elif atom in constants:
            consts[var] = constants[atom]
        elif captured.setdefault(atom, var) is not var:
            env[var] = captured[atom]
    eqns = tuple(renamed(loop.body.eqns, env))
    outvars = tuple(env.get(a, a) if isinstance(a, Var) else a for a in loop.body.outvars)
    body = Flat((*captured.values(), *loop.params), outvars, eqns, consts)
    return dataclasses.replace(loop, body=body, captured=tuple(captured))


def _without_unchanged(loop: _Loop, constants: dict[Any, Any]) -> tuple[_Loop, dict[Any, Any]]:
    """With carried values that no turn changes captured instead; also what they are after the loop."""
    changed = [var is not following for var, following in zip(loop.params, loop.body.outvars, strict=True)]
    changed[0] |= loop.turns is None  # the predicate
    if all(changed):
        return loop, {}
    same = [not flag for flag in changed]
    own = loop.body.invars[: len(loop.captured)]
    invars = (*own, *_kept(loop.params, same), *_kept(loop.params, changed))
    body = dataclasses.replace(loop.body, invars=invars, outvars=_kept(loop.body.outvars, changed))
    captured = (*loop.captured, *_kept(loop.initial, same))
    carried = _only(dataclasses.replace(loop, body=body, captured=captured), changed)
    unchanged = dict(zip(_kept(loop.outvars, same), _kept(loop.initial, same), strict=True))
    return _with_own_constants(carried, constants), unchanged


def _needed(loop: _Loop, used: set[Any]) -> _Loop:
    """Without carried values that nobody needs, inside or after it."""
    needed = [var in used for var in loop.outvars]
    needed[0] |= loop.turns is None
    while True:
        eqns, read = live(_kept(loop.body.outvars, needed), loop.body.eqns)
        grown = [flag or var in read for flag, var in zip(needed, loop.params, strict=True)]
        if grown == needed:
            break
        needed = grown
    captured = [(var, atom) for var, atom in zip(loop.body.invars, loop.captured, strict=False) if var in read]
    invars = (*(var for var, _ in captured), *_kept(loop.params, needed))
    body = Flat(invars, _kept(loop.body.outvars, needed), tuple(eqns), loop.body.consts)
    return _only(dataclasses.replace(loop, body=body, captured=tuple(atom for _, atom in captured)), needed)


def _only(loop: _Loop, flags: Sequence[bool]) -> _Loop:
    """With these carried values; the body has only them already."""
    return dataclasses.replace(
        loop,
        initial=_kept(loop.initial, flags),
        outvars=_kept(loop.outvars, flags),
        is_buffer=_kept(loop.is_buffer, flags),
    )


def _kept(items: Sequence[Any], flags: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(item for item, flag in zip(items, flags, strict=True) if flag)


# Turning it


def _turned(loop: _Loop, out: Equations) -> _Loop:
    """With the head of each turn at the end of the one before, if that saves a dispatch."""
    head, cost = head_of(loop.body.eqns)
    if not head:
        return loop
    is_dear = cost > WORTH_A_DISPATCH
    if is_dear and loop.turns is not None and loop.counter not in loop.params:
        loop = _counted(loop, out)
    body = loop.body
    inside = [eqn for k, eqn in enumerate(body.eqns) if k in head]
    rest = [eqn for k, eqn in enumerate(body.eqns) if k not in head]
    read = {*variables([atom for eqn in rest for atom in eqn.invars]), *variables(body.outvars)}
    crossing = [var for eqn in inside for var in eqn.outvars if var in read]
    consts = {var: body.consts[var] for eqn in inside for var in variables(eqn.invars) if var in body.consts}
    program = Flat(body.invars, tuple(crossing), tuple(inside), consts)
    following = Equations(rest[0])
    own = body.invars[: len(loop.captured)]
    before: Any = None
    again: Any = None
    if is_dear and loop.turns is None:
        before, again = loop.initial[0], body.outvars[0]
    elif is_dear:  # there is a first turn, but maybe no next one
        counter = body.outvars[loop.params.index(loop.counter)]
        (again,) = following.add(lambda i: i < loop.turns, counter)
    initial = _if(before, program, [*loop.captured, *loop.initial], out)
    ahead = _if(again, program, [*own, *body.outvars], following)
    turned = Flat(
        (*own, *loop.params, *crossing),
        (*body.outvars, *ahead),
        (*rest, *following.eqns),
        {**body.consts, **following.consts},
    )
    return dataclasses.replace(
        loop,
        body=turned,
        initial=(*loop.initial, *initial),
        outvars=(*loop.outvars, *(new_var(var.aval) for var in crossing)),
        is_buffer=(*loop.is_buffer, *[False] * len(crossing)),
    )


def _counted(loop: _Loop, out: Equations) -> _Loop:
    """With a carried value that is the number of the turn."""
    count = Equations(loop.body.eqns[0])
    (first,) = out.add(lambda: jax.lax.full((), 0, jnp.int32))
    i = new_var(first.aval)
    (following,) = count.add(lambda i: i + 1, i)
    body = Flat(
        (*loop.body.invars, i),
        (*loop.body.outvars, following),
        (*loop.body.eqns, *count.eqns),
        loop.body.consts,
    )
    return dataclasses.replace(
        loop,
        body=body,
        initial=(*loop.initial, first),
        outvars=(*loop.outvars, new_var(first.aval)),
        is_buffer=(*loop.is_buffer, False),
        counter=i,
    )


def _if(predicate: Any, program: Flat, atoms: Sequence[Any], out: Equations) -> list[Any]:
    """The results of a program on the devices, or anything where the predicate is false."""
    if predicate is None:
        return out.inline(program, atoms)
    run = jaxpr_as_fun(program.jaxpr)

    def otherwise(*_: Any) -> list[Any]:
        return [jax.lax.full(var.aval.shape, 0, var.aval.dtype) for var in program.outvars]

    return out.add(lambda flag, *args: jax.lax.cond(flag, run, otherwise, *args), predicate, *atoms)


def own_initial_values(flat: Flat) -> Flat:
    """With copies of what loops start from, where somebody else has it as well: they give its memory away."""
    uses = collections.Counter(variables([*flat.outvars, *(atom for eqn in flat.eqns for atom in eqn.invars)]))
    computed = [var for eqn in flat.eqns if not is_host(eqn) for var in eqn.outvars]
    single = {var for var in computed if uses[var] == 1}
    eqns: list[Any] = []
    for eqn in flat.eqns:
        if eqn.primitive is loop_p:
            copies = Equations(eqn)
            captured = eqn.params["captured"]
            initial = [
                atom if isinstance(atom, Var) and atom in single else copies.add(jnp.copy, atom)[0]
                for atom in eqn.invars[captured:]
            ]
            eqns += copies.eqns
            eqn = eqn.replace(invars=[*eqn.invars[:captured], *initial])
        eqns.append(eqn)
    return dataclasses.replace(flat, eqns=tuple(eqns))
