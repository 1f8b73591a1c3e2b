"""The equations of a program lowered one after another, as jax lowers them; those like earlier ones at a glance.

jax keeps what it has lowered an equation to for others with the same parameters and types. To find that, and to write
down where in the user's program the equation is, takes three times as long as to copy it. Here it is found by less, and
an operation says from which equation it is by the innermost scope of that alone.

Source: `jaxpr_subcomp` and `_emit_cached_call` of jax.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import jax_mlir_ext
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive, Var, new_jaxpr_eqn
from jax.extend.mlir import ir
from jax.interpreters.mlir import LoweringRuleContext

from partjit._jax.jaxprs import MERGED_JAXPR, Atom, closed_jaxpr, new_var

__all__ = ["lowered_quickly"]

_whole_p = Primitive("whole")
_whole_p.multiple_results = True


def lowered_quickly(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """A jaxpr of one equation that stands for those of another one, and is lowered to the same.

    Args:
        jaxpr: the other one; no effect of it gets tokens.
    """
    inner = jaxpr.jaxpr
    outvars = [new_var(atom.aval) for atom in inner.outvars]
    whole = new_jaxpr_eqn([*inner.constvars, *inner.invars], outvars, _whole_p, {"jaxpr": jaxpr}, set())
    if MERGED_JAXPR:
        return inner.replace(eqns=[whole], outvars=outvars)
    return jaxpr.replace(jaxpr=inner.replace(eqns=[whole], outvars=outvars))


def _lower_whole(ctx: LoweringRuleContext, *args: Any, jaxpr: ClosedJaxpr) -> Sequence[Any]:
    inner = jaxpr.jaxpr
    equations = _Equations(ctx, dict(zip((*inner.constvars, *inner.invars), args, strict=True)))
    for eqn in inner.eqns:
        equations.lower(eqn)
    return [equations.read(atom) for atom in inner.outvars]


mlir.register_lowering(_whole_p, _lower_whole, cacheable=False)


class _Equations:
    """Lowers equations where a rule is asked to lower.

    Args:
        ctx: of the rule.
        env: what the variables are lowered to that equations read, to which their results are added.
    """

    def __init__(self, ctx: LoweringRuleContext, env: dict[Var, Any]) -> None:
        self._ctx, self._env = ctx, env
        # What equations with these parameters and types are lowered to; None where that is more than to be copied.
        self._known: dict[tuple[object, ...], Any] = {}
        self._numbers: dict[tuple[object, ...], Any] = {}  # the first operation of each

    def read(self, atom: Atom) -> Any:
        """What a variable or a literal is lowered to."""
        if isinstance(atom, Var):
            return self._env[atom]
        number, aval = atom.val, cast(ShapedArray, atom.aval)
        if aval.shape or not isinstance(number, int | float | np.ndarray | np.generic):
            return self._constant(atom)
        key = type(number), _bits(number), aval
        if key in self._numbers:
            return self._numbers[key].clone().result
        value = self._constant(atom)
        if not isinstance(value.owner, ir.Block):
            self._numbers[key] = value.owner
        return value

    def _constant(self, literal: Literal) -> Any:
        (value,) = mlir.ir_constants(literal.val, const_lowering=self._ctx.const_lowering, aval=literal.aval)
        return value

    def lower(self, eqn: JaxprEqn) -> None:
        """Lowers the next equation."""
        primitive, env = eqn.primitive, self._env
        if eqn.effects or primitive in mlir._uncacheable_primitives:
            self._lower_as_jax(eqn)
            return
        key = primitive, eqn.ctx, *[atom.aval for atom in eqn.invars], *eqn.params.items()
        scopes = eqn.source_info.name_stack.stack
        where = ir.Location.name(scopes[-1].name if scopes else primitive.name)
        if key not in self._known:
            with where:
                self._known[key] = self._to_be_copied(eqn)
        known = self._known[key]
        if known is None:
            self._lower_as_jax(eqn)
            return
        operands = [env[atom] if type(atom) is Var else self.read(atom) for atom in eqn.invars]
        with where:
            copied = jax_mlir_ext.inlined_func_call(known.func.operation, operands)
        env.update(zip(eqn.outvars, known.output_treedef.unflatten(copied), strict=True))

    def _to_be_copied(self, eqn: JaxprEqn) -> Any:
        """What an equation, and others like it, is lowered to; None where that is more than to be copied."""
        module, avals = self._ctx.module_context, tuple([atom.aval for atom in eqn.invars])
        parameters = tuple(sorted(eqn.params.items()))
        key = mlir.LoweringCacheKey(eqn.primitive, eqn.ctx, avals, frozenset(), parameters, tuple(module.platforms))
        known = module.lowering_cache.get(key)
        if known is None:
            known = mlir._cached_lowering_miss(module, eqn, key, avals, **eqn.params)
        is_flat = len(known.func.type.inputs) == len(avals)
        return known if known.inline and is_flat and not known.const_args else None

    def _lower_as_jax(self, eqn: JaxprEqn) -> None:
        env, ctx = self._env, self._ctx
        operands = {atom: env[atom] for atom in eqn.invars if isinstance(atom, Var)}
        found, _ = mlir.jaxpr_subcomp(
            ctx.module_context,
            closed_jaxpr([*operands], eqn.outvars, [eqn], {}).jaxpr,
            ctx.name_stack,
            mlir.TokenSet(),
            (),
            *operands.values(),
            dim_var_values=(),
            const_lowering=ctx.const_lowering,
            outer_traceback=None,
        )
        env.update(zip(eqn.outvars, found, strict=True))


def _bits(number: Any) -> object:
    """What tells numbers of one type apart, zeros of different signs among them."""
    if isinstance(number, int):
        return number
    return number.hex() if isinstance(number, float) else (number.dtype, number.tobytes())
