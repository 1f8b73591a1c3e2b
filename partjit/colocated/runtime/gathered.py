"""The calls of several iterations of a loop, whose arguments an executable hands over at once."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

__all__ = ["GatheredCall", "GatheredCalls"]

_OfACall: TypeAlias = tuple[int, int, Sequence[np.ndarray]]
"""Which call of the executable it is, its number in the execution, and what a device hands over for it."""


@dataclasses.dataclass(frozen=True)
class GatheredCall:
    """A call that each iteration makes.

    Attributes:
        which: the position of the call among those of the executable.
        arguments: for each argument the position of the operand that has it.
    """

    which: int
    arguments: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class GatheredCalls:
    """The calls of an iteration, in their order.

    Attributes:
        calls: these.
        iterations: how many iterations are handed over at once.
        stacks: how many operands have a row for each iteration. They come first.
        others: how many operands are the same in all.
        is_repeated: whether a loop may have more iterations than are handed over at once.
    """

    calls: tuple[GatheredCall, ...]
    iterations: int
    stacks: int
    others: int
    is_repeated: bool

    def taken_apart(self, number: int, operands: Sequence[np.ndarray]) -> Iterator[_OfACall]:
        """What a device has handed over, call by call.

        Args:
            number: that of the first call in the execution.
            operands: how many iterations there are, the stacks, and the others.
        """
        count, *values = operands
        for row in range(int(count)):
            own = [value[row, ...] if k < self.stacks else value for k, value in enumerate(values)]
            for call in self.calls:
                yield call.which, number, [own[k] for k in call.arguments]
                number += 1

    def each(self, values: Sequence[np.ndarray]) -> Iterator[_OfACall]:
        """What an executable has returned for all iterations, call by call."""
        return self.taken_apart(0, [np.array(self.iterations), *values])
