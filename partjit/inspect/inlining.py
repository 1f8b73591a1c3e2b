"""A program laid open: its nested programs put in their places, every equation marked so that it is found again.

The partitioner decides for every call of a nested program anew, and so does this: what is called twice is there twice.
Only the bodies of loops, branches and `shard_map` stay where they are. Each equation carries a tag in its name stack,
which the operations it is lowered to have in their locations; what it computes is handed to an equation of its own that
does nothing, so that it can be found in the lowered program.
"""

import dataclasses
import itertools
import string
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import DropVar, Effect, Primitive, Var, new_jaxpr_eqn
from jax.interpreters import mlir
from jax.sharding import Mesh

from partjit._jax.effects import register_effect
from partjit._jax.jaxprs import barrier, called_jaxpr, closed_jaxpr, control_flow_kind, is_rematerialized, new_var
from partjit._jax.lowering import custom_call
from partjit._jax.shard_maps import shard_map_p
from partjit._jax.shardings import UnspecifiedValue
from partjit.inspect.annotated import AnnotatedEquation, AnnotatedJaxpr, AnnotatedValue
from partjit.inspect.loop_counts import loop_counts, trip_count_of
from partjit.plan.passes.flatten import constraint, specs_of_nested
from partjit.primitive import pjit_p
from partjit.shardy import TensorSharding

__all__ = ["MARK", "TAG", "InlinedProgram", "inline_program"]

TAG = "eqn:"
"""What precedes the number of an equation in a name stack."""

MARK = "partjit.mark"
"""The target of the operation that stands for a mark."""


class _MarkEffect(Effect):  # type: ignore[misc]  # jax gives the base class no types
    """Keeps marks in the program."""

    def __str__(self) -> str:
        return "Mark"


register_effect(_MarkEffect)
_mark = _MarkEffect()
mark_p: Any = Primitive("mark")
mark_p.multiple_results = True
mark_p.def_effectful_abstract_eval(lambda *_, **__: ([], {_mark}))


def _lower_mark(_: Any, *values: Any, numbers: tuple[int, ...]) -> Sequence[Any]:
    flat = mlir.ir_tree_registry.flatten(values)[0]
    said = ",".join(map(str, numbers))
    custom_call(MARK, result_types=[], operands=flat, backend_config=said, has_side_effect=True)
    return []


mlir.register_lowering(mark_p, _lower_mark, cacheable=False)


@dataclasses.dataclass(frozen=True, eq=False)
class InlinedProgram:
    """A program laid open.

    Attributes:
        jaxpr: the closed jaxpr to be lowered.
        tree: the program as it was, whose values know their numbers in the marks.
        layouts: to be filled: the layout of each value, by its number.
        equations: the equations of the tree, by their numbers.
        times: for each of these how often it runs when the program runs once; None if that is not known.
        numbers: the numbers of the variables of `jaxpr`, at any depth.
    """

    jaxpr: Any
    tree: AnnotatedJaxpr
    layouts: dict[int, TensorSharding]
    equations: list[AnnotatedEquation]
    times: list[int | None]
    numbers: dict[Any, int]


def inline_program(
    jaxpr: Any, mesh: Mesh, paths: Sequence[str | None], result_paths: Sequence[str | None]
) -> InlinedProgram:
    """Lays a closed jaxpr open.

    Args:
        jaxpr: the closed jaxpr.
        mesh: its mesh.
        paths, result_paths: the key paths of its arguments and results.
    """
    opening = _Inliner(mesh)
    inner, names = jaxpr.jaxpr, dict(zip(jaxpr.jaxpr.invars, paths, strict=True))
    names |= {
        var: path
        for var, path in zip(inner.outvars, result_paths, strict=True)
        if isinstance(var, Var) and var not in names
    }
    closed, tree = opening.body(inner, jaxpr.consts, 1, names)
    return InlinedProgram(closed, tree, opening.layouts, opening.equations, opening.times, opening.numbers)


class _Scope:
    """A program being put together.

    Attributes:
        env: what stands for the variables of the original.
        eqns, consts: what there is of it.
        marked: the variables to be handed to its mark.
    """

    def __init__(self) -> None:
        self.env: dict[Any, Any] = {}
        self.eqns: list[Any] = []
        self.consts: dict[Any, Any] = {}
        self.marked: list[Any] = []

    def read(self, atom: Any) -> Any:
        """What stands for an atom."""
        return self.env[atom] if isinstance(atom, Var) else atom


