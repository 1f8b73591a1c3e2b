"""Calls with NumPy arrays and numbers that are like an earlier one, recognized quickly."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from partjit._jax.arrays import ArrayImpl, type_sharding_and_commitment
from partjit._jax.threads import has_64_bits
from partjit._jax.tracing import trace_context
from partjit._jax.types import PyTree, PyTreeDef
from partjit.checks import leaves_of
from partjit.colocated.runtime.host_values import NUMBERS, Destination, is_host_value

__all__ = ["KnownHostArguments", "kinds_of"]

_OF_NUMPY = np.ndarray, np.generic


class KnownHostArguments:
    """How the NumPy arrays and numbers among the arguments of an earlier call became arrays.

    Those of a call whose arguments are of the same kinds become such arrays as well. They stay NumPy arrays until the
    function runs, so they need no pins, and where it runs on a thread, that thread puts them on devices.
    """

    __slots__ = ("_context", "_context_of", "_host", "_of_arrays", "_tree")

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
        kinds = [_kind(leaf) if is_host_value(leaf) else None for leaf in leaves]
        self._host = [
            (i, kind, Destination(array.aval, array.sharding, array.committed))
            for i, (kind, array) in enumerate(zip(kinds, arrays, strict=True))
            if kind is not None
        ]
        self._of_arrays = [
            type_sharding_and_commitment(leaf) for leaf, kind in zip(leaves, kinds, strict=True) if kind is None
        ]
        # Without an array among them, the context says which devices these are.
        self._context_of: Callable[[], object] = has_64_bits if are_devices_given or self._of_arrays else trace_context
        self._context = self._context_of()

    @staticmethod
    def of(
        tree: PyTreeDef, leaves: Sequence[Any], arrays: Sequence[jax.Array], *, are_devices_given: bool
    ) -> "KnownHostArguments | None":
        """As the constructor; None if one of the arguments is no plain array."""
        if not all(type(leaf) is ArrayImpl or is_host_value(leaf) for leaf in leaves):  # pending, or an array of keys
            return None
        return KnownHostArguments(tree, leaves, arrays, are_devices_given)

    def leaves_of(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> list[Any] | None:
        """The flat arguments, with `HostArgument`s, if they are of the known kinds; else None."""
        leaves = leaves_of(self._tree, (args, kwargs))
        return None if leaves is None else self.recognized(leaves)

    def recognized(self, leaves: list[Any]) -> list[Any] | None:
        """The flat arguments of a call, a list that is changed, as of `leaves_of`."""
        if self._context != self._context_of():
            return None
        arrays = [*leaves]
        for i, _, _ in reversed(self._host):
            del arrays[i]
        try:
            of_arrays = [*map(type_sharding_and_commitment, arrays)]
        except AttributeError:  # a leaf that is not a plain array
            return None
        if of_arrays != self._of_arrays:  # as lists, which compare the identities of their items first
            return None
        try:
            for i, kind, destination in self._host:
                leaf = leaves[i]
                if kind != _kind(leaf):
                    return None
                leaves[i] = destination.argument(leaf)
        except OverflowError:  # too large
            return None
        return leaves


def kinds_of(leaves: Sequence[Any]) -> tuple[Hashable, ...] | None:
    """What all that is known of a call follows from, with its structure and context; None for pending ones and keys."""
    kinds: list[Hashable] = []
    for leaf in leaves:
        if is_host_value(leaf):
            kinds.append(_kind(leaf))
        elif type(leaf) is ArrayImpl:
            kinds.append(type_sharding_and_commitment(leaf))
        elif isinstance(leaf, jax.Array):
            return None
        else:
            kinds.append((object, type(leaf)))
    return tuple(kinds)


def _kind(leaf: Any) -> Hashable:
    """What the type of the array follows from, of numbers and NumPy arrays; of anything else, its type."""
    own = type(leaf)
    return own if own in NUMBERS or not isinstance(leaf, _OF_NUMPY) else (own, leaf.dtype, leaf.shape)
