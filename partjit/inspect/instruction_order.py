"""The order in which XLA's CPU compiler runs the instructions of a computation: first those that need nothing but
arguments, then each as soon as what it needs has been computed, first come, first served.

So whatever needs only arguments, as what is gathered of parameters, comes before everything else. Sums over the same
axes are one collective, as those of all gradients, unless one is computed from another.

Source: `BFScheduler` and `AllReduceCombiner` of XLA.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

from partjit.inspect.skeleton import Body, Equation, Variable

__all__ = ["InstructionOrder", "Preparation", "Sums", "combined_sums"]


@dataclasses.dataclass(frozen=True, eq=False)
class Sums:
    """Sums over devices that are one collective: those of the results of these equations."""

    equations: list[Equation]


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What XLA does to an operand of an equation, before the equation: a gather, a transposed copy.

    Attributes:
        equation, operand: whose.
        left: how many more are made of its result for the equation.
    """

    equation: Equation
    operand: Variable
    left: int = 0


_Step: TypeAlias = Equation | Preparation | Sums


class InstructionOrder:
    """The equations of a body, one after another.

    The one who takes a step says when it is done, and which steps are no instructions of their own.

    Attributes:
        released: the equations that need nothing that is not computed yet, to be taken from the left, before `next`.
    """

    def __init__(
        self,
        body: Body,
        prepared: Mapping[Equation, Mapping[Variable, int]] | None = None,
        sums: Mapping[Equation, Sums] | None = None,
    ) -> None:
        """Nothing is done yet.

        Args:
            body: whose equations run.
            prepared: the operands of equations that are prepared for them, and in how many steps.
            sums: of equations whose results are summed over devices, the collective.
        """
        self._users, self._sums = body.users, sums or {}
        self._left = {id(group): len(group.equations) for group in self._sums.values()}
        self._waits = dict(body.waits)
        self._prepared = prepared or {}
        self._ready: collections.deque[Preparation | Sums | Equation] = collections.deque()
        self.released: collections.deque[Equation] = collections.deque()
        for eqn, operands in self._prepared.items():
            for var, count in operands.items():
                if var not in body.makers:
                    self._waits[eqn] += 1
                    self._ready.append(Preparation(eqn, var, count - 1))
        self.released.extend([eqn for eqn, count in self._waits.items() if not count])

    def queue(self, eqn: Equation) -> None:
        """An equation is an instruction, which runs after those that came before it."""
        self._ready.append(eqn)

    def next(self) -> _Step | None:
        """The next step, once no equation is released any more; None after the last."""
        return self._ready.popleft() if self._ready else None

    def done(self, step: _Step) -> None:
        """What a step computes is there."""
        if isinstance(step, Equation):
            group = self._sums.get(step)
            if group is None:
                self._use(step)
                return
            self._left[id(group)] -= 1
            if not self._left[id(group)]:
                self._ready.append(group)
        elif isinstance(step, Sums):
            for eqn in step.equations:
                self._use(eqn)
        elif step.left:
            self._ready.append(dataclasses.replace(step, left=step.left - 1))
        else:
            self._release(step.equation)

    def _use(self, eqn: Equation) -> None:
        users, prepared, waits = self._users, self._prepared, self._waits
        for var in eqn.outvars:
            for user in users.get(var, ()):
                if user in prepared and var in prepared[user]:
                    self._ready.append(Preparation(user, var, prepared[user][var] - 1))
                    continue
                left = waits[user] = waits[user] - 1
                if not left:
                    self.released.append(user)

    def _release(self, eqn: Equation) -> None:
        self._waits[eqn] -= 1
        if not self._waits[eqn]:
            self.released.append(eqn)


def combined_sums(body: Body, summed: Mapping[Equation, object]) -> dict[Equation, Sums]:
    """Which sums over devices are one collective.

    Args:
        body: whose equations have them.
        summed: the equations, each with what is the same of those that may be combined, as the axes.
    """
    found: dict[Equation, Sums] = {}
    if not summed:
        return found
    masks: dict[Variable | str, int] = {}  # of the collectives that variables are computed from
    needs: list[int] = []  # the collectives that each of them is computed from
    open_ones: dict[object, tuple[int, Sums]] = {}
    for eqn in body.equations:
        mask = 0
        for atom in eqn.invars:
            if atom in masks:
                mask |= masks[atom]
        if eqn in summed:
            mask = _closed(mask, needs)
            number, group = open_ones.get(summed[eqn], (-1, Sums([])))
            if number < 0 or mask >> number & 1:
                number, group = len(needs), Sums([])
                needs.append(0)
                open_ones[summed[eqn]] = number, group
            needs[number] |= mask
            group.equations.append(eqn)
            found[eqn] = group
            mask |= 1 << number
        if mask:
            for var in eqn.outvars:
                masks[var] = mask
    return found


def _closed(mask: int, needs: list[int]) -> int:
    """Collectives, and all that they are computed from."""
    left = mask
    while left:
        last = left.bit_length() - 1  # what it is computed from is closed already, but for what was combined later
        found = needs[last] & ~mask
        mask |= found
        left = (left ^ 1 << last) | found
    return mask
