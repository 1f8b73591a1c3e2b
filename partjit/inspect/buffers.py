"""The buffers of a program on one device as XLA would make them, and when each is alive, estimated from its equations.

XLA computes elementwise operations, broadcasts and reshapes where their results are used, so most of these have no
buffer: a use of such a value is a use of the buffers that it is computed from. Values computed from literals alone, as
masks are, are computed anew for each use. An elementwise operation writes over an operand that is not used any more,
and so does an update of a slice. What a loop carries is one buffer, in which the body writes the next iteration's value
if it no longer needs this one's; an argument that is carried is copied before the loop, unless the body leaves it as it
is.

Source: `CpuInstructionFusion`, `CopyInsertion` and `BufferAssignment` of XLA.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from partjit.inspect.buffer_lifetimes import ALWAYS, Buffer, combine_sums
from partjit.inspect.fusion import CONSUMERS, ELEMENTWISE, FUSED, UPDATES, is_fused
from partjit.inspect.skeleton import RANDOM, Body, Equation, Variable

__all__ = ["Moves", "buffers_of"]

_COMMUNICATING = ("psum", "pmax", "pmin", "all_gather", "ppermute", "all_to_all", "reduce_scatter", "ragged_all_to_all")
"""How the names of those begin whose result is what their collective writes."""
_POINTER = 8
"""Bytes of an entry of the table of what a loop carries."""


@dataclasses.dataclass(frozen=True)
class Moves:
    """What the collectives of an equation need.

    Attributes:
        gathered: for each of what they give to the equation, the bytes of a shard and of what they make of it.
        summed: for each sum over devices of what it computes, the axes, and the bytes before and after. These are more
            than those of a result of which each device takes a part.
    """

    gathered: tuple[tuple[int, int], ...] = ()
    summed: tuple[tuple[tuple[str, ...], int, int], ...] = ()


_NO_MOVES = Moves()


_Roots: TypeAlias = frozenset[Buffer]
_NONE: _Roots = frozenset()


def buffers_of(body: Body, size: Callable[[Variable], int], moves: Mapping[int, Moves]) -> list[Buffer]:
    """The buffers of an inlined program whose equations run in their order, besides those of its arguments.

    Args:
        body: the program.
        size: the bytes of a variable on a device.
        moves: by the number of an equation, what its collectives need.
    """
    walk = _Walk(size, moves)
    arguments = {var: frozenset([Buffer(size(var), -1, ALWAYS)]) for var in (*body.constvars, *body.invars)}
    roots = walk.body(body, arguments)
    for var in {var for var in body.outvars if isinstance(var, Variable)} - arguments.keys():
        for buffer in roots[var] if len(roots[var]) == 1 else ():
            buffer.is_result, buffer.last = True, max(buffer.last, walk.clock + 2)
    for sums in walk.sums.values():
        combine_sums(sums)
    for buffer in walk.buffers:
        for before in buffer.over:
            if before.last == buffer.start and not before.is_freed and not before.is_result:
                before.is_freed = True
                break
    return [buffer for buffer in walk.buffers if buffer.nbytes]


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A loop that is running: the buffers that are alive `throughout`."""

    throughout: list[Buffer]


