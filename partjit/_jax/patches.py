"""Rules of jax that partjit replaces, for loops and branches with equations that must be evaluated exactly as often as
the program says.
"""

import dataclasses
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

from jax._src import ad_checkpoint, core, effects, source_info_util
from jax._src.interpreters import ad, batching
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax.control_flow import conditionals, loops

from partjit._jax.jaxprs import MERGED_JAXPR
from partjit._jax.rules import batch_jaxpr

pe: Any = _partial_eval  # its types differ from version to version

Find = Callable[[Sequence[Any]], Sequence[Any]]
"""Gives, of some jaxprs, the equations inside of them that a rule has to be careful with."""

Refuse = Callable[[str, Sequence[Any]], None]
"""Raises for such equations in a loop or branch of a kind."""


def guard_batching(find: Find, refuse: Refuse) -> None:
    """Has `refuse` called where a batched predicate would make jax evaluate equations that `find` finds for all
    examples: both branches of a `cond`, and the body of a `while_loop` for examples that are done.
    """
    batchers = batching.fancy_primitive_batchers
    batch_cond, batch_while = batchers[conditionals.cond_p], batchers[loops.while_p]

    def guarded_cond(axis_data: Any, args: Any, dims: Any, **params: Any) -> Any:
        # What depends on the platform is asked for anew, and not for each example.
        if dims[0] is not None and "branches_platforms" not in params:
            found = find(params["branches"])
            if found:
                refuse("cond", found)
        return batch_cond(axis_data, args, dims, **params)

    def guarded_while(axis_data: Any, args: Any, dims: Any, **params: Any) -> Any:
        found = find([params["cond_jaxpr"], params["body_jaxpr"]])
        if found and _predicate_is_batched(axis_data, dims, **params):
            refuse("while_loop", found)
        return batch_while(axis_data, args, dims, **params)

    batchers[conditionals.cond_p], batchers[loops.while_p] = guarded_cond, guarded_while


def _predicate_is_batched(
    axis_data: Any, dims: Any, *, cond_nconsts: int, cond_jaxpr: Any, body_nconsts: int, body_jaxpr: Any
) -> bool:
    is_batched = [dim is not None for dim in dims]
    of_body, carry = is_batched[cond_nconsts:][:body_nconsts], is_batched[cond_nconsts + body_nconsts :]
    grown = None
    while carry != grown:  # what the body makes of a batched value is carried to its next iteration
        _, out = batch_jaxpr(body_jaxpr, axis_data, [*of_body, *carry])
        grown, carry = carry, [*map(operator.or_, carry, out)]
    _, (predicate,) = batch_jaxpr(cond_jaxpr, axis_data, [*is_batched[:cond_nconsts], *carry])
    return bool(predicate)


def guard_while_loops(find: Find, refuse: Refuse) -> None:
    """Has partial evaluation leave alone what it would evaluate twice: of a `while_loop` it computes the known results
    now and all of it again for the others, and under `jax.checkpoint` all of it again in any case.
    """
    whole, custom = pe.custom_partial_eval_rules, pe.partial_eval_jaxpr_custom_rules
    evaluate, evaluate_custom = whole[loops.while_p], custom[loops.while_p]

    def jaxprs(params: Any) -> list[Any]:
        return [params["cond_jaxpr"], params["body_jaxpr"]]

    def guarded(trace: Any, *tracers: Any, **params: Any) -> Any:
        if not all(tracer.is_known() for tracer in tracers):
            found = find(jaxprs(params))
            if found:
                refuse("while_loop", found)
        return evaluate(trace, *tracers, **params)

    def guarded_custom(saveable: Any, unknown: Any, available: Any, eqn: Any) -> Any:
        found = find(jaxprs(eqn.params))
        if not found:
            return evaluate_custom(saveable, unknown, available, eqn)
        if any(unknown):
            refuse("while_loop", found)
        return eqn, None, [False] * len(eqn.outvars), [False] * len(eqn.outvars), []

    whole[loops.while_p], custom[loops.while_p] = guarded, guarded_custom


