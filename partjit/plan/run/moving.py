"""Moves of values, and their shardings with the types of the axes of the user's mesh."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding, Sharding

from partjit._jax.moves import moved, moved_to
from partjit.colocated.runtime.host_values import HostArgument
from partjit.colocated.runtime.moved_by_calls import (
    MOST_BYTES_COPIED_THERE,
    Around,
    Beside,
    MovedByCall,
    moved_around,
)
from partjit.colocated.runtime.pending import PendingArray
from partjit.colocated.runtime.pins import copied
from partjit.mesh import has_explicit_axes
from partjit.plan.ir.nodes import Transfer

__all__ = ["mover", "typed_on", "value_of"]


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
        beside: Beside = []
        return [
            left(*of_value, beside, around) for of_value in zip(given, avals, shardings, transfer.pinned, strict=True)
        ]

    def left(
        array: Any, aval: ShapedArray, sharding: Sharding, is_pinned: bool, beside: Beside, around: Around | None
    ) -> Any:
        if type(array) is HostArgument:
            return array.moved(sharding)
        if type(array) is not PendingArray and array.nbytes > MOST_BYTES_COPIED_THERE:
            return moved_around(array, sharding, around)  # rather than to keep so much on the accelerators
        if type(array) is PendingArray:
            source = copied(array) if is_pinned else array.value_for_call
        else:
            source = copied(array)() if is_pinned else array
        return PendingArray.made_by(MovedByCall(source, sharding, beside, around), aval, sharding, True)

    return leave


def value_of(array: jax.Array) -> jax.Array:
    """The value of a result that a fragment needs."""
    return array.value() if type(array) is PendingArray else array
