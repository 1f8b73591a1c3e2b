"""The program that the partitioner is given: nested programs inlined, every equation tagged, every value marked.

The partitioner decides for every call of a nested program anew, so a program that is called twice is inlined twice.
Only the bodies of loops, branches and `shard_map` are kept. Each equation carries a tag in its name stack, which is in
the locations of the operations it is lowered to; its results are operands of a mark, an equation that does nothing, by
which they are found in the lowered module.
"""

import dataclasses
import functools
import itertools
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import (
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    new_jaxpr_eqn,
    primitives,
)
from jax.extend.mlir import ir
from jax.extend.source_info_util import SourceInfo
from jax.sharding import Mesh

from partjit._jax.jaxprs import (
    Atom,
    barrier,
    called_jaxpr,
    closed_jaxpr,
    is_rematerialized,
    new_var,
)
from partjit._jax.rules import used_arguments
from partjit._jax.shard_maps import shard_map_p
from partjit._jax.shardings import UnspecifiedValue
from partjit.inspect.annotated import AnnotatedEquation, AnnotatedJaxpr, AnnotatedValue
from partjit.inspect.loop_counts import loop_counts, trip_count_of
from partjit.inspect.loops_around import LoopsAround
from partjit.inspect.marks import mark_effect, mark_p, without_unused
from partjit.inspect.modules import ModulePaths
from partjit.inspect.times import given_trip_count
from partjit.plan.ir.build import constraint
from partjit.plan.passes.inline import specs_of_nested
from partjit.primitive import pjit_p
from partjit.shardy import TensorSharding
from partjit.spec import ParsedPartitionSpec

__all__ = ["ADDED", "TAG", "InlinedProgram", "inline_program", "names_in", "tags_in"]

TAG = "eqn:"
"""What precedes the number of an equation in a name stack."""

ADDED = "partjit.added"
"""In the location of operations that stand for no equation."""

_TAG = re.compile(rf"{TAG}(\d+)")

_Spec: TypeAlias = tuple[ParsedPartitionSpec, Mesh] | None


def names_in(location: ir.Location) -> str:
    """The names in a location, among them those of equations. The other parts are tracebacks, which name none."""
    match location:
        case ir.NameLoc():
            stack = location.name_str  # of all equations around it, as jax lowers them
            return stack if TAG in stack else f"{stack}/{names_in(location.child_loc)}"
        case ir.FusedLoc():
            return "/".join(map(names_in, cast(list[ir.Location], location.locations)))
        case _:
            return ""


def tags_in(names: str) -> list[int]:
    """The numbers of the equations that a location names, outermost first."""
    return [int(number) for number in _TAG.findall(names)]


@dataclasses.dataclass(frozen=True, eq=False)
class InlinedProgram:
    """A program with its nested programs inlined.

    Attributes:
        jaxpr: the jaxpr to be lowered.
        tree: the original program, whose values have the numbers that the marks give them.
        shardings: the sharding of each value, by its number; filled in after the propagation.
        equations: the equations of the tree, by their numbers.
        numbers: the numbers of the variables of `jaxpr`, at any depth.
        makers: the numbers of the equations of the tree that these are computed by.
        calls: for each equation, the numbers of the calls of functions that it is in.
        original: the jaxpr that was inlined.
        keep_unused: whether arguments that it does not use are passed to it all the same.
    """

    jaxpr: ClosedJaxpr
    tree: AnnotatedJaxpr
    shardings: dict[int, TensorSharding]
    equations: list[AnnotatedEquation]
    numbers: dict[Var, int]
    makers: dict[Var, int]
    calls: list[tuple[int, ...]]
    original: ClosedJaxpr
    keep_unused: bool

    @functools.cached_property
    def passed(self) -> tuple[bool, ...]:
        """For each argument whether it is passed to the compiled program."""
        return (True,) * len(self.original.in_avals) if self.keep_unused else used_arguments(self.original)

    @functools.cached_property
    def computing(self) -> Mapping[int, int]:
        """The numbers of the innermost equations that compute values, by the numbers of the values."""
        return {value.number: equation.number for equation in self.equations for value in equation.outputs}

    def functions(self) -> Callable[[ir.Operation], tuple[int, ...]]:
        """Gives the numbers of the calls around an operation: the original program has functions of their own for them.

        What locations say is remembered: several operations are at one, and of most it is asked several times.
        """
        known: dict[ir.Attribute, tuple[int, ...]] = {}

        def function_of(op: ir.Operation) -> tuple[int, ...]:
            where = op.location
            found = known.get(where.attr)
            if found is None:
                numbers = tags_in(names_in(where))
                found = known[where.attr] = self.calls[numbers[-1]] if numbers else ()
            return found

        return function_of

    def equation_of(self, eqn: JaxprEqn) -> AnnotatedEquation | None:
        """The equation of the tree that one of `jaxpr` stands for, if it has results."""
        number = self.makers.get(eqn.outvars[0]) if eqn.outvars else None
        return None if number is None else self.equations[number]


