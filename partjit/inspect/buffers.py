"""The buffers of a program on one device as XLA would make them, and when each is alive, estimated from its equations.

XLA computes elementwise operations, broadcasts, reshapes, splits and gathers where their results are used, so most of
these have no buffer: a use of such a value is a use of the buffers that it is computed from. Values computed from
literals alone, as masks are, are computed anew for each use. An elementwise operation writes over an operand that is
not used any more, and so does an update of a slice. What a loop carries is one buffer, in which the body writes the
next iteration's value if it no longer needs this one's; an argument that is carried is copied before the loop, unless
the body leaves it as it is.

Source: `CpuInstructionFusion`, `CopyInsertion` and `BufferAssignment` of XLA.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from partjit.inspect.branch_results import BranchResults, used_operands
from partjit.inspect.buffer_lifetimes import ALWAYS, Buffer, Lifetimes
from partjit.inspect.buffer_roots import NONE, Roots, are_arguments, as_large, bound, roots_of
from partjit.inspect.equation_moves import NO_MOVES, EquationMoves, Moves
from partjit.inspect.fusion import CONSUMERS, CUMULATIVE, ELEMENTWISE, FUSED, UPDATES, is_cheap, is_fused, viewed
from partjit.inspect.instruction_order import InstructionOrder, Preparation, Sums, combined_sums
from partjit.inspect.library import Kernels, kernels_of
from partjit.inspect.skeleton import RANDOM, Body, Equation, Variable

__all__ = ["buffers_of"]

_POINTER = 8
"""Bytes of an entry of the table of what a loop carries."""


def buffers_of(body: Body, size: Callable[[Variable], int], moves: Mapping[int, Moves]) -> list[Buffer]:
    """The buffers of an inlined program, besides those of its arguments.

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
            buffer.is_result, buffer.last = True, max(buffer.last, walk.times.clock + 2)
    walk.times.write_over()
    return [buffer for buffer in walk.times.buffers if buffer.nbytes]


