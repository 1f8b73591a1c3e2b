"""Where NaNs come from: programs evaluated one equation after another, each looked at for NaNs.

`jaxpr_as_fun` looks for none, and of a compiled program in a jaxpr jax says only that there is one.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from partjit._jax.dispatch import InternalFloatingPointError, infinities_are_checked, results_unchecked
from partjit._jax.jaxprs import called_jaxpr, closed_jaxpr, new_var
from partjit._jax.sources import at_site
from partjit.primitive import pjit_p

__all__ = ["evaluated"]


def evaluated(jaxpr: ClosedJaxpr, *args: Any) -> Sequence[Any]:
    """The results of a program, which `jax.debug_nans` or `jax.debug_infs` look for.

    Raises:
        FloatingPointError: an equation has such a result, and no such argument; it names the operation and its line.
    """
    return _evaluated(jaxpr.jaxpr, jaxpr.consts, args)


def _evaluated(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> Sequence[Any]:
    known: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def value(atom: Var | Literal) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        inner = eqn.params["jaxpr"] if eqn.primitive is pjit_p else None
        called = called_jaxpr(eqn) if inner is None else (inner.jaxpr, inner.consts)
        inputs = [value(atom) for atom in eqn.invars]
        results = _alone(eqn, inputs) if called is None else _evaluated(*called, inputs)
        known.update(zip(eqn.outvars, results, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _alone(eqn: JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
    given = {atom: x for atom, x in zip(eqn.invars, inputs, strict=True) if isinstance(atom, Var)}
    results = [new_var(var.aval) for var in eqn.outvars]
    alone = closed_jaxpr([*given], results, [eqn.replace(outvars=results)], {})
    # A mask of -inf, or the NaN that `jnp.var` has for no elements, is wanted.
    with results_unchecked() if any(map(_is_bad, inputs)) else contextlib.nullcontext():
        try:
            return eval_jaxpr(alone.jaxpr, alone.consts, *given.values())
        except (InternalFloatingPointError, FloatingPointError) as error:
            kind = "inf" if "inf" in str(error) else "nan"
            where = f"{eqn.primitive.name}{at_site(eqn.source_info)}"
            raise FloatingPointError(f"invalid value ({kind}) encountered in {where}") from None


def _is_bad(value: Any) -> bool:
    if not isinstance(value, jax.Array | np.ndarray | np.generic | float | complex):
        return False
    array: Any = value
    if not jnp.issubdtype(jnp.result_type(array), jnp.inexact):
        return False
    return bool(jnp.any(jnp.isnan(array))) or (infinities_are_checked() and bool(jnp.any(jnp.isinf(array))))
