"""Refs (mutable arrays): discharging turns each ref argument into a value that comes in and goes out with its spec."""

from collections.abc import Sequence
from typing import Any

from partjit import _compat
from partjit.primitive import pjit_p
from partjit.spec import Spec


def _discharge(
    ctx: Any,
    in_avals: Sequence[Any],
    *args: Any,
    jaxpr: Any,
    in_specs: tuple[Spec, ...],
    out_specs: tuple[Spec, ...],
    **params: Any,
) -> tuple[list[Any], list[Any]]:
    is_ref = [isinstance(aval, _compat.AbstractRef) for aval in in_avals]
    outs = pjit_p.bind(
        *args,
        jaxpr=_compat.discharge_jaxpr(ctx, jaxpr),
        in_specs=in_specs,
        out_specs=(*out_specs, *(spec for spec, ref in zip(in_specs, is_ref, strict=True) if ref)),
        **params,
    )
    results, new_values = outs[: len(out_specs)], iter(outs[len(out_specs) :])
    return [next(new_values) if ref else None for ref in is_ref], results


_compat.register_discharge(pjit_p, _discharge)
