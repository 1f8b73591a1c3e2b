"""An inlined program without jax: what estimates of memory read, computed once for any shardings of the values.

It can be pickled, as a jaxpr cannot.
"""

import dataclasses
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Var

from partjit._jax.jaxprs import Atom, control_flow_kind, type_of
from partjit.inspect.annotated import AnnotatedEquation, element_bits
from partjit.inspect.flattening import flattened
from partjit.inspect.inlining import InlinedProgram
from partjit.inspect.loop_counts import loop_counts
from partjit.inspect.marks import mark_effect, mark_p
from partjit.inspect.operands import (
    contracted,
    is_in_library,
    is_in_windows,
    is_multiplication,
    joined_bytes,
    transposed_operands,
    turned_operands,
)
from partjit.inspect.simplification import simplified
from partjit.records import quick_dataclass

__all__ = ["RANDOM", "REDUCTIONS", "WINDOWS", "Body", "Equation", "Skeleton", "Variable", "skeleton_of"]

WINDOWS = "windows"
"""The name of what adds to the elements of windows what comes before them; see `partjit.inspect.operands`."""
REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod"}
RANDOM = ("random_bits", "random_split", "random_fold_in", "threefry2x32")
_WITH_WORKSPACE = ("reduce_window", "select_and", "sort", "top_k", "fft", "cholesky", "lu", "qr", "eig", "svd")
_WITH_WORKSPACE += ("bcoo_", "bcsr_", "coo_", "csr_")  # sparse arrays: a primitive is several operations


@quick_dataclass(slots=True)
class Variable:
    """A variable.

    Attributes:
        number: of its array in the inlined program; None if it has none.
        shape, itemsize: of the array.
        bits: of an element in memory, where several of fewer than eight share a byte.
    """

    number: int | None
    shape: tuple[int, ...]
    itemsize: int
    bits: int

    @property
    def ndim(self) -> int:
        """Its rank."""
        return len(self.shape)


@quick_dataclass(slots=True)
class Equation:
    """An equation.

    Attributes:
        name: of its primitive.
        kind: "scan", "while" or "cond"; None if it has no bodies. Those of the body of a `shard_map` are instead of it.
        invars: its operands; the texts of literals.
        outvars: its results.
        has_effects: whether it does more than to compute these.
        number: that of the annotated equation it stands for; None if there is none.
        is_backward: whether it is of the backward pass.
        computed: in a program with loops, a number that is that of all equations that compute the same; else None.
        bodies: the jaxprs in it; of a `while`, its predicate first.
        constants, carried: of a scan, how many arguments are loop-invariant and how many are carried; of a `while`, how
            many are constants of its predicate and of its body.
        transposed: the operands of which it needs a transposed copy.
        turned: those of which an iteration of a loop has transposed copies from its start, if it is given them.
        contracted, in_library, joined_bytes: see `partjit.inspect.operands`.
    """

    name: str
    kind: str | None
    invars: tuple["Variable | str", ...]
    outvars: tuple[Variable, ...]
    has_effects: bool
    number: int | None
    is_backward: bool
    computed: int | None
    bodies: tuple["Body", ...]
    constants: int
    carried: int
    transposed: tuple[Variable, ...]
    turned: tuple[Variable, ...]
    contracted: tuple[int, ...]
    in_library: bool
    joined_bytes: int

    @property
    def literals(self) -> list[tuple[str, tuple[int, ...], int]]:
        """The literals that it reads beside an array, each with the shape of the result."""
        texts = [atom for atom in self.invars if isinstance(atom, str)]
        if not texts or len(texts) == len(self.invars) or len(self.outvars) != 1 or not self.outvars[0].shape:
            return []
        return [(text, self.outvars[0].shape, self.outvars[0].itemsize) for text in texts if text != "-inf"]

    @property
    def is_view(self) -> bool:
        """Whether it is a reduction over dimensions of size 1, which XLA makes a reshape."""
        if self.name not in REDUCTIONS:
            return False
        operand = self.invars[0]
        return isinstance(operand, Variable) and math.prod(operand.shape) == math.prod(self.outvars[0].shape)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Body:
    """A jaxpr.

    Attributes:
        constvars, invars, outvars: its constants, arguments and results.
        equations: those whose results are used, or that have effects.
        users: the equations among these that use each variable.
        makers: the equations among these that compute each variable.
        reductions: those that reduce, the last one first.
        literals: those that read a literal and an array, by the literal and the shape of the result.
        waits: of how many of them each of these equations is computed.
        readers: the primitives of all equations that use each variable.
        fused: whether an equation is computed where its result is used; see `partjit.inspect.fusion`.
    """

    constvars: tuple[Variable, ...]
    invars: tuple[Variable, ...]
    outvars: tuple[Variable | str, ...]
    equations: tuple[Equation, ...]
    users: Mapping[Variable, list[Equation]]
    makers: Mapping[Variable, Equation]
    reductions: tuple[Equation, ...]
    literals: Mapping[tuple[str, tuple[int, ...], int], list[Equation]]
    waits: Mapping[Equation, int]
    readers: Mapping[Variable, frozenset[str]]
    fused: dict[tuple[Equation, int], bool] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Skeleton:
    """An inlined program.

    Attributes:
        body: the program.
        passed: for each of its arguments whether it is passed to the compiled program.
        random: the results of equations that compute random numbers.
        interleaved: arrays with gaps between their elements, for others to be added there.
        workspace: the primitives of its equations that need a workspace, and all that these read and compute.
        narrow_products: the results of matrix products that have less than 32 bits.
        has_unrolled_loops: whether several iterations of a loop are written out.
    """

    body: Body
    passed: tuple[bool, ...]
    random: tuple[Variable, ...]
    interleaved: tuple[Variable, ...]
    workspace: Mapping[str, Sequence[Variable]]
    narrow_products: tuple[Variable, ...]
    has_unrolled_loops: bool


