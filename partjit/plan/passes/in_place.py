"""Which values of a block are updates in place of what it may reuse, such as a cache that a step fills further."""

from collections.abc import Collection, Iterator

from jax.extend.core import Var

from partjit.plan.ir.nodes import Branch, ColocatedCall, Loop, VarBlock, VarNode
from partjit.plan.ir.walk import variables
from partjit.plan.passes.cost import ONLY_INNER, UPDATED

__all__ = ["updated_in_place"]


def updated_in_place(block: VarBlock, given_up: Collection[Var]) -> frozenset[Var]:
    """What may be reused of what a block is given, and what is written into that, in its nodes.

    Args:
        block: the block.
        given_up: what may be reused.
    """
    found = {*given_up}
    if found:
        for node in block.nodes:
            found.update(_updates(node, found))
    return frozenset(found)


def _updates(node: VarNode, found: Collection[Var]) -> Iterator[Var]:
    if isinstance(node, ColocatedCall):
        return
    if isinstance(node, Loop):
        pairs = zip(node.initial, node.outputs, strict=True)
        yield from (out for var, out in pairs if isinstance(var, Var) and var in found)
        return
    inputs = node.inputs
    if not isinstance(node, Branch):
        name = node.eqn.primitive.name
        if name in UPDATED:
            inputs = inputs[:1]
        elif name not in ONLY_INNER:
            return
    types = {(var.aval.shape, var.aval.dtype) for var in variables(inputs) if var in found}
    yield from (out for out in node.outputs if (out.aval.shape, out.aval.dtype) in types)