class _Walk:
    """Runs through a program, and makes its buffers."""

    def __init__(self, size: Callable[[Variable], int], moves: Mapping[int, Moves]) -> None:
        self._size, self._moves = size, EquationMoves(size, moves)
        self.times = Lifetimes()
        self._depths: dict[Variable, int] = {}  # of the innermost loops that change variables
        self._computed: dict[int, tuple[Equation, dict[Variable, Roots]]] = {}  # outside of the loops that run
        self._gathered: dict[Roots, Buffer] = {}  # by what it was gathered from
        self._prepared: dict[Equation, dict[Variable | str, Roots]] = {}  # what was made of operands
        self._partial: dict[Equation, Roots] = {}  # what is summed over devices
        self._summing: set[Equation] = set()  # the equations that are such sums themselves
        self._constants: dict[Equation, list[tuple[str, Variable]]] = {}  # literals that kernels read
        self._arrays_of_literals: dict[tuple[object, ...], Buffer] = {}
        self._read_by: dict[Equation, Roots] = {}  # what equations have read
        self._buffered: dict[Variable | str, Roots] = {}  # what kernels read of what others compute where they use it

    def body(self, body: Body, known: Mapping[Variable, Roots]) -> dict[Variable, Roots]:
        """Runs through the equations of a jaxpr; returns the buffers that each variable is computed from."""
        constants = {var: frozenset([Buffer(self._size(var), -1, ALWAYS)]) for var in body.constvars}
        roots = {**constants, **known}
        order, kernels, moved = self._order(body)
        reads = dict[Equation, Roots]()
        released, prepared, buffered = order.released, self._prepared, self._buffered
        while True:
            if released:  # this runs for each equation of a program, at each question to it
                eqn = released.popleft()
                of_operands = self._operands(eqn, roots) if eqn in prepared else roots_of(eqn.invars, roots)
                if buffered and eqn in kernels.readers:
                    own, pairs = prepared.get(eqn, {}), zip(eqn.invars, of_operands, strict=True)
                    of_operands = [one if var in own else buffered.get(var, one) for var, one in pairs]
                read = of_operands[0] if len(of_operands) == 1 else NONE.union(*of_operands)
                is_barrier = eqn.name == "optimization_barrier"
                is_inside = is_barrier or eqn in kernels.absorbed or is_fused(eqn, body, len(read))
                if not is_inside or eqn in kernels.buffered:
                    reads[eqn] = read
                    order.queue(eqn)
                    continue
                prepared.pop(eqn, None)
                if eqn in moved:
                    read |= self._move_beside(eqn)
                if self.times.loops:
                    self._set_depth(eqn)
                if is_barrier or len(eqn.outvars) != 1:
                    roots.update(zip(eqn.outvars, of_operands if is_barrier else itertools.repeat(read), strict=False))
                else:
                    roots[eqn.outvars[0]] = read
                order.done(eqn)
                continue
            if (step := order.next()) is None:
                return roots
            outer = self.times.is_backward
            if isinstance(step, Preparation):
                self.times.is_backward = outer or step.equation.is_backward
                self._prepare(step, roots, body)
            elif isinstance(step, Sums):
                self._sum(step, roots)
            else:
                self.times.is_backward = outer or step.is_backward
                if self.times.loops:
                    self._set_depth(step)
                self._run(step, roots, read := reads.pop(step))
                self._read_by[step] = read
                var = step.outvars[0] if step.outvars else ""
                is_copy = step in kernels.buffered and step not in kernels.readers and is_fused(step, body, len(read))
                if is_copy and var in roots:
                    buffered[var], roots[var] = roots[var], read
            self.times.is_backward = outer
            order.done(step)

    def _order(self, body: Body) -> tuple[InstructionOrder, Kernels, set[Equation]]:
        moves = self._moves
        needed = moves.needed(body.equations)
        sizes = {eqn: found for eqn in needed if (found := moves.prepared(eqn))}
        steps = {eqn: {var: len(made) for var, made in found.items()} for eqn, found in sizes.items()}
        summed = {eqn: over for eqn in needed if (over := moves.summed_over(eqn)) is not None}
        communicating = {eqn: eqn in summed for eqn in needed if eqn in summed or moves.of(eqn) is not NO_MOVES}
        kernels = kernels_of(body, self._size, communicating)
        self._constants.update(kernels.constants)
        sums = combined_sums(body, summed)
        self._summing.update(eqn for eqn, one in sums.items() if len(one.equations) > 1 and not moves.of(eqn).summed)
        return InstructionOrder(body, steps, sums), kernels, {*filter(moves.beside, needed)}

    def _move_beside(self, eqn: Equation) -> Roots:
        """What collectives give that is made of no operand."""
        return NONE.union(self.times.gather(nbytes, eqn) for nbytes in self._moves.beside(eqn))

    def _operands(self, eqn: Equation, roots: Mapping[Variable, Roots]) -> list[Roots]:
        """The buffers that each operand is computed from, or what was prepared of it, where something was."""
        prepared = self._prepared[eqn]
        # What is gathered for a constraint is not kept: where one is tried out, there is no equation that says it.
        if eqn.name == "sharding_constraint":
            return roots_of(eqn.invars, roots)
        return [prepared.get(atom, one) for atom, one in zip(eqn.invars, roots_of(eqn.invars, roots), strict=True)]

    def _set_depth(self, eqn: Equation) -> None:
        is_own = eqn.kind is not None or eqn.has_effects
        self._depths.update(dict.fromkeys(eqn.outvars, len(self.times.loops) if is_own else self._depth_of(eqn.invars)))

    def _run(self, eqn: Equation, roots: dict[Variable, Roots], read: Roots) -> None:
        kind = eqn.kind
        if kind is None:
            self._compute(eqn, roots, read)
        elif kind == "scan":
            self._scan(eqn, roots)
        elif kind == "while":
            self._while(eqn, roots)
        else:
            self._branches(eqn, roots)

    def _depth_of(self, atoms: Iterable[Variable | str]) -> int:
        return max((self._depths.get(atom, 0) for atom in atoms if isinstance(atom, Variable)), default=0)

    def _enter(
        self, eqn: Equation, constants: Iterable[tuple[Variable, Variable | str]], varying: Iterable[Variable]
    ) -> None:
        """A loop begins, of which these arguments are constants, with what they are, and these are not."""
        self.times.clock += 2
        self.times.enter(self.times.new(_POINTER * len(eqn.invars), eqn))
        self._depths.update((var, self._depth_of([atom])) for var, atom in constants)
        self._depths.update(dict.fromkeys(varying, len(self.times.loops)))

    def _compute(self, eqn: Equation, roots: dict[Variable, Roots], read: Roots) -> None:
        """An equation that writes its results to buffers."""
        name = eqn.name
        depth = self._depth_of(eqn.invars) if self.times.loops else 0
        # What is the same in every iteration is computed before the loop, and once if it is computed twice.
        is_hoisted = depth < len(self.times.loops) and bool(read) and not eqn.has_effects
        if (is_hoisted or not self.times.loops) and self._is_known(eqn, roots, depth):
            return
        self.times.clock += 2
        self.times.need_throughout(read, depth)
        moves = self._moves.of(eqn)
        self._prepared.pop(eqn, None)
        self.times.read(read)
        for text, like in self._constants.get(eqn, ()):
            self._read_constant(text, like, eqn)
        if name in RANDOM:  # XLA computes them in a loop, with two counters for each number, and eight small arrays
            for buffer in [self.times.new(sum(map(self._size, eqn.outvars)), eqn) for _ in range(2)]:
                buffer.last = self.times.clock
            for _ in range(8):
                self.times.new(_POINTER, eqn)
        for var in eqn.turned:
            for root in roots[var]:
                if root.is_given and self.times.loops:  # the product may come last, whatever the order of the equations
                    self.times.loops[-1].throughout.append(self.times.new(self._size(var), eqn))
        self._move_beside(eqn)
        self._read_gathered(eqn, moves, roots)
        sizes = [*map(self._size, eqn.outvars)]
        updated = roots_of(eqn.invars[:1], roots)[0] if name in UPDATES else None
        start = self.times.begin() if updated == NONE else None  # constants are written before the update
        if moves.summed and eqn.kind is None:
            nbytes = max(sum(sizes), *(before for _, before, _ in moves.summed))
            made = self.times.new(nbytes, eqn, start=start)
            self._partial[eqn] = frozenset([made])
            if is_hoisted:
                self.times.hoist(made, depth)
            return
        if eqn in self._summing and not is_hoisted:
            self._partial[eqn] = read
            return
        for var, size in zip(eqn.outvars, sizes, strict=True):
            buffer = self.times.new(size, eqn, var, start)
            roots[var] = frozenset([buffer])
            if is_hoisted:
                self.times.hoist(buffer, depth)
            over = as_large(buffer, read if name in ELEMENTWISE else updated or ())
            buffer.over = [one for one in over if one.eqn is None or one.eqn.name not in CUMULATIVE]

    def _read_constant(self, text: str, like: Variable, eqn: Equation) -> None:
        """A kernel reads an array in which each element is a literal: one for all kernels, made at the beginning."""
        key = text, like.shape, self.times.begin()
        made = self._arrays_of_literals.get(key)
        if made is None:
            made = self._arrays_of_literals[key] = self.times.new(self._size(like), eqn, start=self.times.begin())
        self.times.read([made])

    def _is_known(self, eqn: Equation, roots: dict[Variable, Roots], depth: int) -> bool:
        """Whether what an equation computes outside of so many loops was computed before; then that is its result."""
        if eqn.computed is None:
            return False
        same, known = self._computed.setdefault(eqn.computed, (eqn, roots))
        if same is eqn or any(
            other not in known or self._size(var) != self._size(other)
            for var, other in zip(eqn.outvars, same.outvars, strict=True)
        ):
            return False
        for var, other in zip(eqn.outvars, same.outvars, strict=True):
            roots[var] = known[other]
            self.times.hold(known[other], depth)
        return True

    def _sum(self, sums: Sums, roots: dict[Variable, Roots]) -> None:
        """A collective that sums over devices what equations have computed."""
        self.times.clock += 2
        for eqn in sums.equations:
            if (partial := self._partial.pop(eqn, None)) is None:
                continue
            self.times.is_backward = eqn.is_backward
            self.times.read(partial)
            sizes, summed = [*map(self._size, eqn.outvars)], self._moves.of(eqn).summed
            if len(sizes) == 1:
                sizes = [max([*sizes, *(after for _, _, after in summed)])]
            depth = next((self.times.hoisted.pop(one) for one in partial if one in self.times.hoisted), None)
            for var, size in zip(eqn.outvars, sizes, strict=True):
                (buffer,) = roots[var] = frozenset([self.times.new(size, eqn, var)])
                if depth is not None:
                    self.times.hoist(buffer, depth)

    def _prepare(self, step: Preparation, roots: Mapping[Variable, Roots], body: Body) -> None:
        """What is gathered of an operand of an equation, and transposed copies, which compute anew what is cheap."""
        eqn, var, sizes = step.equation, step.operand, self._moves.prepared(step.equation)[step.operand]
        self.times.clock += 2
        prepared = self._prepared.setdefault(eqn, {})
        self.times.read(prepared.get(var, roots[var]))
        maker = body.makers.get(viewed(var, body))
        if (
            maker is not None
            and maker in self._read_by
            and var in eqn.transposed
            and var not in prepared
            and is_cheap(maker, body)
        ):
            self.times.read(self._read_by[maker])
        make = self.times.gather if var in self._moves.gathers(eqn) else self.times.new
        (made,) = prepared[var] = frozenset([make(sizes[-1 - step.left], eqn)])
        if not step.left and made.is_gathered and are_arguments(roots[var]):
            self._gathered[roots[var]] = made

    def _read_gathered(self, eqn: Equation, moves: Moves, roots: Mapping[Variable, Roots]) -> None:
        """A product reads what was gathered of a parameter before."""
        if eqn.contracted and not moves.summed:
            self.times.read(
                self._gathered[roots[var]]
                for k, var in enumerate(eqn.invars)
                if isinstance(var, Variable) and roots[var] in self._gathered and self._moves.needs_all(eqn, k)
            )

    def _scan(self, eqn: Equation, roots: dict[Variable, Roots]) -> None:
        constants, carried, (inner,) = eqn.constants, eqn.carried, eqn.bodies
        count = constants + carried
        operands = roots_of(eqn.invars, roots)
        self._enter(eqn, zip(inner.invars[:constants], eqn.invars, strict=False), inner.invars[constants:])
        known = bound(inner.invars[:constants], operands)
        carry = self._carry(eqn, inner.invars[constants:count], inner.outvars[:carried], operands[constants:count])
        known.update(zip(inner.invars[constants:count], carry, strict=True))
        begin = self.times.begin(1)
        stacked = [self.times.new(self._size(var), eqn, var, begin) for var in eqn.outvars[carried:]]
        for var, whole in zip(inner.invars[count:], operands[count:], strict=True):
            names = inner.readers.get(var, frozenset())
            needed = "optimization_barrier" in names or not names <= CONSUMERS
            known[var] = whole
            if needed:
                known[var] = frozenset([self.times.new(self._size(var), eqn, var)])
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
        self.times.read(stacked)
        roots.update(zip(eqn.outvars[:carried], after, strict=True))
        roots.update((var, frozenset([one])) for var, one in zip(eqn.outvars[carried:], stacked, strict=True))

    def _while(self, eqn: Equation, roots: dict[Variable, Roots]) -> None:
        (cond, body), of_cond, of_body = eqn.bodies, eqn.constants, eqn.carried
        operands = roots_of(eqn.invars, roots)
        initial = operands[of_cond + of_body :]
        of_cond_vars = zip(cond.invars[:of_cond], eqn.invars, strict=False)
        of_body_vars = zip(body.invars[:of_body], eqn.invars[of_cond:], strict=False)
        varying = [*cond.invars[of_cond:], *body.invars[of_body:]]
        self._enter(eqn, [*of_cond_vars, *of_body_vars], varying)
        carry = self._carry(eqn, body.invars[of_body:], body.outvars, initial)
        self.body(cond, bound(cond.invars, [*operands[:of_cond], *carry]))
        found = self.body(body, bound(body.invars, [*operands[of_cond : of_cond + of_body], *carry]))
        after = self._close(eqn, body.outvars, carry, found, operands[: of_cond + of_body])
        roots.update(zip(eqn.outvars, after, strict=True))

    def _carry(
        self, eqn: Equation, invars: Sequence[Variable], outvars: Sequence[Variable | str], initial: Sequence[Roots]
    ) -> list[Roots]:
        """The buffers of what a loop carries."""
        carry = []
        for before, after, read in zip(invars, outvars, initial, strict=True):
            if before is after:
                carry.append(read)
                continue
            start = self.times.begin(1) if are_arguments(read) or not read else None
            buffer = self.times.new(self._size(before), eqn, before, start)
            buffer.is_given = True
            self.times.read(read)
            buffer.over = as_large(buffer, read)
            carry.append(frozenset([buffer]))
        return carry

    def _close(
        self,
        eqn: Equation,
        outvars: Sequence[Variable | str],
        carry: Sequence[Roots],
        found: Mapping[Variable, Roots],
        constants: Sequence[Roots],
    ) -> list[Roots]:
        """The end of a loop: the buffers of its results.

        What the body returns is written to the memory of what it was given, unless that is still needed: then it is
        copied.
        """
        self.times.clock += 2
        after = list[Roots]()
        for atom, into in zip(outvars, carry, strict=True):
            (buffer,) = into if len(into) == 1 else (None,)
            made = found[atom] if isinstance(atom, Variable) else NONE
            if buffer is None or buffer.eqn is not eqn or len(made) != 1 or made == into:
                after.append(into)
                continue
            (last,) = made
            last.over = (*last.over, *last.replaces & into)
            is_in_place = buffer.last < last.start or last.may_be_over(buffer)
            self.times.read(made)
            # Between its last use and the next value the memory is free.
            after.append(made if is_in_place and last not in self.times.hoisted else into)
        self.times.leave()
        self.times.read(NONE.union(*after, *constants))
        return after

    def _branches(self, eqn: Equation, roots: dict[Variable, Roots]) -> None:
        self.times.clock += 2
        operands = roots_of(eqn.invars, roots)
        results = BranchResults(operands, len(eqn.outvars), self.times.clock, bool(self.times.loops))
        for inner in eqn.bodies:
            self._depths.update(dict.fromkeys(inner.invars, len(self.times.loops)))  # nothing is moved out of branches
            with self.times.branch() as begin:
                results.add(roots_of(inner.outvars, self.body(inner, bound(inner.invars, operands[1:]))), begin)
        self.times.clock += 2
        self.times.read(NONE.union(*(operands[k] for k in used_operands(eqn))))
        for var, buffer in zip(eqn.outvars, results.buffers(self.times, eqn, self._size), strict=True):
            roots[var] = frozenset([buffer])
