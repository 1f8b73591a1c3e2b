"""In which memory the results of a conditional are: that of operands, if each branch returns these or writes over them.

Source: `CopyInsertion` of XLA, which copies what a branch returns of its operands unless nothing else is written there.
"""

from collections.abc import Callable, Iterator, Sequence

from partjit._jax.versions import RELEASE
from partjit.inspect.buffer_lifetimes import ALWAYS, Buffer, Lifetimes
from partjit.inspect.buffer_roots import NONE, Roots, as_large
from partjit.inspect.skeleton import Equation, Variable

__all__ = ["BranchResults"]

_IN_ORDER = RELEASE < (0, 12)
"""Whether, in loops, a branch copies what it returns of its operands, if one before it returns something else.

Then no result is in the memory of what a loop carries, either, unless it is written over it.
"""


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

    def add(self, results: Sequence[Roots]) -> None:
        """What the next branch returns is computed from these buffers; its own are the conditional's."""
        for k, made in enumerate(results):
            written = {one for buffer in made for one in buffer.over if buffer.may_be_over(one)}
            is_returned = bool(made) and made <= self._given
            if made:
                is_copied = is_returned and self._is_changed[k] and self._are_in_order
                self.over[k] &= written if is_copied else made | written
            self._is_changed[k] |= not is_returned
            first = min((buffer.start for buffer in made), default=self._begin)
            self._replaced[k] &= made | written | {one for one in self._given if one.last < first}
            if len(made) == 1:
                (buffer,) = made
                if buffer.start > self._begin:
                    buffer.nbytes, self.starts[k] = 0, min(self.starts[k], buffer.start)

    def buffers(self, times: Lifetimes, eqn: Equation, size: Callable[[Variable], int]) -> Iterator[Buffer]:
        """The buffers of the results of a conditional that has ended."""
        for k, var in enumerate(eqn.outvars):
            buffer = times.new(size(var), eqn, var, min(self.starts[k], times.clock))
            buffer.over, buffer.written = as_large(buffer, self.over[k]), times.clock
            if not self._are_in_order:
                buffer.replaces = frozenset(as_large(buffer, self._replaced[k]))
            yield buffer