def keep_in_scans(is_kept: Callable[[Any], bool]) -> None:
    """Keeps equations where they are in a `scan` that is differentiated: jax moves what depends on no iteration out of
    it, and evaluates it once, whatever its effects.
    """

    def kept(jaxpr: Any) -> Any:
        if not any(map(is_kept, jaxpr.jaxpr.eqns)):
            return jaxpr
        eqns = [
            eqn.replace(primitive=_staged_p, params={"eqn": eqn}) if is_kept(eqn) else eqn for eqn in jaxpr.jaxpr.eqns
        ]
        return jaxpr.replace(eqns=eqns) if MERGED_JAXPR else jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(eqns=eqns))

    def hoist(jaxpr: Any, *args: Any) -> Any:
        return loops_module._scan_known_hoisting(kept(jaxpr), *args)

    def split(jaxpr: Any, *args: Any) -> Any:
        return pe.partial_eval_jaxpr_nounits(kept(jaxpr), *args)

    # jax's own rules, with another function in the one place where they move equations.
    loops_module: Any = loops
    splitting = types.SimpleNamespace(**{**vars(pe), "partial_eval_jaxpr_nounits": split})
    for table, replaced in (
        (ad.primitive_linearizations, {"_scan_known_hoisting": hoist}),
        (pe.custom_partial_eval_rules, {"_scan_known_hoisting": hoist}),
        (pe.partial_eval_jaxpr_custom_rules, {"pe": splitting}),
    ):
        table[loops.scan_p] = _with_globals(table[loops.scan_p], replaced)


def _with_globals(function: Any, replaced: dict[str, Any]) -> Any:
    """A copy of a function that sees other things under some of its global names."""
    assert {*replaced} <= {*function.__code__.co_names}
    namespace = {**function.__globals__, **replaced}
    copy = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_staged_p = core.Primitive("staged")
_staged_p.multiple_results = True


def _stage(trace: Any, *tracers: Any, eqn: Any) -> list[Any]:
    """Partial evaluation puts `eqn` into the unknown half, even if all of its arguments are known."""
    tracers = tuple(map(trace.instantiate_const, tracers))
    outs = [pe.JaxprTracer(trace, pe.PartialVal.unknown(var.aval), None) for var in eqn.outvars]
    source = source_info_util.current().replace(name_stack=trace._current_truncated_name_stack())
    positions = {
        effect.replace(input=eqn.invars.index(effect.input)) if isinstance(effect, effects.JaxprInputEffect) else effect
        for effect in eqn.effects
    }
    recipe = pe.new_eqn_recipe(trace, tracers, outs, eqn.primitive, eqn.params, positions, source)
    for out in outs:
        out.recipe = recipe
    trace.effect_handles.append(pe.EffectHandle(tracers, recipe))
    return outs


pe.custom_partial_eval_rules[_staged_p] = _stage


IsSaved = Callable[[Any, dict[str, Any]], bool]
"""Whether the results of an equation, given by its primitive and parameters, have to be saved."""


def save_under_checkpoint(is_saved: IsSaved) -> None:
    """Has `jax.checkpoint` save the results of equations, whatever its policy."""
    evaluate = pe.custom_partial_eval_rules[ad_checkpoint.remat_p]

    def saving(trace: Any, *tracers: Any, jaxpr: Any, policy: Any, **params: Any) -> Any:
        if is_saved(ad_checkpoint.remat_p, {"jaxpr": jaxpr}) and not isinstance(policy, _Saving):
            policy = _Saving(policy or ad_checkpoint.nothing_saveable, is_saved)
        return evaluate(trace, *tracers, jaxpr=jaxpr, policy=policy, **params)

    pe.custom_partial_eval_rules[ad_checkpoint.remat_p] = saving


@dataclasses.dataclass(frozen=True, repr=False)
class _Saving:
    """A policy that saves what has to be saved, and otherwise does as another one says."""

    policy: Any
    is_saved: IsSaved

    def __repr__(self) -> str:
        return repr(self.policy)

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        return self.is_saved(primitive, params) or self.policy(primitive, *avals, **params)
