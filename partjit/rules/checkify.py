"""`checkify`: the error passes through the program as further arguments and results, with UNSPECIFIED specs."""

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from partjit._jax.rules import checkify_jaxpr, register_checkify
from partjit._jax.shardings import UNSPECIFIED
from partjit._jax.tracing import abstractify
from partjit.primitive import pjit_p
from partjit.spec import Spec


def _check(
    ctx: Any,
    error: Any,
    enabled_errors: Any,
    *args: Any,
    jaxpr: ClosedJaxpr,
    in_specs: tuple[Spec, ...],
    out_specs: tuple[Spec, ...],
    donated_invars: tuple[bool, ...],
    **params: Any,
) -> Any:
    error_values, error_tree = jax.tree.flatten(error)
    checked_args = (*error_values, *args)
    in_avals = tuple(map(abstractify, checked_args))
    checked, out_tree = checkify_jaxpr(ctx, jaxpr, enabled_errors, error_tree, in_avals)
    outs = pjit_p.bind(
        *checked_args,
        jaxpr=checked,
        in_specs=(*[UNSPECIFIED] * len(error_values), *in_specs),
        out_specs=(*[UNSPECIFIED] * (out_tree.num_leaves - len(out_specs)), *out_specs),
        donated_invars=(*[False] * len(error_values), *donated_invars),
        **params,
    )
    return jax.tree.unflatten(out_tree, outs)


register_checkify(pjit_p, _check)