def skeleton_of(inlined: InlinedProgram) -> Skeleton:
    """The skeleton of an inlined program."""
    equations, conversion = inlined.equations, _Conversion(inlined)
    return Skeleton(
        conversion.body(inlined.jaxpr.jaxpr, is_in_loop=False),
        inlined.passed,
        tuple(conversion.random),
        tuple(conversion.interleaved),
        dict(sorted(conversion.workspace.items())),
        tuple(conversion.narrow_products),
        any(e.primitive == "scan" and e.params["unroll"] > 1 for e in equations),
    )


class _Conversion:
    def __init__(self, inlined: InlinedProgram) -> None:
        self._inlined = inlined
        self._variables: dict[Var, Variable] = {}
        self._has_loops = any(equation.primitive in ("scan", "while") for equation in inlined.equations)
        self._values: dict[Var, Hashable] = {}  # equal for variables that have the same value
        self._computed: dict[Hashable, int] = {}
        self.random: list[Variable] = []
        self.interleaved: list[Variable] = []
        self.workspace: dict[str, list[Variable]] = {}
        self.narrow_products: list[Variable] = []

    def body(self, jaxpr: Jaxpr, is_in_loop: bool) -> Body:
        eqns = _used_equations(jaxpr)
        equations = tuple([one for eqn in eqns for one in self._equations(eqn, is_in_loop)])
        users: dict[Variable, list[Equation]] = {}
        waits = dict.fromkeys(equations, 0)
        makers = {variable: equation for equation in equations for variable in equation.outvars}
        reductions = tuple(one for one in reversed(equations) if one.name in REDUCTIONS and not one.is_view)
        for equation in equations:
            for variable in dict.fromkeys(equation.invars):
                if isinstance(variable, Variable):
                    users.setdefault(variable, []).append(equation)
                    waits[equation] += variable in makers
        literals: dict[tuple[str, tuple[int, ...], int], list[Equation]] = {}
        for equation in equations:
            for key in equation.literals:
                literals.setdefault(key, []).append(equation)
        readers: dict[Variable, set[str]] = {}
        for eqn in jaxpr.eqns if is_in_loop else ():
            for var in eqn.invars if eqn.primitive is not mark_p else ():
                if isinstance(var, Var):
                    readers.setdefault(self._variable(var), set()).add(eqn.primitive.name)
        return Body(
            tuple(map(self._variable, jaxpr.constvars)),
            tuple(map(self._variable, jaxpr.invars)),
            tuple(map(self._atom, jaxpr.outvars)),
            equations,
            users,
            makers,
            reductions,
            literals,
            waits,
            {variable: frozenset(names) for variable, names in readers.items()},
        )

    def _variable(self, var: Var) -> Variable:
        if var not in self._variables:
            aval, number = var.aval, self._inlined.numbers.get(var)
            is_array = isinstance(aval, ShapedArray)
            shape, itemsize = (aval.shape, aval.dtype.itemsize) if is_array else ((), 0)
            bits = element_bits(aval.dtype) if is_array else 0
            self._variables[var] = Variable(number if is_array else None, shape, itemsize, bits)
        return self._variables[var]

    def _atom(self, atom: Atom) -> Variable | str:
        return self._variable(atom) if isinstance(atom, Var) else str(atom)

    def _equations(self, eqn: JaxprEqn, is_in_loop: bool) -> list[Equation]:
        """An equation, as the several that XLA makes of it."""
        whole = self._equation(eqn, is_in_loop)
        if not is_in_windows(eqn):
            return [whole]
        (result,) = whole.outvars
        within = Variable(result.number, result.shape, result.itemsize, result.bits)
        added = dataclasses.replace(
            whole, name=WINDOWS, invars=(within,), number=None, computed=None, transposed=(), in_library=False
        )
        return [dataclasses.replace(whole, outvars=(within,), computed=None), added]

    def _equation(self, eqn: JaxprEqn, is_in_loop: bool) -> Equation:
        kind = control_flow_kind(eqn)
        annotated: AnnotatedEquation | None = self._inlined.equation_of(eqn)
        if annotated is not None and annotated.primitive == "shard_map":  # a copy of what it returns
            annotated = None
        is_loop = kind in ("scan", "while")
        if eqn.primitive.name in RANDOM:
            self.random += map(self._variable, eqn.outvars)
        if eqn.primitive.name == "pad" and any(gap > 0 for _, _, gap in eqn.params["padding_config"]):
            self.interleaved += map(self._variable, eqn.outvars)
        if eqn.primitive.name == "dot_general" and type_of(eqn.outvars[0]).dtype.itemsize < 4:
            self.narrow_products.append(self._variable(eqn.outvars[0]))
        if eqn.primitive.name.startswith(_WITH_WORKSPACE):
            read = (atom for atom in eqn.invars if isinstance(atom, Var))
            self.workspace.setdefault(eqn.primitive.name, []).extend(map(self._variable, (*read, *eqn.outvars)))
        counts = (eqn.params["cond_nconsts"], eqn.params["body_nconsts"]) if kind == "while" else loop_counts(eqn)
        if self._has_loops and is_loop:
            self._pass_constants(eqn, kind, counts)
        is_product = not is_multiplication(eqn)
        return Equation(
            eqn.primitive.name if is_product else "mul",
            kind,
            tuple(map(self._atom, eqn.invars)),
            tuple(map(self._variable, eqn.outvars)),
            _has_effects(eqn),
            None if annotated is None else annotated.number,
            annotated is not None and "transpose(" in annotated.scope,
            self._number_of(eqn) if self._has_loops and kind is None else None,
            tuple(self.body(inner, is_in_loop or is_loop) for inner in _bodies(eqn, kind)),
            *counts,
            tuple(map(self._variable, transposed_operands(eqn))) if is_product else (),
            tuple(map(self._variable, turned_operands(eqn))) if is_product else (),
            contracted(eqn) if is_product else (),
            is_in_library(eqn),
            joined_bytes(eqn),
        )

    def _pass_constants(self, eqn: JaxprEqn, kind: str, counts: tuple[int, int]) -> None:
        """The constants of the bodies of a loop have the values that the loop is given."""
        first = 0
        for inner, count in zip(_bodies(eqn, kind), counts, strict=False):
            given = eqn.invars[first : first + count]
            self._values.update((var, self._value(atom)) for var, atom in zip(inner.invars, given, strict=False))
            first += count

    def _value(self, atom: Atom) -> Hashable:
        return self._values.get(atom, atom) if isinstance(atom, Var) else str(atom)

    def _number_of(self, eqn: JaxprEqn) -> int | None:
        """What is equal for equations that compute the same. A barrier keeps values apart."""
        if _has_effects(eqn) or eqn.primitive.name == "optimization_barrier":
            return None
        key = eqn.primitive.name, str(eqn.params), *map(self._value, eqn.invars)
        number = self._computed.setdefault(key, len(self._computed))
        self._values.update((var, (number, k)) for k, var in enumerate(eqn.outvars))
        return number


