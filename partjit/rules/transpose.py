"""Reverse mode: the cotangent of an argument is sharded like the argument, and nothing is donated.

Nothing is donated because the arguments of the backward program are residuals and cotangents: the caller of the
forward program gave away its arguments, not those.
"""

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad

from partjit._jax.caches import weakref_cache
from partjit._jax.rules import transpose_jaxpr
from partjit._jax.tracing import abstractify, typed_like
from partjit.mesh import tracing_under
from partjit.primitive import pjit_p
from partjit.spec import Spec

_transposed_jaxpr = weakref_cache(transpose_jaxpr)


def _transpose(
    cts_in: Any,
    *primals: Any,
    jaxpr: ClosedJaxpr,
    in_specs: tuple[Spec, ...],
    out_specs: tuple[Spec, ...],
    **params: Any,
) -> list[Any]:
    # Types inside are those of the jaxpr: outside of a program on Auto axes a type may have a sharding.
    linear = [
        ad.UndefinedPrimal(aval) if ad.is_undefined_primal(primal) else primal
        for aval, primal in zip(jaxpr.in_avals, primals, strict=True)
    ]
    args, in_tree = jax.tree.flatten((linear, list(cts_in)))
    typed = [aval for aval, primal in zip(jaxpr.in_avals, primals, strict=True) if not ad.is_undefined_primal(primal)]
    typed += [a.to_ct_aval() for a, ct in zip(jaxpr.out_avals, cts_in, strict=True) if type(ct) is not ad.Zero]
    avals = tuple(typed_like(abstractify(x), aval) for x, aval in zip(args, typed, strict=True))
    with tracing_under(params["mesh"]):  # custom rules in the jaxpr are traced now
        transposed, out_tree = _transposed_jaxpr(jaxpr, in_tree, avals)
    # Undefined primals and zero cotangents have no leaves, so they take no part in the program.
    transposed_in_specs = (
        *(spec for spec, primal in zip(in_specs, primals, strict=True) if not ad.is_undefined_primal(primal)),
        *(spec for spec, ct in zip(out_specs, cts_in, strict=True) if type(ct) is not ad.Zero),
    )
    positions = out_tree.unflatten(range(out_tree.num_leaves))
    transposed_out_specs = tuple(
        spec for spec, position in zip(in_specs, positions, strict=True) if isinstance(position, int)
    )
    params |= {
        "jaxpr": transposed,
        "in_specs": transposed_in_specs,
        "out_specs": transposed_out_specs,
        "donated_invars": (False,) * len(args),
    }
    cts_out = pjit_p.bind(*args, **params)
    return out_tree.unflatten(cts_out)


ad.primitive_transposes[pjit_p] = _transpose
