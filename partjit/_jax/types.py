"""Types for annotations.

The public names of devices and tree structures (`jax.Device`, `jax.tree_util.PyTreeDef`) are variables to type
checkers. Of trees and of the parameters of equations, no type says what is in them.
"""

from typing import Any, TypeAlias

from jaxlib._jax import Device
from jaxlib._jax.pytree import PyTreeDef

__all__ = ["Device", "Params", "PyTree", "PyTreeDef"]

PyTree: TypeAlias = Any
"""Containers that jax knows, with arrays, specs or types for leaves: Python has no type for it."""

Params: TypeAlias = dict[str, Any]
"""The parameters of an equation by name; its primitive determines what they are."""
