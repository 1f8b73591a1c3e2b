"""Functions that afterwards delete the arrays that they consumed."""

import collections
import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.tree_util import tree_leaves

from partjit._jax.arrays import ArrayImpl
from partjit._jax.types import PyTree
from partjit.arguments import Function, Numbered, positions

__all__ = ["delete_consumed", "retiring"]


def _is_array(leaf: object) -> bool:
    """Whether a leaf is an array with memory of its own."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


def retiring(function: Function, donate: Numbered = ((), ()), donated_leaves: Sequence[bool] = ()) -> Function:
    """`function`, which afterwards deletes the arrays it consumed.

    They are given by the numbers and names of arguments, or by a flag for each leaf of all arguments.

    For versions of jax in which passing a consumed array over several devices to any compiled function ends the process
    (see `USE_OF_DONATED_BUFFERS_CRASHES`); an array that was deleted is refused with "Array has been deleted".
    """

    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        given = [args[i] for i in positions(donate[0], len(args))]
        if donate[1]:
            given += [kwargs[name] for name in donate[1] if name in kwargs]
        leaves = tree_leaves((args, kwargs))
        given += itertools.compress(leaves, donated_leaves)
        donated = [leaf for leaf in tree_leaves(given) if type(leaf) is ArrayImpl or _is_array(leaf)]
        ids = [*map(id, leaves)]
        if len({*ids}) < len(ids):
            passed = collections.Counter(ids)
            for leaf in donated:
                if passed[id(leaf)] > 1:
                    what = f"an array {leaf.aval.str_short()}"
                    raise RuntimeError(f"{what} is donated and passed a second time in one call")
        try:
            return function(*args, **kwargs)
        finally:  # one that fails in the middle has consumed them as well
            delete_consumed(donated)

    return call


def delete_consumed(leaves: Sequence[Any]) -> None:
    """Deletes those of the arguments of a call that are arrays that it consumed."""
    for leaf in leaves:
        if (type(leaf) is ArrayImpl or _is_array(leaf)) and leaf.is_deleted():
            leaf.delete()
