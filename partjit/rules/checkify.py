"""`checkify`: the error passes through the program as further arguments and results, with UNSPECIFIED specs."""

import jax
from jax.extend.core import ClosedJaxpr

from partjit._jax.rules import checkify_jaxpr, register_checkify
from partjit._jax.shardings import UNSPECIFIED
from partjit._jax.tracing import abstractify, typed_like
from partjit._jax.types import PyTree
from partjit.primitive import pjit_p
from partjit.spec import Spec


def _check(
    ctx: object,
    error: PyTree,
    enabled_errors: object,
    *args: object,
    jaxpr: ClosedJaxpr,
    in_specs: tuple[Spec, ...],
    out_specs: tuple[Spec, ...],
    donated_invars: tuple[bool, ...],
    **params: object,
) -> PyTree:
    error_values, error_tree = jax.tree.flatten(error)
    checked_args = (*error_values, *args)
    in_avals = (
        *map(abstractify, error_values),
        *(typed_like(abstractify(x), aval) for x, aval in zip(args, jaxpr.in_avals, strict=True)),
    )
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
