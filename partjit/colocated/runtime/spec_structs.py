"""Specs of arrays as users write them: ShapeDtypeStructs, or arrays as examples."""

import inspect
from typing import Any

import jax
from jax.core import ShapedArray
from jax.sharding import PartitionSpec, Sharding

from partjit._jax.types import PyTree, PyTreeDef
from partjit.checks import flattened, shown
from partjit.colocated.runtime.host_values import KINDS_OF_NUMPY
from partjit.host_objects import HostConstant, is_placeholder

__all__ = ["check_out_specs", "spec_struct", "spec_structs", "struct_of"]


def spec_struct(leaf: Any, path: str) -> jax.ShapeDtypeStruct:
    """A user's spec as a ShapeDtypeStruct.

    Raises:
        ValueError: it has no shape and dtype.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if is_placeholder(leaf):
        object_ = shown(leaf.value) if isinstance(leaf, HostConstant) else repr(leaf)
        raise ValueError(
            f"{path} is an argument that is no array ({object_}), and functions return arrays: give a "
            "jax.ShapeDtypeStruct, or None where nothing is returned"
        )
    try:
        if isinstance(leaf.shape, tuple) and getattr(leaf.dtype, "kind", None) not in KINDS_OF_NUMPY:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))
    except (AttributeError, TypeError, ValueError):  # attributes of these names that are something else
        pass
    raise ValueError(f"{path} must be a jax.ShapeDtypeStruct, but is {shown(leaf)}{_remedy(leaf, path)}")


def _remedy(leaf: object, path: str) -> str:
    """What to do about what looks like a spec, but is none."""
    if isinstance(leaf, PartitionSpec | Sharding):
        sharding = "NamedSharding(mesh, ...)" if isinstance(leaf, PartitionSpec) else "..."
        return f", which says no shape and dtype: give jax.ShapeDtypeStruct((8,), 'float32', sharding={sharding})"
    if inspect.isroutine(leaf) and "out_specs" in path:
        return ": a function from the specs of the arguments to those of the results is given as out_specs_fn"
    return ""


def struct_of(aval: ShapedArray | jax.ShapeDtypeStruct, sharding: Sharding | None) -> jax.ShapeDtypeStruct:
    """The spec of a value, from its abstract value or another spec, with a sharding."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def spec_structs(specs: PyTree, what: str) -> tuple[list[jax.ShapeDtypeStruct], PyTreeDef]:
    """The leaves of a tree of specs as ShapeDtypeStructs, and its structure; ValueError that names what is none."""
    with_paths, tree = flattened(specs, what, is_placeholder)
    return [spec_struct(leaf, f"{what}{jax.tree_util.keystr(path)}") for path, leaf in with_paths], tree


def check_out_specs(where: str, name: str, out_specs: PyTree) -> PyTree:
    """The tree of specs of results, checked."""
    spec_structs(out_specs, f"{where}: {name}")
    return out_specs
