"""Which arrays are in the same memory: one ends with the others, whichever is deleted or donated."""

from collections.abc import Iterable

import jax

from partjit._jax.arrays import ArrayImpl, PRNGKeyArray, memory_of

__all__ = ["ArraysInMemory"]

_WITH_MEMORY = (ArrayImpl, PRNGKeyArray)


class ArraysInMemory:
    """Arrays and what is in their memory: an array is among them if it ends when one of them does.

    Asking where memory is takes a call for each device, so that is found out for arrays of equal types only.
    """

    __slots__ = ("_ids", "_memory", "_of_type")

    def __init__(self, arrays: Iterable[object]) -> None:
        self._ids: set[int] = set()
        self._of_type: dict[object, list[jax.Array]] = {}
        self._memory: dict[object, set[int]] = {}
        for array in arrays:
            self.add(array)

    def add(self, array: object) -> None:
        """Adds one."""
        self._ids.add(id(array))
        if isinstance(array, _WITH_MEMORY):
            self._of_type.setdefault((array.shape, array.dtype), []).append(array)

    def __contains__(self, array: jax.Array) -> bool:
        if id(array) in self._ids:
            return True
        kind = array.shape, array.dtype
        others = self._of_type.get(kind)
        if others is None or not array.size:  # without elements it has no address, and its copy costs nothing
            return others is not None
        memory = self._memory.setdefault(kind, set())
        while others:
            memory.update(memory_of(others.pop()))
        return not memory.isdisjoint(memory_of(array))
