"""Loops and branches that are driven from the host, as equations of a flat program.

`loop_p` runs its body a number of times, or as long as its first carried value is true. Parameters: `body`, a closed
jaxpr from captured and carried values to carried ones; `captured`, how many of its arguments are captured; `turns`, or
None; `is_buffer`, for each carried value whether it is a stack that each turn writes a slice of.

`branch_p` runs one of `branches`, closed jaxprs of all arguments but the first, which says which.

They stand only for loops and branches with colocated calls in them; their lowering is for the partitioner to look at.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun, jaxprs_in_params
from jax.interpreters import mlir

from partjit._jax.caches import weakref_cache
from partjit._jax.effects import without_axes
from partjit.colocated.ir.primitive import colocated_call_p

__all__ = ["branch_p", "is_call", "is_host", "is_pure", "is_separate", "lanes_of", "loop_p"]

loop_p = Primitive("colocated_loop")
loop_p.multiple_results = True
branch_p = Primitive("colocated_branch")
branch_p.multiple_results = True


@loop_p.def_abstract_eval
def _loop_types(*_: Any, body: Any, **__: Any) -> Any:
    return body.out_avals


@branch_p.def_abstract_eval
def _branch_types(*_: Any, branches: Sequence[Any]) -> Any:
    return branches[0].out_avals


def _loop(*args: Any, body: Any, captured: int, turns: int | None, **_: Any) -> Sequence[Any]:
    fixed, initial = args[:captured], args[captured:]
    run = jaxpr_as_fun(body)
    if turns is None:
        return jax.lax.while_loop(lambda carried: carried[0], lambda carried: run(*fixed, *carried), [*initial])
    return jax.lax.fori_loop(0, turns, lambda _, carried: run(*fixed, *carried), [*initial])


def _branch(index: Any, *args: Any, branches: Sequence[Any]) -> Sequence[Any]:
    return jax.lax.switch(index, [jaxpr_as_fun(branch) for branch in branches], *args)


mlir.register_lowering(loop_p, mlir.lower_fun(_loop, multiple_results=True), cacheable=False)
mlir.register_lowering(branch_p, mlir.lower_fun(_branch, multiple_results=True), cacheable=False)


def is_call(eqn: Any) -> bool:
    """Whether it is a call."""
    return eqn.primitive is colocated_call_p


def is_host(eqn: Any) -> bool:
    """Whether the host makes or drives it: a call, or a loop or branch with calls."""
    return eqn.primitive is colocated_call_p or eqn.primitive is loop_p or eqn.primitive is branch_p


def is_separate(eqn: Any, k: int) -> bool:
    """Whether a result is an array of its own, and not one that went in."""
    if eqn.primitive is branch_p:
        return all(_is_computed(branch.jaxpr, k) for branch in eqn.params["branches"])
    # What is an argument of a turn and its result is copied by the devices.
    return eqn.primitive is not loop_p or _is_computed(eqn.params["body"].jaxpr, k, of_arguments=True)


def _is_computed(jaxpr: Any, k: int, of_arguments: bool = False) -> bool:
    atom = jaxpr.outvars[k]
    for eqn in jaxpr.eqns:
        for j, var in enumerate(eqn.outvars):
            if var is atom:
                return is_separate(eqn, j)
    return of_arguments


def is_pure(eqn: Any) -> bool:
    """Whether there is no order in which it has to come."""
    return not lanes_of(eqn)


@weakref_cache
def _lanes_in(jaxpr: Any) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(lane for eqn in jaxpr.eqns for lane in lanes_of(eqn)))


def lanes_of(eqn: Any) -> list[Any]:
    """What it is ordered by: for a call its stream, and the object whose method it is; for others what is in them."""
    if eqn.primitive is colocated_call_p:
        if eqn.params["callee"].is_pure:
            return []
        origin = eqn.params["callee"].definition.function
        return [("stream", eqn.params["stream"]), *([("object", origin.lane)] if origin.lane is not None else [])]
    if is_host(eqn):
        return [*dict.fromkeys(lane for jaxpr in jaxprs_in_params(eqn.params) for lane in _lanes_in(jaxpr))]
    # Equations with effects of jax's own keep their order as well.
    return ["effects"] if without_axes(eqn.effects) else []
