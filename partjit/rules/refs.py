"""Refs (mutable arrays): discharging makes each ref argument an argument and a result, both with its spec."""

from collections.abc import Sequence

from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr
from jax.ref import AbstractRef

from partjit._jax.rules import discharge_jaxpr, register_discharge
from partjit.primitive import pjit_p
from partjit.spec import Spec


def _discharge(
    ctx: object,
    in_avals: Sequence[AbstractValue],
    *args: object,
    jaxpr: ClosedJaxpr,
    in_specs: tuple[Spec, ...],
    out_specs: tuple[Spec, ...],
    **params: object,
) -> tuple[list[object], list[object]]:
    is_ref = [isinstance(aval, AbstractRef) for aval in in_avals]
    outs = pjit_p.bind(
        *args,
        jaxpr=discharge_jaxpr(ctx, jaxpr),
        in_specs=in_specs,
        out_specs=(*out_specs, *(spec for spec, ref in zip(in_specs, is_ref, strict=True) if ref)),
        **params,
    )
    results, new_values = outs[: len(out_specs)], iter(outs[len(out_specs) :])
    return [next(new_values) if ref else None for ref in is_ref], results


register_discharge(pjit_p, _discharge)
