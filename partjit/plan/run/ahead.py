"""Fragments that a process dispatches before it is known whether all others go on."""

import collections
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.extend.core import Jaxpr
from jax.extend.core.primitives import cond_p
from jax.sharding import Sharding

from partjit.calls import inner_jaxprs, is_unpredictable
from partjit.plan.ir.nodes import Fragment, Value
from partjit.plan.ir.walk import blocks_of, walk
from partjit.plan.plan import Plan

__all__ = ["zeros_of"]


def zeros_of(
    plan: Plan, fragment: Fragment[Value, Value], sharding_of: Callable[[Value], Sharding]
) -> Callable[[], Sequence[jax.Array]] | None:
    """Makes arguments for a fragment whose results nobody sees, in a process that has failed.

    Args:
        plan: the plan.
        fragment: one of its fragments.
        sharding_of: the sharding of an argument.

    Returns:
        A function of no arguments; None where the fragment has to wait until it is known that all processes go on: it
        makes calls, goes by its arguments, or takes over memory that the caller, or a loop, would still have if one of
        them does not, and where its dispatch would wait for the other processes.
    """
    if plan.agree != "ahead" or fragment.calls or _goes_by_values(fragment.jaxpr.jaxpr) or _dispatch_waits(plan):
        return None
    made = {value for node in walk(plan.nodes) for value in node.outputs}
    carried = {value for node in walk(plan.nodes) for block in blocks_of(node) for value in block.inputs}
    taken = {value for value, is_taken in zip(fragment.inputs, fragment.donated, strict=True) if is_taken}
    if not taken <= made - carried or any(
        jax.dtypes.issubdtype(value.aval.dtype, jax.dtypes.extended) for value in fragment.inputs
    ):
        return None

    def zeros() -> Sequence[jax.Array]:
        return [_zeros(value, sharding_of(value)) for value in fragment.inputs]

    return zeros


def _dispatch_waits(plan: Plan) -> bool:
    """Whether a process runs what it dispatches in the thread that does: XLA does so on a CPU device of its own."""
    devices = [*plan.mesh.devices.flat]
    return devices[0].platform == "cpu" and 1 in collections.Counter(d.process_index for d in devices).values()


def _goes_by_values(jaxpr: Jaxpr) -> bool:
    """Whether its arguments decide what is executed: zeros may lead to other collectives, to no end, or into Python."""
    return is_unpredictable(jaxpr) or any(
        eqn.primitive is cond_p or any(map(_goes_by_values, inner_jaxprs(eqn))) for eqn in jaxpr.eqns
    )


def _zeros(value: Value, sharding: Sharding) -> jax.Array:
    shape, dtype = value.aval.shape, value.aval.dtype

    zero = np.broadcast_to(np.zeros((), dtype), shape)
    return jax.make_array_from_callback(shape, sharding, lambda index: np.array(zero[index], order="C"))
