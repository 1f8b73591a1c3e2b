"""Functions that afterwards delete the arrays that they consumed."""

import collections

import jax
from jax.core import Tracer

from partjit._jax.types import PyTree
from partjit.arguments import Function, Numbered, positions

__all__ = ["retiring"]


def retiring(function: Function, donate: Numbered) -> Function:
    """`function`, which afterwards deletes the arrays it consumed.

    For versions of jax in which passing a consumed array over several devices to any compiled function ends the process
    (see `USE_OF_DONATED_BUFFERS_CRASHES`); an array that was deleted is refused with "Array has been deleted".
    """

    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        given = [args[i] for i in positions(donate[0], len(args))] + [kwargs[n] for n in donate[1] if n in kwargs]
        donated = [
            leaf for leaf in jax.tree.leaves(given) if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        ]
        passed = collections.Counter(map(id, jax.tree.leaves((args, kwargs))))
        for leaf in donated:
            if passed[id(leaf)] > 1:
                raise RuntimeError(f"an array {leaf.aval.str_short()} is donated and passed a second time in one call")
        result = function(*args, **kwargs)
        for leaf in donated:
            if leaf.is_deleted():
                leaf.delete()
        return result

    return call