def inline_program(
    jaxpr: ClosedJaxpr,
    mesh: Mesh,
    paths: Sequence[str | None],
    result_paths: Sequence[str | None],
    iterations: Mapping[str, int],
    keep_unused: bool = False,
) -> InlinedProgram:
    """Inlines the nested programs of a jaxpr whose arguments and results have these key paths.

    Trip counts that the jaxpr does not say are those that were given for the lines of the loops.
    """
    inliner, inner = _Inliner(mesh, iterations), jaxpr.jaxpr
    of_results = {var: path for var, path in zip(inner.outvars, result_paths, strict=True) if isinstance(var, Var)}
    named = {**of_results, **dict(zip(inner.invars, paths, strict=True))}
    closed, tree = inliner.body(inner, jaxpr.consts, named)
    inliner.modules.read(tree, inliner.equations, [*zip(result_paths, tree.outputs, strict=True)])
    found = inliner.shardings, inliner.equations, inliner.numbers, inliner.makers, inliner.calls
    return InlinedProgram(closed, tree, *found, jaxpr, keep_unused)


class _Scope:
    """A jaxpr under construction.

    Attributes:
        env: the atoms that replace the variables of the original.
        eqns, consts: the equations and constants so far.
        marked: the operands of its mark.
    """

    def __init__(self) -> None:
        self.env: dict[Atom, Atom] = {}
        self.eqns: list[JaxprEqn] = []
        self.consts: dict[Var, object] = {}
        self.marked: list[Var] = []

    def read_all(self, atoms: Sequence[Atom]) -> list[Atom]:
        """The atoms that replace those of the original."""
        env = self.env
        return [env[atom] if isinstance(atom, Var) else atom for atom in atoms]

    def fresh(self, like: Atom) -> Var:
        """A new variable of the same type, which replaces `like`."""
        var = self.env[like] = new_var(like.aval)
        return var


