"""Results that no equation computes: which of them are a call's as they are, and which pass through a fragment."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from jax.extend.core import Var
from jax.sharding import Sharding

from partjit._jax.jaxprs import new_var
from partjit._jax.shardings import MaybeSharding, UnspecifiedValue
from partjit.plan.ir.nodes import AnyNode, Block, Branch, Forward, Loop, VarBlock
from partjit.plan.ir.walk import is_host, variables
from partjit.plan.passes.explicit import is_replicated_stack, results_of_hosts

__all__ = ["Kind", "forward"]

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
                is_kept &= kind != "program" or _is_separate(node, k)
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


def _is_separate(node: AnyNode, k: int) -> bool:
    """Whether a result of a node is an array of its own, and not one that went in."""
    if isinstance(node, Branch):
        return all(_is_computed(block, k) for block in node.blocks)
    # What is an argument of an iteration and its result is copied by the devices.
    return not isinstance(node, Loop) or _is_computed(node.block, k, of_arguments=True)


def _is_computed(block: Block, k: int, of_arguments: bool = False) -> bool:
    for node in block.nodes:
        for j, var in enumerate(node.outputs):
            if var is block.outputs[k]:
                return _is_separate(node, j)
    return of_arguments
