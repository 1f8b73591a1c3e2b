"""What tests are given: specs, shapes, names and dtypes, checked and read."""

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from partjit.checks import items_of, require, require_integer, require_text, wrong_type
from partjit.spec import ParsedPartitionSpec

__all__ = ["axes_to_avoid", "axis_names_of", "mesh_shapes_of", "parsed_spec", "require_numeric", "shape_of"]


def parsed_spec(
    where: str, spec: object, mesh: Mesh | AbstractMesh | None = None, *, unconstrained: bool = False
) -> ParsedPartitionSpec:
    """Parses a spec, whose axes are those of a mesh.

    Raises:
        TypeError: it is neither a PartitionSpec nor None.
        ValueError: it is wrong by itself, or names an axis that the mesh does not have.
    """
    given = require(where, "spec", spec, P | None, "a PartitionSpec, or None for replicated")
    parsed = ParsedPartitionSpec.from_user_input(given, f"{where}: spec", allow_unconstrained_dims=unconstrained)
    unknown = [axis for axis in parsed.mesh_axes if mesh is not None and axis not in mesh.shape]
    if mesh is not None and unknown:
        axes = ", ".join(map(str, mesh.shape)) or "no axes"
        raise ValueError(f"{where}: the spec {parsed} names the axis {unknown[0]!r}, but the mesh has {axes}")
    return parsed


def shape_of(where: str, shape: object) -> tuple[int, ...]:
    """A shape as a tuple of Python integers; TypeError or ValueError if it is none."""
    sizes = items_of(where, "shape", shape, "a tuple of sizes")
    return tuple(require_integer(where, f"shape[{dim}]", size, 0) for dim, size in enumerate(sizes))


def mesh_shapes_of(mesh_shapes: object) -> list[tuple[int, ...]]:
    """Shapes of meshes; TypeError or ValueError if they are none."""
    found = []
    for i, shape in enumerate(items_of("meshes", "mesh_shapes", mesh_shapes, "a sequence of shapes")):
        sizes = items_of("meshes", f"mesh_shapes[{i}]", shape, "a shape, a tuple of sizes")
        found.append(tuple(require_integer("meshes", f"mesh_shapes[{i}][{k}]", s, 1) for k, s in enumerate(sizes)))
    return found


def axes_to_avoid(where: str, avoid: object) -> tuple[str, ...]:
    """The names of axes; TypeError if they are none."""
    axes = items_of(where, "avoid", avoid, "a sequence of names of axes")
    return tuple(require_text(where, f"avoid[{i}]", axis, "the name of an axis") for i, axis in enumerate(axes))


def axis_names_of(axis_names: object, most: int) -> list[tuple[str, ...]]:
    """Tuples of at least `most` names of axes; TypeError or ValueError if they are none."""
    found = []
    for i, names in enumerate(items_of("meshes", "axis_names", axis_names, "a sequence of tuples of names")):
        found.append(items_of("meshes", f"axis_names[{i}]", names, "a tuple of names"))
        for k, name in enumerate(found[-1]):
            require_text("meshes", f"axis_names[{i}][{k}]", name, "the name of an axis")
        if len(found[-1]) < most:
            raise ValueError(f"meshes: axis_names[{i}] must have a name for each of {most} axes, but is {found[-1]}")
    if not found:
        raise ValueError("meshes: axis_names must have a tuple of names to draw from, but is empty")
    return found


def require_numeric(where: str, dtype: object) -> None:
    """Raises TypeError if it is no dtype of numbers or flags."""
    expected = "the dtype of numbers or flags"
    try:
        found = np.dtype(require(where, "dtype", dtype, str | type | np.dtype, expected))
    except TypeError:
        raise wrong_type(where, "dtype", dtype, expected) from None
    if not (jnp.issubdtype(found, jnp.number) or jnp.issubdtype(found, jnp.bool_)):
        raise wrong_type(where, "dtype", dtype, expected)