_BODIES = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}


def _bodies(eqn: JaxprEqn, kind: str | None) -> Iterator[Jaxpr]:
    for name in _BODIES.get(kind or "", ()):
        param: Any = eqn.params[name]
        for jaxpr in param if isinstance(param, tuple) else (param,):
            yield getattr(jaxpr, "jaxpr", jaxpr)


def _has_effects(eqn: JaxprEqn) -> bool:
    """Whether an equation does more than to compute its results; marks in its bodies do nothing."""
    return bool(eqn.effects - {mark_effect})


def _used_equations(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The equations of a jaxpr whose results are used, or that have effects: each after those of its operands.

    This is the order in which XLA's passes see them: that of a depth-first search from the results.
    """
    eqns = simplified(flattened(jaxpr.eqns))
    makers = {var: eqn for eqn in eqns for var in eqn.outvars}
    with_effects = filter(_has_effects, eqns)
    kept: dict[int, JaxprEqn] = {}
    seen = set[int]()
    wanted = [makers[var] for var in jaxpr.outvars if isinstance(var, Var) and var in makers]
    stack = [*with_effects, *wanted][::-1]
    while stack:
        eqn = stack[-1]
        if id(eqn) in seen:
            kept.setdefault(id(eqn), eqn)
            stack.pop()
            continue
        seen.add(id(eqn))
        operands = (makers.get(var) for var in reversed(eqn.invars) if isinstance(var, Var))
        stack += [other for other in operands if other is not None and id(other) not in seen]
    return [*kept.values()]