class _Inliner:
    def __init__(self, mesh: Mesh) -> None:
        self.layouts: dict[int, TensorSharding] = {}
        self.equations: list[Any] = []
        self.times: list[int | None] = []
        self._mesh = mesh
        self._names = _names()
        self._sources: tuple[Any, ...] = ()
        self.numbers: dict[Any, int] = {}
        self._values: dict[Any, AnnotatedValue] = {}

    def body(
        self, jaxpr: Any, consts: Sequence[Any], times: int | None, paths: dict[Any, Any] | None = None
    ) -> tuple[Any, AnnotatedJaxpr]:
        """An open jaxpr as a closed one of its own, and as it was."""
        scope = _Scope()
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            scope.env[var] = new_var(var.aval)
            scope.consts[scope.env[var]] = value
        for var in jaxpr.invars:
            scope.env[var] = new_var(var.aval)
        first = [scope.env[var] for var in (*jaxpr.constvars, *jaxpr.invars)]
        self._mark(scope, first)
        tree = self._inside(jaxpr, scope, times, paths or {})
        # One mark at the end: one per equation would take longer than all that is marked.
        numbers = tuple(self.numbers[var] for var in scope.marked)
        scope.eqns.append(new_jaxpr_eqn(scope.marked, [], mark_p, {"numbers": numbers}, {_mark}))
        invars = [scope.env[var] for var in jaxpr.invars]
        outvars = [scope.read(atom) for atom in jaxpr.outvars]
        return closed_jaxpr(invars, outvars, scope.eqns, scope.consts), tree

    def _inside(self, jaxpr: Any, scope: _Scope, times: int | None, paths: dict[Any, Any]) -> AnnotatedJaxpr:
        """The equations of an open jaxpr whose arguments the scope knows, added to it."""
        outer, self._values = self._values, {}
        for var in (*jaxpr.constvars, *jaxpr.invars):
            self._values[var] = self._named(var, scope.env[var], paths.get(var))
        equations = tuple([self._equation(eqn, scope, times, paths) for eqn in jaxpr.eqns])
        tree = AnnotatedJaxpr(
            tuple(self._values[var] for var in jaxpr.constvars),
            tuple(self._values[var] for var in jaxpr.invars),
            tuple(self._value(atom) for atom in jaxpr.outvars),
            equations,
        )
        self._values = outer
        return tree

    def _equation(self, eqn: Any, scope: _Scope, times: int | None, paths: dict[Any, Any]) -> AnnotatedEquation:
        number = len(self.equations)
        self.equations.append(None)
        self.times.append(times)
        inputs = tuple(map(self._value, eqn.invars))
        info = eqn.source_info
        outer_sources, self._sources = self._sources, (info, *self._sources)
        tagged = eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(f"{TAG}{number}")))
        turns: int | None = 1
        bodies: dict[str, AnnotatedJaxpr] = {}
        if (called := _called(eqn)) is not None:
            bodies["jaxpr"] = self._inlined(eqn, tagged, called, scope, times)
        else:
            turns = trip_count_of(eqn)
            inner_times = None if times is None or turns is None else times * turns
            params = {**eqn.params}
            for name, jaxpr, consts, closed in _bodies(eqn):
                made, bodies[name] = self.body(jaxpr, consts, inner_times)
                _put(params, name, made if closed else made.jaxpr)
            fresh = [new_var(var.aval) for var in eqn.outvars]
            new = tagged.replace(invars=[scope.read(atom) for atom in eqn.invars], outvars=fresh, params=params)
            # Shardy refuses a `shard_map` without arguments and results, which jax leaves out if nothing marks it.
            if eqn.invars or eqn.outvars or eqn.effects:
                scope.eqns.append(new.replace(effects={*new.effects, _mark}) if bodies else new)
            scope.env.update(zip(eqn.outvars, fresh, strict=True))
            self._mark(scope, fresh)
        outputs = []
        for var in eqn.outvars:
            value = self._named(var, scope.env[var], paths.get(var))
            self._values[var] = value
            outputs.append(value)
        made = AnnotatedEquation(
            number,
            eqn.primitive.name,
            inputs,
            tuple(outputs),
            eqn.params,
            self._sources,
            bodies,
            turns,
            *loop_counts(eqn),
        )
        self._sources = outer_sources
        self.equations[number] = made
        return made

    def _inlined(self, eqn: Any, tagged: Any, called: Any, scope: _Scope, times: int | None) -> AnnotatedJaxpr:
        """The body of an equation that calls it once, in the place of the equation."""
        (jaxpr, values), in_specs, out_specs = called
        inner = _Scope()
        given = [scope.read(atom) for atom in eqn.invars]
        if is_rematerialized(eqn):  # what it computes again must not be taken for what was computed before
            behind = {atom: new_var(atom.aval) for atom in given if isinstance(atom, Var)}
            scope.eqns.append(barrier([*behind], [*behind.values()], tagged))
            self._mark(scope, [*behind.values()])
            given = [behind.get(atom, atom) if isinstance(atom, Var) else atom for atom in given]
        inner.eqns, inner.consts, inner.marked = scope.eqns, scope.consts, scope.marked
        for var, value in zip(jaxpr.constvars, values, strict=True):
            inner.env[var] = new_var(var.aval)
            scope.consts[inner.env[var]] = value
            self._mark(scope, [inner.env[var]])
        for var, atom, spec in zip(jaxpr.invars, given, in_specs, strict=True):
            inner.env[var] = self._constrained(atom, var, spec, tagged, scope)
        tree = self._inside(jaxpr, inner, times, {})
        for var, atom, spec in zip(eqn.outvars, map(inner.read, jaxpr.outvars), out_specs, strict=True):
            scope.env[var] = self._constrained(atom, var, spec, tagged, scope)
        return tree

    def _constrained(self, atom: Any, var: Any, spec: Any, tagged: Any, scope: _Scope) -> Any:
        if spec is None or not var.aval.ndim:
            return atom
        fresh = new_var(var.aval)
        scope.eqns.append(constraint(atom, fresh, spec, tagged))
        self._mark(scope, [fresh])
        return fresh

    def _mark(self, scope: _Scope, variables: Sequence[Any]) -> None:
        """Numbers values and lets the scope hand them to its mark."""
        for var in variables:
            self.numbers[var] = len(self.numbers)
            if isinstance(var.aval, ShapedArray):
                scope.marked.append(var)

    def _value(self, atom: Any) -> AnnotatedValue:
        return self._values[atom] if isinstance(atom, Var) else self._named(atom, atom, None)

    def _named(self, var: Any, atom: Any, path: str | None) -> AnnotatedValue:
        """A value of the tree: a variable under which a program knows an atom."""
        if not isinstance(atom, Var):
            number = -1 - len(self.layouts)
            self.layouts[number] = TensorSharding.replicated(getattr(atom.aval, "ndim", 0))
            name = _shown_literal(atom) if not isinstance(var, Var) else next(self._names)
            return AnnotatedValue(name, number, atom.aval, self._mesh, self.layouts, path, not isinstance(var, Var))
        name = "_" if isinstance(var, DropVar) else next(self._names)
        return AnnotatedValue(name, self.numbers[atom], var.aval, self._mesh, self.layouts, path)


