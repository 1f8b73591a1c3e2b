"""Dead code elimination: unused results and arguments leave the program, effects stay."""

from collections.abc import Sequence

from jax.extend.core import JaxprEqn, new_jaxpr_eqn

from partjit._jax.rules import Dce, eqn_effects, register_dce
from partjit.primitive import keep_where, pjit_p


def _dce(used_outputs: Sequence[bool], eqn: JaxprEqn, dce: Dce) -> tuple[list[bool], JaxprEqn | None]:
    if not any(used_outputs) and not dce.has_effects(eqn):
        return [False] * len(eqn.invars), None
    jaxpr, used_inputs = dce(eqn.params["jaxpr"], tuple(used_outputs))
    if all(used_inputs) and all(used_outputs) and len(jaxpr.eqns) == len(eqn.params["jaxpr"].eqns):
        return used_inputs, eqn  # keep the equation, and with it what is compiled for its jaxpr
    params = dict(
        eqn.params,
        jaxpr=jaxpr,
        in_specs=keep_where(eqn.params["in_specs"], used_inputs),
        out_specs=keep_where(eqn.params["out_specs"], used_outputs),
        donated_invars=keep_where(eqn.params["donated_invars"], used_inputs),
    )
    invars = keep_where(eqn.invars, used_inputs)
    return used_inputs, new_jaxpr_eqn(
        list(invars),
        list(keep_where(eqn.outvars, used_outputs)),
        pjit_p,
        params,
        eqn_effects(jaxpr, invars),
        eqn.source_info,
        eqn.ctx,
    )


register_dce(pjit_p, _dce)
