"""The buffers of a program on one device as XLA would assign them: what is alive at once, estimated from its equations.

XLA computes elementwise operations, broadcasts and reshapes where their results are used, so most of these have no
buffer: a use of such a value is a use of the buffers that it is computed from. Values computed from literals alone, as
masks are, are computed anew for each use. An elementwise operation writes over an operand that is not used any more.

Source: `CpuInstructionFusion`, `InstructionFusion` and `BufferAssignment` of XLA.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxprs_in_params

from partjit._jax.jaxprs import Atom
from partjit.inspect.annotated import AnnotatedEquation
from partjit.inspect.inlining import mark_p

__all__ = ["Temporaries", "temporaries"]

_EquationOf: TypeAlias = Callable[[JaxprEqn], AnnotatedEquation | None]

_VIEWS = {"reshape", "squeeze", "expand_dims", "copy", "sharding_constraint", "optimization_barrier", "name"}
_SHAPED = {"broadcast_in_dim", "iota", "convert_element_type", "select_n", "slice", "rev", "pad", "transpose"}
_ELEMENTWISE = {
    *("abs", "add", "add_any", "and", "atan2", "ceil", "clamp", "cos", "cosh", "div", "eq", "erf", "erf_inv", "exp"),
    *("exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt"),
    *("max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "real", "rem", "round", "rsqrt", "select_n"),
    *("sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor", "convert_element_type", "stop_gradient"),
}
_EXPENSIVE = {
    *("exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "sin", "cos", "pow", "erf", "rsqrt", "sqrt", "div"),
    *("rem", "atan2", "tan", "sinh", "cosh", "erf_inv", "integer_pow"),
}
"""These are not computed several times."""
_COPIES: dict[str, Callable[[Iterable[int]], int]] = {"conv_general_dilated": sum, "dot_general": max}
"""Of these, operands are transposed."""
_FUSED = _VIEWS | _SHAPED | _ELEMENTWISE
_CONSUMERS = _FUSED | {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax"}


def _no_copies(_: Iterable[int]) -> int:
    return 0


@dataclasses.dataclass(frozen=True)
class Temporaries:
    """Bytes that are alive at once, besides arguments and results.

    Attributes:
        saved: of what the forward pass computes and the backward pass uses.
        others: of everything else.
        alive: the bytes of each variable that is alive then, and whether it is saved.
        during: the equation that needs the rest.
    """

    saved: int = 0
    others: int = 0
    alive: Mapping[Var, tuple[int, bool]] = dataclasses.field(default_factory=dict)
    during: JaxprEqn | None = None

    @property
    def total(self) -> int:
        """Of all."""
        return self.saved + self.others


def temporaries(
    jaxpr: Jaxpr, size: Callable[[Var], int], moved: Mapping[int, int], equation_of: _EquationOf
) -> Temporaries:
    """The most that is alive at once while the equations of an inlined program run in their order.

    Args:
        jaxpr: the program, whose marks do not count.
        size: the bytes of a variable on a device.
        moved: by the number of an equation, the bytes that the results of its collectives need.
        equation_of: the annotated equation that one of the jaxpr stands for.
    """
    return _Buffers(jaxpr, size, moved, equation_of).peak()


class _Buffers:
    def __init__(
        self,
        jaxpr: Jaxpr,
        size: Callable[[Var], int],
        moved: Mapping[int, int],
        equation_of: _EquationOf,
    ) -> None:
        self._size, self._moved, self._equation_of = size, moved, equation_of
        self._eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive is not mark_p]
        self._equations = [*map(equation_of, self._eqns)]
        self._outside = {*jaxpr.constvars, *jaxpr.invars}
        self._results = {var for var in jaxpr.outvars if isinstance(var, Var)}
        self._users: dict[Var, list[JaxprEqn]] = collections.defaultdict(list)
        for eqn in self._eqns:
            for var in {var for var in eqn.invars if isinstance(var, Var)}:
                self._users[var].append(eqn)
        self._roots: dict[Var, frozenset[Var]] = {var: frozenset([var]) for var in self._outside}
        for eqn in self._eqns:
            for var in eqn.outvars:
                self._roots[var] = self._roots_of(eqn, var)

    def _roots_of(self, eqn: JaxprEqn, var: Var) -> frozenset[Var]:
        """The buffers that a use of a result of an equation needs."""
        name = eqn.primitive.name
        operands = [atom for atom in eqn.invars if isinstance(atom, Var)]
        roots = frozenset().union(*(self._roots[operand] for operand in operands))
        if name in _FUSED and not roots:
            return roots
        if name in _VIEWS and var not in self._results and len(eqn.outvars) == 1:
            return roots
        users = self._users[var]
        fits = name in _FUSED and var not in self._results and all(u.primitive.name in _CONSUMERS for u in users)
        is_cheap = name not in _EXPENSIVE and (len(operands) == 1 or name in _SHAPED)
        if fits and (len(users) == 1 or is_cheap):
            return roots
        return frozenset([var])

    def peak(self) -> Temporaries:
        """The most that is alive at once."""
        last: dict[Var, int] = {}
        for k, eqn in enumerate(self._eqns):
            for atom in eqn.invars:
                if isinstance(atom, Var):
                    last.update((root, k) for root in self._roots[atom])
        dying: dict[int, list[Var]] = collections.defaultdict(list)
        made = {var: k for k, eqn in enumerate(self._eqns) for var in eqn.outvars if self._roots[var] == {var}}
        for var in made:
            dying[last.get(var, made[var])].append(var)
        backward = [equation is not None and "transpose(" in equation.scope for equation in self._equations]
        # What the forward pass computes and the backward pass uses last.
        is_saved = {var for var, k in made.items() if backward[last.get(var, k)] and not backward[k]}
        alive: dict[Var, int] = {}
        most = at = most_saved = 0
        total = saved = 0
        for k, eqn in enumerate(self._eqns):
            new = {var: self._temporary(var) for var in eqn.outvars if made.get(var) == k}
            within = self._within(eqn, self._equations[k])
            ending = [var for var in dying[k] if var in alive]
            reused = 0
            if eqn.primitive.name in _ELEMENTWISE:
                reused = sum(min(nbytes, max((alive[v] for v in ending), default=0)) for nbytes in new.values())
            alive.update(new)
            total += sum(new.values())
            saved += sum(nbytes for var, nbytes in new.items() if var in is_saved)
            now = total + within - reused
            if now > most:
                most, at, most_saved = now, k, saved
            for var in dying[k]:
                nbytes = alive.pop(var, 0)
                total -= nbytes
                saved -= nbytes if var in is_saved else 0
        if not most:
            return Temporaries()
        held = {
            var: (nbytes, var in is_saved)
            for var, k in made.items()
            if k <= at <= last.get(var, k) and (nbytes := self._temporary(var))
        }
        return Temporaries(most_saved, most - most_saved, held, self._eqns[at])

    def _temporary(self, var: Var) -> int:
        return 0 if var in self._results else self._size(var)

    def _size_of(self, atom: Atom) -> int:
        return self._size(atom) if isinstance(atom, Var) else 0

    def _within(self, eqn: JaxprEqn, equation: AnnotatedEquation | None) -> int:
        """Bytes that an equation needs besides its operands and results."""
        bodies: Iterable[Jaxpr] = ()
        if equation is None or equation.bodies:
            bodies = (getattr(inner, "jaxpr", inner) for inner in jaxprs_in_params(eqn.params))
        inside = (_Buffers(body, self._size, self._moved, self._equation_of).peak().total for body in bodies)
        moved = 0 if equation is None else self._moved.get(equation.number, 0)
        copies = _COPIES.get(eqn.primitive.name, _no_copies)(map(self._size_of, eqn.invars))
        return max(inside, default=0) + moved + copies
