"""What the collectives of an equation need: copies of its operands before it, and sums of what it computes.

XLA gathers along the first dimension: an operand is transposed for a gather along another one, and what was gathered
is transposed back, where it is used if that is elementwise.

Source: `SpmdPartitioner` and `AllGatherDecomposer` of XLA.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from partjit.inspect.collectives import Collective
from partjit.inspect.fusion import CONSUMERS
from partjit.inspect.skeleton import Equation, Variable

__all__ = ["NO_MOVES", "EquationMoves", "Gathered", "Moves", "moves_by_equation"]

_COMMUNICATING = ("psum", "pmax", "pmin", "all_gather", "ppermute", "all_to_all", "reduce_scatter", "ragged_all_to_all")
"""How the names of those begin whose result is what their collective writes."""
_SUMMING = ("psum", "pmax", "pmin")


class Gathered(NamedTuple):
    """What a collective gives to an equation.

    Attributes:
        shard: the bytes of its operand.
        nbytes: of what it makes of it.
        shape: of that.
        is_transposed: whether both are copied for it.
    """

    shard: int
    nbytes: int
    shape: tuple[int, ...]
    is_transposed: bool

    def is_of(self, var: Variable) -> bool:
        """Whether what it makes is not larger than a variable along any dimension."""
        return len(self.shape) == var.ndim and all(map(operator.le, self.shape, var.shape))


@dataclasses.dataclass(frozen=True)
class Moves:
    """What the collectives of an equation need.

    Attributes:
        gathered: what they give to the equation.
        summed: for each sum over devices of what it computes, the axes, and the bytes before and after. These are more
            than those of a result of which each device takes a part.
    """

    gathered: tuple[Gathered, ...] = ()
    summed: tuple[tuple[tuple[str, ...], int, int], ...] = ()


NO_MOVES = Moves()


def moves_by_equation(collectives: Iterable[Collective]) -> dict[int, Moves]:
    """What the collectives of each equation need, by the number of the equation."""
    moves: dict[int, Moves] = {}
    for one in collectives:
        for number in one.tags[-1:]:
            before = moves.get(number, NO_MOVES)
            if one.kind in ("all-reduce", "reduce-scatter"):
                summed = one.axes, one.operand_bytes, one.result_bytes
                moves[number] = Moves(before.gathered, (*before.summed, summed))
            else:
                moves[number] = Moves((*before.gathered, _gathered(one)), before.summed)
    return moves


def _gathered(one: Collective) -> Gathered:
    """What a collective gives; of a gather along a dimension before which there are others, both are transposed."""
    before, after = _sizes(one.operand), _sizes(one.result)
    same = itertools.takewhile(lambda sizes: sizes[0] == sizes[1], zip(before, after, strict=False))
    is_transposed = one.kind == "all-gather" and any(size != 1 for size, _ in same)
    return Gathered(one.operand_bytes, one.result_bytes, after, is_transposed)


def _sizes(array: str) -> tuple[int, ...]:
    """The shape of an array as a collective shows it: of f32[8,16] 8 and 16."""
    sizes = array.partition("[")[2].partition("]")[0]
    return tuple(map(int, sizes.split(","))) if sizes else ()


class EquationMoves:
    """What the collectives of the equations of a program need."""

    def __init__(self, size: Callable[[Variable], int], moves: Mapping[int, Moves]) -> None:
        """Of equations with variables of these bytes, by the numbers of the equations."""
        self._size, self._moves = size, moves

    def needed(self, equations: Iterable[Equation]) -> list[Equation]:
        """Those of these equations that may have collectives, or need copies of operands."""
        moves = self._moves
        return [eqn for eqn in equations if eqn.transposed or eqn.number in moves]

    def of(self, eqn: Equation) -> Moves:
        """What the collectives of an equation need; nothing if it is a collective itself."""
        if eqn.number is None or eqn.kind is not None or eqn.name.startswith(_COMMUNICATING):
            return NO_MOVES
        return self._moves.get(eqn.number, NO_MOVES)

    def summed_over(self, eqn: Equation) -> object:
        """What tells the sum over devices of an equation's results from others; None if there is none."""
        summed = self.of(eqn).summed
        if eqn.name.startswith(_SUMMING) and eqn.number is not None and len(eqn.outvars) == len(eqn.invars) == 1:
            own = self._moves.get(eqn.number, NO_MOVES).summed
            return (eqn.name, eqn.outvars[0].itemsize, *(axes for axes, _, _ in own)) if own else None
        reduction = eqn.name if eqn.name in ("reduce_max", "reduce_min") else ""
        return (reduction, eqn.outvars[0].itemsize, *(axes for axes, _, _ in summed)) if summed else None

    def gathers(self, eqn: Equation) -> dict[Variable, Gathered]:
        """What is gathered for an equation, by its operands."""
        found: dict[Variable, Gathered] = {}
        for gathered in self.of(eqn).gathered:
            operands = (var for var in eqn.invars if isinstance(var, Variable) and var not in found)
            large = [var for var in operands if self._size(var) == gathered.shard]
            if large:
                found[next(filter(gathered.is_of, large), large[0])] = gathered
        return found

    def beside(self, eqn: Equation) -> list[int]:
        """The bytes of what collectives give that none of the operands is gathered to, as of a result that is moved."""
        left = [*self.of(eqn).gathered]
        for one in self.gathers(eqn).values():
            left.remove(one)
        return [one.nbytes for one in left]

    def prepared(self, eqn: Equation) -> dict[Variable, list[int]]:
        """The operands that are gathered or transposed for an equation; bytes of what is made, one of another."""
        made: dict[Variable, list[int]] = {}
        if eqn.kind is None:
            for var, one in self.gathers(eqn).items():
                before = [one.shard] if one.is_transposed else []
                is_fused = eqn.name in CONSUMERS and eqn.name != "reshape"
                after = [one.nbytes] if one.is_transposed and not is_fused else []
                made[var] = [*before, one.nbytes, *after]
            for var in eqn.transposed:
                before = made.get(var, [])
                made[var] = [*before, before[-1] if before else self._size(var)]
        return made

    def needs_all(self, eqn: Equation, k: int) -> bool:
        """Whether a product needs more of an operand than the device's shard, by the size of its result."""
        operand, beside, (result,) = eqn.invars[k], eqn.invars[1 - k], eqn.outvars
        shard = self._size(operand) if isinstance(operand, Variable) else 0
        other = self._size(beside) if isinstance(beside, Variable) else 0
        other = max({one.shard: one.nbytes for one in self.of(eqn).gathered}.get(other, other), 1)
        return self._size(result) * eqn.contracted[k] ** 2 * result.itemsize > shard * other
