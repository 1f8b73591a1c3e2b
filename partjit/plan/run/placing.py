"""Putting the arguments of a call where its plan wants them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from partjit._jax.arrays import ArrayImpl, device_put, is_computed, is_laid_out_as_numpy, is_of_one_process
from partjit._jax.moves import resharded
from partjit._jax.shardings import MaybeSharding, UnspecifiedValue, addressable_devices, kind_of_memory
from partjit._jax.to_numpy import as_numpy
from partjit.colocated.runtime.host_values import Destination, is_host_value
from partjit.colocated.runtime.pending import PendingArray, values_of
from partjit.colocated.runtime.replicated_arguments import SMALL
from partjit.compile import own_sharding
from partjit.devices import ids_of
from partjit.placement import is_placed
from partjit.plan.ir.nodes import Branch, Fragment, Loop, Node, Value
from partjit.plan.ir.walk import blocks_of, walk
from partjit.plan.passes.propagate import default_sharding
from partjit.plan.plan import Plan
from partjit.plan.run.agreed import moving_with_all
from partjit.plan.run.moving import typed_on

__all__ = ["Move", "Placing", "is_read_here", "placing_of"]


@dataclasses.dataclass(frozen=True)
class Move:
    """How an argument of a call is resharded before its plan runs.

    Attributes:
        position: which argument it is.
        aval: its type.
        sharding: its sharding in the plan.
        is_for_calls: whether only calls read it: then a NumPy array or number is put on devices where one of them runs.
        is_of_host: whether it is a NumPy array or number.
        is_read: whether it is an array for calls which is read as a NumPy array, if it is there.
    """

    position: int
    aval: ShapedArray
    sharding: Sharding
    is_for_calls: bool
    is_of_host: bool
    is_read: bool = False

    @functools.cached_property
    def destination(self) -> Destination:
        """Where a NumPy array or number is put, which of an array is explicit to jax's transfer guard."""
        return Destination(self.aval, self.sharding, True, is_explicit=self.is_read)

    def argument(self, value: Any) -> Any:
        """What calls get of an argument that is of the host, or read; raises as `Destination.argument`.

        It does not wait for an array that is still computed. One that is deleted is refused by whoever makes the calls.
        """
        if not self.is_read:
            return self.destination.argument(value)
        if value.is_deleted():
            return value
        return self.destination.argument(as_numpy(value)) if is_computed(value) else device_put(value, self.sharding)


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

    def for_calls(self) -> Mapping[int, Move] | None:
        """What is done with NumPy arrays, numbers and small arrays that calls alone read, by position.

        None if more than that has to be done with the arguments. What the first fragment waits for is there.
        """
        if not all(move.is_for_calls and (move.is_of_host or move.is_read) for move in self.moves):
            return None
        return {move.position: move for move in self.moves}

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
            if move.is_read:
                placed[i] = move.argument(placed[i])
            elif move.is_of_host:
                given = move.argument(placed[i])
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
    default = typed_on(mesh, default_sharding(plan.mesh, map(own_sharding, args)).sharding)
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
            sharding = typed_on(mesh, value.sharding)
            is_read = value in for_calls and is_read_here(arg, sharding, mesh)
            moves.append(Move(i, value.aval, sharding, value in for_calls, is_host_value(arg), is_read))
    resharded = [
        f"{move.position}: {move.aval.str_short()} from {arg.sharding} of {ids_of(arg.sharding)} to {move.sharding}"
        for move in moves
        if isinstance(arg := args[move.position], jax.Array)
        and not (move.sharding.is_fully_addressable or is_of_one_process(arg, move.sharding))
    ]
    return Placing(tuple(moves), tuple(waits), moving_with_all(plan, resharded))


def is_read_here(arg: object, sharding: MaybeSharding, mesh: Mesh | AbstractMesh) -> bool:
    """Whether an argument that only calls read is read as a NumPy array, rather than moved to the devices of a mesh.

    It is, if it is small and on a CPU device, and these are such devices of this process.

    Args:
        arg: the argument, or a struct in its place.
        sharding: the sharding that it is to have.
        mesh: the mesh, over which it is replicated if its sharding is not specified.
    """
    if type(arg) is not ArrayImpl or arg.nbytes > SMALL or not is_laid_out_as_numpy(arg.dtype):
        return False
    if isinstance(sharding, UnspecifiedValue):
        if mesh.size <= 1 or isinstance(mesh, AbstractMesh):
            return False
        sharding = NamedSharding(mesh, PartitionSpec())
    if arg.committed and arg.sharding.is_equivalent_to(sharding, arg.ndim):
        return False
    ends = arg.sharding, sharding
    are_here = all(end.is_fully_addressable and kind_of_memory(end) == "device" for end in ends)
    are_cpus = are_here and all(addressable_devices(end)[0].platform == "cpu" for end in ends)
    return are_cpus and arg.sharding.num_devices == 1


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
