"""A program whose colocated calls all stand at its top level, or in the bodies of loops and branches of the plan."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import DropVar, Var, jaxprs_in_params, new_jaxpr_eqn

from partjit._jax.caches import weakref_cache
from partjit._jax.effects import is_input_effect, without_axes
from partjit._jax.jaxprs import closed_jaxpr, new_var
from partjit._jax.sources import nested_source_info
from partjit.colocated.ir.primitive import calls_in, colocated_call_p
from partjit.colocated.runtime.streams import Stream

__all__ = ["Equations", "Flat", "has_calls", "live", "names_of_calls", "renamed", "streams_of", "variables"]


@dataclasses.dataclass(frozen=True)
class Flat:
    """A program that was opened as far as its calls are.

    Attributes:
        invars: the variables of its arguments.
        outvars: the variables (or literals) of its results.
        eqns: its equations, in program order.
        consts: the variables that are constants, with their values.
    """

    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]
    eqns: tuple[Any, ...]
    consts: dict[Any, Any]

    @classmethod
    def of_jaxpr(cls, jaxpr: Any) -> "Flat":
        """A closed jaxpr as it stands."""
        inner = jaxpr.jaxpr
        consts = dict(zip(inner.constvars, jaxpr.consts, strict=True))
        return cls(tuple(inner.invars), tuple(inner.outvars), tuple(inner.eqns), consts)

    @property
    def jaxpr(self) -> Any:
        """The closed jaxpr."""
        return closed_jaxpr(self.invars, self.outvars, self.eqns, self.consts)


@weakref_cache
def has_calls(jaxpr: Any) -> bool:
    """Whether there is a colocated call in a jaxpr, at any depth."""
    return any(
        eqn.primitive is colocated_call_p or any(has_calls(inner) for inner in jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
    )


@weakref_cache
def streams_of(jaxpr: Any) -> frozenset[Stream]:
    """The streams that a jaxpr itself puts calls on, at any depth."""
    return frozenset({call.params["stream"] for call in calls_in([jaxpr])} - {None})


def names_of_calls(eqn: Any) -> list[str]:
    """The names of the colocated functions that are called inside of an equation, at any depth."""
    return sorted({call.params["callee"].name for call in calls_in(jaxprs_in_params(eqn.params))})


def variables(atoms: Sequence[Any]) -> list[Any]:
    """The variables among atoms: those that are no literals."""
    return [atom for atom in atoms if isinstance(atom, Var)]


def live(outvars: Sequence[Any], eqns: Sequence[Any]) -> tuple[list[Any], set[Any]]:
    """The equations that have effects or that somebody needs, and the variables that are needed."""
    needed = {*variables(outvars)}
    kept = []
    for eqn in reversed(eqns):
        if without_axes(eqn.effects) or not needed.isdisjoint(eqn.outvars):
            needed.update(variables(eqn.invars))
            kept.append(eqn)
    return kept[::-1], needed


def renamed(eqns: Sequence[Any], env: dict[Any, Any], outer: Any = None) -> Iterator[Any]:
    """Equations with fresh variables for what they compute.

    Args:
        eqns: the equations.
        env: what takes the place of variables; the fresh ones are put into it.
        outer: the equation in whose place they come, if their names are relative to that.
    """
    for eqn in eqns:
        fresh = [var if isinstance(var, DropVar) else new_var(var.aval) for var in eqn.outvars]
        invars = [env.get(atom, atom) if isinstance(atom, Var) else atom for atom in eqn.invars]
        env.update(zip(eqn.outvars, fresh, strict=True))
        info = eqn.source_info if outer is None else nested_source_info(eqn.source_info, outer.source_info)
        yield eqn.replace(invars=invars, outvars=fresh, source_info=info)


class Equations:
    """Equations being put together, in the place of another one.

    Args:
        like: that one; those made here stand at its line in the user's code.
        consts: the constants of the program that it stands in, to which those of the equations are added.

    Attributes:
        eqns: what there is so far.
        consts: the variables that are constants, with their values.
    """

    def __init__(self, like: Any, consts: dict[Any, Any] | None = None) -> None:
        self._like = like
        self.eqns: list[Any] = []
        self.consts: dict[Any, Any] = {} if consts is None else consts

    def add(self, fun: Callable[..., Any], *atoms: Any) -> list[Any]:
        """The results, flat, of a function of jax on these atoms."""
        structs = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms]
        return self.inline(Flat.of_jaxpr(jax.make_jaxpr(fun)(*structs)), atoms)

    def inline(self, flat: Flat, atoms: Sequence[Any], outvars: Sequence[Any] | None = None) -> list[Any]:
        """The results of a program on these atoms; `outvars` are atoms of it to be given instead of its results."""
        env = dict(zip(flat.invars, atoms, strict=True))
        for var, value in flat.consts.items():
            env[var] = new_var(var.aval)
            self.consts[env[var]] = value
        self.eqns += (eqn.replace(ctx=self._like.ctx) for eqn in renamed(flat.eqns, env, self._like))
        return [
            env.get(atom, atom) if isinstance(atom, Var) else atom
            for atom in (flat.outvars if outvars is None else outvars)
        ]

    def bind(self, primitive: Any, atoms: Sequence[Any], outvars: Sequence[Any], params: dict[str, Any]) -> None:
        """An equation whose effects are those of the jaxprs among its parameters."""
        effects = {
            effect
            for jaxpr in jaxprs_in_params(params)
            for eqn in jaxpr.eqns
            for effect in eqn.effects
            if not is_input_effect(effect)
        }
        like = self._like
        self.eqns.append(new_jaxpr_eqn([*atoms], [*outvars], primitive, params, effects, like.source_info, like.ctx))
