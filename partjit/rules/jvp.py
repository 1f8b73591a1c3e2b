"""`jax.jvp`: a tangent is sharded like its primal. A constraint is linear: its tangent is constrained alike."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad

from partjit._jax.rules import jvp_jaxpr
from partjit.mesh import tracing_under
from partjit.primitive import keep_where, pjit_p, sharding_constraint_p
from partjit.spec import Spec


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    jaxpr: ClosedJaxpr,
    in_specs: tuple[Spec, ...],
    out_specs: tuple[Spec, ...],
    **params: Any,
) -> tuple[list[Any], list[Any]]:
    nonzero_in = [type(tangent) is not ad.Zero for tangent in tangents]
    with tracing_under(params["mesh"]):  # custom rules in the jaxpr are traced now
        jvp, nonzero_out = jvp_jaxpr(jaxpr, nonzero_in, instantiate=False)
    params = dict(
        params,
        jaxpr=jvp,
        in_specs=(*in_specs, *keep_where(in_specs, nonzero_in)),
        out_specs=(*out_specs, *keep_where(out_specs, nonzero_out)),
        # Nothing is donated: the primals may be needed for a second tangent.
        donated_invars=(False,) * (len(in_specs) + sum(nonzero_in)),
    )
    outs = pjit_p.bind(*primals, *keep_where(tangents, nonzero_in), **params)
    primals_out, nonzero_tangents = outs[: len(out_specs)], iter(outs[len(out_specs) :])
    return primals_out, [
        next(nonzero_tangents) if nonzero else ad.Zero(aval.to_tangent_aval())
        for nonzero, aval in zip(nonzero_out, jaxpr.out_avals, strict=True)
    ]


ad.primitive_jvps[pjit_p] = _jvp
ad.deflinear2(sharding_constraint_p, lambda ct, _, **params: (sharding_constraint_p.bind(ct, **params),))
