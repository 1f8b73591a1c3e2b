"""The bodies of `shard_map`s, as parts of the jaxprs around them: XLA has no calls where it decides what has a buffer.

So a residual that the forward pass of a `shard_map` returns to its backward pass is computed where it is used, if it
would be without the `shard_map`.

Source: `CallInliner` of XLA.
"""

from collections.abc import Iterable, Iterator

from jax.extend.core import JaxprEqn, Var, primitives

from partjit._jax.jaxprs import Atom
from partjit._jax.shard_maps import shard_map_p
from partjit.inspect.marks import mark_p

__all__ = ["flattened"]


def flattened(eqns: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    """The equations of a jaxpr, those of the bodies of `shard_map`s instead of these; without marks.

    The arguments of a body, and what it returns to its caller, are copies, which XLA makes nowhere.
    """
    for eqn in eqns:
        if eqn.primitive is shard_map_p:
            inner = eqn.params["jaxpr"]
            inner = getattr(inner, "jaxpr", inner)
            yield from (_copy(eqn, *pair) for pair in zip(eqn.invars, inner.invars, strict=True))
            yield from flattened(inner.eqns)
            yield from (_copy(eqn, *pair) for pair in zip(inner.outvars, eqn.outvars, strict=True))
        elif eqn.primitive is not mark_p:
            yield eqn


def _copy(eqn: JaxprEqn, operand: Atom, result: Var) -> JaxprEqn:
    return eqn.replace(primitive=primitives.copy_p, invars=[operand], outvars=[result], params={}, effects=set())
