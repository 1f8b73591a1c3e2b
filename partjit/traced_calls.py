"""Calls under an eager transformation, recognized at a glance.

`jax.grad` of a program, not in a `jax.jit`, calls it with tracers each time, of which C++ knows nothing. What has to be
equal for a call to be of the same program as an earlier one is compared here, by identity first: the structure of the
arguments, their types, the shardings of arrays among them, and jax's context.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from jax.core import ShapedArray, Tracer
from jax.tree_util import tree_flatten

from partjit._jax.arrays import ArrayImpl, type_sharding_and_commitment
from partjit._jax.caches import CacheGroup
from partjit._jax.dispatch import results_are_checked
from partjit._jax.tracing import trace_context
from partjit._jax.types import PyTree, PyTreeDef
from partjit.compile import Program

__all__ = ["TracedCalls"]

_groups = CacheGroup("partjit traced calls")

_MOST = 4

_Key: TypeAlias = tuple[PyTreeDef, list[object], object, bool]


class TracedCalls:
    """The programs of the last calls of one function, without static or host arguments, and of different kinds."""

    def __init__(self) -> None:
        self._programs: tuple[tuple[_Key, Program], ...] = ()
        _groups.add(self)

    def find(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> tuple[Program, list[Any]] | None:
        """The program of a call, and its flat arguments; None if none of the last calls was of this kind."""
        if not self._programs:
            return None
        known = _flat(args, kwargs)
        if known is None:
            return None
        leaves, key = known
        for own, program in self._programs:
            if own == key:
                return program, leaves
        return None

    def remember(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], program: Program) -> None:
        """Has calls like this one recognized from here on."""
        known = None if any(isinstance(const, Tracer) for const in program.consts) else _flat(args, kwargs)
        if known is not None:
            self._programs = ((known[1], program), *self._programs)[:_MOST]

    def clear(self) -> None:
        """Recognizes nothing until the next call."""
        self._programs = ()


def _flat(args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> tuple[list[Any], _Key] | None:
    """The flat arguments and what their program depends on; None if keys do not compare, or a leaf is unusual."""
    try:
        leaves, tree = tree_flatten((args, kwargs))
        kinds = [_kind(leaf) for leaf in leaves]
    except (ValueError, TypeError, AttributeError):
        return None
    return leaves, (tree, kinds, trace_context(), results_are_checked())


def _kind(leaf: Any) -> object:
    of_known_type = _KINDS.get(type(leaf))
    if of_known_type is not None:
        return of_known_type(leaf)
    if not isinstance(leaf, Tracer) or type(leaf.aval) is not ShapedArray:
        raise TypeError
    return leaf.aval


def _int_kind(leaf: int) -> object:
    if not -(2**31) <= leaf < 2**31:  # what does not know the call says which integer has too many bits
        raise ValueError
    return int


_KINDS: dict[type, Callable[[Any], object]] = {
    ArrayImpl: type_sharding_and_commitment,
    np.ndarray: lambda x: (np.ndarray, x.shape, x.dtype),
    int: _int_kind,
    bool: type,
    float: type,
    complex: type,
}
