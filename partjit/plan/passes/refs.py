"""Refs that a program makes itself become values; those of its caller remain until `control_flow` meets them."""

from collections.abc import Iterable

from jax.extend.core import ClosedJaxpr, JaxprEqn

from partjit._jax.effects import uses_refs, writes_refs
from partjit._jax.jaxprs import control_flow_kind
from partjit._jax.rules import without_own_refs
from partjit._jax.sources import at_site
from partjit.calls import inner_jaxprs, makes_calls, names_of_calls

__all__ = ["without_refs"]


def without_refs(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr without refs of its own.

    Raises:
        ValueError: the predicate of a loop with calls needs a ref.
    """
    if uses_refs(jaxpr):
        _check_predicates(jaxpr.jaxpr.eqns)
    return without_own_refs(jaxpr)


def _check_predicates(eqns: Iterable[JaxprEqn]) -> None:
    """Refuses what jax does not evaluate as it is written.

    It gives a predicate the value that a ref had before the loop, whatever the body writes, and evaluates one that
    writes a ref twice, which would make its calls twice.
    """
    for eqn in eqns:
        if control_flow_kind(eqn) == "while" and makes_calls(eqn):
            predicate, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
            if uses_refs(predicate) and (writes_refs(predicate) or writes_refs(body)):
                (name, *_) = names_of_calls(inner_jaxprs(eqn))
                raise ValueError(
                    f"the colocated function {name} is called in a while_loop whose predicate needs a ref"
                    f"{at_site(eqn.source_info)}, which jax does not evaluate anew when the ref is written. Let the "
                    "body compute whether there is another iteration, and carry that"
                )
        for inner in inner_jaxprs(eqn):
            _check_predicates(inner.eqns)
