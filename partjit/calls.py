"""Where the colocated calls in jaxprs are."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxprs_in_params

from partjit._jax.caches import weakref_cache
from partjit._jax.tracing import low_jaxpr
from partjit.primitive import colocated_call_p

if TYPE_CHECKING:
    from partjit.colocated.runtime.streams import Stream

__all__ = [
    "chooses_whether_to_call",
    "given_to_calls_without_results",
    "has_calls",
    "inner_jaxprs",
    "is_program_with_calls",
    "is_unpredictable",
    "makes_calls",
    "names_of_calls",
    "streams_of",
]

_WITHOUT_JAXPRS = frozenset({bool, int, float, str, type(None)})
_UNPREDICTABLE = frozenset({"while", "debug_print", "ffi_call"})


def inner_jaxprs(eqn: JaxprEqn) -> Sequence[Jaxpr]:
    """The jaxprs among the parameters of an equation. Most have none, and this is asked of every equation."""
    for value in eqn.params.values():
        if type(value) not in _WITHOUT_JAXPRS:
            return [*jaxprs_in_params(eqn.params)]
    return ()


@weakref_cache
def _calls(jaxpr: Jaxpr) -> "Sequence[tuple[str, Stream | None]]":
    """The name and the stream of each colocated call in a jaxpr, at any depth."""
    found: list[tuple[str, Stream | None]] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is colocated_call_p:
            found.append((eqn.params["callee"].name, eqn.params["stream"]))
        else:
            for inner in inner_jaxprs(eqn):
                found += _calls(inner)
    return found


def has_calls(jaxpr: Jaxpr) -> bool:
    """Whether there is a colocated call in a jaxpr, at any depth."""
    return bool(_calls(jaxpr))


def is_program_with_calls(jaxpr: ClosedJaxpr) -> bool:
    """Whether a program makes colocated calls, also in equations that hide what they are made of."""
    return has_calls(low_jaxpr(jaxpr).jaxpr)


def makes_calls(eqn: JaxprEqn) -> bool:
    """Whether there is a colocated call inside of an equation, at any depth."""
    inner = inner_jaxprs(eqn)
    return bool(inner) and any(map(has_calls, inner))


@weakref_cache
def chooses_whether_to_call(jaxpr: Jaxpr) -> bool:
    """Whether there is, at any depth, a branch that makes calls."""
    return any(
        eqn.primitive.name == "cond" or any(map(chooses_whether_to_call, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
        if makes_calls(eqn)
    )


@weakref_cache
def given_to_calls_without_results(jaxpr: Jaxpr) -> Sequence[int]:
    """The positions of the arguments that calls without results get as they are; not of calls inside of equations."""
    calls = [eqn for eqn in jaxpr.eqns if eqn.primitive is colocated_call_p and not eqn.outvars]
    given = {atom for call in calls for atom in call.invars if isinstance(atom, Var)}
    return [i for i, var in enumerate(jaxpr.invars) if var in given] if given else []


@weakref_cache
def is_unpredictable(jaxpr: Jaxpr) -> bool:
    """Whether it may take any time, or fail: there is a `while_loop`, a callback of jax or a foreign function in it."""
    return any(
        "callback" in eqn.primitive.name
        or eqn.primitive.name in _UNPREDICTABLE
        or any(map(is_unpredictable, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def streams_of(jaxpr: Jaxpr) -> "set[Stream]":
    """The streams that a jaxpr itself puts calls on, at any depth."""
    return {stream for _, stream in _calls(jaxpr) if stream is not None}


def names_of_calls(jaxprs: Iterable[Jaxpr]) -> list[str]:
    """The names of the colocated functions that jaxprs call, at any depth."""
    return sorted({name for jaxpr in jaxprs for name, _ in _calls(jaxpr)})
