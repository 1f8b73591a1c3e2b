"""When buffers are alive, as the program that makes them goes on."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence, Set

from partjit.inspect.skeleton import Equation, Variable

__all__ = ["ALWAYS", "Buffer", "Lifetimes"]

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
        written: when it has been written; what is last read between its start and then may be written over.
        replaces: those of operands of a conditional that each branch has read before it writes this one, a result.
        freed: when another one is written over it; None if none is.
        is_given: whether it is what an iteration of a loop gets: carried, or a slice.
        is_result: whether a result of the program is in it.
        is_gathered: whether a collective gives it that is not a sum.
        is_backward, is_used_backward: whether the equations that make it, and that use it last, are of the backward
            pass.
    """

    __slots__ = (
        *("nbytes", "start", "first", "last", "eqn", "var", "number", "over", "written"),
        *("replaces", "freed", "is_given", "is_result", "is_gathered", "is_backward", "is_used_backward"),
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
        self.nbytes, self.start, self.last, self.written = nbytes, start, last, start
        self.first = ALWAYS
        self.eqn, self.var, self.number = eqn, var, number
        self.over: Sequence[Buffer] = ()
        self.replaces: Set[Buffer] = frozenset()
        self.freed: int | None = None
        self.is_given = self.is_result = self.is_gathered = False
        self.is_backward = self.is_used_backward = is_backward

    @property
    def end(self) -> int:
        """The time from which on others may have its memory."""
        return self.last + 1 if self.freed is None else self.freed

    def may_be_over(self, other: "Buffer") -> bool:
        """Whether it may be written over another one, as far as that was read until now."""
        return self.start <= other.last <= self.written and other in self.over

    @property
    def is_saved(self) -> bool:
        """Whether the forward pass makes it for the backward pass."""
        return self.is_used_backward and not self.is_backward


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A loop that is running.

    Attributes:
        begin: when its first iteration begins.
        throughout: the buffers that are alive in all of it.
        before: those of what is computed before it, though its body says it.
        held: those of what is computed before it, though its body says it as well.
    """

    begin: int
    throughout: list[Buffer]
    before: list[Buffer] = dataclasses.field(default_factory=list)
    held: list[Buffer] = dataclasses.field(default_factory=list)


class Lifetimes:
    """The buffers of a program so far, and the time.

    Attributes:
        clock: the time, an even number.
        is_backward: whether what is computed now is of the backward pass.
        buffers: all of them, in the order of the program.
        loops: those that are running, outermost first.
        hoisted: the buffers that are made before loops, though bodies make them, and in how many loops they are made.
    """

    def __init__(self) -> None:
        """At the beginning of a program."""
        self.clock = 0
        self.is_backward = False
        self.buffers: list[Buffer] = []
        self.loops: list[_Loop] = []
        self._begins = [0]  # when the computations that are running began, outermost first
        self.hoisted: dict[Buffer, int] = {}

    def new(self, nbytes: int, eqn: Equation, var: Variable | None = None, start: int | None = None) -> Buffer:
        """A buffer that is written now, or was at another time."""
        start = self.clock if start is None else start
        buffer = Buffer(nbytes, start, self.clock, eqn, var, self.is_backward, len(self.buffers))
        self.buffers.append(buffer)
        return buffer

    def gather(self, nbytes: int, eqn: Equation) -> Buffer:
        """A buffer that a collective gives to an equation now."""
        buffer = self.new(nbytes, eqn)
        buffer.is_gathered = True
        return buffer

    def read(self, buffers: Iterable[Buffer]) -> None:
        """Buffers are read now."""
        for buffer in buffers:
            buffer.first = min(buffer.first, self.clock)
            if buffer.last <= self.clock:
                buffer.last, buffer.is_used_backward = self.clock, self.is_backward

    def write_over(self) -> None:
        """Each buffer is written over the first that it may be, and that no other is."""
        for buffer in self.buffers:
            for before in buffer.over:
                if buffer.may_be_over(before) and before.freed is None and not before.is_result:
                    before.freed = buffer.start
                    break

    def begin(self, outside: int = 0) -> int:
        """When the computation that runs begins, or that outside of so many loops or branches.

        What is computed from constants alone comes first in it, as do copies of its arguments.
        """
        return self._begins[-1 - outside]

    @contextlib.contextmanager
    def branch(self) -> Iterator[int]:
        """What is computed meanwhile is so in a branch of its own, which begins at the time that this gives."""
        self.clock += 2
        self._begins.append(self.clock)
        yield self.clock
        self._begins.pop()

    def enter(self, table: Buffer) -> None:
        """A loop begins, with a table of what it carries."""
        self.loops.append(_Loop(self.clock, [table]))
        self._begins.append(self.clock)

    def leave(self) -> None:
        """The innermost loop ends."""
        loop = self.loops.pop()
        self._begins.pop()
        for buffer in loop.before:
            if buffer in self.hoisted:  # only what is computed before the loop as well reads it
                buffer.start = buffer.last = loop.begin
        for buffer in loop.throughout:
            buffer.start = loop.begin
        self.read(loop.throughout)
        self.read(loop.held)

    def hoist(self, buffer: Buffer, depth: int) -> None:
        """A buffer is made where so many loops are running, though the body of a deeper one makes it."""
        self.hoisted[buffer] = depth
        self.loops[depth].before.append(buffer)

    def hold(self, buffers: Iterable[Buffer], depth: int) -> None:
        """Buffers that were made where at most so many loops are running are read in the body of a deeper one."""
        if depth < len(self.loops):
            self.loops[depth].held.extend(one for one in buffers if one not in self.hoisted)

    def need_throughout(self, buffers: Set[Buffer], depth: int) -> None:
        """Those of these buffers that were made before a loop are needed in all of its iterations."""
        for buffer in buffers & self.hoisted.keys() if self.hoisted else ():
            if depth > self.hoisted[buffer]:
                self.loops[self.hoisted.pop(buffer)].throughout.append(buffer)
