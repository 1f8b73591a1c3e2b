"""`jax.linearize`, and with it an eager `jax.grad`: a program becomes one that computes residuals as well, and a linear
program of residuals and tangents.

jax has the same of `jax.jvp` and partial evaluation, which traces a program anew each time; the halves that are made
here are cached with it. A residual leaves the first program with the sharding that the partitioner gives it, as in
`partjit.rules.partial_eval`, and nothing is donated for the reasons said there.

Source: the rule of `jax.jit`.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad

from partjit._jax.effects import has_registered_effects
from partjit._jax.rules import (
    Linearized,
    linearize_jaxpr,
    linearize_without_a_rule,
    prune_closed_jaxpr_outputs,
    register_linearization,
    without_own_refs,
)
from partjit._jax.shardings import UNSPECIFIED
from partjit.mesh import tracing_under
from partjit.primitive import keep_where, pjit_p
from partjit.spec import Spec


def _linearize(
    is_vjp: bool,
    nonzero: Sequence[bool],
    *primals: jax.Array,
    jaxpr: ClosedJaxpr,
    in_specs: tuple[Spec, ...],
    out_specs: tuple[Spec, ...],
    **params: Any,
) -> tuple[Any, ...]:
    if has_registered_effects(jaxpr):  # calls, which neither half may repeat
        # Partial evaluation would have a ref that is made inside leave the known half as a result.
        params |= {"jaxpr": without_own_refs(jaxpr), "in_specs": in_specs, "out_specs": out_specs}
        return linearize_without_a_rule(pjit_p, is_vjp, nonzero, *primals, **params)
    with tracing_under(params["mesh"]):  # custom rules in the jaxpr are traced now
        linear = linearize_jaxpr(jaxpr, nonzero, is_vjp)
    results, computed, specs_of_computed = _with_residuals(linear, primals, in_specs, out_specs, params)
    sources = [*((const, UNSPECIFIED) for const in jaxpr.consts), *zip(primals, in_specs, strict=True)]
    own = iter(zip(computed, specs_of_computed, strict=True))
    residuals = [next(own) if index is None else sources[index] for index in linear.forwarded]
    structured = [*own]

    def tangents(residuals: Sequence[Any], structured: Sequence[Any], *tangents_in: Any) -> list[Any]:
        args = (*residuals, *keep_where(tangents_in, nonzero), *structured)
        outs = iter(
            pjit_p.bind(
                *args,
                **params
                | {
                    "jaxpr": linear.tangents,
                    "in_specs": (*specs[0], *keep_where(in_specs, nonzero), *specs[1]),
                    "out_specs": keep_where(out_specs, linear.nonzero_out),
                    "donated_invars": (False,) * len(args),
                },
            )
        )
        return [
            next(outs) if flag else ad.Zero(aval.to_tangent_aval())
            for flag, aval in zip(linear.nonzero_out, jaxpr.out_avals, strict=True)
        ]

    specs = [spec for _, spec in residuals], [spec for _, spec in structured]
    return linear.answer(results, [value for value, _ in residuals], [value for value, _ in structured], tangents)


def _with_residuals(
    linear: Linearized,
    primals: Sequence[jax.Array],
    in_specs: tuple[Spec, ...],
    out_specs: tuple[Spec, ...],
    params: dict[str, Any],
) -> tuple[list[Any], list[Any], list[Spec]]:
    """Runs the first program: its results, and the residuals that it computes, with their specs."""
    number = len(out_specs)
    # A residual that is a result as well need not come out twice.
    outvars = linear.primals.jaxpr.outvars
    position = {id(var): i for i, var in enumerate(outvars[:number])}
    same_as_out = [position.get(id(var)) for var in outvars[number:]]
    program = prune_closed_jaxpr_outputs(linear.primals, [True] * number + [i is None for i in same_as_out])
    params = params | {
        "jaxpr": program,
        "in_specs": in_specs,
        "out_specs": (*out_specs, *[UNSPECIFIED] * same_as_out.count(None)),
        "donated_invars": (False,) * len(primals),
    }
    outs = pjit_p.bind(*primals, **params)
    results, computed = outs[:number], iter(outs[number:])
    values = [next(computed) if i is None else results[i] for i in same_as_out]
    return results, values, [UNSPECIFIED if i is None else out_specs[i] for i in same_as_out]


register_linearization(pjit_p, _linearize)
