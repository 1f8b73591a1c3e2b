"""Differentiation of calls without rules.

Calls with rules from `defvjp` or `defjvp` are custom derivatives, which jax handles before these rules apply. Other
calls are allowed if none of their results is differentiable, and rejected if one is.
"""

from collections.abc import Sequence
from typing import NoReturn

import jax
from jax.extend import source_info_util
from jax.interpreters import ad

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


def _transpose(_: object, *args: object, callee: Callee, **__: object) -> NoReturn:
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
