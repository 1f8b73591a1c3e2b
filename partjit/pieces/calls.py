"""Calls in which each process passes and receives its own pieces of arrays: `positional_semantics="local"`.

The program is the same as in a call with global arrays. Its arguments are made of the pieces before the call, and the
pieces of its results are returned.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax.core import ShapedArray, Tracer
from jax.sharding import Mesh, NamedSharding

from partjit._jax.shardings import UNSPECIFIED, MaybeSharding, UnspecifiedValue
from partjit._jax.tracing import is_staged
from partjit._jax.types import PyTree
from partjit.errors import ShardingError
from partjit.host_objects import HostReference
from partjit.infer import Definition, Inferred, infer, out_specs_of
from partjit.mesh import describe_mesh, has_explicit_axes
from partjit.pieces.boxes import (
    global_array,
    global_shape_of,
    is_over_processes,
    local_array,
    local_mesh,
    local_sharding_of,
)
from partjit.pieces.primitives import to_global_p, to_local_p
from partjit.placement import Misplaced, misplaced
from partjit.spec import ParsedPartitionSpec, Spec
from partjit.trace import with_static
from partjit.validate import Mismatch, check_devices, check_specs, raise_mismatches

__all__ = ["NOT_LOCAL", "call_locally", "is_global", "of_pieces", "pieces_of", "with_global_arguments"]

NOT_LOCAL = object()
"""What `call_locally` returns for a call that is like one with global arrays."""


def call_locally(
    definition: Definition,
    call: Callable[..., PyTree],
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    misplacement: Misplaced | None = None,
) -> PyTree:
    """Calls a program with pieces of this process, and returns the pieces of its results.

    Args:
        definition: what `pjit` was given.
        call: the same function, of global arrays.
        args, kwargs: the arguments of the call.
        misplacement: reports the pieces that have to be moved.

    Returns:
        The result, or NOT_LOCAL, without a call, where the arguments are global: inside of another program, and on a
        mesh without devices of other processes.

    Raises:
        ShardingError: the mesh cannot be cut into pieces, which every process finds alike; or an argument is no piece.
    """
    if is_staged():
        return NOT_LOCAL
    known = infer(definition, args, kwargs)
    if not is_over_processes(known.mesh):
        return NOT_LOCAL
    shardings = piece_shardings(definition, known)
    leaves, paths = known.arguments.leaves, known.arguments.paths
    if misplacement is not None:
        own: list[MaybeSharding] = [
            UNSPECIFIED if s is None or isinstance(x, Tracer) else local_sharding_of(s)
            for s, x in zip(shardings, leaves, strict=True)
        ]
        misplacement.report(leaves, own, paths, misplaced(leaves, own))
    arrays = [*map(of_pieces, leaves, shardings)]
    positional, named = _arguments(definition, known, arrays, args, kwargs)
    result = call(*positional, **named)
    return _localized(definition, result, known.mesh)


def with_global_arguments(
    definition: Definition, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree], list[NamedSharding | None] | None]:
    """The arguments of a program that is traced, with global arrays and types in the place of pieces.

    Returns:
        The arguments, and `piece_shardings`; None for these where the arguments are global anyway.
    """
    if is_staged():
        return args, kwargs, None
    known = infer(definition, args, kwargs)
    if not is_over_processes(known.mesh):
        return args, kwargs, None
    shardings = piece_shardings(definition, known)
    arrays = [*map(of_pieces, known.arguments.leaves, shardings)]
    return *_arguments(definition, known, arrays, args, kwargs), shardings


def piece_shardings(definition: Definition, known: Inferred) -> list[NamedSharding | None]:
    """The sharding of the array of which each argument is a piece; None for one that is global, or the same for all.

    Raises:
        ShardingError: as `call_locally`.
    """
    own = local_mesh(known.mesh)
    arguments = known.arguments
    if has_explicit_axes(known.mesh) and any(isinstance(leaf, Tracer) for leaf in arguments.leaves):
        raise ShardingError(
            f"{definition.name}, which has positional_semantics='local', is called by a transformation such as "
            f"jax.grad on the mesh ({describe_mesh(known.mesh)}) with Explicit axes, where the types of pieces name "
            "another mesh than those of the arrays: transform inside of it, or make the axes Auto"
        )
    shardings: list[NamedSharding | None] = []
    mismatches: list[Mismatch] = []
    for leaf, path, aval, spec in zip(arguments.leaves, arguments.paths, known.avals, known.in_specs, strict=True):
        if is_global(leaf):
            shardings.append(None)
        elif isinstance(spec, ParsedPartitionSpec):
            if spec.mesh is not None:
                own = local_mesh(spec.mesh)
            local = dataclasses.replace(spec, mesh=None)
            mismatches += check_specs("pjit arguments", [path], [aval], [local], own)
            mismatches += check_devices([path], [leaf], [local], own)
            shardings.append(spec.named_sharding(known.mesh))
        else:
            shardings.append(_sharding_of_piece(leaf, path, definition, known.mesh))
    raise_mismatches(mismatches, f"{definition.name}, for the pieces of process {jax.process_index()},", own)
    return shardings


def of_pieces(leaf: Any, sharding: NamedSharding | None) -> Any:
    """The array, or its type, of which an argument is the piece of this process."""
    if sharding is None:
        return leaf
    if isinstance(leaf, Tracer):
        return to_global_p.bind(leaf, sharding=sharding)
    if isinstance(leaf, jax.ShapeDtypeStruct | ShapedArray):
        shape = global_shape_of(leaf.shape, sharding)
        own = None if getattr(leaf, "sharding", None) is None else sharding
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=own, weak_type=leaf.weak_type)
    return global_array(leaf, sharding)


def pieces_of(result: PyTree) -> PyTree:
    """What this process has of the arrays in a result."""
    with_paths, tree = jax.tree_util.tree_flatten_with_path(result)
    return tree.unflatten(
        [
            local_array(leaf, "result" + jax.tree_util.keystr(path)) if isinstance(leaf, jax.Array) else leaf
            for path, leaf in with_paths
        ]
    )


def _localized(definition: Definition, result: PyTree, mesh: Mesh) -> PyTree:
    leaves, tree = jax.tree.flatten(result)
    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        return pieces_of(result)
    specs = out_specs_of(definition, tree, [jax.typeof(leaf) for leaf in leaves])
    return tree.unflatten(
        [_piece_of_traced(definition, leaf, spec, mesh) for leaf, spec in zip(leaves, specs, strict=True)]
    )


def _piece_of_traced(definition: Definition, leaf: Any, spec: Spec, mesh: Mesh) -> Any:
    if not isinstance(leaf, Tracer):
        return local_array(leaf, "result")
    if isinstance(spec, UnspecifiedValue):
        raise ShardingError(
            f"{definition.name}, which has positional_semantics='local', is called by a transformation such as "
            "jax.grad and has a result without a spec, which alone says what piece a process has of it: give it one "
            f"in {definition.out_name}"
        )
    return to_local_p.bind(leaf, sharding=spec.named_sharding(mesh))


def _sharding_of_piece(leaf: Any, path: str, definition: Definition, mesh: Mesh) -> NamedSharding | None:
    """The sharding of the array of which an argument without a spec is a piece, from the piece's own."""
    if isinstance(leaf, Tracer):
        raise ShardingError(
            f"Argument {path} of {definition.name}, which has positional_semantics='local', is passed by a "
            f"transformation such as jax.grad and has no spec: give it one in {definition.in_name}"
        )
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not getattr(leaf, "committed", True):
        return None  # a number, say, that all processes pass alike
    own = local_mesh(mesh)
    its_mesh = cast(Mesh, sharding.mesh) if isinstance(sharding, NamedSharding) else None
    if its_mesh is None or its_mesh.shape != own.shape or [*its_mesh.devices.flat] != [*own.devices.flat]:
        raise ShardingError(
            f"Argument {path} of {definition.name} has no spec in {definition.in_name}, and its own sharding, "
            f"{sharding}, is none over the local mesh ({describe_mesh(own)}), which would say what the other processes "
            "have: give it a spec"
        )
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def is_global(leaf: Any) -> bool:
    """Whether an argument is an array over several processes, which all pass."""
    if isinstance(leaf, Tracer):
        return False
    sharding = getattr(leaf, "sharding", None)
    return (
        sharding is not None
        and isinstance(getattr(sharding, "mesh", None), Mesh | None)
        and not sharding.is_fully_addressable
    )


def _arguments(
    definition: Definition, known: Inferred, leaves: Sequence[Any], args: Sequence[PyTree], kwargs: dict[str, PyTree]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """The arguments of the call with other leaves."""
    objects = definition.referenced(args, kwargs)[2]
    static = tuple(
        (key, objects[value] if isinstance(value, HostReference) and value in objects else value, kind)
        for key, value, kind in known.arguments.static
    )
    positional, named = with_static(known.arguments.tree, leaves, static)
    return tuple(positional), named
