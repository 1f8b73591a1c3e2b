"""Shardings in types: on a mesh with Explicit axes a value's type says how it is sharded over them.

A program is traced with the types that its in specs say; an argument whose spec is UNSPECIFIED has its own type. Where
a value has another type than is needed it is resharded, by an equation whose derivatives are of the right types.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
from jax.core import AbstractValue, ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from partjit._jax.caches import weakref_cache
from partjit._jax.meshes import manual_axes, under_mesh
from partjit._jax.shardings import DuplicateSpecError
from partjit._jax.tracing import retraced
from partjit.errors import ShardingError
from partjit.mesh import ambient_mesh, has_explicit_axes, tracing_under
from partjit.placement import reshard_policy
from partjit.spec import ParsedPartitionSpec, Spec

__all__ = [
    "check_types",
    "own_type",
    "requested_type",
    "resharded",
    "sharding_in_type",
    "sharding_of_type",
    "type_of_result",
    "typed_by",
    "with_result_types",
]

A = TypeVar("A", bound=AbstractValue)
T = TypeVar("T")


def requested_type(aval: A, spec: Spec, mesh: Mesh) -> A:
    """The type of a value of type `aval` that is sharded as `spec` says: with the Explicit axes of the spec.

    An UNCONSTRAINED dimension keeps those of its axes that the spec does not name; UNSPECIFIED keeps the type.
    """
    if not isinstance(spec, ParsedPartitionSpec) or not isinstance(aval, ShapedArray):
        return aval
    mesh = spec.mesh or mesh
    if not has_explicit_axes(mesh):
        return aval
    inside = _of_types(mesh)
    own: Sequence[Any] = aval.sharding.spec.partitions if aval.sharding.mesh == inside else ()
    types = dict(zip(inside.axis_names, inside.axis_types, strict=True))
    entries = []
    for dim in range(aval.ndim):
        axes = spec[dim] if dim < len(spec) else ()
        if axes is P.UNCONSTRAINED:
            kept = own[dim] if dim < len(own) else None
            kept = kept if isinstance(kept, tuple) else (kept,)
            axes = tuple(axis for axis in kept if axis not in spec.mesh_axes)
        entries.append(tuple(axis for axis in axes if types[axis] is AxisType.Explicit) or None)
    partitions = P(*entries, **dict(spec.reductions))
    return cast(A, aval.update(sharding=NamedSharding(inside, partitions)))


def _of_types(mesh: Mesh) -> AbstractMesh:
    """The mesh in the types of values: inside of a `shard_map` it knows which axes are manual."""
    return jax.sharding.get_abstract_mesh() if manual_axes() else mesh.abstract_mesh


def typed_by(aval: ShapedArray, sharding: Sharding | None) -> ShapedArray:
    """The type of a value with this sharding."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return aval
    return requested_type(aval, ParsedPartitionSpec.from_user_input(sharding, "a sharding"), sharding.mesh)


def type_of_result(aval: ShapedArray, sharding: Sharding | None) -> ShapedArray:
    """The type of what a call returns in the function that is traced, with this sharding or, if it is None, any.

    A number is replicated in any case, so its type says so over Explicit axes. Without a mesh in its type jax could not
    batch a nested `jax.jit` that gets it in a loop, such as `jnp.where`.
    """
    if sharding is None and not aval.shape and not manual_axes():
        return requested_type(aval, ParsedPartitionSpec.from_user_input(P(), "a sharding"), ambient_mesh())
    return typed_by(aval, sharding)


def sharding_of_type(aval: AbstractValue) -> NamedSharding | None:
    """What the type of a value of the function that is traced says, on the devices of the mesh; None for nothing."""
    return sharding_in_type(aval, ambient_mesh())


def sharding_in_type(aval: AbstractValue, mesh: Mesh) -> NamedSharding | None:
    """What the type of a value in a program on `mesh` says, on the devices of the mesh; None for nothing."""
    if not isinstance(aval, ShapedArray) or not has_explicit_axes(mesh) or aval.sharding.mesh != mesh.abstract_mesh:
        return None
    return NamedSharding(mesh, aval.sharding.spec)


