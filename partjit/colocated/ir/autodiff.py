"""Differentiation of calls without rules.

Calls with rules from `defvjp` or `defjvp` are custom derivatives, which jax handles before these rules apply. Other
calls are allowed if none of their results is differentiable, and rejected if one is.
"""

from collections.abc import Sequence
from typing import NoReturn

import jax
from jax.core import ShapedArray
from jax.experimental import jet
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from partjit._jax.sources import at_site
from partjit.colocated.ir.primitive import Callee, colocated_call_p
from partjit.colocated.runtime.streams import Stream


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array | ad.Zero], *, callee: Callee, stream: Stream | None
) -> tuple[Sequence[jax.Array], list[ad.Zero]]:
    differentiated = [
        path
        for path, tangent in zip(callee.paths, tangents, strict=True)
        if not isinstance(tangent, ad.Zero) and tangent.dtype != jax.dtypes.float0
    ]
    if differentiated and any(aval.to_tangent_aval().dtype != jax.dtypes.float0 for aval in callee.out_avals):
        where = at_site(source_info_util.current())
        raise ValueError(
            f"the colocated function {callee.name} has no derivative, and is differentiated with respect to "
            f"{', '.join(differentiated)}{where}: say what it is with {callee.name}.defvjp(fwd, bwd) or "
            f"{callee.name}.defjvp(jvp) before the program is traced, or pass what it only looks at as "
            "jax.lax.stop_gradient(x)"
        )
    results = colocated_call_p.bind(*primals, callee=callee, stream=stream)
    return results, [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]


def _jet(
    primals: Sequence[jax.Array], series: Sequence[Sequence[jax.Array]], *, callee: Callee, stream: Stream | None
) -> tuple[Sequence[jax.Array], list[list[jax.Array]]]:
    if any(aval.to_tangent_aval().dtype != jax.dtypes.float0 for aval in callee.out_avals):
        where = at_site(source_info_util.current())
        raise ValueError(
            f"the colocated function {callee.name} has no Taylor series, and jax.experimental.jet needs one with "
            f"respect to {', '.join(callee.paths)}{where}: jet looks at no rule of defjvp or defvjp. Use jax.jvp, "
            f"nested for higher orders, which takes the rule of {callee.name}.defjvp(jvp)"
        )
    results = colocated_call_p.bind(*primals, callee=callee, stream=stream)
    return results, [[jax.numpy.zeros_like(result) for _ in series[0]] for result in results]


def _transpose(_: object, *args: object, callee: Callee, **__: object) -> list[jax.Array | None]:
    """An equation that nothing can evaluate: a solver transposes what it is given, also where it never needs that."""
    where = at_site(source_info_util.current())
    is_linear = [ad.is_undefined_primal(arg) for arg in args]
    linear = [path for path, flag in zip(callee.paths, is_linear, strict=True) if flag]
    reason = (
        f"the colocated function {callee.name} cannot be transposed, and is called with {', '.join(linear)}, which "
        f"depends on what is transposed{where}: a call is no linear operation, as jax.linear_transpose and the "
        "tangents of a defjvp rule in reverse mode need it to be. Compute with device code what is transposed, or say "
        "with defvjp how to go backward"
    )
    avals = tuple(aval.to_tangent_aval() for aval, flag in zip(callee.in_avals, is_linear, strict=True) if flag)
    results = iter(_transposed_p.bind(reason=reason, avals=avals))
    return [next(results) if flag else None for flag in is_linear]


_transposed_p = Primitive("transposed_colocated_call")
_transposed_p.multiple_results = True


@_transposed_p.def_abstract_eval
def _types_of_transposed(*, avals: Sequence[ShapedArray], **_: object) -> Sequence[ShapedArray]:
    return avals


def _refuse(*_: object, reason: str, **__: object) -> NoReturn:
    raise ValueError(reason)


ad.primitive_jvps[colocated_call_p] = _jvp
jet.jet_rules[colocated_call_p] = _jet
ad.primitive_transposes[colocated_call_p] = _transpose
_transposed_p.def_impl(_refuse)
mlir.register_lowering(_transposed_p, _refuse, cacheable=False)
