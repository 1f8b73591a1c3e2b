"""A program with constraints of some of its values: as a jaxpr, which a partitioned function evaluates."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Var
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from partjit._jax.jaxprs import Atom, closed_jaxpr, new_var
from partjit.inspect.inlining import TAG, InlinedProgram
from partjit.inspect.marks import mark_p
from partjit.plan.ir.build import constraint
from partjit.spec import ParsedPartitionSpec

__all__ = ["with_constraints"]


def with_constraints(inlined: InlinedProgram, specs: Mapping[int, P], mesh: Mesh) -> ClosedJaxpr:
    """The jaxpr of an inlined program, without marks, that constrains values to these specs, by their numbers.

    What uses such a value uses the constrained one, whether in the same jaxpr or in that of a loop.
    """
    parsed = {number: ParsedPartitionSpec.from_user_input(spec, "constraint") for number, spec in specs.items()}
    closed = inlined.jaxpr
    return _rewritten(closed.jaxpr, closed.consts, inlined.numbers, parsed, mesh)


def _rewritten(
    jaxpr: Any,
    consts: Sequence[object],
    numbers: Mapping[Var, int],
    specs: Mapping[int, ParsedPartitionSpec],
    mesh: Mesh,
) -> ClosedJaxpr:
    env: dict[Var, Var] = {}
    eqns: list[JaxprEqn] = []

    def read(atom: Atom) -> Atom:
        return env.get(atom, atom) if isinstance(atom, Var) else atom

    marks = {effect for eqn in jaxpr.eqns if eqn.primitive is mark_p for effect in eqn.effects}

    def constrain(var: Var, like: JaxprEqn) -> None:
        if (spec := specs.get(numbers.get(var, -1))) is not None:
            env[var] = new_var(var.aval)
            eqns.append(constraint(var, env[var], spec, mesh, _without_tags(like)))

    for var in jaxpr.invars if jaxpr.eqns else ():
        constrain(var, jaxpr.eqns[0])
    for eqn in jaxpr.eqns:
        if eqn.primitive is mark_p:
            continue
        params = {name: _param(param, numbers, specs, mesh) for name, param in eqn.params.items()}
        effects = {*eqn.effects} - marks
        new = _without_tags(eqn).replace(invars=[*map(read, eqn.invars)], params=params, effects=effects)
        eqns.append(new)
        for var in eqn.outvars:
            constrain(var, eqn)
    bound = dict(zip(jaxpr.constvars, consts, strict=True))
    return closed_jaxpr(jaxpr.invars, [*map(read, jaxpr.outvars)], eqns, bound)


def _without_tags(eqn: JaxprEqn) -> JaxprEqn:
    """An equation without the number that the inlined program gave it, which is in its name stack."""
    info = eqn.source_info
    stack: Any = info.name_stack
    kept = tuple(scope for scope in stack.stack if not scope.name.startswith(TAG))
    return eqn.replace(source_info=info.replace(name_stack=type(stack)(kept)))


def _param(param: Any, numbers: Mapping[Var, int], specs: Mapping[int, ParsedPartitionSpec], mesh: Mesh) -> Any:
    """A parameter of an equation; the jaxprs in it are rewritten as well."""
    if isinstance(param, tuple) and any(hasattr(item, "eqns") for item in param):
        return tuple(_param(item, numbers, specs, mesh) for item in param)
    if not hasattr(param, "eqns"):
        return param
    inner = getattr(param, "jaxpr", param)
    made = _rewritten(inner, getattr(param, "consts", ()), numbers, specs, mesh)
    return made if hasattr(param, "consts") else made.jaxpr
