"""Abstract arguments (`jax.ShapeDtypeStruct`, `jax.core.ShapedArray`) and their shardings.

These may be on an abstract mesh, which has no devices; an abstract value always has one, on an empty mesh if need be.
A program runs on devices.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias, TypeGuard, cast

import jax
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from partjit._jax.meshes import under_mesh
from partjit._jax.shardings import UnspecifiedValue
from partjit.arguments import Arguments
from partjit.errors import ShardingError
from partjit.mesh import describe_mesh, is_abstract_mesh
from partjit.spec import ParsedPartitionSpec, Spec

__all__ = ["abstract_mesh_of", "is_abstract", "on_devices", "require_devices", "with_devices_of"]

Struct: TypeAlias = jax.ShapeDtypeStruct | ShapedArray


def on_devices(arguments: Arguments, mesh: Mesh) -> Arguments:
    """The arguments, abstract ones with their shardings on the devices of `mesh` where their meshes have its shape.

    A sharding on a mesh of another shape is kept; `require_devices` refuses it where it would be used.

    Raises:
        ShardingError: a sharding is a bare PartitionSpec that means nothing on `mesh`.
    """
    if not [leaf for leaf in arguments.leaves if isinstance(leaf, Struct)]:
        return arguments
    leaves = [_on_devices(leaf, path, mesh) for leaf, path in zip(arguments.leaves, arguments.paths, strict=True)]
    return dataclasses.replace(arguments, leaves=leaves)


def abstract_mesh_of(arguments: Arguments, specs: Sequence[ParsedPartitionSpec], name: str) -> Mesh | None:
    """The abstract mesh that specs bring along or, if none does, abstract arguments; on it a program is lowered.

    Raises:
        ShardingError: they have different axes.
    """
    of_specs = [("a spec", spec.abstract_mesh) for spec in specs if spec.abstract_mesh is not None]
    of_arguments = (
        (path, leaf.sharding.mesh)
        for path, leaf in zip(arguments.paths, arguments.leaves, strict=True)
        if isinstance(leaf, Struct) and is_abstract(leaf) and not _is_unspecified(leaf, leaf.sharding.mesh)
    )
    found = of_specs or [*of_arguments]
    for what, mesh in found[1:]:
        first, of_first = found[0]
        if mesh.shape_tuple != of_first.shape_tuple:
            raise ShardingError(
                f"{name} runs on one mesh, but {first} has a sharding on the abstract mesh ({describe_mesh(of_first)}) "
                f"and {what} one on ({describe_mesh(mesh)}): give all NamedShardings the same mesh, or enter a mesh "
                "and give PartitionSpecs"
            )
    # An abstract mesh is passed wherever a mesh is: it only has no devices.
    return cast(Mesh, found[0][1]) if found else None


def with_devices_of(values: Sequence[object], mesh: Mesh) -> Mesh:
    """A mesh or, if it is abstract, one of those of arrays that have its axes: in a call they say where it runs."""
    if not is_abstract_mesh(mesh):
        return mesh
    for value in values:
        own = getattr(getattr(value, "sharding", None), "mesh", None) if isinstance(value, jax.Array) else None
        if isinstance(own, Mesh) and (own.shape_tuple, own.axis_types) == (mesh.shape_tuple, mesh.axis_types):
            return own
    return mesh


def require_devices(arguments: Arguments, specs: Sequence[Spec], name: str, mesh: Mesh) -> None:
    """Raises ShardingError for an argument that keeps its sharding, where the devices of its mesh are unknown."""
    problems = [
        f"{path} has the sharding {leaf.sharding.spec} on the abstract mesh ({describe_mesh(leaf.sharding.mesh)})"
        for path, leaf, spec in zip(arguments.paths, arguments.leaves, specs, strict=True)
        if isinstance(leaf, Struct)
        and is_abstract(leaf)
        and leaf.sharding.mesh != mesh  # a program on an abstract mesh is lowered for devices that are not known yet
        and (isinstance(spec, UnspecifiedValue) or (mesh.empty and spec.mesh is None))
    ]
    if problems:
        given = "no mesh is set" if mesh.empty else f"the mesh of the program is ({describe_mesh(mesh)})"
        raise ShardingError(
            f"{name} needs devices, but {'; '.join(problems)}, and {given}. Enter a mesh of that shape with `with "
            "partjit.Mesh(devices, axis_names):`, give NamedShardings on a mesh with devices, or leave the sharding out"
        )


def _on_devices(leaf: object, path: str, mesh: Mesh) -> object:
    if not is_abstract(leaf):
        return leaf
    try:
        with under_mesh(mesh):  # a struct with a bare PartitionSpec reads it on the mesh of jax.set_mesh
            sharding = leaf.sharding
    except (TypeError, ValueError) as error:
        place = "no mesh is set" if mesh.empty else f"the mesh is ({describe_mesh(mesh)})"
        raise ShardingError(
            f"The sharding of {path} is a bare PartitionSpec, and {place}: {error}. Enter its mesh with `with "
            "partjit.Mesh(devices, axis_names):`, or give a NamedSharding"
        ) from None
    sharding_mesh = sharding.mesh
    if _is_unspecified(leaf, sharding_mesh):
        sharding = None
    elif [*sharding_mesh.shape.items()] == [*mesh.shape.items()]:
        sharding = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    else:
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)


def _is_unspecified(leaf: Struct, mesh: Mesh | AbstractMesh) -> bool:
    """Whether the sharding of an abstract argument, on this mesh, says nothing."""
    # In the type of a value only Explicit axes have a meaning: the others are left to the partitioner.
    return mesh.empty or (isinstance(leaf, ShapedArray) and AxisType.Explicit not in mesh.axis_types)


def is_abstract(leaf: object) -> TypeGuard[Struct]:
    """Whether an argument is abstract, with a sharding, if any, on an abstract mesh."""
    if not isinstance(leaf, jax.ShapeDtypeStruct | ShapedArray):
        return False
    try:
        return isinstance(getattr(leaf.sharding, "mesh", None), AbstractMesh)
    except TypeError:  # a bare PartitionSpec, and no mesh is set with jax.set_mesh
        return True
