"""Rules of primitives, for transformations whose rules differ between versions, and what these rules call."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence, Set
from typing import Any

from jax._src import checkify, core, tree_util
from jax._src.core import JaxprPpContext, JaxprPpSettings
from jax._src.interpreters import ad, batching, partial_eval
from jax._src.interpreters.batching import AxisData
from jax._src.pretty_printer import Doc
from jax._src.state import discharge
from jax._src.state.types import ReadEffect, RefEffect
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, Var, jaxpr_as_fun
from jax.ref import AbstractRef

from partjit._jax.caches import weakref_cache
from partjit._jax.jaxprs import MERGED_JAXPR, closed_jaxpr, new_var
from partjit._jax.tracing import retraced, trace_to_jaxpr
from partjit._jax.types import Params, PyTreeDef

__all__ = [
    "AxisData",
    "Dce",
    "Linearized",
    "batch_jaxpr",
    "checkify_jaxpr",
    "closed_call_partial_eval_custom_rule",
    "discharge_jaxpr",
    "eqn_effects",
    "jvp_jaxpr",
    "linearize_jaxpr",
    "linearize_without_a_rule",
    "move_binders_to_back",
    "moveaxis",
    "new_effect_handle",
    "new_eqn_recipe",
    "partial_eval_jaxpr_nounits_fwd",
    "prune_closed_jaxpr_outputs",
    "register_checkify",
    "register_dce",
    "register_discharge",
    "register_linearization",
    "register_printing",
    "register_transposition",
    "transpose_jaxpr",
    "used_arguments",
    "with_explicit_batch",
    "with_values_of_refs",
    "without_own_refs",
]

_pe: Any = partial_eval  # the types of both differ from version to version
_discharge: Any = discharge

# Private in jax 0.10, some also in 0.12.
closed_call_partial_eval_custom_rule = _pe.closed_call_partial_eval_custom_rule
move_binders_to_back = _pe.move_binders_to_back
new_effect_handle = _pe.EffectHandle
new_eqn_recipe = _pe.new_eqn_recipe
partial_eval_jaxpr_nounits_fwd = _pe.partial_eval_jaxpr_nounits_fwd
prune_closed_jaxpr_outputs = _pe.prune_closed_jaxpr_outputs
jvp_jaxpr = ad.jvp_jaxpr
moveaxis = batching.moveaxis  # unlike that of `jnp`, it is no jitted function and makes one equation
eqn_effects = core.eqn_effects


# Linearization


@dataclasses.dataclass(frozen=True)
class Linearized:
    """A program split in two for linearization.

    Attributes:
        primals: from arguments to results, residuals and structured residuals.
        tangents: from residuals, tangents that are not zero and structured residuals to tangents that are not zero.
        nonzero_out: for each result whether its tangent may be other than zero.
        forwarded: for each residual the constant or argument that it is, or None if it is computed.
        answer: what the rule of a primitive returns, from results, residuals, structured residuals and a function of
            both and of tangents.
    """

    primals: ClosedJaxpr
    tangents: ClosedJaxpr
    nonzero_out: Sequence[bool]
    forwarded: Sequence[int | None]
    answer: Callable[[Sequence[Any], Sequence[Any], Sequence[Any], Callable[..., Any]], tuple[Any, ...]]


def linearize_jaxpr(jaxpr: ClosedJaxpr, nonzero: Sequence[bool], is_vjp: bool) -> Linearized:
    """Splits a program, where the tangents of these arguments are not zero; cached with it."""
    linearize: Any = ad.linearize_jaxpr
    primals, residuals, nonzero_out, forwarded, tangents = linearize(jaxpr, tuple(nonzero), is_vjp=is_vjp)

    def answer(results: Any, values: Any, structured: Any, fun: Any) -> tuple[Any, ...]:
        if isinstance(residuals, int):  # jax 0.10 knows no structured residuals
            return results, nonzero_out, values, lambda residuals, *tangents: fun(residuals, (), *tangents)
        tree = residuals.unpack()[2].update(structured).unflatten()
        return (
            *(results, nonzero_out, values, tree),
            lambda residuals, structured, *tangents: fun(residuals, tree_util.tree_leaves(structured), *tangents),
        )

    return Linearized(primals, tangents, nonzero_out, forwarded, answer)


linearize_without_a_rule: Any = ad.fallback_linearize_rule


def register_linearization(primitive: Primitive, rule: Callable[..., tuple[Any, ...]]) -> None:
    """Registers how a primitive is linearized."""
    linearizations: Any = ad.primitive_linearizations
    linearizations[primitive] = rule


# Batching, transposition


def batch_jaxpr(
    jaxpr: ClosedJaxpr, axis_data: AxisData, batched_in: Sequence[bool]
) -> tuple[ClosedJaxpr, Sequence[bool]]:
    """The jaxpr of the function batched at dimension 0, and which outputs are batched."""
    return batching.batch_jaxpr(jaxpr, axis_data, tuple(batched_in), instantiate=False)


def with_explicit_batch(axis_data: AxisData, explicit: Set[Hashable]) -> AxisData:
    """A batch whose axes of `spmd_axis_name` are in the types of its values, as far as they are Explicit ones."""
    names = axis_data.spmd_name
    if not names or axis_data.explicit_mesh_axis or explicit.isdisjoint(names):
        return axis_data
    others = tuple(name for name in names if name not in explicit)
    return AxisData(axis_data.name, axis_data.size, others or None, tuple(name for name in names if name in explicit))


def transpose_jaxpr(
    jaxpr: ClosedJaxpr, in_tree: PyTreeDef, in_avals: Sequence[AbstractValue]
) -> tuple[ClosedJaxpr, PyTreeDef]:
    """The jaxpr that maps (residuals, output cotangents) to input cotangents, flat, and the tree of its results.

    Args:
        jaxpr: the linear program.
        in_tree: of its arguments as `register_transposition` gives them, and of its results' cotangents.
        in_avals: the types of the leaves.
    """
    out_trees: list[PyTreeDef] = []

    def transposed(*flat: object) -> Sequence[object]:
        primals, cts_in = in_tree.unflatten(flat)
        accumulators = [*map(_accumulator, primals)]
        # jax 0.10 gets the type of a scan's stacked result wrong if its cotangent is zero: what has none goes first.
        nonzero = [type(ct) is not ad.Zero for ct in cts_in]
        live, _ = _pe.dce_jaxpr(jaxpr.jaxpr, nonzero, instantiate=True)
        cts_live = [ct for ct, is_live in zip(cts_in, nonzero, strict=True) if is_live]
        ad.backward_pass3(live, False, jaxpr.consts, accumulators, cts_live)
        cts_out = [each.freeze() if isinstance(each, ad.ValAccum) else None for each in accumulators]
        flat_out, out_tree = tree_util.tree_flatten(cts_out)
        out_trees.append(out_tree)
        return flat_out

    source = jaxpr.jaxpr.debug_info.func_src_info
    traced = trace_to_jaxpr(transposed, in_avals, source=source, arg_names=("",) * len(in_avals))
    return traced, out_trees[0]


@tree_util.register_pytree_node_class
class _CotangentOfRef:
    """In place of a linear argument that is a ref: the ref of its cotangent, which the transposed program updates."""

    def __init__(self, ref: Any) -> None:
        self.ref = ref

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.ref,), None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: tuple[Any]) -> "_CotangentOfRef":
        return cls(*leaves)


def _accumulator(primal: Any) -> Any:
    """What jax takes for an argument of a program that it transposes: what is not linear as it is."""
    if isinstance(primal, ad.UndefinedPrimal):
        return ad.ValAccum(primal.aval)
    if isinstance(primal, _CotangentOfRef):
        return ad.RefAccum(primal.ref.aval.inner_aval, primal.ref)
    return primal


def register_transposition(primitive: Primitive, rule: Callable[..., Sequence[Any]]) -> None:
    """Registers `rule(cotangents of results, *args, jaxpr=..., **params) -> cotangents of arguments`.

    An argument is an `ad.UndefinedPrimal` if it is linear, or a tree of the ref of its cotangent if it is a ref, whose
    cotangent is not among those that are returned.
    """

    def accumulate(cts_in: Sequence[Any], *args: Any, jaxpr: ClosedJaxpr, **params: Any) -> None:
        def given(arg: Any, aval: AbstractValue) -> Any:
            if isinstance(arg, ad.RefAccum) and isinstance(aval, AbstractRef):
                return _CotangentOfRef(arg.inst().ref)
            return ad.UndefinedPrimal(aval) if isinstance(arg, ad.GradAccum) else arg

        primals = map(given, args, jaxpr.in_avals)
        cts_out = ad.primitive_transposes[primitive](cts_in, *primals, jaxpr=jaxpr, **params)
        for arg, ct in zip(args, cts_out, strict=True):
            if isinstance(arg, ad.GradAccum):
                arg.accum(ct)

    ad.primitive_transposes[primitive] = rule
    ad.fancy_transposes[primitive] = accumulate


# Dead code


def used_arguments(jaxpr: ClosedJaxpr) -> tuple[bool, ...]:
    """For each argument of a program whether it is used: jax passes no others to what it compiles."""
    _, used = _pe.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    return tuple(used)


def register_dce(
    primitive: Primitive,
    rule: Callable[[list[bool], JaxprEqn, "Dce"], tuple[Sequence[bool], JaxprEqn | None]],
) -> None:
    """Registers `rule(used_outputs, eqn, dce) -> (used_inputs, eqn | None)`.

    `dce(closed_jaxpr, used_outputs) -> (closed_jaxpr, used_inputs)` and `dce.has_effects(eqn)`: jax 0.12 also says
    which inputs anybody reads afterwards, and both depend on it.
    """
    if MERGED_JAXPR:
        _pe.dce_rules[primitive] = lambda used, live, eqn: rule(used, eqn, Dce(tuple(live)))
    else:
        _pe.dce_rules[primitive] = lambda used, eqn: rule(used, eqn, Dce(None))


class Dce:
    """Removes dead code; see `register_dce`."""

    def __init__(self, live_inputs: tuple[bool, ...] | None) -> None:
        self._live_inputs = live_inputs

    def __call__(self, jaxpr: ClosedJaxpr, used_outputs: Sequence[bool]) -> tuple[ClosedJaxpr, list[bool]]:
        if self._live_inputs is not None:
            tokens = [v.aval is core.abstract_token for v in jaxpr.invars]
            return _pe.dce_jaxpr(jaxpr, used_outputs, instantiate=tokens, live_inputs=self._live_inputs)
        return _dce_closed_jaxpr(jaxpr, used_outputs)

    def has_effects(self, eqn: JaxprEqn) -> bool:
        return _pe.has_effects(eqn) if self._live_inputs is None else _pe.has_effects(eqn, self._live_inputs)


@weakref_cache
def _dce_closed_jaxpr(jaxpr: ClosedJaxpr, used_outputs: Sequence[bool]) -> tuple[ClosedJaxpr, list[bool]]:
    # Cached, so that the same dead code gives the same jaxpr and what is compiled for it is found again.
    live, used_inputs = _pe.dce_jaxpr(jaxpr.jaxpr, used_outputs)
    return ClosedJaxpr(live, jaxpr.consts), used_inputs


# Refs


def register_discharge(primitive: Primitive, rule: Callable) -> None:
    """Registers `rule(ctx, in_avals, *args, **params) -> (new values of the refs, results)`."""

    @_discharge.register_discharge_rule(primitive)
    def _(*args: Any, **params: Any) -> tuple[Sequence[object], Sequence[object]]:
        if MERGED_JAXPR:
            ctx, *values = args
            return rule(ctx, ctx.in_avals, *values, **params)
        in_avals, _, *values = args
        return rule(None, in_avals, *values, **params)


def discharge_jaxpr(ctx: Any, jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr with its refs turned into values that are passed in and out."""
    if MERGED_JAXPR:  # the context says whether memory spaces are to be stripped as well
        return _discharge.discharge_state(jaxpr, strip_memory_space=ctx.strip_memory_space)
    return _discharge.discharge_state(jaxpr)


