"""How much work an equation is, roughly: enough to tell what is worth a dispatch of its own."""

import math
from typing import Any

from jax.extend.core import jaxprs_in_params

from partjit._jax.caches import weakref_cache

__all__ = ["cost_of"]

_TURNS_OF_WHILE = 10


def cost_of(eqn: Any) -> float:
    """An estimate in elementary operations, over all devices."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2.0 * _size(eqn.outvars) * math.prod(shape[dim] for dim in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * _size(eqn.outvars) * math.prod(kernel) / max(features, 1)
    inner = sum(_cost_of_jaxpr(jaxpr) for jaxpr in jaxprs_in_params(eqn.params))
    if name == "scan":
        inner *= eqn.params["length"]
    elif name == "while":
        inner *= _TURNS_OF_WHILE
    elif name == "shard_map":  # which says what one device does
        inner *= eqn.params["mesh"].size
    return inner + _size(eqn.outvars)


@weakref_cache
def _cost_of_jaxpr(jaxpr: Any) -> float:
    return sum(map(cost_of, jaxpr.eqns))


def _size(variables: Any) -> float:
    return float(sum(math.prod(getattr(var.aval, "shape", ())) for var in variables))