def _shown_literal(atom: Any) -> str:
    value = np.asarray(atom.val)
    return f"{value.item():.6g}" if value.dtype.kind == "f" else str(value)


def _called(eqn: Any) -> tuple[Any, Sequence[Any], Sequence[Any]] | None:
    """What an equation calls exactly once, and the specs that it has for arguments and results."""
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


def _bodies(eqn: Any) -> Iterator[tuple[str, Any, Sequence[Any], bool]]:
    """The programs of loops, branches and shard_maps: name, open jaxpr, constants, whether it is a closed one."""
    if control_flow_kind(eqn) is None and eqn.primitive is not shard_map_p:
        return
    for name, param in eqn.params.items():
        several = param if isinstance(param, tuple) else (param,)
        for k, jaxpr in enumerate(several):
            if hasattr(jaxpr, "eqns"):
                closed = hasattr(jaxpr, "consts")
                key = f"{name}[{k}]" if isinstance(param, tuple) else name
                yield key, getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()), closed


def _put(params: dict[str, Any], key: str, jaxpr: Any) -> None:
    name, _, k = key.partition("[")
    if not k:
        params[name] = jaxpr
        return
    position = int(k[:-1])
    params[name] = (*params[name][:position], jaxpr, *params[name][position + 1 :])


def _names() -> Iterator[str]:
    """a, b, ..., z, aa, ab, ..."""
    for length in itertools.count(1):
        yield from map("".join, itertools.product(string.ascii_lowercase, repeat=length))