def without_own_refs(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr with refs that it makes itself turned into values; those among its arguments remain."""
    return _with_own_refs_discharged(jaxpr) if core.internal_mutable_array_effect in jaxpr.effects else jaxpr


@weakref_cache
def _with_own_refs_discharged(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    discharged = _discharge.discharge_state(jaxpr, should_discharge=False)
    discharged.jaxpr._debug_info = jaxpr.jaxpr.debug_info
    return discharged


def with_values_of_refs(eqn: JaxprEqn) -> ClosedJaxpr:
    """What an equation does, as a jaxpr of its variables: refs are read before it, and written after it.

    In between there are their values, as in `discharge_jaxpr`.

    Raises:
        NotImplementedError: jax cannot do this to the equation.
    """
    given = [*dict.fromkeys(atom for atom in eqn.invars if isinstance(atom, Var))]
    results = [new_var(var.aval) for var in eqn.outvars]
    alone = closed_jaxpr(given, results, [eqn.replace(outvars=results)], {})
    discharged = jaxpr_as_fun(_discharge.discharge_state(alone))
    is_ref = [isinstance(var.aval, AbstractRef) for var in given]
    written = {e.input for e in eqn.effects if isinstance(e, RefEffect) and not isinstance(e, ReadEffect)}

    def run(*args: Any) -> Sequence[Any]:
        outs = discharged(*(arg[...] if ref else arg for arg, ref in zip(args, is_ref, strict=True)))
        values = iter(outs[len(results) :])
        for arg, var, ref in zip(args, given, is_ref, strict=True):
            value = next(values) if ref else None
            if var in written:
                arg[...] = value
        return outs[: len(results)]

    return retraced(alone, run)


# checkify


def register_checkify(primitive: Primitive, rule: Callable) -> None:
    """Registers `rule(ctx, error, enabled_errors, *args, **params) -> (error, results)`."""
    checkify.error_checks[primitive] = rule if MERGED_JAXPR else lambda *args, **kw: rule(None, *args, **kw)


def checkify_jaxpr(
    ctx: Any, jaxpr: ClosedJaxpr, enabled_errors: object, err_tree: PyTreeDef, in_avals: tuple[AbstractValue, ...]
) -> tuple[ClosedJaxpr, PyTreeDef]:
    """The jaxpr that carries checkify's error along, and the tree of its (error, results)."""
    context = (ctx,) if MERGED_JAXPR else ()  # jax 0.12 passes a context through all of checkify
    checked, out_tree, _ = checkify.jaxpr_to_checkify_jaxpr(*context, jaxpr, enabled_errors, err_tree, *in_avals)
    return checked, out_tree


# Printing


def register_printing(primitive: Primitive, shown: Callable[[Params], Params]) -> None:
    """Prints equations of `primitive` in jaxprs with the parameters `shown` returns, in that order."""

    def rule(eqn: JaxprEqn, context: JaxprPpContext, settings: JaxprPpSettings) -> Doc:
        params = shown(eqn.params)
        jaxpr = eqn.params.get("jaxpr")
        if jaxpr is not None and (jaxpr if MERGED_JAXPR else jaxpr.jaxpr) not in context.shared_jaxprs:
            context.suggest_same_var_names(jaxpr.jaxpr.invars, eqn.invars)
            context.suggest_same_var_names(jaxpr.jaxpr.outvars, eqn.outvars)
        return core._pp_eqn(eqn.replace(params=params), context, settings, params=list(params))

    core.pp_eqn_rules[primitive] = rule
