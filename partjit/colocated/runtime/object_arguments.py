"""Calls with objects that are like an earlier one, recognized quickly; the objects may be others each time."""

from collections.abc import Mapping, Sequence
from typing import Any

from partjit._jax.arrays import ArrayImpl, type_sharding_and_commitment
from partjit._jax.types import PyTree, PyTreeDef
from partjit.checks import leaves_of
from partjit.colocated.runtime.host_arguments import KnownHostArguments
from partjit.host_objects import HostReference

__all__ = ["KnownObjects"]


class KnownObjects:
    """Where an earlier call had arrays and where objects; calls like it differ in the objects alone.

    Whether an argument is an object follows from its type, unless it has an attribute that jax asks for.

    Attributes:
        tree: the structure of the arguments, with references in the place of the objects.
        host_arguments: what became of the NumPy arrays and numbers; None if there were none.
    """

    __slots__ = ("_flat", "_kinds", "_references", "host_arguments", "tree")

    def __init__(
        self,
        flat: PyTreeDef,
        tree: PyTreeDef,
        leaves: Sequence[Any],
        references: Sequence[HostReference | None],
        host_arguments: KnownHostArguments | None,
    ) -> None:
        """Of a call whose other arguments are plain arrays, NumPy arrays and numbers.

        Args:
            flat, tree: the structure of the arguments with the objects as leaves, and with references.
            leaves: the leaves of the former.
            references: for each leaf, what takes its place if it is an object.
            host_arguments: of the others, if NumPy arrays or numbers are among them.
        """
        self.tree = tree
        self.host_arguments = host_arguments
        self._flat = flat
        self._references = references
        is_plain = host_arguments is None
        self._kinds = [
            type_sharding_and_commitment(leaf) if is_plain and reference is None else type(leaf)
            for leaf, reference in zip(leaves, references, strict=True)
        ]

    def leaves_of(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> list[Any] | None:
        """The flat arguments, if they have the structure of those of the earlier call; else None."""
        return leaves_of(self._flat, (args, kwargs))

    def recognized(self, leaves: Sequence[Any]) -> tuple[list[Any], dict[HostReference, object]] | None:
        """The other arguments of a call and its objects, from the flat ones, if it is like the earlier one; else None.

        With NumPy arrays or numbers among them, the former are those of `Specialization.call_with_host_arguments`.
        """
        others: list[Any] = []
        objects: dict[HostReference, object] = {}
        host_arguments = self.host_arguments
        for leaf, kind, reference in zip(leaves, self._kinds, self._references, strict=True):
            if reference is None:
                if host_arguments is None and (
                    type(leaf) is not ArrayImpl or type_sharding_and_commitment(leaf) != kind
                ):
                    return None
                others.append(leaf)
            elif type(leaf) is kind and not hasattr(leaf, "aval"):
                objects[reference] = leaf
            else:
                return None
        if host_arguments is None:
            return others, objects
        known = host_arguments.recognized(others)
        return None if known is None else (known, objects)
