"""Specs that users give: as axes of the arrays they are about."""

from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.sharding import Mesh

from partjit._jax.shardings import UNSPECIFIED, UnspecifiedValue
from partjit._jax.types import PyTree
from partjit.auto_specs import Auto
from partjit.checks import wrong_value
from partjit.errors import UnrepresentableShardingError
from partjit.inspect.changes import Axes, axes_on
from partjit.spec import ParsedPartitionSpec, Spec, parse_spec_tree
from partjit.trees import Values, broadcast_specs
from partjit.validate import check_specs, raise_mismatches

__all__ = ["axes_if_any", "given_axes"]


def axes_if_any(spec: Spec, mesh: Mesh, rank: int) -> Axes | None:
    """The axes of a spec; None where it leaves them to the partitioner, or where no axes of the mesh say the same.

    An array that is sharded like that keeps its sharding; only estimates do not know of it.
    """
    try:
        return axes_on(spec, mesh, rank, "it") if isinstance(spec, ParsedPartitionSpec) else None
    except UnrepresentableShardingError:
        return None


def given_axes(
    specs: PyTree, name: str, value: PyTree, mesh: Mesh, where: str = "search_specs"
) -> dict[int, Axes | None]:
    """The axes of the leaves of a tree of leaves, by position, for which specs are given; None where UNSPECIFIED is.

    Args:
        specs: a tree prefix of specs.
        name: the user's name of them.
        value: a tree of leaves with a `path` and a `shape`.
        mesh: the mesh.
        where: the public name of the function that the specs were given to.

    Raises:
        TypeError, ValueError: `specs` is no tree prefix, or a leaf of it no spec.
        ShardingError: specs do not fit; the message lists all that do not.
        ValueError: one is FROM_ARRAY, or over another mesh and like none on this one.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from partjit.auto_specs import AUTO
        >>> from partjit.search.blocks import Leaf
        >>> mesh = jax.sharding.AbstractMesh((4,), ("x",))
        >>> value = Leaf("x", (3,), "float32", 12), {"w": Leaf("params['w']", (4, 2), "float32", 32)}
        >>> given_axes((AUTO, P("x")), "in_specs", value, mesh)
        {1: (('x',), ())}
    """
    parsed = parse_spec_tree(specs, name, allow_auto=True)
    leaves: list[Any] = broadcast_specs(parsed, value, name, lambda: _named(name, value), where)
    arrays = jax.tree.leaves(value)
    types = [ShapedArray(leaf.shape, np.dtype("float32")) for leaf in arrays]
    settled = [UNSPECIFIED if isinstance(spec, Auto) else spec for spec in leaves]
    raise_mismatches(check_specs(name, [leaf.path for leaf in arrays], types, settled, mesh), "the function", mesh)
    found: dict[int, Axes | None] = {}
    for k, (spec, leaf) in enumerate(zip(leaves, arrays, strict=True)):
        if isinstance(spec, ParsedPartitionSpec):
            found[k] = axes_on(spec, mesh, len(leaf.shape), f"{leaf.path}, one of {name},")
        elif isinstance(spec, UnspecifiedValue):
            found[k] = None
        elif not isinstance(spec, Auto):
            raise wrong_value(
                name,
                leaf.path,
                spec,
                "a spec that says how it is sharded",
                f"give that of an array, {leaf.path}.sharding",
            )
    return found


def _named(name: str, value: PyTree) -> Values:
    """How messages name arguments or results."""
    if not name.startswith("in_"):
        return Values("the result", "result")
    names = []
    for i, argument in enumerate(value):
        leaves = jax.tree_util.tree_leaves_with_path(argument)
        of_first = [leaf.path.removesuffix(jax.tree_util.keystr(path)) for path, leaf in leaves[:1]]
        names += of_first or [f"arguments[{i}]"]
    return Values("the arguments", names)
