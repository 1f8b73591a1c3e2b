"""Going between the global arrays of programs over several processes, and what one process has of them."""

import dataclasses
from typing import Any, cast

import jax
import numpy as np
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from partjit._jax.types import PyTree
from partjit.arguments import abstract_argument, require_values
from partjit.checks import flattened, items_of, require_integer, wrong_type
from partjit.mesh import ambient_mesh
from partjit.pieces.boxes import global_array, global_shape_of, local_array, local_mesh, part_of_process
from partjit.spec import ParsedPartitionSpec, parse_spec_tree
from partjit.trees import Values, broadcast_specs
from partjit.validate import check_specs, raise_mismatches, require_mesh

__all__ = ["from_process_local", "to_process_local"]


def from_process_local(specs: PyTree, local_data: PyTree, global_shape: PyTree = None) -> PyTree:
    """Global arrays of which each process gives its own piece; every process has to call this.

    The piece of a process is what its devices hold, cut together in the order of the mesh. Along a dimension that no
    other process has a part of, all give the full size; where several processes have the same part, all of them have to
    give equal data, which is not checked.

    Args:
        specs: how the arrays are sharded, a tree prefix of `local_data`: `PartitionSpec` and None, over the ambient
            mesh, or `NamedSharding`, which brings its own.
        local_data: a tree of this process's pieces: NumPy arrays, numbers, and jax arrays of this process, which
            are not copied if they are sharded over the local mesh already. Without several processes the piece is the
            array.
        global_shape: the shape of the array, or a tree like `local_data` of shapes. A dimension in which the data is as
            long as the array is cut: each process takes its own part of it. None for the shape that follows from the
            pieces.

    Returns:
        A tree like `local_data` of arrays.

    Raises:
        ShardingError: a spec does not fit its piece on the local mesh; or the devices of a process are no box of the
            mesh, which every process finds alike.
        MissingMeshError: a spec needs a mesh and none is set.
        ValueError: `global_shape` is none that data of this shape is a piece of.
        TypeError: the data is no array, or `global_shape` no shape.

    Example:
        >>> import jax, numpy as np
        >>> from partjit import Mesh, P, from_process_local
        >>> with Mesh(jax.devices(), "data"):
        ...     batch = from_process_local(P("data"), {"x": np.ones((16, 4)), "y": np.ones(16)})
        >>> batch["x"].shape, batch["x"].sharding.spec  # on two processes: (32, 4)
        ((16, 4), P('data',))

    Source: `jax.make_array_from_process_local_data`, which takes one array, and no pieces that are not contiguous, and
    `host_local_array_to_global_array` of `jax.experimental.multihost_utils`, whose pieces these are.
    """
    with_paths, tree = flattened(local_data, "from_process_local: local_data")
    paths = tuple("local_data" + jax.tree_util.keystr(path) for path, _ in with_paths)
    leaves = [leaf for _, leaf in with_paths]
    parsed = _parsed(specs, local_data)
    shapes = _shapes(global_shape, local_data, len(leaves))
    require_values(leaves, paths, "from_process_local")
    arrays = [
        _from_piece(leaf, spec, shape, path)
        for leaf, spec, shape, path in zip(leaves, parsed, shapes, paths, strict=True)
    ]
    return tree.unflatten(arrays)


def to_process_local(arrays: PyTree) -> PyTree:
    """This process's pieces of global arrays, as arrays over its local mesh; nothing is copied.

    It is the inverse of `from_process_local`: devices that share a part of an array have it once in the piece.

    Args:
        arrays: a tree of arrays. One whose devices are all of this process is its own piece.

    Raises:
        ShardingError: an array has no `NamedSharding`; this process has none of its devices; or the devices of a
            process are no box of its mesh, which every process finds alike.
        TypeError: a leaf is no array.

    Example:
        >>> import jax, numpy as np
        >>> from partjit import Mesh, P, from_process_local, to_process_local
        >>> with Mesh(jax.devices(), "data"):
        ...     batch = from_process_local(P("data"), np.arange(16.0))
        >>> to_process_local(batch).shape  # on every process, however many there are
        (16,)

    Source: `global_array_to_host_local_array` of `jax.experimental.multihost_utils`.
    """
    with_paths, tree = flattened(arrays, "to_process_local: arrays")
    for path, leaf in with_paths:
        if not isinstance(leaf, jax.Array):
            where = "arrays" + jax.tree_util.keystr(path)
            raise wrong_type("to_process_local", where, leaf, "a jax.Array")
    return tree.unflatten([local_array(leaf, "arrays" + jax.tree_util.keystr(path)) for path, leaf in with_paths])