class _Inliner:
    def __init__(self, mesh: Mesh, iterations: Mapping[str, int]) -> None:
        self._iterations = iterations
        self.shardings: dict[int, TensorSharding] = {}
        self.equations: list[AnnotatedEquation] = []
        self._loops = LoopsAround(self.equations)
        self.modules = ModulePaths()  # read when the tree is complete
        self._module_of, self._loop_of = self.modules.of, self._loops.of
        self._mesh = mesh
        self._names = _names()
        self._sources: tuple[SourceInfo, ...] = ()
        self.numbers: dict[Var, int] = {}
        self.makers: dict[Var, int] = {}
        self.calls: list[tuple[int, ...]] = []
        self._around: tuple[int, ...] = ()
        self._values: dict[Atom, AnnotatedValue] = {}

    def body(
        self, jaxpr: Jaxpr, consts: Sequence[object], paths: Mapping[Var, str | None] | None = None
    ) -> tuple[ClosedJaxpr, AnnotatedJaxpr]:
        """A jaxpr inlined, and annotated as it was."""
        scope = _Scope()
        constvars = [scope.fresh(var) for var in jaxpr.constvars]
        scope.consts.update(zip(constvars, consts, strict=True))
        invars = [scope.fresh(var) for var in jaxpr.invars]
        self._mark(scope, [*constvars, *invars])
        tree = self._inside(jaxpr, scope, paths or {})
        outvars = scope.read_all(jaxpr.outvars)
        eqns, unused = without_unused(scope.eqns, outvars)
        # One mark at the end: one per equation would take longer than all that is marked.
        marked = [var for var in scope.marked if var not in unused]
        numbers = tuple(self.numbers[var] for var in marked)
        eqns.append(new_jaxpr_eqn(marked, [], mark_p, {"numbers": numbers}, {mark_effect}))
        return closed_jaxpr(invars, outvars, eqns, scope.consts), tree

    def _inside(self, jaxpr: Jaxpr, scope: _Scope, paths: Mapping[Var, str | None]) -> AnnotatedJaxpr:
        """Adds the equations of a jaxpr, whose arguments are in the scope, to the scope."""
        outer, self._values = self._values, {}
        for var in (*jaxpr.constvars, *jaxpr.invars):
            self._values[var] = self._named(var, scope.env[var], paths.get(var))
        equations = tuple([self._equation(eqn, scope, paths) for eqn in jaxpr.eqns])
        tree = AnnotatedJaxpr(
            tuple(self._values[var] for var in jaxpr.constvars),
            tuple(self._values[var] for var in jaxpr.invars),
            tuple(self._value(atom) for atom in jaxpr.outvars),
            equations,
        )
        self._values = outer
        return tree

    def _equation(self, eqn: JaxprEqn, scope: _Scope, paths: Mapping[Var, str | None]) -> AnnotatedEquation:
        number = len(self.equations)
        self.equations.append(cast(AnnotatedEquation, None))  # those in its body are numbered before it is complete
        values = self._values
        inputs = tuple([values[a] if isinstance(a, Var) else self._named(a, a, None) for a in eqn.invars])
        info = eqn.source_info
        outer_sources, self._sources = self._sources, (info, *self._sources)
        tagged = info.replace(name_stack=info.name_stack.extend(f"{TAG}{number}"))
        trip_count: int | None = 1
        outer_calls = self._around
        self.calls.append(outer_calls)
        if (called := _called(eqn)) is not None:
            self._around = (*outer_calls, *([number] if _is_function(eqn) else []))
            bodies = {"jaxpr": self._inlined(number, eqn.replace(source_info=tagged), called, scope)}
            self._around = outer_calls
        else:
            params, bodies = eqn.params, _NO_BODIES
            if eqn.primitive in _WITH_BODIES:  # few have
                trip_count = trip_count_of(eqn)
                params, bodies = self._bodies(eqn)
            invars = scope.read_all(eqn.invars)
            outvars = [scope.fresh(var) for var in eqn.outvars]
            effects = {*eqn.effects, mark_effect} if bodies else eqn.effects
            new = eqn.replace(invars=invars, outvars=outvars, params=params, effects=effects, source_info=tagged)
            # Shardy refuses a `shard_map` without arguments and results, which jax leaves out if nothing marks it.
            if eqn.invars or eqn.outvars or eqn.effects:
                scope.eqns.append(new)
            self._mark(scope, outvars, number)
        outputs = tuple([self._named(var, scope.env[var], paths.get(var)) for var in eqn.outvars])
        values.update(zip(eqn.outvars, outputs, strict=True))
        self.equations[number] = AnnotatedEquation(
            number,
            eqn.primitive.name,
            inputs,
            outputs,
            eqn.params,
            self._sources,
            bodies,
            self._module_of,
            self._loop_of,
            trip_count,
            *(loop_counts(eqn) if bodies else ()),
        )
        self._sources = outer_sources
        given = None if trip_count is not None else given_trip_count(self.equations[number].site, self._iterations)
        if given is not None:
            self.equations[number] = dataclasses.replace(self.equations[number], trip_count=given)
        return self.equations[number]

    def _bodies(self, eqn: JaxprEqn) -> tuple[dict[str, Any], dict[str, AnnotatedJaxpr]]:
        """The parameters of a loop, branch or shard_map with the jaxprs in them inlined; these, annotated."""
        params, bodies = {**eqn.params}, {}
        for name, param in eqn.params.items():
            several = param if isinstance(param, tuple) else (param,)
            made = []
            for k, jaxpr in enumerate(several):
                if hasattr(jaxpr, "eqns"):
                    key = f"{name}[{k}]" if isinstance(param, tuple) else name
                    inner, bodies[key] = self.body(getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()))
                    made.append(inner if hasattr(jaxpr, "consts") else inner.jaxpr)
            if made:
                params[name] = tuple(made) if isinstance(param, tuple) else made[0]
        return params, bodies

    def _inlined(self, number: int, eqn: JaxprEqn, called: "_Called", scope: _Scope) -> AnnotatedJaxpr:
        """The body of an equation that calls it once, in the scope of the equation."""
        (jaxpr, values), in_specs, out_specs = called
        inner = _Scope()
        operands = scope.read_all(eqn.invars)
        if is_rematerialized(eqn):  # what it computes again must not be merged with the first computation
            behind = {atom: new_var(atom.aval) for atom in operands if isinstance(atom, Var)}
            scope.eqns.append(barrier([*behind], [*behind.values()], eqn))
            self._mark(scope, [*behind.values()], number)
            operands = [behind.get(atom, atom) if isinstance(atom, Var) else atom for atom in operands]
        inner.eqns, inner.consts, inner.marked = scope.eqns, scope.consts, scope.marked
        constvars = [inner.fresh(var) for var in jaxpr.constvars]
        scope.consts.update(zip(constvars, values, strict=True))
        self._mark(scope, constvars)
        for var, atom, spec in zip(jaxpr.invars, operands, in_specs, strict=True):
            inner.env[var] = self._constrained(atom, var, spec, (number, eqn), scope)
        tree = self._inside(jaxpr, inner, {})
        for var, atom, spec in zip(eqn.outvars, inner.read_all(jaxpr.outvars), out_specs, strict=True):
            scope.env[var] = self._constrained(atom, var, spec, (number, eqn), scope)
        return tree

    def _constrained(self, atom: Atom, var: Var, spec: _Spec, of: tuple[int, JaxprEqn], scope: _Scope) -> Atom:
        if spec is None or not getattr(var.aval, "ndim", 0):
            return atom
        fresh = new_var(var.aval)
        requested, mesh = spec
        number, eqn = of
        scope.eqns.append(constraint(atom, fresh, requested, mesh, eqn))
        self._mark(scope, [fresh], number)
        return fresh

    def _mark(self, scope: _Scope, variables: Sequence[Var], maker: int | None = None) -> None:
        """Numbers variables, those of an equation, and makes the arrays among them operands of the scope's mark."""
        for var in variables:
            self.numbers[var] = len(self.numbers)
            if maker is not None:
                self.makers[var] = maker
            if isinstance(var.aval, ShapedArray):
                scope.marked.append(var)

    def _value(self, atom: Atom) -> AnnotatedValue:
        return self._values[atom] if isinstance(atom, Var) else self._named(atom, atom, None)

    def _named(self, original: Atom, atom: Atom, path: str | None) -> AnnotatedValue:
        """A value of the tree: an atom of the original program, and the one that replaces it."""
        if isinstance(atom, Var):
            name = "_" if isinstance(original, DropVar) else next(self._names)
            return AnnotatedValue(name, self.numbers[atom], original.aval, self._mesh, self.shardings, path)
        number, literal = -1 - len(self.shardings), not isinstance(original, Var)
        self.shardings[number] = TensorSharding.replicated(getattr(atom.aval, "ndim", 0))
        name = _shown_literal(atom) if literal else next(self._names)
        return AnnotatedValue(name, number, atom.aval, self._mesh, self.shardings, path, literal)


