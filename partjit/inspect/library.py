"""What XLA's CPU compiler makes one kernel of its library, YNNPACK: a large reduction, with what it reduces.

Such a kernel takes in the operations that compute what it reduces, matrix products and convolutions included, where
nothing else uses their results, and those that use its result, as long as one does. Nothing between them has a buffer.
But what it reads from elsewhere has one, even what other operations would compute where they use it.

A smaller reduction over more than 32 elements is done in windows of 32, which read an array that is computed before.

Source: `LibraryRewriter`, `YnnMatcher` and `TreeReductionRewriter` of XLA.
"""

from collections.abc import Callable, Mapping, Set
from typing import NamedTuple

from partjit.inspect.fusion import ELEMENTWISE, VIEWS, find_fused, is_fused
from partjit.inspect.skeleton import REDUCTIONS, Body, Equation, Variable

__all__ = ["Kernels", "kernels_of"]

_LARGE = 4096
"""Elements of what the library computes, at least."""
_WINDOW = 32
_PRODUCTS = {"dot_general", "conv_general_dilated"}
_LIMITS = {"max": "min", "min": "max"}
_ALWAYS = VIEWS | {"broadcast_in_dim", "iota", "transpose", "tile"}


class Kernels(NamedTuple):
    """What reductions do to other equations of a body.

    Attributes:
        absorbed: the equations that are computed in the kernel of a reduction, which have no buffers.
        readers: the equations of kernels, which read buffers of all that is computed elsewhere.
        buffered: the equations that have a buffer, since one of these reads it, or a kernel writes it.
        constants: by the last equation of a kernel, the literals that it reads as arrays, with what they are as large
            as: those that others need in the same shape.
    """

    absorbed: set[Equation]
    readers: set[Equation]
    buffered: set[Equation]
    constants: dict[Equation, list[tuple[str, Variable]]]


_NONE = Kernels(set(), set(), set(), {})


def kernels_of(body: Body, size: Callable[[Variable], int], communicating: Mapping[Equation, bool]) -> Kernels:
    """The kernels of the reductions of a body.

    Args:
        body: the body.
        size: the bytes of a variable on a device.
        communicating: the equations that have collectives, and whether these sum their results.
    """
    find_fused(body)
    found = Kernels(set(), set(), set(), {})
    for eqn in body.reductions:
        if eqn not in found.absorbed:
            _grow(eqn, body, size, communicating, found)
    return found if found.readers else _NONE


def _grow(
    start: Equation, body: Body, size: Callable[[Variable], int], communicating: Mapping[Equation, bool], found: Kernels
) -> None:
    (operand,) = start.invars
    if not isinstance(operand, Variable):
        return
    count, of_result = _elements(operand, size), _elements(start.outvars[0], size)
    if not (start.in_library and count >= _LARGE):
        if count > _WINDOW * max(of_result, 1) and max(operand.shape) > _WINDOW:
            found.readers.add(start)
            _keep(operand, body, found)
        return
    kernel = _Kernel(start, body, size, communicating, found.absorbed)
    kernel.grow()
    found.readers.update(kernel.members)
    found.absorbed.update(kernel.members - {kernel.last})
    found.buffered.add(kernel.last)
    for eqn in kernel.members:
        for key in eqn.literals if eqn.name in ELEMENTWISE else ():
            others = (one for one in body.literals[key] if size(one.outvars[0]) == size(eqn.outvars[0]))
            if not kernel.members.issuperset(one for one in others if one.name in ELEMENTWISE):
                found.constants.setdefault(kernel.last, []).append((key[0], eqn.outvars[0]))
        for atom in eqn.invars:
            if isinstance(atom, Variable) and body.makers.get(atom) not in kernel.members:
                _keep(atom, body, found)


def _keep(var: Variable, body: Body, found: Kernels) -> None:
    """A variable has a buffer, or what it is a view of."""
    eqn = body.makers.get(var)
    while eqn is not None and eqn.name in VIEWS and isinstance(eqn.invars[0], Variable):
        found.readers.add(eqn)
        eqn = body.makers.get(eqn.invars[0])
    if eqn is not None and is_fused(eqn, body, 2):
        found.buffered.add(eqn)


class _Kernel:
    """The kernel of a reduction, which grows.

    Attributes:
        members: its equations.
        last: the one whose result it writes.
    """

    def __init__(
        self,
        start: Equation,
        body: Body,
        size: Callable[[Variable], int],
        communicating: Mapping[Equation, bool],
        absorbed: Set[Equation],
    ) -> None:
        self._body, self._size, self._communicating, self._absorbed = body, size, communicating, absorbed
        self.members, self.last = {start}, start

    def grow(self) -> None:
        """Takes in all that it may."""
        while self._grow_up() or self._grow_down():
            pass

    def _grow_up(self) -> bool:
        before, frontier = len(self.members), [*self.members]
        while frontier:
            eqn = frontier.pop()
            if eqn in self._communicating and eqn.name not in REDUCTIONS:
                continue
            for atom in eqn.invars:
                maker = self._body.makers.get(atom) if isinstance(atom, Variable) else None
                if maker is None or maker in self.members or atom in self._body.outvars or not self._may_have(maker):
                    continue
                if not self._communicating.get(maker) and self.members.issuperset(self._body.users[maker.outvars[0]]):
                    self.members.add(maker)
                    frontier.append(maker)
        return len(self.members) > before

    def _grow_down(self) -> bool:
        before, steps = self.last, list[Equation]()
        eqn = self.last
        while eqn not in self._communicating:
            (var,) = eqn.outvars
            users = self._body.users.get(var, ())
            if len(users) != 1 or var in self._body.outvars or not self._may_have(users[0]):
                break
            if users[0].name == "div" and users[0].invars[-1] is var and eqn.name in _ALWAYS:
                steps = []  # XLA multiplies by the reciprocal, which is computed before it is broadcast
                break
            eqn = users[0]
            if eqn in self._communicating:
                break
            steps.append(eqn)
            if eqn.name not in _ALWAYS:
                self.last = eqn
                self.members.update(steps)
                steps = []
        return self.last is not before

    def _may_have(self, eqn: Equation) -> bool:
        """Whether the library computes an equation, and would in this kernel."""
        if not eqn.in_library or eqn in self._absorbed or len(eqn.outvars) != 1:
            return False
        if eqn.name in _LIMITS and self._is_clamp(eqn):
            return False
        if eqn.name in _ALWAYS or eqn.name in _PRODUCTS or "-inf" in eqn.invars:
            return True
        variables = (*eqn.outvars, *(atom for atom in eqn.invars if isinstance(atom, Variable)))
        return any(_elements(var, self._size) >= _LARGE for var in variables)

    def _is_clamp(self, eqn: Equation) -> bool:
        """Whether an equation is half of a limit from above and below, which the library does not compute."""
        beside = [maker for atom in eqn.invars if isinstance(atom, Variable) and (maker := self._body.makers.get(atom))]
        beside += self._body.users.get(eqn.outvars[0], ())
        other = _LIMITS[eqn.name]
        return bool(eqn.literals) and any(one.name == other and one.literals for one in beside)


def _elements(var: Variable, size: Callable[[Variable], int]) -> int:
    return size(var) // max(var.itemsize, 1)
