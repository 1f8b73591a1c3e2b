"""Moves of values, and their shardings with the types of the axes of the user's mesh."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from partjit._jax.arrays import device_put
from partjit.colocated.runtime.host_values import HostArgument
from partjit.colocated.runtime.pending import PendingArray
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
    """What makes a transfer of a program on the mesh."""
    shardings = [typed_on(mesh, cast(Sharding, value.sharding)) for value in transfer.outputs]

    def move(*given: Any) -> Sequence[Any]:
        if HostArgument not in map(type, given):
            return device_put([*map(value_of, given)], shardings)
        return [
            x.moved(sharding) if type(x) is HostArgument else device_put(value_of(x), sharding)
            for x, sharding in zip(given, shardings, strict=True)
        ]

    return move


def value_of(array: jax.Array) -> jax.Array:
    """The value of a result that a fragment needs."""
    return array.value() if type(array) is PendingArray else array
