"""The arguments of calls, flat, and what has to be equal of them in calls that are alike."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jax.tree_util import tree_flatten, treedef_is_leaf

from partjit._jax.arrays import ArrayImpl, PRNGKeyArray, kind_of_keys, type_sharding_and_commitment
from partjit._jax.types import PyTree, PyTreeDef
from partjit.colocated.runtime.pending import PendingArray

__all__ = ["KINDS", "are_arguments", "flat_arguments", "numbers_of"]


def _kind_of_integer(x: int) -> object:
    bits = x.bit_length()
    return int if bits < 32 else (int, bits < 64)  # where these are too many, no call with such a one is known


KINDS: dict[type, Callable[[Any], object]] = {
    ArrayImpl: type_sharding_and_commitment,
    PRNGKeyArray: kind_of_keys,
    PendingArray: lambda x: (x.aval, x.sharding, x.committed),
    int: _kind_of_integer,
    np.ndarray: lambda x: (np.ndarray, x.shape, x.dtype),
    **dict.fromkeys((bool, float, complex, np.bool_, np.int32, np.int64, np.float32, np.float64), type),
}
"""By the type of an argument, what has to be equal of it."""


def flat_arguments(
    args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[list[Any], PyTreeDef, list[object]] | None:
    """The flat arguments, their structure and kinds; None if keys do not compare, or a leaf is no plain array."""
    try:
        leaves, tree = tree_flatten((args, kwargs))
        return leaves, tree, [KINDS[type(leaf)](leaf) for leaf in leaves]
    except (ValueError, KeyError, AttributeError):
        return None


def numbers_of(tree: PyTreeDef) -> list[int]:
    """Of each leaf of the arguments and keyword arguments of a call, the number of the argument that it is part of.

    Those of keyword arguments have numbers beyond them.
    """
    arguments = [*tree.children()[0].children(), tree.children()[1]]
    return [number for number, argument in enumerate(arguments) for _ in range(argument.num_leaves)]


def are_arguments(tree: PyTreeDef, leaves: Iterable[int]) -> bool:
    """Whether these leaves of the arguments and keyword arguments of a call are positional arguments themselves."""
    positional, numbers = tree.children()[0].children(), numbers_of(tree)
    return all(numbers[i] < len(positional) and treedef_is_leaf(positional[numbers[i]]) for i in leaves)
