"""Results that no equation computes: which of them are a call's as they are, and which pass through a fragment."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from jax.extend.core import Var
from jax.sharding import Sharding

from partjit._jax.jaxprs import new_var
from partjit._jax.shardings import MaybeSharding, UnspecifiedValue
from partjit.plan.ir.nodes import Branch, ColocatedCall, Forward, Loop, VarBlock, VarNode
from partjit.plan.ir.walk import is_host, variables
from partjit.plan.passes.explicit import is_replicated_stack, results_of_hosts

__all__ = ["Kind", "forward", "origins"]

Kind = Literal["program", "iteration", "branch"]


def forward(
    block: VarBlock,
    in_shardings: Sequence[MaybeSharding],
    out_shardings: Sequence[MaybeSharding],
    kind: Kind,
    threads_reshard: bool,
) -> tuple[VarBlock, dict[Var, Sharding | None]]:
    """Adds a `Forward` for each result that has to pass through a fragment, though none computes it.

    Args:
        block: a block.
        in_shardings, out_shardings: of its arguments and results; UNSPECIFIED where nothing is known.
        kind: what it is a block of.
        threads_reshard: whether the thread of a call can reshard what it returns, by itself.

    Returns:
        The block; and the results that are those of a call, loop or branch as they are, each with the sharding in which
        it leaves, or None.
    """
    of_hosts = results_of_hosts(block)
    leaving = of_hosts.keys() & variables(block.outputs)
    on_device = leaving and {atom for node in block.nodes if not is_host(node) for atom in variables(node.inputs)}
    comes_in_as = dict(zip(block.inputs, in_shardings, strict=True))
    has_blocks = any(isinstance(of_hosts[var][0], Loop | Branch) for var in leaving)
    shared = _shared(block) if has_blocks and kind == "program" else set()
    outputs = [*block.outputs]
    forwarded: list[Forward] = []
    direct: dict[Var, Sharding | None] = {}
    for i, (atom, wanted) in enumerate(zip(block.outputs, out_shardings, strict=True)):
        is_open = isinstance(wanted, UnspecifiedValue)
        if isinstance(atom, Var) and atom in of_hosts:
            node, k = of_hosts[atom]
            own = None
            if isinstance(node, Loop | Branch):
                is_kept = is_open or _may_leave_as(node, k, wanted, comes_in_as)
                is_kept &= atom not in shared
            else:
                own = node.callee.out_shardings[k]
                is_kept = is_open or (own is not None and own.is_equivalent_to(wanted, node.callee.out_avals[k].ndim))
                # A thread may reshard an array as well, but shards only mean something in their own sharding.
                may_be_another = own is None or (threads_reshard and not node.callee.returns_shards)
                is_kept |= atom not in on_device and may_be_another
            if is_kept and atom not in direct:  # a second time it is another array
                direct[atom] = own if is_open else wanted
                continue
        elif isinstance(atom, Var):
            is_given = kind == "branch" and atom in comes_in_as and (is_open or comes_in_as[atom] == wanted)
            is_computed = atom not in comes_in_as and atom not in block.consts
            if is_given or is_computed:
                continue
        outputs[i] = var = new_var(atom.aval)
        forwarded.append(Forward((atom,), (var,)))
    return dataclasses.replace(block, nodes=(*block.nodes, *forwarded), outputs=tuple(outputs)), direct


def _may_leave_as(node: Loop | Branch, k: int, wanted: Sharding, comes_in_as: Mapping[Var, MaybeSharding]) -> bool:
    """Whether a result of a loop or branch can be had in a sharding, without resharding it afterwards."""
    if isinstance(node, Branch):
        return True
    if node.initial[k] in comes_in_as:
        return comes_in_as[node.initial[k]] == wanted
    return not node.is_buffer[k] or is_replicated_stack(wanted)


def _shared(block: VarBlock) -> set[Var]:
    """The results of loops and branches of a program that may be arrays which somebody else has as well.

    A branch may give what a fragment or another branch has made as it is, if nothing else would give it and no call
    outside of the branch reads it: that would have to pin what the caller of the program may donate.
    """
    captured = collections.Counter[Var]()
    taken = {*variables(block.outputs)}
    for node in block.nodes:
        if isinstance(node, Branch):
            captured.update({*variables(node.captured)})
        elif is_host(node):
            taken.update(variables(node.inputs))
    free: set[Var] = set()
    shared: set[Var] = set()
    for node in block.nodes:
        found = origins(node)
        free -= {var for var, times in collections.Counter(v for own in found for v in own).items() if times > 1}
        shared.update(var for var, own in zip(node.outputs, found, strict=True) if not own <= free)
        if not isinstance(node, ColocatedCall):
            free.update(var for var in node.outputs if captured[var] == 1 and var not in taken | shared)
    return shared


def origins(node: VarNode) -> list[set[Var]]:
    """For each result of a node which variables it may be as they are: those that it reads, or others inside of it."""
    found: list[set[Var]] = [set() for _ in node.outputs]
    for block in node.blocks if isinstance(node, Loop | Branch) else ():
        read = node.captured if isinstance(node, Branch) else node.inputs
        outside = {var: atom for var, atom in zip(block.inputs, read, strict=True) if isinstance(atom, Var)}
        inside: dict[Var, set[Var]] = {}
        for inner in block.nodes:
            inside.update(zip(inner.outputs, origins(inner), strict=True))
        if isinstance(node, Branch):  # an argument of an iteration that is its result is copied by the devices
            inside.update((var, {var}) for var in block.inputs)
        for own, atom in zip(found, block.outputs, strict=True):
            if isinstance(atom, Var):  # a constant passes through a fragment
                own |= {outside.get(var, var) for var in inside.get(atom, ())}
    return found
