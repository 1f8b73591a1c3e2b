"""Moves of values, and their shardings with the types of the axes of the user's mesh."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import jax
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding, Sharding

from partjit._jax.moves import moved, moved_to
from partjit.colocated.prepared import MOST_BYTES_COPIED_THERE
from partjit.colocated.runtime.host_values import HostArgument
from partjit.colocated.runtime.pending import OnDemand, PendingArray
from partjit.colocated.runtime.pins import copied
from partjit.mesh import has_explicit_axes
from partjit.plan.ir.nodes import Transfer

__all__ = ["mover", "typed_on", "value_of"]

Around: TypeAlias = Callable[[int], contextlib.AbstractContextManager[None]]
"""Of so many bytes, the block in which they are moved."""


def typed_on(mesh: Mesh, sharding: Sharding) -> Sharding:
    """The sharding with the types of the axes of the user's mesh, on its devices or on those of their hosts.

    On it fragments give their results, and functions want what they compute.
    """
    if has_explicit_axes(mesh) and isinstance(sharding, NamedSharding) and sharding.mesh.shape == mesh.shape:
        return sharding.update(
            mesh=Mesh(cast(Mesh, sharding.mesh).devices, mesh.axis_names, axis_types=mesh.axis_types)
        )
    return sharding


def mover(transfer: Transfer, mesh: Mesh) -> Callable[..., Sequence[jax.Array]]:
    """What makes a transfer of a program on the mesh; one that is left to calls takes what is `around` each move."""
    shardings = [typed_on(mesh, cast(Sharding, value.sharding)) for value in transfer.outputs]
    if transfer.is_left_to_calls:
        return _leaver(transfer, shardings)

    def move(*given: Any) -> Sequence[Any]:
        if HostArgument not in map(type, given):
            return moved([*map(value_of, given)], shardings)
        return [
            x.moved(sharding) if type(x) is HostArgument else moved_to(value_of(x), sharding)
            for x, sharding in zip(given, shardings, strict=True)
        ]

    return move


def _leaver(transfer: Transfer, shardings: Sequence[Sharding]) -> Callable[..., Sequence[jax.Array]]:
    """What keeps what a transfer is given, and returns arrays that are moved when a call needs them."""
    avals = [value.aval for value in transfer.outputs]

    def leave(*given: Any, around: Around | None = None) -> Sequence[Any]:
        return [*map(left, given, avals, shardings, transfer.pinned, [around] * len(given))]

    def left(array: Any, aval: ShapedArray, sharding: Sharding, is_pinned: bool, around: Around | None) -> Any:
        if type(array) is HostArgument:
            return array.moved(sharding)
        if type(array) is not PendingArray and array.nbytes > MOST_BYTES_COPIED_THERE:
            return _moved(array, sharding, around)  # rather than to keep so much on the accelerators
        itself = array.value_for_call if type(array) is PendingArray else lambda: array
        take = copied(array) if is_pinned else itself
        return PendingArray.made_by(_Left(take, sharding, around), aval, sharding, True)

    return leave


class _Left(OnDemand):
    """An array that the first call that needs it moves to the hosts, in its thread.

    Args:
        take: returns the array on the accelerators, once.
        sharding: that on the hosts.
        around: what is around the move, if there is somebody who listens.
    """

    __slots__ = ("_around", "_lock", "_moved", "_sharding", "_take")

    def __init__(self, take: Callable[[], jax.Array], sharding: Sharding, around: Around | None) -> None:
        self._take: Callable[[], jax.Array] | None = take
        self._sharding = sharding
        self._around = around
        self._moved: jax.Array | None = None
        self._lock = threading.Lock()

    def __call__(self) -> jax.Array:
        with self._lock:  # calls of several streams may need it at the same time
            if self._moved is None:
                assert self._take is not None
                array = self._take()
                self._take = lambda: array  # should the move fail, for the next call
                self._moved = _moved(array, self._sharding, self._around)
                self._take = None  # which keeps memory of the accelerators
            return self._moved


def _moved(array: jax.Array, sharding: Sharding, around: Around | None) -> jax.Array:
    if around is None:
        return moved_to(array, sharding)
    jax.block_until_ready(array)  # the move does not account for the time in which it is computed
    with around(array.nbytes):
        return jax.block_until_ready(moved_to(array, sharding))


def value_of(array: jax.Array) -> jax.Array:
    """The value of a result that a fragment needs."""
    return array.value() if type(array) is PendingArray else array
