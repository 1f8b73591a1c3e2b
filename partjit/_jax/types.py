"""Types for annotations whose public names (`jax.tree_util.PyTreeDef`, `jax.Device`) are variables to type checkers."""

from jaxlib._jax import Device
from jaxlib._jax.pytree import PyTreeDef

__all__ = ["Device", "PyTreeDef"]