_WITH_BODIES = {primitives.scan_p, primitives.while_p, primitives.cond_p, shard_map_p}
_NO_BODIES: dict[str, AnnotatedJaxpr] = {}


def _is_function(eqn: JaxprEqn) -> bool:
    """Whether an equation is lowered to the call of a function."""
    is_inlined = getattr(eqn.params.get("inline"), "value", "") == "jax_late"
    return eqn.primitive in (primitives.jit_p, pjit_p) and not is_inlined


def _shown_literal(atom: Literal) -> str:
    value = np.asarray(atom.val)
    return f"{value.item():.6g}" if value.dtype.kind == "f" else str(value)


_Called: TypeAlias = tuple[tuple[Jaxpr, Sequence[object]], Sequence[_Spec], Sequence[_Spec]]


def _called(eqn: JaxprEqn) -> _Called | None:
    """The jaxpr and constants that an equation calls exactly once, and its specs of arguments and results."""
    if eqn.primitive is pjit_p:
        jaxpr, mesh = eqn.params["jaxpr"], eqn.params["mesh"]
        in_specs, out_specs = (
            [None if isinstance(spec, UnspecifiedValue) else (spec, mesh) for spec in eqn.params[which]]
            for which in ("in_specs", "out_specs")
        )
        return (jaxpr.jaxpr, jaxpr.consts), in_specs, out_specs
    called = called_jaxpr(eqn)
    if called is None:
        return None
    return called, *specs_of_nested(eqn)


def _names() -> Iterator[str]:
    """a, b, ..., z, aa, ab, ..."""
    for length in itertools.count(1):
        yield from map("".join, itertools.product(string.ascii_lowercase, repeat=length))
