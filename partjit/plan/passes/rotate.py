"""Loop rotation: what comes before the first awaited call of an iteration moves to the end of the one before.

There it is compiled together with what comes after the last call, so that an iteration takes one dispatch, not two:

    for each iteration:  head; call; tail      becomes      head; for each iteration:  call; tail and the next head

The first head then is a part of what comes before the loop. The last iteration would compute a head too many: where
that is expensive, it is under a condition inside of the fragment. To peel off the last iteration instead would compile
its pieces once more.
"""

import dataclasses
from collections.abc import Collection, Sequence

import jax
from jax.extend.core import jaxpr_as_fun

from partjit._jax.jaxprs import Atom, new_var, type_of
from partjit.plan.ir.build import Builder, jaxpr_of, with_loops
from partjit.plan.ir.nodes import Block, VarBlock, VarLoop
from partjit.plan.ir.walk import variables
from partjit.plan.passes.choose_emitted import nbytes
from partjit.plan.passes.cost import amortizes_a_dispatch
from partjit.plan.passes.counting import carrying, counted
from partjit.plan.passes.cut import head_of
from partjit.plan.passes.in_place import updated_in_place
from partjit.plan.passes.run_to_calls import runs_from_calls

__all__ = ["rotate"]

_BYTES_COPIED_IN_A_DISPATCH = 2**18
"""What is copied in about the time that it takes to dispatch one more executable in an iteration."""


def rotate(block: VarBlock) -> VarBlock:
    """Rotates the loops of a block where that saves a dispatch, or lets them run on without calls."""
    return with_loops(block, _rotated)


def _rotated(loop: VarLoop, before: Builder) -> VarLoop:
    if loop.on_devices:
        return loop
    runs_on = runs_from_calls(loop.block)
    head, cost = head_of(loop.block.nodes, of_all=runs_on)
    if not head or (not runs_on and _copies_much(loop, head)):
        return loop
    is_expensive = amortizes_a_dispatch(cost)
    if is_expensive and loop.trip_count is not None and loop.counter is None:
        loop = counted(loop, before)
    block = loop.block
    inside = [node for k, node in enumerate(block.nodes) if k in head]
    rest = [node for k, node in enumerate(block.nodes) if k not in head]
    used = {*variables(atom for node in rest for atom in node.inputs), *variables(block.outputs)}
    crossing = [var for node in inside for var in node.outputs if var in used]
    consts = {var: block.consts[var] for node in inside for var in variables(node.inputs) if var in block.consts}
    program = Block(block.inputs, tuple(inside), tuple(crossing), consts)
    after = Builder(loop.eqn, dict(block.consts))
    own = block.inputs[: len(loop.captured)]
    first: Atom | None = None
    again: Atom | None = None
    if is_expensive and loop.trip_count is None:
        first, again = loop.initial[0], block.outputs[0]
    elif is_expensive:  # there is a first iteration, but maybe no next one
        trip_count = loop.trip_count
        (again,) = after.add(lambda i: i < trip_count, block.outputs[loop.counter or 0])
    initial = _if(first, program, [*loop.captured, *loop.initial], before)
    following = _if(again, program, [*own, *block.outputs], after)
    arrived = [new_var(var.aval) for var in crossing]
    inputs = (*block.inputs, *crossing)
    block = Block(inputs, (*rest, *after.nodes), (*block.outputs, *following), after.consts)
    return carrying(dataclasses.replace(loop, block=block), initial, arrived)


def _copies_much(loop: VarLoop, head: Collection[int]) -> bool:
    """Whether a head writes into what is carried, and more is copied than a dispatch is worth.

    What the last iteration has carried is the result of the loop, also when one more head has been computed.
    """
    nodes = loop.block.nodes
    program = dataclasses.replace(loop.block, nodes=tuple(node for k, node in enumerate(nodes) if k in head))
    written = updated_in_place(program, loop.carried) - {*loop.carried}
    return nbytes(map(type_of, written)) > _BYTES_COPIED_IN_A_DISPATCH


def _if(predicate: Atom | None, program: VarBlock, atoms: Sequence[Atom], out: Builder) -> list[Atom]:
    """The results of a block on the devices, or anything where the predicate is false."""
    if predicate is None:
        return out.inline(program, atoms)
    run = jaxpr_as_fun(jaxpr_of(program))

    def otherwise(*_: jax.Array) -> list[jax.Array]:
        return [jax.lax.full(aval.shape, 0, aval.dtype) for aval in map(type_of, program.outputs)]

    return out.add(lambda flag, *args: jax.lax.cond(flag, run, otherwise, *args), predicate, *atoms)
