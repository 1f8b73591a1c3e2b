"""Reverse mode: the cotangent of an argument is sharded like the argument, and nothing is donated.

Nothing is donated because the arguments of the backward program are residuals and cotangents: the caller of the
forward program gave away its arguments, not those.
"""

from collections.abc import Sequence
from typing import Any

from jax.core import AbstractValue, Tracer
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad
from jax.ref import AbstractRef
from jax.tree_util import tree_flatten

from partjit._jax.caches import weakref_cache
from partjit._jax.rules import register_transposition, transpose_jaxpr
from partjit._jax.shardings import UNSPECIFIED
from partjit._jax.tracing import abstractify, typed_like
from partjit._jax.types import PyTreeDef
from partjit.mesh import tracing_under
from partjit.primitive import keep_where, pjit_p
from partjit.spec import Spec


@weakref_cache
def _transposed_jaxpr(
    jaxpr: ClosedJaxpr, in_tree: PyTreeDef, avals: tuple[AbstractValue, ...]
) -> tuple[ClosedJaxpr, Sequence[int | ad.Zero | None]]:
    """The transposed jaxpr, and what each argument gets: the position of its cotangent among the results, or zero."""
    transposed, out_tree = transpose_jaxpr(jaxpr, in_tree, avals)
    return transposed, out_tree.unflatten(range(out_tree.num_leaves))


def _transpose(
    cts_in: Any,
    *primals: Any,
    jaxpr: ClosedJaxpr,
    in_specs: tuple[Spec, ...],
    out_specs: tuple[Spec, ...],
    **params: Any,
) -> list[Any]:
    # This runs in every eager `jax.grad`, where a Python frame for each argument is felt.
    are_known = [type(primal) is not ad.UndefinedPrimal for primal in primals]
    are_nonzero = [type(ct) is not ad.Zero for ct in cts_in]
    # Types inside are those of the jaxpr: outside of a program on Auto axes a type may have a sharding.
    in_avals, out_avals = jaxpr.in_avals, jaxpr.out_avals
    args, in_tree = tree_flatten(([*primals], [*cts_in]))
    typed = [*keep_where(in_avals, are_known), *[a.to_ct_aval() for a in keep_where(out_avals, are_nonzero)]]
    avals = tuple([typed_like(abstractify(x), aval) for x, aval in zip(args, typed, strict=True)])
    with tracing_under(params["mesh"]):  # custom rules in the jaxpr are traced now
        transposed, places = _transposed_jaxpr(jaxpr, in_tree, avals)
    # An eager `jax.grad` makes the ref of a cotangent where it will, and a ref cannot be moved.
    given = (*keep_where(in_specs, are_known), *keep_where(out_specs, are_nonzero))
    given = tuple(
        UNSPECIFIED if isinstance(aval, AbstractRef) and not isinstance(arg, Tracer) else spec
        for arg, aval, spec in zip(args, typed, given, strict=True)
    )
    params |= {
        "jaxpr": transposed,
        # Undefined primals and zero cotangents have no leaves, so they take no part in the program.
        "in_specs": given,
        "out_specs": keep_where(in_specs, [type(place) is int for place in places]),
        "donated_invars": (False,) * len(args),
    }
    cts_out = pjit_p.bind(*args, **params)
    return [cts_out[place] if type(place) is int else place for place in places]


register_transposition(pjit_p, _transpose)
