"""`jax.experimental.jet`: the terms of a Taylor series are sharded like the value that they are of."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import jet
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from partjit.mesh import tracing_under
from partjit.primitive import pjit_p, sharding_constraint_p
from partjit.spec import Spec


def _jet(
    primals: Sequence[Any],
    series: Sequence[Sequence[Any]],
    *,
    jaxpr: ClosedJaxpr,
    in_specs: tuple[Spec, ...],
    out_specs: tuple[Spec, ...],
    **params: Any,
) -> tuple[list[Any], list[list[Any]]]:
    args, tree = jax.tree.flatten((list(primals), [list(terms) for terms in series]))
    order = len(series[0])

    def with_terms(*args: Any) -> Any:
        return jet.jet(jaxpr_as_fun(jaxpr), *tree.unflatten(args), factorial_scaled=False)  # as rules get and give them

    with tracing_under(params["mesh"]):
        terms_jaxpr, out = jax.make_jaxpr(with_terms, return_shape=True)(*args)
    params = dict(
        params,
        jaxpr=terms_jaxpr,
        in_specs=(*in_specs, *(spec for spec in in_specs for _ in range(order))),
        out_specs=(*out_specs, *(spec for spec in out_specs for _ in range(order))),
        donated_invars=(False,) * len(args),
    )
    return jax.tree.unflatten(jax.tree.structure(out), pjit_p.bind(*args, **params))


jet.jet_rules[pjit_p] = _jet
jet.deflinear(sharding_constraint_p)
