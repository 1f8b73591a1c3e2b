"""Calls in jax's loops, branches and `jax.checkpoint`: made as often as the program says, or refused.

Whatever jax splits into a forward and a backward half, a call is in the forward half, once, and stays in its loop. The
rules of jax that would have it otherwise are replaced in `_jax/patches.py`; what these need to know of calls is here.
"""

from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, jaxprs_in_params

from partjit._jax import patches
from partjit._jax.sources import at_site
from partjit._jax.tokens import allow_memory_kinds
from partjit._jax.types import Params
from partjit.colocated.ir.primitive import calls_in, colocated_call_p
from partjit.colocated.runtime.arrivals import ColocatedEffect


def install_patches() -> None:
    """Puts the rules in place; to be called before a call becomes an equation."""
    patches.install(_CALLS)
    allow_memory_kinds()


def _has_effect(of: ClosedJaxpr | JaxprEqn) -> bool:
    """Whether an equation or a jaxpr has the effect of a call."""
    return any(isinstance(effect, ColocatedEffect) for effect in of.effects)


def _effectful_in(jaxprs: Sequence[ClosedJaxpr]) -> list[JaxprEqn]:
    return [eqn for eqn in calls_in(filter(_has_effect, jaxprs)) if _has_effect(eqn)]


def _is_saved(primitive: Primitive, params: Params) -> bool:
    """What a function returned the first time is what the backward half must compute with."""
    return primitive is colocated_call_p or next(calls_in(jaxprs_in_params(params)), None) is not None


def _refuse_batched(kind: str, calls: Sequence[JaxprEqn]) -> None:
    what = "branches would be run for all examples" if kind == "cond" else "loop would go on for examples that are done"
    raise ValueError(
        f"the colocated function {_name_and_site(calls[0])} in a {kind} whose predicate is batched by jax.vmap. The "
        f"{what}, and the call be made where it should not: give the predicate to the function and let it decide, "
        "decide before jax.vmap, or say pure=True if the call does nothing but compute its results"
    )


def _refuse_split(kind: str, calls: Sequence[JaxprEqn]) -> None:
    raise ValueError(
        f"the colocated function {_name_and_site(calls[0])} in a {kind} that is linearized, or differentiated in "
        "reverse mode, with respect to what it carries. jax would run the loop twice for that, and make the call "
        "again: use jax.lax.scan, jax.lax.fori_loop with bounds that are no arrays, or jax.jvp"
    )


def _name_and_site(eqn: JaxprEqn) -> str:
    return f"{eqn.params['callee'].name} is called{at_site(eqn.source_info)}"


_CALLS = patches.CallRules(_has_effect, _effectful_in, _is_saved, _refuse_batched, _refuse_split)
