"""A program with colocated calls, from the arguments of a call to its results.

The plan is made and compiled once per jaxpr, shardings and mesh.
"""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partjit._jax.compiling import MeshExecutable
from partjit._jax.dispatch import results_are_checked
from partjit._jax.jaxprs import has_types_of_64_bits
from partjit._jax.shardings import MaybeSharding, UnspecifiedValue
from partjit._jax.threads import with_64_bits
from partjit._jax.tracing import low_jaxpr, trace_context
from partjit.calls import chooses_whether_to_call, given_to_calls_without_results, streams_of
from partjit.colocated.ir.eager import DefaultSharding
from partjit.colocated.runtime.host_values import is_host_value
from partjit.colocated.runtime.streams import current_stream
from partjit.compile import in_shardings_of, own_sharding
from partjit.mesh import has_explicit_axes
from partjit.plan.passes.propagate import default_sharding
from partjit.plan.pipeline import make_plan
from partjit.plan.plan import Plan
from partjit.plan.run.agreed import agreement_for, failing_everywhere
from partjit.plan.run.link import LoweredFragment, compile_fragments, link, lower_fragment
from partjit.plan.run.placing import Placing, is_read_here, placing_of
from partjit.plan.run.run import Run
from partjit.primitive import shardings_of
from partjit.spec import Spec

__all__ = [
    "Placing",
    "agreement_for",
    "default_sharding_for",
    "failing_everywhere",
    "lower_plan",
    "placing_of",
    "plan_of",
    "runnable_of",
]


def plan_of(
    args: Sequence[object],
    *,
    jaxpr: ClosedJaxpr,
    in_specs: Sequence[Spec],
    out_specs: Sequence[Spec],
    mesh: Mesh,
    donated_invars: tuple[bool, ...],
    name: str,
    agree: bool | str = True,
    is_for_caller: bool = True,
    **_: object,
) -> Plan:
    """The plan of a program for arguments placed as these are; the parameters are those of `pjit_p`.

    Args:
        args: the arguments, or structs in their place.
        is_for_caller: whether it is for a call from the current stream; otherwise it is for calls from any that the
            program does not name.
    """
    jaxpr = low_jaxpr(jaxpr)
    in_shardings = tuple(
        _as_propagated(sharding) if isinstance(spec, UnspecifiedValue) else sharding
        for spec, sharding in zip(in_specs, in_shardings_of(args, in_specs, mesh), strict=True)
    )
    out_shardings = shardings_of(out_specs, mesh)
    caller = current_stream()
    caller = caller if is_for_caller and caller in streams_of(jaxpr.jaxpr) else None
    numbers: tuple[int, ...] = ()
    if chooses_whether_to_call(jaxpr.jaxpr):
        numbers = tuple(i for i, arg in enumerate(args) if is_host_value(arg) and not np.ndim(cast(Any, arg)))
    on_devices: tuple[int, ...] = ()
    if not results_are_checked():  # for NaNs, which an argument may have
        on_devices = tuple(
            i
            for i in given_to_calls_without_results(jaxpr.jaxpr)
            if not (is_host_value(args[i]) or is_read_here(args[i], in_shardings[i], mesh))
        )
    # Types of 64 bits may come from where they are enabled: what the plan adds to the program must not truncate them.
    with with_64_bits() if has_types_of_64_bits(jaxpr.jaxpr) else contextlib.nullcontext():
        return make_plan(
            jaxpr, in_shardings, out_shardings, donated_invars, mesh, name, agree, caller, numbers, on_devices
        )


def _as_propagated(sharding: MaybeSharding) -> MaybeSharding:
    """The sharding of an argument, spelled as that of the result which takes its place in the next call.

    The partitioner names no unsharded dimensions at the end, and no axes of size 1, which types over Explicit axes do.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec, sizes = sharding.spec, sharding.mesh.shape
    least = 1 if has_explicit_axes(cast(Mesh, sharding.mesh)) else 2
    entries = []
    for entry in spec:
        axes = (entry,) if isinstance(entry, str) else entry or ()
        entries.append(tuple(axis for axis in axes if sizes[axis] >= least))
    while entries and not entries[-1]:
        entries.pop()
    return sharding.update(spec=PartitionSpec(*entries, unreduced=spec.unreduced, reduced=spec.reduced))


def lower_plan(plan: Plan, mesh: Mesh) -> list[LoweredFragment]:
    """The fragments of a plan, lowered."""
    key = "lowered", mesh, trace_context()
    return plan.made.get(key, lambda: [lower_fragment(plan, fragment, mesh) for fragment in plan.fragments])


def _compile_plan(plan: Plan, mesh: Mesh) -> list[MeshExecutable]:
    key = "compiled", mesh, trace_context()
    return plan.made.get(key, lambda: compile_fragments(lower_plan(plan, mesh), mesh))


def runnable_of(plan: Plan, args: Sequence[object], mesh: Mesh) -> Run:
    """The plan compiled, for arguments placed as these are."""
    default = default_sharding_for(plan, args)
    key = "linked", mesh, default, trace_context()
    return plan.made.get(key, lambda: link(plan, lower_plan(plan, mesh), _compile_plan(plan, mesh), default, mesh))


def default_sharding_for(plan: Plan, args: Iterable[object]) -> DefaultSharding:
    """The default sharding of a plan: that of values whose own it leaves open."""
    return default_sharding(plan.mesh, map(own_sharding, args))
