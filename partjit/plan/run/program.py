"""A program with colocated calls, from the arguments of a call to its results.

The plan is made and compiled once per jaxpr, shardings and mesh.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from partjit._jax.arrays import device_put, is_of_one_process
from partjit._jax.compiling import MeshExecutable
from partjit._jax.dispatch import results_are_checked
from partjit._jax.jaxprs import has_types_of_64_bits
from partjit._jax.moves import resharded
from partjit._jax.shardings import MaybeSharding, UnspecifiedValue
from partjit._jax.threads import with_64_bits
from partjit._jax.tracing import low_jaxpr, trace_context
from partjit.calls import chooses_whether_to_call, given_to_calls_without_results, streams_of
from partjit.colocated.ir.eager import DefaultSharding
from partjit.colocated.runtime.host_values import Destination, is_host_value
from partjit.colocated.runtime.pending import PendingArray, values_of
from partjit.colocated.runtime.streams import current_stream
from partjit.compile import in_shardings_of, own_sharding
from partjit.devices import ids_of
from partjit.mesh import has_explicit_axes
from partjit.placement import is_placed
from partjit.plan.ir.nodes import Branch, Fragment, Loop, Node, Value
from partjit.plan.ir.walk import blocks_of, walk
from partjit.plan.passes.propagate import default_sharding
from partjit.plan.pipeline import make_plan
from partjit.plan.plan import Plan
from partjit.plan.run.agreed import agreement_for, failing_everywhere, moving_with_all
from partjit.plan.run.link import LoweredFragment, compile_fragments, link, lower_fragment
from partjit.plan.run.moving import typed_on
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
        on_devices = tuple(i for i in given_to_calls_without_results(jaxpr.jaxpr) if not is_host_value(args[i]))
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


@dataclasses.dataclass(frozen=True)
class Move:
    """How an argument of a call is resharded before its plan runs.

    Attributes:
        position: which argument it is.
        aval: its type.
        sharding: its sharding in the plan.
        is_for_calls: whether only calls read it: then a NumPy array or number is put on devices where one of them runs.
        is_of_host: whether it is a NumPy array or number.
    """

    position: int
    aval: ShapedArray
    sharding: Sharding
    is_for_calls: bool
    is_of_host: bool

    @functools.cached_property
    def destination(self) -> Destination:
        """Where a NumPy array or number is put."""
        return Destination(self.aval, self.sharding, True)


@dataclasses.dataclass(frozen=True)
class Placing:
    """What has to be done with the arguments of a call before its plan runs.

    Attributes:
        moves: those that are resharded.
        waits: the positions of those that are waited for if they are pending.
        with_all: reshards arrays over several processes in all of them, or in none; None if there are none.
    """

    moves: tuple[Move, ...]
    waits: tuple[int, ...]
    with_all: Callable[[Callable[[], Any]], Any] | None = None

    def for_calls(self) -> Mapping[int, Destination] | None:
        """Where NumPy arrays and numbers that calls alone read are put, by position.

        None if more than that has to be done with the arguments. What the first fragment waits for is there.
        """
        if any(not move.is_for_calls or not move.is_of_host for move in self.moves):
            return None
        return {move.position: move.destination for move in self.moves}

    def apply(self, args: Sequence[object]) -> Sequence[object]:
        """The arguments, as the plan wants them."""
        if not self.moves and not self.waits:
            return args
        placed: list[Any] = [*args]
        for i in self.waits:
            if isinstance(pending := placed[i], PendingArray):
                placed[i] = pending.value()
        arrays: list[tuple[int, Sharding]] = []
        for move in self.moves:
            i = move.position
            if is_host_value(placed[i]):
                given = move.destination.argument(placed[i])
                placed[i] = given if move.is_for_calls else given.array()
            elif is_of_one_process(placed[i], move.sharding):
                placed[i] = resharded(placed[i], move.sharding)
            else:
                arrays.append((i, move.sharding))
        if arrays:
            values = values_of([placed[i] for i, _ in arrays])  # which may fail in one process alone
            move = functools.partial(device_put, values, [sharding for _, sharding in arrays])
            moved = move() if self.with_all is None else self.with_all(move)
            for (i, _), value in zip(arrays, moved, strict=True):
                placed[i] = value
        return placed


def placing_of(plan: Plan, args: Sequence[object], mesh: Mesh) -> Placing:
    """What has to be done with arguments like these, in a program on the user's mesh."""
    readers: dict[Value, list[Node]] = {}
    for node in walk(plan.nodes):
        if isinstance(node, Fragment) and node.by_one_device:  # which takes what there is
            continue
        for value in node.inputs:
            readers.setdefault(value, []).append(node)
    for_calls = _read_by_calls_alone(plan)
    moves, waits = [], []
    default = typed_on(mesh, default_sharding_for(plan, args).sharding)
    for i, (value, arg) in enumerate(zip(plan.inputs, args, strict=True)):
        nodes = readers.get(value, [])
        by_call = any(not isinstance(node, Fragment) for node in nodes)
        is_array = isinstance(arg, jax.Array)
        if isinstance(arg, PendingArray) and (not by_call or len(nodes) > 1):
            waits.append(i)
        if isinstance(arg, jax.Ref):  # which cannot be moved, and whose sharding has been checked
            continue
        if value.sharding is None:
            if by_call and not is_array:
                moves.append(Move(i, value.aval, default, value in for_calls, is_host_value(arg)))
            continue
        is_there = is_array and arg.committed and arg.sharding.is_equivalent_to(value.sharding, arg.ndim)
        # The dispatch of an executable places what had no place, and once is enough.
        if not is_there and (by_call or len(nodes) > 1 or not is_placed(arg, value.sharding)):
            moves.append(Move(i, value.aval, typed_on(mesh, value.sharding), value in for_calls, is_host_value(arg)))
    resharded = [
        f"{move.position}: {move.aval.str_short()} from {arg.sharding} of {ids_of(arg.sharding)} to {move.sharding}"
        for move in moves
        if isinstance(arg := args[move.position], jax.Array)
        and not (move.sharding.is_fully_addressable or is_of_one_process(arg, move.sharding))
    ]
    return Placing(tuple(moves), tuple(waits), moving_with_all(plan, resharded))


def _read_by_calls_alone(plan: Plan) -> set[Value]:
    """The arguments that only calls read, directly or after a move to the hosts."""
    others = {*plan.outputs}
    for node in walk(plan.nodes):
        if isinstance(node, Fragment):
            others.update(() if node.by_one_device else node.inputs)
        elif isinstance(node, Loop):
            others.update(node.initial)
        elif isinstance(node, Branch):
            others.add(node.inputs[0])
        others.update(value for block in blocks_of(node) for value in block.outputs)
    return {*plan.inputs} - others
