"""Types for annotations whose public names (`jax.tree_util.PyTreeDef`, `jax.Device`) are variables to type checkers."""

from typing import Any, TypeAlias

from jaxlib._jax import Device
from jaxlib._jax.pytree import PyTreeDef

__all__ = ["Device", "PyTree", "PyTreeDef"]

PyTree: TypeAlias = Any
"""Containers that jax knows, with arrays, specs or types for leaves: Python has no type for it."""
