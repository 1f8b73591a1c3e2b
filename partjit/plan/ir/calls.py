"""In which order nodes run."""

from collections.abc import Sequence
from typing import TypeAlias

from partjit._jax.effects import without_axes
from partjit.plan.ir.nodes import AnyNode, ColocatedCall, Equation
from partjit.plan.ir.walk import blocks_of

__all__ = ["Order", "orders_of"]

Order: TypeAlias = tuple[str, object]
"""What calls have in common that run one after the other: a stream, an object, or effects of jax's own."""


def orders_of(node: AnyNode) -> Sequence[Order]:
    """The orders that a node keeps its place in.

    For a call these are that of its stream and that of the object whose method it is. Equations with effects of jax's
    own have one, and loops and branches have those of what is in them.
    """
    if isinstance(node, Equation):
        effects = node.eqn.effects
        return (("effects", None),) if effects and without_axes(effects) else ()
    if isinstance(node, ColocatedCall):
        if node.callee.is_pure:
            return ()
        function = node.callee.definition.function
        return (("stream", node.stream), *((("object", function.lane),) if function.lane is not None else ()))
    return [*dict.fromkeys(order for block in blocks_of(node) for inner in block.nodes for order in orders_of(inner))]
