"""Calls with objects that are like an earlier one, recognized quickly; the objects may be others each time."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from partjit._jax.arrays import ArrayImpl, type_sharding_and_commitment
from partjit._jax.types import PyTree, PyTreeDef
from partjit.checks import leaves_of
from partjit.host_objects import HostReference

__all__ = ["KnownObjects"]


class KnownObjects:
    """Where an earlier call had arrays and where objects; calls like it differ in the objects alone.

    Whether an argument is an object follows from its type, unless it has an attribute that jax asks for.

    Attributes:
        tree: the structure of the arguments, with references in the place of the objects.
    """

    __slots__ = ("_flat", "_kinds", "_references", "tree")

    def __init__(
        self, flat: PyTreeDef, tree: PyTreeDef, leaves: Sequence[Any], references: Sequence[HostReference | None]
    ) -> None:
        """Of a call whose other arguments are plain arrays.

        Args:
            flat, tree: the structure of the arguments with the objects as leaves, and with references.
            leaves: the leaves of the former.
            references: for each leaf, what takes its place if it is an object.
        """
        self.tree = tree
        self._flat = flat
        self._references = references
        self._kinds = [
            type_sharding_and_commitment(leaf) if reference is None else type(leaf)
            for leaf, reference in zip(leaves, references, strict=True)
        ]

    @staticmethod
    def of(
        flat: PyTreeDef, tree: PyTreeDef, leaves: Sequence[Any], references: Sequence[HostReference | None]
    ) -> "KnownObjects | None":
        """As the constructor; None if one of the other arguments is no plain array."""
        others = (leaf for leaf, reference in zip(leaves, references, strict=True) if reference is None)
        return KnownObjects(flat, tree, leaves, references) if all(type(x) is ArrayImpl for x in others) else None

    def recognized(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> tuple[list[jax.Array], dict[HostReference, object]] | None:
        """The arrays of a call and its objects, if it is like the earlier one; else None."""
        leaves = leaves_of(self._flat, (args, kwargs))
        if leaves is None:
            return None
        arrays: list[jax.Array] = []
        objects: dict[HostReference, object] = {}
        try:
            for leaf, kind, reference in zip(leaves, self._kinds, self._references, strict=True):
                if reference is None:
                    if type_sharding_and_commitment(leaf) != kind:
                        return None
                    arrays.append(leaf)
                elif type(leaf) is kind and not hasattr(leaf, "aval"):
                    objects[reference] = leaf
                else:
                    return None
        except AttributeError:  # of what is no plain array
            return None
        return arrays, objects
