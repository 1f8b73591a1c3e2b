"""What branches do on the devices before their first calls, computed before the branch is chosen.

Where an executable ends because a call is needed next, it may as well compute what the call gets: the branch then needs
no fragment of its own before the call.

    if needed: x = device work; call(x)          becomes          x = device work; if needed: call(x)
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
from jax.extend.core import Var, jaxpr_as_fun

from partjit._jax.jaxprs import new_var
from partjit.plan.ir.build import jaxpr_of
from partjit.plan.ir.nodes import Block, VarBlock, VarBranch
from partjit.plan.ir.walk import variables, with_blocks
from partjit.plan.passes.cost import amortizes_a_dispatch
from partjit.plan.passes.cut import head_of

__all__ = ["Heads", "heads_of"]


@dataclasses.dataclass(frozen=True)
class Heads:
    """The heads of the blocks of a branch.

    Attributes:
        branch: the branch without them, which reads what they compute.
        results: the variables of that.
        compute: computes it from what the branch captures.
    """

    branch: VarBranch
    results: Sequence[Var]
    compute: Callable[..., list[jax.Array]]


def heads_of(branch: VarBranch) -> Heads:
    """The heads of a branch; none where it would cost something to compute them in vain."""
    split = [_split(block) for block in branch.blocks]
    if amortizes_a_dispatch(sum(cost for _, _, cost in split)):
        return Heads(branch, (), lambda *_: [])
    heads = [jaxpr_as_fun(jaxpr_of(head)) for head, _, _ in split]

    def compute(*captured: jax.Array) -> list[jax.Array]:
        return [result for head in heads for result in head(*captured)]

    given = [[new_var(var.aval) for var in variables(head.outputs)] for head, _, _ in split]
    blocks = []
    for k, (head, rest, _) in enumerate(split):
        slots = [variables(head.outputs) if j == k else [new_var(v.aval) for v in own] for j, own in enumerate(given)]
        inputs = (*rest.inputs, *(var for own in slots for var in own))
        blocks.append(dataclasses.replace(rest, inputs=inputs))
    results = [var for own in given for var in own]
    return Heads(with_blocks(dataclasses.replace(branch, inputs=(*branch.inputs, *results)), blocks), results, compute)


def _split(block: VarBlock) -> tuple[VarBlock, VarBlock, float]:
    """What a block computes before its first calls, the rest of it, and what the former costs."""
    head, cost = head_of(block.nodes, of_all=True)
    inside = tuple(node for k, node in enumerate(block.nodes) if k in head)
    rest = tuple(node for k, node in enumerate(block.nodes) if k not in head)
    used = {*variables(atom for node in rest for atom in node.inputs), *variables(block.outputs)}
    crossing = tuple(var for node in inside for var in node.outputs if var in used)
    before = Block(block.inputs, inside, crossing, block.consts)
    return before, dataclasses.replace(block, nodes=rest), cost
