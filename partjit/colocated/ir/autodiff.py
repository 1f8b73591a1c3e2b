"""Differentiation of calls without rules.

Calls with rules from `defvjp` or `defjvp` are custom derivatives, which jax handles before these rules apply. Other
calls are allowed if none of their results is differentiable, and rejected if one is.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend import source_info_util
from jax.interpreters import ad

from partjit._jax.sources import at_site
from partjit.colocated.ir.primitive import Callee, colocated_call_p


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, callee: Callee, **params: Any
) -> tuple[Sequence[Any], list[Any]]:
    differentiated = [
        path
        for path, tangent in zip(callee.paths, tangents, strict=True)
        if type(tangent) is not ad.Zero and tangent.dtype != jax.dtypes.float0
    ]
    if differentiated and any(_is_differentiable(aval) for aval in callee.out_avals):
        where = at_site(source_info_util.current())
        raise ValueError(
            f"the colocated function {callee.name} has no derivative, and is differentiated with respect to "
            f"{', '.join(differentiated)}{where}: say what it is with {callee.name}.defvjp(fwd, bwd) or "
            f"{callee.name}.defjvp(jvp) before the program is traced, or pass what it only looks at as "
            "jax.lax.stop_gradient(x)"
        )
    results = colocated_call_p.bind(*primals, callee=callee, **params)
    return results, [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]


def _is_differentiable(aval: ShapedArray) -> bool:
    return aval.to_tangent_aval().dtype != jax.dtypes.float0


def _transpose(_: Any, *args: Any, callee: Callee, **__: Any) -> Any:
    where = at_site(source_info_util.current())
    linear = [path for path, arg in zip(callee.paths, args, strict=True) if ad.is_undefined_primal(arg)]
    raise ValueError(
        f"the colocated function {callee.name} cannot be transposed, and is called with {', '.join(linear)}, which "
        f"depends on what is transposed{where}: a call is no linear operation, as jax.linear_transpose and the "
        "tangents of a defjvp rule in reverse mode need it to be. Compute with device code what is transposed, or say "
        "with defvjp how to go backward"
    )


ad.primitive_jvps[colocated_call_p] = _jvp
ad.primitive_transposes[colocated_call_p] = _transpose
