"""When a buffer is alive, and sums over devices that are one collective."""

from collections.abc import Sequence

from partjit.inspect.skeleton import Equation, Variable

__all__ = ["ALWAYS", "Buffer", "combine_sums"]

ALWAYS = 1 << 60
"""A time after the end of every program."""


class Buffer:
    """A buffer, and when it is alive. Times are even numbers, in the order of the program.

    Attributes:
        nbytes: its size; 0 if it was merged with another.
        start: when it is written.
        first, last: when it is first read, and last.
        eqn: the equation that makes it; None for one of an argument.
        var: the variable that it is of; None for what an equation needs besides.
        number: its position among those of the program; -1 for one of an argument.
        over: buffers of the same size that it may be written over, if they are not read later.
        is_freed: whether another one is written over it when it is last read.
        is_given: whether it is what an iteration of a loop gets: carried, or a slice.
        is_result: whether a result of the program is in it.
        is_backward, is_used_backward: whether the equations that make it, and that use it last, are of the backward
            pass.
    """

    __slots__ = (
        *("nbytes", "start", "first", "last", "eqn", "var", "number", "over"),
        *("is_freed", "is_given", "is_result", "is_backward", "is_used_backward"),
    )

    def __init__(
        self,
        nbytes: int,
        start: int,
        last: int,
        eqn: Equation | None = None,
        var: Variable | None = None,
        is_backward: bool = False,
        number: int = -1,
    ) -> None:
        """What is last read when it is written, so far."""
        self.nbytes, self.start, self.last = nbytes, start, last
        self.first = ALWAYS
        self.eqn, self.var, self.number = eqn, var, number
        self.over: Sequence[Buffer] = ()
        self.is_freed = self.is_given = self.is_result = False
        self.is_backward = self.is_used_backward = is_backward

    @property
    def end(self) -> int:
        """The time from which on others may have its memory."""
        return self.last if self.is_freed else self.last + 1

    @property
    def is_saved(self) -> bool:
        """Whether the forward pass makes it for the backward pass."""
        return self.is_used_backward and not self.is_backward


def combine_sums(sums: Sequence[tuple[Buffer, Buffer]]) -> None:
    """Makes sums over the same axes one collective, as those of all gradients, unless one is computed from another.

    Args:
        sums: what a device has computed, and the sum over devices, in the order of the program.

    Source: `AllReduceCombiner` of XLA.
    """
    together: list[tuple[Buffer, Buffer]] = []

    def close() -> None:
        end = max((result.start for _, result in together), default=0)
        for partial, result in together:
            partial.last, result.start = max(partial.last, end), end

    for partial, result in sums:
        if any(partial.start >= other.first for _, other in together):
            close()
            together.clear()
        together.append((partial, result))
    close()
