"""What differentiation makes of calls.

A call has the derivatives that `defvjp` or `defjvp` say; jax uses these and never comes here. Other calls are made as
they are where nothing differentiable comes out of them, and refused where it does. And whatever jax splits into a
forward and a backward half, under `jax.checkpoint` as well, a call is in the forward half, once, and stays in its loop.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import jaxprs_in_params
from jax.interpreters import ad

from partjit._jax.patches import guard_while_loops, keep_in_scans, save_under_checkpoint
from partjit._jax.sources import source_site
from partjit.colocated.ir.primitive import Callee, ColocatedEffect, calls_in, colocated_call_p


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, callee: Callee, **params: Any
) -> tuple[Sequence[Any], list[Any]]:
    differentiated = [
        path
        for path, tangent in zip(callee.paths, tangents, strict=True)
        if type(tangent) is not ad.Zero and tangent.dtype != jax.dtypes.float0
    ]
    if differentiated and any(_is_differentiable(aval) for aval in callee.out_avals):
        raise ValueError(
            f"the colocated function {callee.name} has no derivative, and is differentiated with respect to "
            f"{', '.join(differentiated)}{_here()}: say what it is with {callee.name}.defvjp(fwd, bwd) or "
            f"{callee.name}.defjvp(jvp) before the program is traced, or pass what it only looks at as "
            "jax.lax.stop_gradient(x)"
        )
    results = colocated_call_p.bind(*primals, callee=callee, **params)
    return results, [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]


def _is_differentiable(aval: Any) -> bool:
    return aval.to_tangent_aval().dtype != jax.dtypes.float0


def _here() -> str:
    """Where in the user's code the equation stands that is being transformed, for a message."""
    return _place(source_info_util.current())


def _place(source_info: Any) -> str:
    site = source_site(source_info)
    return "" if site is None else " at {}:{} in {}".format(*site)


def _transpose(_: Any, *args: Any, callee: Callee, **__: Any) -> Any:
    linear = [path for path, arg in zip(callee.paths, args, strict=True) if ad.is_undefined_primal(arg)]
    raise ValueError(
        f"the colocated function {callee.name} cannot be transposed, and is called with {', '.join(linear)}, which "
        f"depends on what is transposed{_here()}: a call is no linear operation, as jax.linear_transpose and the "
        "tangents of a defjvp rule in reverse mode need it to be. Compute with device code what is transposed, or say "
        "with defvjp how to go backward"
    )


def _is_saved(primitive: Any, params: dict[str, Any]) -> bool:
    """What a function said the first time is what the backward half must compute with."""
    return primitive is colocated_call_p or next(calls_in(jaxprs_in_params(params)), None) is not None


def _has_effect(eqn: Any) -> bool:
    return any(isinstance(effect, ColocatedEffect) for effect in eqn.effects)


def _refuse_split(kind: str, calls: Sequence[Any]) -> None:
    eqn = calls[0]
    raise ValueError(
        f"the colocated function {eqn.params['callee'].name} is called{_place(eqn.source_info)} in a {kind} that is "
        "linearized, or differentiated in reverse mode, with respect to what it carries. jax would run the loop twice "
        "for that, and make the call again: use jax.lax.scan, jax.lax.fori_loop with bounds that are no arrays, or "
        "jax.jvp"
    )


ad.primitive_jvps[colocated_call_p] = _jvp
ad.primitive_transposes[colocated_call_p] = _transpose
save_under_checkpoint(_is_saved)
keep_in_scans(_has_effect)
guard_while_loops(lambda jaxprs: [eqn for eqn in calls_in(jaxprs) if _has_effect(eqn)], _refuse_split)