class _Walk:
    """Runs through a program, and makes its buffers."""

    def __init__(self, size: Callable[[Variable], int], moves: Mapping[int, Moves]) -> None:
        self._size, self._moves = size, moves
        self._is_backward = False
        self.clock = 0
        self.buffers: list[Buffer] = []
        self._depths: dict[Variable, int] = {}  # of the innermost loops that change variables
        self._loops: list[_Loop] = []
        self._hoisted: dict[Buffer, int] = {}  # what is computed before a loop, and how deep that is nested
        self._equal: dict[tuple[object, ...], Equation] = {}
        self._gathered: dict[_Roots, Buffer] = {}  # by what it was gathered from
        self.sums: dict[tuple[object, ...], list[tuple[Buffer, Buffer]]] = {}  # what is summed, and the sums, by axes

    def body(self, body: Body, known: Mapping[Variable, _Roots]) -> dict[Variable, _Roots]:
        """Runs through the equations of a jaxpr; returns the buffers that each variable is computed from."""
        constants = {var: frozenset([Buffer(self._size(var), -1, ALWAYS)]) for var in body.constvars}
        roots = {**constants, **known}
        for eqn in body.equations:
            kind, of_operands = eqn.kind, _roots_of(eqn.invars, roots)
            read = of_operands[0] if len(of_operands) == 1 else _NONE.union(*of_operands)
            if self._loops:
                is_own = kind not in (None, "shard_map") or eqn.has_effects
                depth = len(self._loops) if is_own else self._depth_of(eqn.invars)
                self._depths.update(dict.fromkeys(eqn.outvars, depth))
            if len(eqn.outvars) == 1 and is_fused(eqn, body, len(read)):
                roots[eqn.outvars[0]] = read
                continue
            outer = self._is_backward
            self._is_backward = outer or eqn.is_backward
            if eqn.name == "optimization_barrier":
                roots.update(zip(eqn.outvars, of_operands, strict=True))
            elif kind == "scan":
                self._scan(eqn, roots)
            elif kind == "while":
                self._while(eqn, roots)
            elif kind == "cond":
                self._branches(eqn, roots)
            elif kind == "shard_map":
                (inner,) = eqn.bodies
                found = self.body(inner, _bound(inner.invars, of_operands))
                roots.update(zip(eqn.outvars, _roots_of(inner.outvars, found), strict=True))
            else:
                self._compute(eqn, roots, read)
            self._is_backward = outer
        return roots

    def _depth_of(self, atoms: Iterable[Variable | str]) -> int:
        return max((self._depths.get(atom, 0) for atom in atoms if isinstance(atom, Variable)), default=0)

    def _enter(
        self, eqn: Equation, constants: Iterable[tuple[Variable, Variable | str]], varying: Iterable[Variable]
    ) -> None:
        """A loop begins, of which these arguments are constants, with what they are, and these are not."""
        self._loops.append(_Loop([self._new(_POINTER * len(eqn.invars), eqn)]))
        self._depths.update((var, self._depth_of([atom])) for var, atom in constants)
        self._depths.update(dict.fromkeys(varying, len(self._loops)))

    def _new(self, nbytes: int, eqn: Equation, var: Variable | None = None, start: int | None = None) -> Buffer:
        start = self.clock if start is None else start
        buffer = Buffer(nbytes, start, self.clock, eqn, var, self._is_backward, len(self.buffers))
        self.buffers.append(buffer)
        return buffer

    def _read(self, buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            buffer.first = min(buffer.first, self.clock)
            if buffer.last <= self.clock:
                buffer.last, buffer.is_used_backward = self.clock, self._is_backward

    def _compute(self, eqn: Equation, roots: dict[Variable, _Roots], read: _Roots) -> None:
        """An equation that writes its results to buffers."""
        name = eqn.name
        depth = self._depth_of(eqn.invars) if self._loops else 0
        # What is the same in every iteration is computed before the loop, and once if it is computed twice.
        is_hoisted = depth < len(self._loops) and bool(read) and not eqn.has_effects
        if is_hoisted:
            atoms = (atom if isinstance(atom, str) else roots[atom] for atom in eqn.invars)
            same = self._equal.setdefault((name, eqn.parameters, *atoms), eqn)
            if same is not eqn and all(var in roots for var in same.outvars):
                roots.update((var, roots[other]) for var, other in zip(eqn.outvars, same.outvars, strict=True))
                return
        self.clock += 2
        for buffer in read & self._hoisted.keys() if self._hoisted else ():
            if depth > self._hoisted[buffer]:
                self._loops[self._hoisted.pop(buffer)].throughout.append(buffer)
        self._read(read)
        moves = _NO_MOVES
        if eqn.number is not None and not name.startswith(_COMMUNICATING):
            moves = self._moves.get(eqn.number, _NO_MOVES)
        if name in RANDOM:  # XLA computes them in a loop, with two counters for each number, and eight small arrays
            for buffer in [self._new(sum(map(self._size, eqn.outvars)), eqn) for _ in range(2)]:
                buffer.last = self.clock
            for _ in range(8):
                self._new(_POINTER, eqn)
        for var in eqn.transposed:
            self._new(self._size(var), eqn)
        for var in eqn.turned:
            for root in roots[var]:
                if root.is_given and self._loops:  # the product may come last, whatever the order of the equations
                    self._loops[-1].throughout.append(self._new(self._size(var), eqn))
        self._gather(eqn, moves, roots)
        sizes, partial = [*map(self._size, eqn.outvars)], None
        if moves.summed:
            partial = self._new(max(sum(sizes), *(before for _, before, _ in moves.summed)), eqn)
            self.clock += 2
            self._read([partial])
            if len(sizes) == 1:
                sizes = [max(*sizes, *(after for _, _, after in moves.summed))]
        for var, size in zip(eqn.outvars, sizes, strict=True):
            buffer = self._new(size, eqn, var)
            roots[var] = frozenset([buffer])
            if partial is not None:
                over = (axes for axes, _, _ in moves.summed)
                self.sums.setdefault((len(self._loops), *over), []).append((partial, buffer))
            if is_hoisted:
                self._hoisted[buffer] = depth
            over = read if name in ELEMENTWISE else _roots_of(eqn.invars[:1], roots)[0] if name in UPDATES else ()
            buffer.over = _as_large(buffer, over)

    def _gather(self, eqn: Equation, moves: Moves, roots: Mapping[Variable, _Roots]) -> None:
        """Makes what is gathered for an equation; a later product reads what was gathered of a parameter."""
        may_reuse = eqn.contracted and not moves.summed
        if not may_reuse and not moves.gathered:
            return
        operands = [(k, roots[var], self._size(var)) for k, var in enumerate(eqn.invars) if isinstance(var, Variable)]
        if may_reuse:
            self._read(
                self._gathered[of]
                for k, of, shard in operands
                if of in self._gathered and self._needs_all(eqn, k, shard, moves)
            )
        for shard, nbytes in moves.gathered:
            buffer = self._new(nbytes, eqn)
            self._gathered.update((of, buffer) for _, of, size in operands if size == shard and _are_arguments(of))

    def _needs_all(self, eqn: Equation, k: int, shard: int, moves: Moves) -> bool:
        """Whether a product needs more of an operand than the device's shard, by the size of its result."""
        beside, (result,) = eqn.invars[1 - k], eqn.outvars
        other = self._size(beside) if isinstance(beside, Variable) else 0
        other = max(dict(moves.gathered).get(other, other), 1)
        return self._size(result) * eqn.contracted[k] ** 2 * result.itemsize > shard * other

    def _scan(self, eqn: Equation, roots: dict[Variable, _Roots]) -> None:
        constants, carried, (inner,) = eqn.constants, eqn.carried, eqn.bodies
        count = constants + carried
        operands = _roots_of(eqn.invars, roots)
        self.clock += 2
        self._enter(eqn, zip(inner.invars[:constants], eqn.invars, strict=False), inner.invars[constants:])
        known = _bound(inner.invars[:constants], operands)
        carry = self._carry(eqn, inner.invars[constants:count], inner.outvars[:carried], operands[constants:count])
        known.update(zip(inner.invars[constants:count], carry, strict=True))
        stacked = [self._new(self._size(var), eqn, var) for var in eqn.outvars[carried:]]
        for var, whole in zip(inner.invars[count:], operands[count:], strict=True):
            names = inner.readers.get(var, frozenset())
            needed = "optimization_barrier" in names or not names <= CONSUMERS
            known[var] = whole
            if needed:
                known[var] = frozenset([self._new(self._size(var), eqn, var)])
                (made,) = known[var]
                made.is_given = True
        found = self.body(inner, known)
        for atom in inner.outvars[carried:]:
            if isinstance(atom, Variable) and len(found[atom]) == 1:
                (made,) = found[atom]
                if (
                    made.eqn is not None
                    and made.eqn.name in FUSED
                    and inner.outvars.count(atom) == 1
                    and not inner.readers.get(atom)
                ):
                    made.nbytes = 0
        after = self._close(eqn, inner.outvars[:carried], carry, found, [*operands[:constants], *operands[count:]])
        self._read(stacked)
        roots.update(zip(eqn.outvars[:carried], after, strict=True))
        roots.update((var, frozenset([one])) for var, one in zip(eqn.outvars[carried:], stacked, strict=True))

    def _while(self, eqn: Equation, roots: dict[Variable, _Roots]) -> None:
        (cond, body), of_cond, of_body = eqn.bodies, eqn.constants, eqn.carried
        operands = _roots_of(eqn.invars, roots)
        self.clock += 2
        initial = operands[of_cond + of_body :]
        of_cond_vars = zip(cond.invars[:of_cond], eqn.invars, strict=False)
        of_body_vars = zip(body.invars[:of_body], eqn.invars[of_cond:], strict=False)
        varying = [*cond.invars[of_cond:], *body.invars[of_body:]]
        self._enter(eqn, [*of_cond_vars, *of_body_vars], varying)
        carry = self._carry(eqn, body.invars[of_body:], body.outvars, initial)
        self.body(cond, _bound(cond.invars, [*operands[:of_cond], *carry]))
        found = self.body(body, _bound(body.invars, [*operands[of_cond : of_cond + of_body], *carry]))
        after = self._close(eqn, body.outvars, carry, found, operands[: of_cond + of_body])
        roots.update(zip(eqn.outvars, after, strict=True))

    def _carry(
        self, eqn: Equation, invars: Sequence[Variable], outvars: Sequence[Variable | str], initial: Sequence[_Roots]
    ) -> list[_Roots]:
        """The buffers of what a loop carries."""
        carry = []
        for before, after, read in zip(invars, outvars, initial, strict=True):
            if before is after:
                carry.append(read)
                continue
            buffer = self._new(self._size(before), eqn, before)
            buffer.is_given = True
            self._read(read)
            buffer.over = _as_large(buffer, read)
            carry.append(frozenset([buffer]))
        return carry

    def _close(
        self,
        eqn: Equation,
        outvars: Sequence[Variable | str],
        carry: Sequence[_Roots],
        found: Mapping[Variable, _Roots],
        constants: Sequence[_Roots],
    ) -> list[_Roots]:
        """The end of a loop: the buffers of its results.

        What the body returns is written to the memory of what it was given, unless that is still needed: then it is
        copied.
        """
        self.clock += 2
        after = list[_Roots]()
        for atom, into in zip(outvars, carry, strict=True):
            (buffer,) = into if len(into) == 1 else (None,)
            made = found[atom] if isinstance(atom, Variable) else _NONE
            if buffer is None or buffer.eqn is not eqn or len(made) != 1 or made == into:
                after.append(into)
                continue
            (last,) = made
            is_in_place = buffer.last < last.start or (buffer.last == last.start and buffer in last.over)
            self._read(made)
            # Between its last use and the next value the memory is free.
            after.append(made if is_in_place and last not in self._hoisted else into)
        loop = self._loops.pop()
        start = loop.throughout[0].start
        for buffer in loop.throughout:
            buffer.start = start
        self._read(loop.throughout)
        self._read(_NONE.union(*after, *constants))
        return after

    def _branches(self, eqn: Equation, roots: dict[Variable, _Roots]) -> None:
        self.clock += 2
        first, operands = self.clock, _roots_of(eqn.invars, roots)
        starts = [ALWAYS for _ in eqn.outvars]
        for inner in eqn.bodies:
            found = self.body(inner, _bound(inner.invars, operands[1:]))
            for k, atom in enumerate(inner.outvars):
                if isinstance(atom, Variable) and len(found[atom]) == 1:
                    (made,) = found[atom]
                    if made.start > first:
                        made.nbytes, starts[k] = 0, min(starts[k], made.start)
        self.clock += 2
        self._read(_NONE.union(*operands))
        for var, start in zip(eqn.outvars, starts, strict=True):
            roots[var] = frozenset([self._new(self._size(var), eqn, var, min(start, self.clock))])


def _as_large(buffer: Buffer, others: Iterable[Buffer]) -> list[Buffer]:
    """Those of the same size, in the order of the program: sets have another one in each process."""
    nbytes = buffer.nbytes
    found = [one for one in others if one.nbytes == nbytes]
    return found if len(found) < 2 else sorted(found, key=lambda one: one.number)


def _are_arguments(buffers: _Roots) -> bool:
    return bool(buffers) and all(buffer.start < 0 for buffer in buffers)


def _bound(invars: Iterable[Variable], values: Iterable[_Roots]) -> dict[Variable, _Roots]:
    return dict(zip(invars, values, strict=False))


def _roots_of(atoms: Iterable[Variable | str], roots: Mapping[Variable, _Roots]) -> list[_Roots]:
    return [roots[atom] if isinstance(atom, Variable) else _NONE for atom in atoms]
