"""What an equation costs, roughly: enough to tell whether it amortizes a dispatch of its own."""

import math
from collections.abc import Iterable

from jax.extend.core import Jaxpr, JaxprEqn, Var

from partjit._jax.caches import weakref_cache
from partjit._jax.jaxprs import type_of
from partjit.calls import inner_jaxprs

__all__ = [
    "ONLY_INNER",
    "UPDATED",
    "amortizes_a_brief_call",
    "amortizes_a_dispatch",
    "amortizes_leaving",
    "cost_of",
    "is_run_at_once",
]

WORTH_A_DISPATCH = 1e6
"""Elementary operations that take about as long as it takes to dispatch a fragment over a few devices."""

WORTH_LEAVING = 1e7
"""Those that take about as long as the host takes longer than an executable that waits for a call: that has to end, the
host reads and calls, and dispatches what comes next."""

WORTH_A_BRIEF_CALL = 1e8
"""Those that take long beside a function of numbers, and beside the dispatches and the thread that it takes to have the
devices compute meanwhile."""

RUN_AT_ONCE = 1e3
"""XLA:CPU computes what takes fewer operations in the thread that dispatches it."""

FOR_HOST_THREAD = 2e5
"""Those that take no longer than it takes to hand an executable to another thread and to wait for it.

Measured on one CPU device, with callers that wait for results and callers that have 0.1 ms of work of their own: up to
here the host's thread is the faster one for element by element operations before a call and after it, 70 us of them, as
well as for calls made at once. Of matrix products that is so to ten times as many, which take less time each.
"""

FOR_HOST_THREAD_IN_LOOPS = 3e6
"""The same where nothing else could be done meanwhile, as in a loop in which the host waits in each iteration."""

_ITERATIONS_OF_WHILE = 10

UPDATED = {
    "dynamic_update_slice": 1,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), 2),
}
"""Which operand of a primitive is written into the first one."""

ONLY_INNER = {
    "jit",
    "pjit",
    "checkpoint",
    "closed_call",
    "cond",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vmap_call",
    "scan",
    "while",
}
"""Primitives that hand on what their jaxprs compute: an array that these update in place is not computed anew."""


def amortizes_a_dispatch(cost: float) -> bool:
    """Whether so many elementary operations take as long as the dispatch of a fragment."""
    return cost >= WORTH_A_DISPATCH


def amortizes_leaving(cost: float, devices: int = 1) -> bool:
    """Whether so many take as long as it takes these devices to leave an executable for a call, and to go on."""
    return cost >= WORTH_LEAVING * devices


def amortizes_a_brief_call(cost: float) -> bool:
    """Whether so many had better be computed beside a call that is brief, as far as one can tell."""
    return cost >= WORTH_A_BRIEF_CALL


def is_run_at_once(cost: float) -> bool:
    """Whether a single CPU has computed so many elementary operations when their dispatch returns."""
    return cost < RUN_AT_ONCE


def cost_of(eqn: JaxprEqn) -> float:
    """An estimate in elementary operations, over all devices."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = type_of(eqn.invars[0]).shape
        return 2.0 * _size(eqn.outvars) * math.prod(shape[dim] for dim in contracted)
    if name == "conv_general_dilated":
        kernel = type_of(eqn.invars[1]).shape
        features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * _size(eqn.outvars) * math.prod(kernel) / max(features, 1)
    if name in UPDATED:  # in place in a loop, and where its operand is donated
        return float(math.prod(type_of(eqn.invars[UPDATED[name]]).shape))
    inner = sum(map(_cost_of_jaxpr, inner_jaxprs(eqn)))
    if name == "scan":
        inner *= eqn.params["length"]
    elif name == "while":
        inner *= _ITERATIONS_OF_WHILE
    elif name == "shard_map":  # whose body is what one device does
        inner *= eqn.params["mesh"].size
    if name.startswith("reduce_"):
        return _size([atom for atom in eqn.invars if isinstance(atom, Var)])
    return inner if name in ONLY_INNER else inner + _size(eqn.outvars)


@weakref_cache
def _cost_of_jaxpr(jaxpr: Jaxpr) -> float:
    return sum(map(cost_of, jaxpr.eqns))


def _size(variables: Iterable[Var]) -> float:
    return float(sum([math.prod(getattr(var.aval, "shape", ())) for var in variables]))
