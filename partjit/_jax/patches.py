"""The rules of jax that partjit replaces, each with the behaviour of jax that forces it.

A colocated call with an effect is made exactly as often as the program says. jax's rules for loops, branches and
`jax.checkpoint` evaluate equations more often than that, or less often, whatever their effects. No rule of the call's
own primitive can prevent it: what jax does to a loop is up to the rule of the loop, which either does not ask the
equations in its body, or asks them in the same way whatever it is going to do with the answer.

`install` puts the rules in place, once, when the first colocated call is traced; importing partjit does not. Loops
and branches without calls are handed to jax's own rules, as they are.
"""

import dataclasses
import operator
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax._src import ad_checkpoint, effects
from jax._src.interpreters import ad, batching, partial_eval
from jax._src.interpreters.partial_eval import JaxprTrace, JaxprTracer
from jax._src.lax.control_flow import loops
from jax.core import AbstractValue
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive
from jax.extend.core.primitives import cond_p, remat_p, scan_p, while_p

from partjit._jax.jaxprs import MERGED_JAXPR
from partjit._jax.rules import AxisData, batch_jaxpr
from partjit._jax.types import Params

__all__ = ["PATCHES", "CallRules", "Patch", "install"]

_pe: Any = partial_eval  # the types of both differ from version to version
_loops: Any = loops
Rule = Callable[..., Any]
"""A rule of jax for a primitive, or a policy; what it takes and returns differs from table to table."""


@dataclasses.dataclass(frozen=True)
class CallRules:
    """What the rules need to know of calls.

    Attributes:
        has_effect: whether an equation is, or has in its jaxprs, a call that must be made as often as the program says.
        effectful_in: those calls in some jaxprs, at any depth.
        is_saved: whether the results of an equation, given by its primitive and parameters, are saved by
            `jax.checkpoint` whatever its policy.
        refuse_batched: raises for such calls in a loop or branch of a kind, where batching would repeat them.
        refuse_split: raises for such calls in a loop of a kind, where splitting it into two halves would repeat them.
    """

    has_effect: Callable[[JaxprEqn], bool]
    effectful_in: Callable[[Sequence[ClosedJaxpr]], Sequence[JaxprEqn]]
    is_saved: Callable[[Primitive, Params], bool]
    refuse_batched: Callable[[str, Sequence[JaxprEqn]], None]
    refuse_split: Callable[[str, Sequence[JaxprEqn]], None]


class Patch(NamedTuple):
    """One rule that is replaced.

    Attributes:
        table: jax's table of rules.
        primitive: its key.
        replacement: gives the rule that takes the place of jax's.
    """

    table: dict[Primitive, Rule]
    primitive: Primitive
    replacement: Callable[[Rule, CallRules], Rule]


def install(calls: CallRules) -> None:
    """Puts the rules in place, unless they are; each has the rule that it replaces as its `of_jax`."""
    if not _installed:
        with _lock:
            for table, primitive, replacement in PATCHES:
                # Another thread was quicker, or an earlier attempt has been interrupted.
                of_jax = getattr(table[primitive], "of_jax", table[primitive])
                rule = replacement(of_jax, calls)
                vars(rule)["of_jax"] = of_jax
                table[primitive] = rule
            _installed.append(calls)


_lock = threading.RLock()  # a finalizer that comes in between may trace a call
_installed: list[CallRules] = []


def _batch_cond(of_jax: Rule, calls: CallRules) -> Rule:
    """Refuses calls in a branch whose predicate is batched.

    jax evaluates all branches for all examples then, and selects ("assumes branches are side-effect-free"). Needless
    once jax has a registry of effects that are refused there; so far it refuses effects of its own by name.
    """

    def rule(axis_data: AxisData, args: Sequence[object], dims: Sequence[int | None], **params: Any) -> object:
        # jax asks anew for the index of branches for platforms, and not for each example.
        if dims[0] is not None and "branches_platforms" not in params:
            found = calls.effectful_in(params["branches"])
            if found:
                calls.refuse_batched("cond", found)
        return of_jax(axis_data, args, dims, **params)

    return rule


