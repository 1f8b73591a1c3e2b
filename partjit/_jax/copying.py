"""Programs that copy many small arrays, which takes a few times as long one by one; numbers also into one array."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core.primitives import copy_p
from jax.sharding import Sharding
from jax.stages import Wrapped

from partjit._jax.arrays import ArrayImpl, copy_of, type_sharding_and_commitment
from partjit._jax.dispatch import FastPath, fast_path_data, make_cpp_function

__all__ = ["Copier", "copier_into_one_of", "copier_of"]

Copier = Callable[..., Sequence[jax.Array]]
"""A function of arrays that returns their copies."""

_NAME = "copies_of_arguments"
_copiers: "weakref.WeakValueDictionary[tuple[object, ...], Any]" = weakref.WeakValueDictionary()


def copier_of(arrays: Sequence[ArrayImpl]) -> Copier | None:
    """A C++ function that copies arrays by one program, which is compiled here; None if there is no such program.

    It dispatches the program without waiting until the arrays are computed, whatever the context is in which it is
    called, and has a copy for whoever donates or deletes an array afterwards.

    Args:
        arrays: what it is first called with; on the same devices, and all or none committed. Later arrays have their
            types and shardings, or are copied one by one.
    """
    return _copier_of(arrays, into_one=False)


def copier_into_one_of(numbers: Sequence[ArrayImpl]) -> Copier | None:
    """The same of numbers of one dtype, which it copies into one array; those that are copied one by one stay so."""
    return _copier_of(numbers, into_one=True)


def _copier_of(arrays: Sequence[ArrayImpl], into_one: bool) -> Copier | None:
    kinds = (*map(type_sharding_and_commitment, arrays),)
    copier = _copiers.get((kinds, into_one))
    if copier is None:
        copier = _compiled(arrays, kinds, into_one)
        copies = copier(*arrays)
        if into_one:
            are_alike = copies[0].dtype == arrays[0].dtype
        else:
            are_alike = (*map(type_sharding_and_commitment, copies),) == kinds
        if not are_alike:
            return None
        _copiers[kinds, into_one] = copier
    return copier


def _compiled(arrays: Sequence[ArrayImpl], kinds: tuple[object, ...], into_one: bool) -> Copier:
    made = arrays[:1] if into_one else arrays
    shardings = tuple(array.sharding for array in made) if arrays[0].committed else None
    traced: Any = _jitted(shardings, into_one).trace(*arrays)
    executable: Any = traced.lower().compile()._executable
    tree = jax.tree.structure((0,) * len(made))

    def cache_miss(*given: ArrayImpl) -> tuple[Sequence[jax.Array], FastPath | None, bool]:
        if (*map(type_sharding_and_commitment, given),) != kinds:
            return _one_by_one(*given), None, False
        copies = executable.unsafe_call(*given)
        return (*copies,), fast_path_data(executable, tree, given, copies, traced.jaxpr, ()), False

    def without_programs(*given: ArrayImpl) -> Sequence[jax.Array]:  # C++ forgets the programs of one that is gone
        return _one_by_one(*given)

    return make_cpp_function(without_programs, _NAME, cache_miss, ((), ()), ())


@functools.lru_cache(maxsize=256)
def _jitted(shardings: tuple[Sharding, ...] | None, into_one: bool) -> Wrapped:
    return jax.jit(_in_one if into_one else _copies, out_shardings=shardings)


def _copies(*arrays: jax.Array) -> Sequence[jax.Array]:
    return tuple(map(copy_p.bind, arrays))


def _in_one(*numbers: jax.Array) -> Sequence[jax.Array]:
    return (jax.lax.concatenate([jax.lax.expand_dims(number, (0,)) for number in numbers], 0),)


_copies.__name__ = _in_one.__name__ = _NAME


def _one_by_one(*arrays: ArrayImpl) -> Sequence[jax.Array]:
    return tuple(map(copy_of, arrays))
