"""Partial evaluation: what `jax.linearize`, `jax.grad` and `jax.checkpoint` do to split a program in two.

The known half runs now, the unknown half later; what the first computes for the second are residuals. A residual
leaves the known half with the sharding the partitioner gives it, not replicated: its spec is UNSPECIFIED on both sides,
and the second half is compiled for the sharding the residual really has.

Neither half is donated anything: an argument may be a residual, `jax.checkpoint` saves all arguments to compute from
them again, and a linearized function may be called twice.
"""

import functools
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval as pe

from partjit._jax.effects import has_kept_effects, positional_effects
from partjit._jax.rules import (
    closed_call_partial_eval_custom_rule,
    move_binders_to_back,
    new_effect_handle,
    new_eqn_recipe,
    partial_eval_jaxpr_nounits_fwd,
    prune_closed_jaxpr_outputs,
)
from partjit._jax.shardings import UNSPECIFIED
from partjit.primitive import keep_where, pjit_p
from partjit.spec import Spec


def _partial_eval(
    trace: Any,
    *tracers: Any,
    jaxpr: ClosedJaxpr,
    in_specs: tuple[Spec, ...],
    out_specs: tuple[Spec, ...],
    **params: Any,
) -> list[object]:
    known_ins = [tracer.pval.is_known() for tracer in tracers]
    unknown_ins = [not known for known in known_ins]
    known_jaxpr, unknown_jaxpr, unknown_outs, _, forwarded = partial_eval_jaxpr_nounits_fwd(
        jaxpr, tuple(unknown_ins), instantiate=False
    )
    known_outs = [not unknown for unknown in unknown_outs]
    num_known_outs = sum(known_outs)
    known_out_specs = keep_where(out_specs, known_outs)

    # A residual that is a result of the known half as well need not come out twice.
    position = {id(var): i for i, var in enumerate(known_jaxpr.jaxpr.outvars[:num_known_outs])}
    same_as_out = [position.get(id(var)) for var in known_jaxpr.jaxpr.outvars[num_known_outs:]]
    known_jaxpr = prune_closed_jaxpr_outputs(
        known_jaxpr, [True] * num_known_outs + [index is None for index in same_as_out]
    )
    known_in_specs = keep_where(in_specs, known_ins)
    known_args = [tracer.pval.get_known() for tracer in tracers if tracer.pval.is_known()]
    known_params = dict(
        params,
        jaxpr=known_jaxpr,
        in_specs=known_in_specs,
        out_specs=(*known_out_specs, *[UNSPECIFIED] * same_as_out.count(None)),
        donated_invars=(False,) * len(known_args),
    )
    outs = pjit_p.bind(*known_args, **known_params)
    known_results, computed = outs[:num_known_outs], iter(outs[num_known_outs:])

    # Residuals in the order the second half expects, each with its spec: an argument, a result, or a value of its own.
    own = iter(
        (next(computed), UNSPECIFIED) if index is None else (known_results[index], known_out_specs[index])
        for index in same_as_out
    )
    sources = [*((const, UNSPECIFIED) for const in jaxpr.consts), *zip(known_args, known_in_specs, strict=True)]
    residuals = [next(own) if index is None else sources[index] for index in forwarded]

    # Partial evaluation puts residuals first; `pjit_p` has them last.
    num_unknown = sum(unknown_ins)
    unknown_jaxpr = move_binders_to_back(unknown_jaxpr, [True] * len(residuals) + [False] * num_unknown)
    args = [
        *(tracer for tracer in tracers if not tracer.pval.is_known()),
        *(trace.new_instantiated_const(value) for value, _ in residuals),
    ]
    unknown_out_specs = keep_where(out_specs, unknown_outs)
    unknown_results = [pe.JaxprTracer(trace, pe.PartialVal.unknown(aval), None) for aval in unknown_jaxpr.out_avals]
    eqn = new_eqn_recipe(
        trace,
        args,
        unknown_results,
        pjit_p,
        dict(
            params,
            jaxpr=unknown_jaxpr,
            in_specs=(*keep_where(in_specs, unknown_ins), *(spec for _, spec in residuals)),
            out_specs=unknown_out_specs,
            donated_invars=(False,) * len(args),
        ),
        positional_effects(unknown_jaxpr),
        source_info_util.current(),
    )
    for tracer in unknown_results:
        tracer.recipe = eqn
    if has_kept_effects(unknown_jaxpr):
        # Nothing reads the results of an equation that is there for its effects; the trace must not lose it.
        trace.effect_handles.append(new_effect_handle(args, eqn))
    known_iter, unknown_iter = iter(known_results), iter(unknown_results)
    return [next(unknown_iter) if unknown else next(known_iter) for unknown in unknown_outs]


def _split_params(
    unknown_ins: list[bool],
    staged_ins: list[bool],
    known_outs: list[bool],
    staged_outs: list[bool],
    num_residuals_out: int,
    num_residuals_in: int,
    known_params: dict[str, Any],
    staged_params: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of `jax.checkpoint`'s two halves: residuals last out of the first, first into the second."""
    known_ins = [not unknown for unknown in unknown_ins]
    known = dict(
        known_params,
        in_specs=keep_where(known_params["in_specs"], known_ins),
        out_specs=(*keep_where(known_params["out_specs"], known_outs), *[UNSPECIFIED] * num_residuals_out),
        donated_invars=(False,) * sum(known_ins),
    )
    staged = dict(
        staged_params,
        in_specs=(*[UNSPECIFIED] * num_residuals_in, *keep_where(staged_params["in_specs"], staged_ins)),
        out_specs=keep_where(staged_params["out_specs"], staged_outs),
        donated_invars=(False,) * (num_residuals_in + sum(staged_ins)),
    )
    return known, staged


pe.custom_partial_eval_rules[pjit_p] = _partial_eval
pe.partial_eval_jaxpr_custom_rules[pjit_p] = functools.partial(
    closed_call_partial_eval_custom_rule, "jaxpr", _split_params
)