def _batch_while(of_jax: Rule, calls: CallRules) -> Rule:
    """Refuses calls in a `while_loop` whose predicate is batched.

    jax evaluates the body for all examples until the last one is done. Needless as for `cond`.
    """

    def rule(axis_data: AxisData, args: Sequence[object], dims: Sequence[int | None], **params: Any) -> object:
        found = _calls_in_while(params, calls)
        if found and _predicate_is_batched(axis_data, dims, **params):
            calls.refuse_batched("while_loop", found)
        return of_jax(axis_data, args, dims, **params)

    return rule


def _calls_in_while(params: Params, calls: CallRules) -> Sequence[JaxprEqn]:
    return calls.effectful_in([params["cond_jaxpr"], params["body_jaxpr"]])


def _predicate_is_batched(
    axis_data: AxisData,
    dims: Sequence[int | None],
    *,
    cond_nconsts: int,
    cond_jaxpr: ClosedJaxpr,
    body_nconsts: int,
    body_jaxpr: ClosedJaxpr,
) -> bool:
    is_batched = [dim is not None for dim in dims]
    of_body, carry = is_batched[cond_nconsts:][:body_nconsts], is_batched[cond_nconsts + body_nconsts :]
    grown = None
    while carry != grown:  # what the body makes of a batched value is carried to its next iteration
        _, out = batch_jaxpr(body_jaxpr, axis_data, [*of_body, *carry])
        grown, carry = carry, [*map(operator.or_, carry, out)]
    _, (predicate,) = batch_jaxpr(cond_jaxpr, axis_data, [*is_batched[:cond_nconsts], *carry])
    return bool(predicate)


def _split_while(of_jax: Rule, calls: CallRules) -> Rule:
    """Refuses calls in a `while_loop` of which some values are known and some are not.

    jax evaluates the loop for the known results, and all of it again for the others. Needless once jax refuses to
    repeat equations with an effect that is in `partial_eval_kept_effects`.
    """

    def rule(trace: JaxprTrace, *tracers: JaxprTracer, **params: object) -> object:
        if not all(tracer.is_known() for tracer in tracers):
            found = _calls_in_while(params, calls)
            if found:
                calls.refuse_split("while_loop", found)
        return of_jax(trace, *tracers, **params)

    return rule


def _split_while_under_checkpoint(of_jax: Rule, calls: CallRules) -> Rule:
    """Keeps a `while_loop` with calls out of what `jax.checkpoint` computes again.

    jax evaluates every `while_loop` again, whose residuals it could not save. Needless once it leaves loops with
    effects in the known half, as it leaves equations without a rule of their own.
    """

    def rule(saveable: Rule, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: JaxprEqn) -> object:
        found = _calls_in_while(eqn.params, calls)
        if not found:
            return of_jax(saveable, unknown, instantiated, eqn)
        if any(unknown):
            calls.refuse_split("while_loop", found)
        return eqn, None, [False] * len(eqn.outvars), [False] * len(eqn.outvars), []

    return rule


def _linearize_scan(of_jax: Rule, calls: CallRules) -> Rule:
    """Keeps calls where they are in a `scan` that is linearized.

    jax moves equations whose arguments are the same in all iterations out of it, and evaluates them once, whatever
    their effects. Needless once it leaves equations with an effect that is in `partial_eval_kept_effects`.
    """

    def hoist(jaxpr: ClosedJaxpr, *args: object) -> object:
        return _loops._scan_known_hoisting(_staged(jaxpr, calls), *args)

    careful = _with_globals(of_jax, {"_scan_known_hoisting": hoist})

    def rule(*args: object, jaxpr: ClosedJaxpr, **params: object) -> object:
        return (careful if _has_effects(jaxpr, calls) else of_jax)(*args, jaxpr=jaxpr, **params)

    return rule


def _split_scan_under_checkpoint(of_jax: Rule, calls: CallRules) -> Rule:
    """Keeps calls where they are in a `scan` under `jax.checkpoint`, for the same reason."""

    def split(jaxpr: ClosedJaxpr, *args: object) -> object:
        return _pe.partial_eval_jaxpr_nounits(_staged(jaxpr, calls), *args)

    names = types.SimpleNamespace(**{**vars(_pe), "partial_eval_jaxpr_nounits": split})
    careful = _with_globals(of_jax, {"pe": names})

    def rule(saveable: Rule, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: JaxprEqn) -> object:
        has_effects = _has_effects(eqn.params["jaxpr"], calls)
        return (careful if has_effects else of_jax)(saveable, unknown, instantiated, eqn)

    return rule


