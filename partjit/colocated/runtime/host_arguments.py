"""Calls with NumPy arrays and numbers that are like an earlier one, recognized quickly."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from partjit._jax.arrays import type_sharding_and_commitment
from partjit._jax.threads import has_64_bits
from partjit._jax.tracing import trace_context
from partjit._jax.types import PyTree, PyTreeDef
from partjit.checks import leaves_of
from partjit.colocated.runtime.host_values import NUMBERS, Destination, is_host_value

__all__ = ["KnownHostArguments", "kinds_of"]


class KnownHostArguments:
    """How the NumPy arrays and numbers among the arguments of an earlier call became arrays.

    Those of a call whose arguments are of the same kinds become such arrays as well. They stay NumPy arrays until the
    function runs, so they need no pins, and where it runs on a thread, that thread puts them on devices.
    """

    __slots__ = ("_context", "_context_of", "_destinations", "_kinds", "_of_arrays", "_tree")

    def __init__(
        self, tree: PyTreeDef, leaves: Sequence[Any], arrays: Sequence[jax.Array], are_devices_given: bool
    ) -> None:
        """Of a call.

        Args:
            tree: the structure of the arguments.
            leaves: the arguments.
            arrays: what they became; other arguments are as they were.
            are_devices_given: whether the options of the function say on which devices.
        """
        self._tree = tree
        self._kinds = [_kind(leaf) if is_host_value(leaf) else None for leaf in leaves]
        self._of_arrays = [
            type_sharding_and_commitment(leaf) if kind is None else None
            for leaf, kind in zip(leaves, self._kinds, strict=True)
        ]
        self._destinations = [Destination(array.aval, array.sharding, array.committed) for array in arrays]
        # Without an array among them, the context says which devices these are.
        self._context_of: Callable[[], object] = (
            has_64_bits if are_devices_given or None in self._kinds else trace_context
        )
        self._context = self._context_of()

    @staticmethod
    def of(
        tree: PyTreeDef, leaves: Sequence[Any], arrays: Sequence[jax.Array], *, are_devices_given: bool
    ) -> "KnownHostArguments | None":
        """As the constructor; None if one of the arguments is no plain array."""
        try:
            return KnownHostArguments(tree, leaves, arrays, are_devices_given)
        except AttributeError:  # pending, or an array of keys
            return None

    def leaves_of(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> list[Any] | None:
        """The flat arguments, with `HostArgument`s, if they are of the known kinds; else None."""
        leaves = leaves_of(self._tree, (args, kwargs))
        return None if leaves is None else self.recognized(leaves)

    def recognized(self, leaves: list[Any]) -> list[Any] | None:
        """The flat arguments of a call, a list that is changed, as of `leaves_of`."""
        if self._context != self._context_of():
            return None
        try:
            for i, kind in enumerate(self._kinds):
                leaf = leaves[i]
                if kind is None:
                    if type_sharding_and_commitment(leaf) != self._of_arrays[i]:
                        return None
                elif kind == _kind(leaf):
                    leaves[i] = self._destinations[i].argument(leaf)
                else:
                    return None
        except (AttributeError, OverflowError):  # no plain array, too large
            return None
        return leaves


def kinds_of(leaves: Sequence[Any]) -> tuple[Hashable, ...] | None:
    """What all that is known of a call follows from, with its structure and context; None for pending ones and keys."""
    try:
        return tuple([_kind(leaf) if is_host_value(leaf) else _kind_of_other(leaf) for leaf in leaves])
    except AttributeError:
        return None


def _kind_of_other(leaf: Any) -> Hashable:
    return type_sharding_and_commitment(leaf) if isinstance(leaf, jax.Array) else (object, type(leaf))


def _kind(leaf: Any) -> Hashable:
    """What the type of the array follows from, of numbers and NumPy arrays."""
    own = type(leaf)
    dtype = None if own in NUMBERS else getattr(leaf, "dtype", None)  # a class may be made of a number
    return own if dtype is None else (own, dtype, leaf.shape)
