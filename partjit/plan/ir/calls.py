"""Where the colocated calls in jaxprs are, and in which order calls run."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from partjit._jax.caches import weakref_cache
from partjit._jax.effects import without_axes
from partjit._jax.tracing import low_jaxpr
from partjit.colocated.ir.primitive import colocated_call_p
from partjit.colocated.runtime.streams import Stream
from partjit.plan.ir.nodes import AnyNode, ColocatedCall, Equation, blocks_of

__all__ = [
    "Order",
    "has_calls",
    "inner_jaxprs",
    "is_program_with_calls",
    "makes_calls",
    "names_of_calls",
    "orders_of",
    "streams_of",
]

_WITHOUT_JAXPRS = frozenset({bool, int, float, str, type(None)})


def inner_jaxprs(eqn: JaxprEqn) -> Sequence[Jaxpr]:
    """The jaxprs among the parameters of an equation. Most have none, and this is asked of every equation."""
    for value in eqn.params.values():
        if type(value) not in _WITHOUT_JAXPRS:
            return [*jaxprs_in_params(eqn.params)]
    return ()


@weakref_cache
def _calls(jaxpr: Jaxpr) -> Sequence[tuple[str, Stream | None]]:
    """The name and the stream of each colocated call in a jaxpr, at any depth."""
    found: list[tuple[str, Stream | None]] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is colocated_call_p:
            found.append((eqn.params["callee"].name, eqn.params["stream"]))
        else:
            for inner in inner_jaxprs(eqn):
                found += _calls(inner)
    return found


def has_calls(jaxpr: Jaxpr) -> bool:
    """Whether there is a colocated call in a jaxpr, at any depth."""
    return bool(_calls(jaxpr))


def is_program_with_calls(jaxpr: ClosedJaxpr) -> bool:
    """Whether a program makes colocated calls, also in equations that hide what they are made of."""
    return has_calls(low_jaxpr(jaxpr).jaxpr)


def makes_calls(eqn: JaxprEqn) -> bool:
    """Whether there is a colocated call inside of an equation, at any depth."""
    inner = inner_jaxprs(eqn)
    return bool(inner) and any(map(has_calls, inner))


def streams_of(jaxpr: Jaxpr) -> set[Stream]:
    """The streams that a jaxpr itself puts calls on, at any depth."""
    return {stream for _, stream in _calls(jaxpr) if stream is not None}


def names_of_calls(jaxprs: Iterable[Jaxpr]) -> list[str]:
    """The names of the colocated functions that jaxprs call, at any depth."""
    return sorted({name for jaxpr in jaxprs for name, _ in _calls(jaxpr)})


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