def _has_effects(jaxpr: ClosedJaxpr, calls: CallRules) -> bool:
    return any(map(calls.has_effect, jaxpr.jaxpr.eqns))


def _with_globals(function: Rule, replaced: Mapping[str, object]) -> Rule:
    """A copy of a rule of jax's that sees another function in the one place where it moves equations."""
    assert isinstance(function, types.FunctionType)
    assert {*replaced} <= {*function.__code__.co_names}
    namespace = {**function.__globals__, **replaced}
    copy = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _staged(jaxpr: Any, calls: CallRules) -> ClosedJaxpr:
    """A closed jaxpr whose calls partial evaluation leaves in the unknown half, which stays in the loop."""
    eqns = [
        eqn.replace(primitive=_staged_p, params={"eqn": eqn}) if calls.has_effect(eqn) else eqn
        for eqn in jaxpr.jaxpr.eqns
    ]
    return jaxpr.replace(eqns=eqns) if MERGED_JAXPR else jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(eqns=eqns))


_staged_p = Primitive("staged")
_staged_p.multiple_results = True


def _stage(trace: JaxprTrace, *tracers: JaxprTracer, eqn: JaxprEqn) -> list[JaxprTracer]:
    """Puts `eqn` into the unknown half, even if all of its arguments are known."""
    tracers = tuple(map(trace.instantiate_const, tracers))
    outs: list[JaxprTracer] = [_pe.JaxprTracer(trace, _pe.PartialVal.unknown(var.aval), None) for var in eqn.outvars]
    source = source_info_util.current().replace(name_stack=trace._current_truncated_name_stack())
    positions = {
        effect.replace(input=eqn.invars.index(effect.input)) if isinstance(effect, effects.JaxprInputEffect) else effect
        for effect in eqn.effects
    }
    recipe = _pe.new_eqn_recipe(trace, tracers, outs, eqn.primitive, eqn.params, positions, source)
    for out in outs:
        out.recipe = recipe
    trace.effect_handles.append(_pe.EffectHandle(tracers, recipe))
    return outs


_pe.custom_partial_eval_rules[_staged_p] = _stage


def _split_checkpoint(of_jax: Rule, calls: CallRules) -> Rule:
    """Has `jax.checkpoint` save the results of calls, whatever its policy.

    jax saves those of equations with effects, and asks the policy about others: pure calls, and functions with custom
    derivatives that make some. A rule of the call's own could say so, but jax asks the same rule in a `while_loop`,
    where nothing can be saved. Needless once that is not so, or a primitive can overrule the policy.
    """

    def rule(trace: JaxprTrace, *tracers: JaxprTracer, jaxpr: Jaxpr, policy: Rule | None, **params: object) -> object:
        if calls.is_saved(remat_p, {"jaxpr": jaxpr}) and not isinstance(policy, _SavingCalls):
            policy = _SavingCalls(policy or ad_checkpoint.nothing_saveable, calls)
        return of_jax(trace, *tracers, jaxpr=jaxpr, policy=policy, **params)

    return rule


@dataclasses.dataclass(frozen=True, repr=False)
class _SavingCalls:
    """A policy that saves results of calls, and otherwise does as another one says."""

    policy: Rule
    calls: CallRules

    def __repr__(self) -> str:
        return repr(self.policy)

    def __call__(self, primitive: Primitive, *avals: AbstractValue, **params: Any) -> object:
        return self.calls.is_saved(primitive, params) or self.policy(primitive, *avals, **params)


PATCHES = (
    Patch(batching.fancy_primitive_batchers, cond_p, _batch_cond),
    Patch(batching.fancy_primitive_batchers, while_p, _batch_while),
    Patch(_pe.custom_partial_eval_rules, while_p, _split_while),
    Patch(_pe.partial_eval_jaxpr_custom_rules, while_p, _split_while_under_checkpoint),
    Patch(ad.primitive_linearizations, scan_p, _linearize_scan),
    Patch(_pe.custom_partial_eval_rules, scan_p, _linearize_scan),  # the same hoisting
    Patch(_pe.partial_eval_jaxpr_custom_rules, scan_p, _split_scan_under_checkpoint),
    Patch(_pe.custom_partial_eval_rules, remat_p, _split_checkpoint),
)
"""All of them."""
