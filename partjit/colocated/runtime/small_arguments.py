"""Small arguments of calls on threads: a program copies all of them, which takes less time than a pin of each.

To compile it takes about as long as hundreds of pins, so that is done for calls that are made often, and for some of
many arguments at a time: no call is held up for the sake of all later ones. Of numbers that all devices have, such as
the metrics of a step, a program of one of them copies its own into one array for each dtype. Where no program copies
them, those over several devices are copied each by itself: a pin takes a step for each device, twice.

Large arguments that are still computed cannot be pinned, and are copied as well: many of them by one program.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from partjit._jax.arrays import ArrayImpl, copy_of, is_computed, replica_of
from partjit._jax.copying import Copier, copier_into_one_of, copier_of
from partjit._jax.dispatch import USE_OF_DONATED_BUFFERS_CRASHES, results_are_checked
from partjit._jax.shardings import device_list, kind_of_memory
from partjit.colocated.runtime.interrupts import is_interrupt
from partjit.colocated.runtime.replicated_arguments import KeptTogether, is_replicated_number, of_replica

__all__ = ["SmallArguments"]

_SMALL = 2**14
"""The bytes on a device above which a copy takes longer than a pin."""
_MOST = 2**21
"""The bytes, on all devices, that a call copies at most: as many calls may wait as a stream holds."""
_FEWEST_NUMBERS = 8
"""How many replicated numbers of a dtype it takes as long to keep one by one as to dispatch a program that does."""
_FEWEST_LARGE = 8
"""How many large arrays a program copies in less time than one by one."""
_PINS_OF_A_PROGRAM, _PINS_OF_AN_ARGUMENT = 1024, 64
"""How many pins take as long as to compile a program, and by how many each of its arguments adds to that."""
_MOST_TOGETHER = 256
"""How many arguments a program copies at most: to compile it for more holds up a call, and spares it little."""


class SmallArguments:
    """The small ones among the arguments of calls with arguments of the same types and shardings."""

    __slots__ = ("_large", "_last", "_over_devices", "_programs")

    def __init__(self) -> None:
        self._large: _LargeArguments | None = None
        self._over_devices: Sequence[int] | None = None  # the positions of those that are copied by themselves
        self._programs: _Programs | None = None
        self._last: Sequence[Callable[[], ArrayImpl | None]] = ()  # the last arguments that are not gone

    def copies(self, arrays: Sequence[ArrayImpl]) -> Sequence[Any] | None:
        """A copy of each argument that is small, as it is now, or what returns it; None for each of the others.

        Returns:
            None in place of all if there are none, or where pins serve better: calls with the same arguments share
            them, and they say that an argument was deleted.
        """
        if self._are_last(arrays):
            return None
        if self._large is None:
            self._large = _LargeArguments(arrays)
        small, large = self._copies_of_small(arrays), self._large.copies(arrays)
        if not large:
            return small
        copies: list[Any] = [None] * len(arrays) if small is None else [*small]
        for i, copy in large.items():
            copies[i] = copy
        return copies

    def _copies_of_small(self, arrays: Sequence[ArrayImpl]) -> Sequence[Any] | None:
        if self._programs is None:
            self._programs = _Programs(_copied_together(arrays))
        programs = self._programs.compiled_for(arrays)
        if not programs or results_are_checked():  # for NaNs, which an argument may have
            return self._copied_by_themselves(arrays)
        if USE_OF_DONATED_BUFFERS_CRASHES and any(array.is_deleted() for array in arrays):
            return None
        try:
            made = [program.copies(arrays) for program in programs]
        except Exception:
            if any(array.is_deleted() for array in arrays):
                return None
            raise
        if programs[0].are_all:
            return made[0]
        copies: list[Any] = [None] * len(arrays)
        for program, own in zip(programs, made, strict=True):
            for i, copy in zip(program.positions, own, strict=True):
                copies[i] = copy
        return copies

    def _copied_by_themselves(self, arrays: Sequence[ArrayImpl]) -> Sequence[ArrayImpl | None] | None:
        if self._over_devices is None:
            self._over_devices = [i for i, array in enumerate(arrays) if _is_small_over_devices(array)]
        if not self._over_devices:
            return None
        copies: list[ArrayImpl | None] = [None] * len(arrays)
        for i in self._over_devices:
            if not arrays[i].is_deleted():
                copies[i] = copy_of(arrays[i])
        return copies

    def _are_last(self, arrays: Sequence[ArrayImpl]) -> bool:
        """Whether these are the arguments of the last call; the next one is compared with these."""
        last = self._last
        if len(last) == len(arrays) and all(map(_refers_to, last, arrays)):
            return bool(arrays)
        self._last = [*map(weakref.ref, arrays)]
        return False


class _LargeArguments:
    """The large ones among the arguments of calls, which a program copies where all of them are still computed.

    Args:
        arrays: the arguments of a call.

    Attributes:
        positions: which of them these are; empty if they are too few for a program.
    """

    __slots__ = ("_programs", "positions")

    def __init__(self, arrays: Sequence[ArrayImpl]) -> None:
        large = [i for i, array in enumerate(arrays) if _is_copied(array) and _bytes_on_a_device(array) > _SMALL]
        positions = [i for i in large if _place_of(arrays[i]) == _place_of(arrays[large[0]])]
        self.positions: Sequence[int] = positions if len(positions) >= _FEWEST_LARGE else ()
        self._programs = _Programs(_groups(self.positions, are_numbers=False))

    def copies(self, arrays: Sequence[ArrayImpl]) -> Mapping[int, Any]:
        """Copies of these by their positions, of as many as there are programs for; of none if some are computed."""
        own = [arrays[i] for i in self.positions]
        if not own or results_are_checked() or any(array.is_deleted() or is_computed(array) for array in own):
            return {}
        try:
            made = [(program, program.copies(arrays)) for program in self._programs.compiled_for(arrays)]
        except Exception:
            if any(array.is_deleted() for array in own):
                return {}
            raise
        return {i: copy for program, copies in made for i, copy in zip(program.positions, copies, strict=True)}


class _Group(NamedTuple):
    """Arguments that one program copies.

    Attributes:
        positions: which arguments they are.
        are_numbers: whether each is a number that all devices have, of which one is copied.
    """

    positions: Sequence[int]
    are_numbers: bool

    def of(self, arrays: Sequence[ArrayImpl]) -> Sequence[ArrayImpl]:
        """What is copied."""
        own = [arrays[i] for i in self.positions]
        return [*map(replica_of, own)] if self.are_numbers else own


class _Program:
    """A program that copies the arguments of a group.

    Attributes:
        positions: those of the group.
        are_all: whether these are all arguments of a call, and the copies are what the program returns.
    """

    __slots__ = ("_copier", "_group", "are_all", "positions")

    def __init__(self, group: _Group, copier: Copier, count: int) -> None:
        self._group = group
        self._copier = copier
        self.positions = group.positions
        self.are_all = len(group.positions) == count and not group.are_numbers

    def copies(self, arrays: Sequence[ArrayImpl]) -> Sequence[Any]:
        """The copies of its arguments, in their order, or what returns them."""
        if self.are_all:
            return self._copier(*arrays)
        group = self._group
        copies = self._copier(*group.of(arrays))
        if not group.are_numbers:
            return copies
        own = [arrays[i] for i in group.positions]
        if len(copies) == len(own):
            return [*map(of_replica, own, copies)]
        together = KeptTogether(copies[0])
        return [of_replica(array, together, which) for which, array in enumerate(own)]


class _Programs:
    """The programs that copy the groups of the arguments of calls.

    Each is compiled once as many pins were made in place of copies as that takes time, one after the other: a call with
    thousands of arguments does not wait until there are copies of all of them.
    """

    __slots__ = ("_compiled", "_left", "_pins")

    def __init__(self, groups: Iterable[_Group]) -> None:
        self._left = [*groups]
        self._compiled: list[_Program] = []
        self._pins = 0

    def compiled_for(self, arrays: Sequence[ArrayImpl]) -> Sequence[_Program]:
        """Those that there are when a call is made with these arguments."""
        left = self._left
        if left:
            self._pins += sum(len(group.positions) for group in left)
        while left and self._pins >= (cost := _PINS_OF_A_PROGRAM + _PINS_OF_AN_ARGUMENT * len(left[0].positions)):
            self._pins -= cost
            program = _compiled(left.pop(0), arrays)
            if program is not None:
                self._compiled.append(program)
        return self._compiled


def _compiled(group: _Group, arrays: Sequence[ArrayImpl]) -> _Program | None:
    """The program of a group; None if there is none: one was deleted, or is of a type that programs do not have."""
    own = group.of(arrays)
    copier = _made(copier_into_one_of, own) if group.are_numbers and len(own) > 1 else None
    copier = copier or _made(copier_of, own)
    return None if copier is None else _Program(group, copier, len(arrays))


def _made(make: Callable[[Sequence[ArrayImpl]], Copier | None], arrays: Sequence[ArrayImpl]) -> Copier | None:
    try:
        return make(arrays)
    except Exception as error:
        if is_interrupt(error):
            raise
        return None


def _refers_to(reference: Callable[[], ArrayImpl | None], array: ArrayImpl) -> bool:
    return reference() is array


def _copied_together(arrays: Sequence[ArrayImpl]) -> Iterator[_Group]:
    """Those that one program copies in less time than it takes to pin them."""
    small = sorted((size, i) for i, array in enumerate(arrays) if (size := _bytes_on_all(array)) is not None)
    are_numbers = {i: is_replicated_number(arrays[i]) for _, i in small}
    numbers = [i for _, i in small if are_numbers[i]]
    numbers = [i for i in numbers if _place_of(arrays[i]) == _place_of(arrays[numbers[0]])]
    for dtype in dict.fromkeys(arrays[i].dtype for i in numbers):
        own = [i for i in numbers if arrays[i].dtype == dtype]
        if len(own) >= _FEWEST_NUMBERS:
            yield from _groups(own, are_numbers=True)
    others = [(size, i) for size, i in small if not are_numbers[i]]
    others = [(size, i) for size, i in others if _place_of(arrays[i]) == _place_of(arrays[others[0][1]])]
    if others and len(others) >= arrays[others[0][1]].sharding.num_devices:
        totals = itertools.accumulate(size for size, _ in others)
        positions = [i for (_, i), total in zip(others, totals, strict=True) if total <= _MOST]
        yield from _groups(positions, are_numbers=False)


def _groups(positions: Sequence[int], *, are_numbers: bool) -> Iterator[_Group]:
    for start in range(0, len(positions), _MOST_TOGETHER):
        yield _Group(positions[start : start + _MOST_TOGETHER], are_numbers)


def _is_small_over_devices(array: ArrayImpl) -> bool:
    """Whether it is in pieces on several devices, and copied in less time than pinned."""
    sharding = array.sharding
    return sharding.num_devices > 1 and not sharding.is_fully_replicated and _bytes_on_all(array) is not None


def _bytes_on_all(array: ArrayImpl) -> int | None:
    """The bytes of an array on all devices; None unless it is small and can be copied."""
    size = _bytes_on_a_device(array) if _is_copied(array) else _SMALL + 1
    return size * array.sharding.num_devices if size <= _SMALL else None


def _is_copied(array: ArrayImpl) -> bool:
    """Whether a program of this process can copy it."""
    dtype, sharding = array.dtype, array.sharding
    if not any(jax.numpy.issubdtype(dtype, kind) for kind in (jax.numpy.number, jax.numpy.bool_)):
        return False
    return sharding.is_fully_addressable and kind_of_memory(sharding) == "device"


def _bytes_on_a_device(array: ArrayImpl) -> int:
    return array.dtype.itemsize * math.prod(array.sharding.shard_shape(array.shape))


def _place_of(array: ArrayImpl) -> tuple[object, bool]:
    return device_list(array.sharding), array.committed