def _parsed(specs: PyTree, values: PyTree) -> list[ParsedPartitionSpec]:
    """The spec of each array, with its mesh."""
    mesh = ambient_mesh()
    parsed = []
    data = Values("local_data", "local_data")
    for spec in broadcast_specs(parse_spec_tree(specs, "specs"), values, "specs", lambda: data, "from_process_local"):
        if not isinstance(spec, ParsedPartitionSpec):
            raise wrong_type("from_process_local", "specs", spec, "a tree of PartitionSpec, None or NamedSharding")
        if spec.mesh is None:
            require_mesh(mesh, [ParsedPartitionSpec(P(), ())], "from_process_local", "local_data")
            spec = dataclasses.replace(spec, mesh=mesh)
        parsed.append(spec)
    return parsed


def _shapes(given: PyTree, values: PyTree, count: int) -> list[tuple[int, ...] | None]:
    """The shape of each array, if it is known."""
    if given is None:
        return [None] * count
    expected = "a shape, a tuple of sizes, or a tree of shapes like local_data"
    is_shape = isinstance(given, tuple | list) and all(isinstance(size, int | np.integer) for size in given)
    try:
        shapes = [given] * count if is_shape else jax.tree.structure(values).flatten_up_to(given)
    except (TypeError, ValueError):
        raise wrong_type("from_process_local", "global_shape", given, expected) from None
    return [None if shape is None else _shape(shape, expected) for shape in shapes]


def _shape(given: object, expected: str) -> tuple[int, ...]:
    sizes = items_of("from_process_local", "global_shape", given, expected)
    return tuple(require_integer("from_process_local", "global_shape", size, least=0) for size in sizes)


def _from_piece(piece: Any, spec: ParsedPartitionSpec, shape: tuple[int, ...] | None, path: str) -> jax.Array:
    aval = abstract_argument(piece, path, "from_process_local")
    mesh = cast(Mesh, spec.mesh)
    own, bare = local_mesh(mesh), dataclasses.replace(spec, mesh=None)
    _check(f"the pieces of process {jax.process_index()}", path, aval, bare, own)
    sharding = spec.named_sharding(mesh)
    if shape is not None:
        _check("the arrays", f"global_shape of {path}", ShapedArray(shape, aval.dtype), bare, mesh)
        piece = _cut(piece, aval.shape, sharding, shape, path)
    return global_array(piece, sharding)


def _check(what: str, path: str, aval: ShapedArray, spec: ParsedPartitionSpec, mesh: Mesh) -> None:
    raise_mismatches(check_specs(what, [path], [aval], [spec], mesh), "from_process_local", mesh)


def _cut(piece: Any, given: tuple[int, ...], sharding: NamedSharding, shape: tuple[int, ...], path: str) -> Any:
    """The piece of this process, from data that may be complete along some dimensions."""
    of_pieces = global_shape_of(given, sharding)
    if len(shape) == len(given):
        for dim, (size, expected, of_piece) in enumerate(zip(given, shape, of_pieces, strict=True)):
            if size == expected != of_piece:
                piece = part_of_process(piece, dim, sharding, shape)
        if global_shape_of(np.shape(piece), sharding) == shape:
            return piece
    raise ValueError(
        f"from_process_local: {path} has the shape {given}, which is no piece of an array of the global_shape {shape} "
        f"with the spec {sharding.spec}: in each dimension it has to be as long as the array, or as this process's "
        f"piece of it; leave global_shape out for one of the shape {of_pieces}"
    )
