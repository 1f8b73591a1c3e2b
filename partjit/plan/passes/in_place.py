"""Which values of a block are updates in place of what it may reuse, such as a cache that a step fills further."""

from collections.abc import Collection, Iterator, Sequence

from jax.extend.core import Var

from partjit._jax.jaxprs import Atom, type_of
from partjit.plan.ir.nodes import Branch, Equation, Loop, VarBlock, VarNode
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
    if isinstance(node, Loop):
        pairs = zip(node.initial, node.outputs, strict=True)
        yield from (out for var, out in pairs if isinstance(var, Var) and var in found)
        return
    avals = [type_of(var) for var in variables(_written(node)) if var in found]
    types = {(aval.shape, aval.dtype) for aval in avals}
    yield from (out for out in node.outputs if (type_of(out).shape, type_of(out).dtype) in types)


def _written(node: VarNode) -> Sequence[Atom]:
    """What a node may write into, to give a value of the same type."""
    if isinstance(node, Equation):
        name = node.eqn.primitive.name
        return node.inputs[:1] if name in UPDATED else node.inputs if name in ONLY_INNER else ()
    return node.inputs if isinstance(node, Branch) else ()
