"""In which memory the results of a conditional are: that of operands, if each branch returns these or writes over them.

Source: `CopyInsertion` of XLA, which copies what a branch returns of its operands unless nothing else is written there.
"""

from collections.abc import Callable, Iterator, Sequence

from partjit._jax.versions import RELEASE
from partjit.inspect.buffer_lifetimes import ALWAYS, Buffer, Lifetimes
from partjit.inspect.buffer_roots import NONE, Roots, as_large
from partjit.inspect.skeleton import Equation, Variable

__all__ = ["BranchResults", "used_operands"]

_IN_ORDER = RELEASE < (0, 12)
"""Whether, in loops, branches are as if one ran after the other: none reads what one before it has written over."""


class BranchResults:
    """The results of a conditional, as far as its branches were seen.

    Attributes:
        starts: when each of them is first written.
        over: the buffers of operands that each of them may be in.
    """

    def __init__(self, operands: Sequence[Roots], count: int, time: int, is_in_loop: bool) -> None:
        """Those of so many results of a conditional that begins now."""
        self._begin, self._are_in_order = time, is_in_loop and _IN_ORDER
        self._given = NONE.union(*operands)
        self.starts, self.over = [ALWAYS] * count, [self._given] * count
        self._is_changed = [False] * count
        self._replaced = [self._given] * count

    def add(self, results: Sequence[Roots], begin: int) -> None:
        """What the next branch returns is computed from these buffers; its own are the conditional's.

        Args:
            results: the buffers that each result is computed from.
            begin: when the branch began.
        """
        for k, made in enumerate(results):
            written = {one for buffer in made for one in buffer.over if buffer.may_be_over(one)}
            is_returned = bool(made) and made <= self._given
            read = {one for one in self._given if one.last >= begin or one in made}
            kept = self._given - read if self._are_in_order and self._is_changed[k] else self._given
            if made:
                self.over[k] &= kept & (made | written)
            self._is_changed[k] |= not is_returned
            first = min((buffer.start for buffer in made), default=self._begin)
            replaced = {one for buffer in made for one in buffer.replaces}
            replaced |= {one for one in self._given if one.last < first}
            self._replaced[k] &= kept & (made | written | replaced)
            if len(made) == 1:
                (buffer,) = made
                if buffer.start > self._begin:
                    buffer.nbytes, self.starts[k] = 0, min(self.starts[k], buffer.start)

    def buffers(self, times: Lifetimes, eqn: Equation, size: Callable[[Variable], int]) -> Iterator[Buffer]:
        """The buffers of the results of a conditional that has ended."""
        for k, var in enumerate(eqn.outvars):
            buffer = times.new(size(var), eqn, var, min(self.starts[k], times.clock))
            buffer.over, buffer.written = as_large(buffer, self.over[k]), times.clock
            buffer.replaces = frozenset(as_large(buffer, self._replaced[k]))
            yield buffer


def used_operands(eqn: Equation) -> set[int]:
    """The positions of the operands of a conditional that it needs: what none of its branches uses is not read."""
    inputs = ((k, var, inner) for inner in eqn.bodies for k, var in enumerate(inner.invars, 1))
    return {0, *(k for k, var, inner in inputs if var in inner.users or var in inner.outvars)}
