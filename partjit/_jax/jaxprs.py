"""Jaxprs and their equations, decomposed and composed."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from jax._src import effects
from jax._src.custom_batching import custom_vmap_p
from jax.core import AbstractValue, ShapedArray
from jax.extend.core import (
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxprs_in_params,
    new_jaxpr_eqn,
    primitives,
)
from jax.lax import optimization_barrier_p
from jax.typing import ArrayLike

from partjit._jax.arrays import OF_64_BITS
from partjit._jax.caches import weakref_cache
from partjit._jax.shardings import MaybeSharding

Atom = Var | Literal
"""What an equation reads."""

MERGED_JAXPR = ClosedJaxpr is Jaxpr
"""Whether a jaxpr has its constants itself: since jax 0.12."""


def type_of(atom: Atom) -> ShapedArray:
    """The type of a variable or literal, which is an array's in the programs that are partitioned."""
    return cast(ShapedArray, atom.aval)


def new_var(aval: AbstractValue) -> Var:
    """A fresh variable of a jaxpr."""
    make: Any = Var  # `Var(aval)` on all versions, which its types deny on some
    return make(aval)


def closed_jaxpr(
    invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[JaxprEqn], consts: Mapping[Var, object]
) -> ClosedJaxpr:
    """A closed jaxpr of equations.

    Args:
        invars, outvars: its arguments and results.
        eqns: its equations, in an order in which they can be evaluated.
        consts: the values of the variables that are constants.
    """
    positions = {var: i for i, var in enumerate((*consts, *invars))}
    joined = {effect for eqn in eqns for effect in eqn.effects}
    kept = {e for e in joined if not isinstance(e, effects.JaxprInputEffect) or e.input in positions}
    info = DebugInfo("pjit", "fragment", ("",) * len(invars), ("",) * len(outvars))
    if MERGED_JAXPR:
        merged: Any = Jaxpr
        return merged([*consts], [*invars], [*outvars], [*eqns], kept, info, consts=[*consts.values()])
    open_jaxpr = Jaxpr([*consts], [*invars], [*outvars], [*eqns], kept, info)
    return ClosedJaxpr(open_jaxpr, [*consts.values()])


def with_inputs(eqn: JaxprEqn, invars: Sequence[Atom]) -> JaxprEqn:
    """An equation that reads other variables and literals, on which it has the effects that it had on its own."""
    if not any(isinstance(effect, effects.JaxprInputEffect) for effect in eqn.effects):
        return eqn.replace(invars=[*invars])
    renamed = {old: new for old, new in zip(eqn.invars, invars, strict=True) if isinstance(old, Var)}
    moved = {
        effect.replace(renamed[effect.input]) if isinstance(effect, effects.JaxprInputEffect) else effect
        for effect in eqn.effects
    }
    return eqn.replace(invars=[*invars], effects=moved)


_CLOSED_CALLS = {
    primitives.jit_p: "jaxpr",
    primitives.custom_jvp_call_p: "call_jaxpr",
    primitives.custom_vjp_call_p: "call_jaxpr",
    primitives.remat_p: "jaxpr",
    primitives.closed_call_p: "call_jaxpr",
    custom_vmap_p: "call",
}


def called_jaxpr(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[ArrayLike]] | None:
    """The open jaxpr and the constants of what one of jax's equations calls exactly once; None for other equations.

    These are nested `jax.jit`, functions with custom derivatives or a custom batching rule, and `jax.checkpoint`.
    """
    name = _CLOSED_CALLS.get(eqn.primitive)
    if name is None:
        return None
    jaxpr = eqn.params[name]
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())  # that of `jax.checkpoint` is an open one


@weakref_cache
def has_types_of_64_bits(jaxpr: Jaxpr) -> bool:
    """Whether a value of a jaxpr is of such a type, at any depth: also where `jax_enable_x64` is not set."""
    made = [*jaxpr.constvars, *jaxpr.invars, *(var for eqn in jaxpr.eqns for var in eqn.outvars)]
    return any(getattr(var.aval, "dtype", None) in OF_64_BITS for var in made) or any(
        map(has_types_of_64_bits, [inner for eqn in jaxpr.eqns for inner in jaxprs_in_params(eqn.params)])
    )


def solving(eqn: JaxprEqn) -> JaxprEqn:
    """In place of a `custom_linear_solve` a call of its `solve`, which is what it evaluates; other equations unchanged.

    Its other functions (`matvec`, and what is transposed) are for derivatives, which have been taken.
    """
    if eqn.primitive is not primitives.linear_solve_p:
        return eqn
    lengths, jaxpr = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
    start = lengths.matvec + lengths.vecmat
    consts, b = eqn.invars[start : start + lengths.solve], eqn.invars[sum(lengths) :]
    return eqn.replace(invars=[*consts, *b], primitive=primitives.closed_call_p, params={"call_jaxpr": jaxpr})


def is_rematerialized(eqn: JaxprEqn) -> bool:
    """Whether an equation is one of `jax.checkpoint` that computes anew what was computed before."""
    return eqn.primitive is primitives.remat_p and bool(eqn.params["differentiated"] and eqn.params["prevent_cse"])


def barrier(atoms: Sequence[Atom], outvars: Sequence[Var], like: JaxprEqn) -> JaxprEqn:
    """An equation that passes values on, and lets nothing behind it be merged with what is before it."""
    return new_jaxpr_eqn([*atoms], [*outvars], optimization_barrier_p, {}, set(), like.source_info, like.ctx)


def control_flow_kind(eqn: JaxprEqn) -> str | None:
    """Which kind of loop or branch one of jax's equations is: "scan", "while" or "cond"; None for other equations."""
    kinds = (primitives.scan_p, primitives.while_p, primitives.cond_p)
    return eqn.primitive.name if eqn.primitive in kinds else None


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many of the arguments of a scan are constants and how many are carried; the rest are stacks of slices.

    jax 0.12 says it with trees that are flat here.
    """
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carries, _ = map(list, eqn.params["ft_in"].update(eqn.invars).unpack())
    return len(consts), len(carries)


def nested_shardings(eqn: JaxprEqn) -> tuple[Sequence[MaybeSharding], Sequence[MaybeSharding]] | None:
    """The shardings of arguments and results that a nested `jax.jit` requests, UNSPECIFIED where it does not."""
    if eqn.primitive is not primitives.jit_p:
        return None
    return eqn.params["in_shardings"], eqn.params["out_shardings"]