def own_type(aval: AbstractValue, leaf: object, mesh: Mesh) -> AbstractValue:
    """The type of an argument in a program on `mesh` that requests none: its own, if it is sharded over these axes."""
    if not has_explicit_axes(mesh) or not isinstance(aval, ShapedArray):
        return aval
    sharding = getattr(leaf, "sharding", None) if not isinstance(leaf, Tracer) else jax.typeof(leaf).sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.abstract_mesh != mesh.abstract_mesh:
        return aval
    return aval.update(sharding=NamedSharding(mesh.abstract_mesh, sharding.spec))


@functools.lru_cache(256)
def _reshard_to(sharding: NamedSharding, mesh: Mesh | None) -> Callable[[Any], Any]:
    """Reshards to the sharding in a type; given the mesh, by a program that knows its devices."""
    reshard = functools.partial(jax.sharding.reshard, out_shardings=sharding)
    return reshard if mesh is None else jax.jit(reshard, out_shardings=NamedSharding(mesh, sharding.spec))


def resharded(value: T, aval: AbstractValue, mesh: Mesh) -> T:
    """`value`, or its reshard to the sharding in the type `aval` where its own type has another."""
    if not has_explicit_axes(mesh) or not isinstance(aval, ShapedArray) or aval.sharding.mesh.empty:
        return value
    own = jax.typeof(value)
    if not isinstance(own, ShapedArray) or own.sharding == aval.sharding:
        return value
    # An equation that is evaluated later, as that of a linearized function, finds no mesh but its own: the program's is
    # not ambient then. Given a mesh of devices, jax sets it itself, which it refuses in an eager `jax.grad`; a jit
    # has devices.
    is_ambient = manual_axes() or not jax.sharding.get_abstract_mesh().empty
    reshard = _reshard_to(aval.sharding, None if is_ambient else mesh)
    with contextlib.nullcontext() if manual_axes() else under_mesh(mesh):
        try:
            return reshard(value)
        except DuplicateSpecError:
            raise ShardingError(
                f"a value ({own.str_short()}) is to be sharded over {aval.sharding.spec}, but its type has one of "
                "these axes for another dimension: the batch of an enclosing jax.vmap. A mesh axis shards at most one "
                "dimension: reshard the batch before (jax.sharding.reshard), or leave the axis out of the spec"
            ) from None


def check_types(values: Sequence[object], avals: Sequence[AbstractValue], paths: Sequence[str], name: str) -> None:
    """Raises ShardingError that names all arguments that would be resharded, where `reshard_policy` is "error"."""
    if reshard_policy.current != "error":
        return
    others = [
        f"{path} ({own.str_short()}) has the sharding {own.sharding.spec} in its type, and its spec says "
        f"{aval.sharding.spec}"
        for path, value, aval in zip(paths, values, avals, strict=True)
        if isinstance(aval, ShapedArray) and AxisType.Explicit in aval.sharding.mesh.axis_types
        if (own := jax.typeof(value)).sharding != aval.sharding
    ]
    if others:
        raise ShardingError(
            f"Sharding passed to pjit does not match the types of arguments of {name}: {'; '.join(others)}. "
            "Reshard it with jax.sharding.reshard, change the spec, or set partjit.reshard_policy('warn')"
        )


def with_result_types(jaxpr: ClosedJaxpr, out_specs: Sequence[Spec], mesh: Mesh) -> ClosedJaxpr:
    """A jaxpr whose results have the types that `out_specs` say: `jaxpr` itself where they have them already."""
    wanted = tuple(requested_type(aval, spec, mesh) for aval, spec in zip(jaxpr.out_avals, out_specs, strict=True))
    return jaxpr if wanted == tuple(jaxpr.out_avals) else _resharding(jaxpr, wanted, mesh)


@weakref_cache
def _resharding(jaxpr: ClosedJaxpr, wanted: tuple[AbstractValue, ...], mesh: Mesh) -> ClosedJaxpr:
    def results(*args: object) -> list[object]:
        return [resharded(x, aval, mesh) for x, aval in zip(jaxpr_as_fun(jaxpr)(*args), wanted, strict=True)]

    with tracing_under(mesh):
        return retraced(jaxpr, results)
