"""Where the colocated calls in jaxprs are, and in which order calls run."""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import jaxprs_in_params

from partjit._jax.caches import weakref_cache
from partjit._jax.effects import without_axes
from partjit.colocated.ir.primitive import colocated_call_p
from partjit.colocated.runtime.streams import Stream
from partjit.plan.ir.nodes import AnyNode, ColocatedCall, Equation, blocks_of

__all__ = [
    "has_calls",
    "has_effects",
    "inner_jaxprs",
    "makes_calls",
    "names_of_calls",
    "orders_of",
    "streams_of",
]

_WITHOUT_JAXPRS = (bool, int, float, str, type(None))


def inner_jaxprs(eqn: Any) -> Sequence[Any]:
    """The jaxprs among the parameters of an equation. Most have none, and this is asked of every equation."""
    for value in eqn.params.values():
        if not isinstance(value, _WITHOUT_JAXPRS):
            return [*jaxprs_in_params(eqn.params)]
    return ()


@weakref_cache
def has_calls(jaxpr: Any) -> bool:
    """Whether there is a colocated call in a jaxpr, at any depth."""
    return any(eqn.primitive is colocated_call_p or makes_calls(eqn) for eqn in jaxpr.eqns)


def makes_calls(eqn: Any) -> bool:
    """Whether there is a colocated call inside of an equation, at any depth."""
    return any(map(has_calls, inner_jaxprs(eqn)))


@weakref_cache
def streams_of(jaxpr: Any) -> frozenset[Stream]:
    """The streams that a jaxpr itself puts calls on, at any depth."""
    return frozenset({call.params["stream"] for call in _calls(jaxpr)} - {None})


def names_of_calls(eqn: Any) -> list[str]:
    """The names of the colocated functions that are called inside of an equation, at any depth."""
    return sorted({call.params["callee"].name for jaxpr in inner_jaxprs(eqn) for call in _calls(jaxpr)})


def _calls(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive is colocated_call_p:
            yield eqn
        elif makes_calls(eqn):
            for inner in inner_jaxprs(eqn):
                yield from _calls(inner)


def has_effects(eqn: Any) -> bool:
    """Whether an equation has effects, other than that of naming an axis of the mesh."""
    return bool(eqn.effects) and bool(without_axes(eqn.effects))


def orders_of(node: AnyNode) -> Sequence[Any]:
    """The orders that a node keeps its place in.

    For a call these are that of its stream and that of the object whose method it is. Equations with effects of jax's
    own have one, and loops and branches have those of what is in them.
    """
    if isinstance(node, Equation):
        return ("effects",) if has_effects(node.eqn) else ()
    if isinstance(node, ColocatedCall):
        if node.callee.is_pure:
            return ()
        function = node.callee.definition.function
        return (("stream", node.stream), *((("object", function.lane),) if function.lane is not None else ()))
    return [*dict.fromkeys(order for block in blocks_of(node) for inner in block.nodes for order in orders_of(inner))]
