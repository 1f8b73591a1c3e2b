"""Jaxprs without the shardings that types have on meshes with Explicit axes: the same program over Auto axes.

Types do not change what a program computes, so equations stay what they are but for their types and for the parameters
that request one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax._src import core
from jax._src.pjit import reshard_p
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.ref import AbstractRef
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from partjit._jax.jaxprs import MERGED_JAXPR, Atom, new_var, with_inputs

__all__ = ["reshard_p", "untyped"]

Rewrite: TypeAlias = Callable[[JaxprEqn, JaxprEqn], Sequence[JaxprEqn]]
"""Given an equation and what it is without types, the equations in its place."""

_REQUESTS = ("sharding", "out_sharding")
"""Parameters with the sharding that the type of a result is to have; None is none."""


def untyped(jaxpr: ClosedJaxpr, rewrites: Mapping[Primitive, Rewrite], requested: Rewrite) -> ClosedJaxpr:
    """A closed jaxpr without shardings in its types.

    Args:
        jaxpr: the jaxpr.
        rewrites: what becomes of the equations of a primitive.
        requested: what becomes of an equation with a parameter that requested a sharding of its result.
    """
    return _Untyped(rewrites, requested).closed(jaxpr)


class _Untyped:
    def __init__(self, rewrites: Mapping[Primitive, Rewrite], requested: Rewrite) -> None:
        self._rewrites = rewrites
        self._requested = requested
        self._done: dict[int, tuple[object, Any]] = {}  # with the key's object, whose identity must not be reused

    def closed(self, jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        if MERGED_JAXPR:
            return self.open(jaxpr)
        return jaxpr.replace(jaxpr=self.open(jaxpr.jaxpr))

    def open(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self._done:
            env: dict[Var, Atom] = {}
            invars, constvars = self._bound(jaxpr.invars, env), self._bound(jaxpr.constvars, env)
            eqns = [made for eqn in jaxpr.eqns for made in self._equations(eqn, env)]
            outvars = [self._read(atom, env) for atom in jaxpr.outvars]
            kept = {"consts": jaxpr.consts} if MERGED_JAXPR else {}
            # jax takes new variables for others, whose names and values it does not know.
            made = jaxpr.replace(
                invars=invars,
                constvars=constvars,
                eqns=eqns,
                outvars=outvars,
                debug_info=jaxpr.debug_info,
                **kept,
            )
            self._done[id(jaxpr)] = jaxpr, made
        return self._done[id(jaxpr)][1]

    def _bound(self, variables: Sequence[Var], env: dict[Var, Atom]) -> list[Var]:
        made = [new_var(_aval(var.aval)) for var in variables]
        env.update(zip(variables, made, strict=True))
        return made

    def _read(self, atom: Atom, env: Mapping[Var, Atom]) -> Atom:
        if isinstance(atom, Literal):
            return Literal(atom.val, _aval(atom.aval))
        return env[atom]

    def _equations(self, eqn: JaxprEqn, env: dict[Var, Atom]) -> Sequence[JaxprEqn]:
        invars = [self._read(atom, env) for atom in eqn.invars]
        outvars: list[Any] = [
            core.DropVar(_aval(var.aval)) if isinstance(var, core.DropVar) else new_var(_aval(var.aval))
            for var in eqn.outvars
        ]
        env.update(zip(eqn.outvars, outvars, strict=True))
        requests = [name for name in _REQUESTS if isinstance(eqn.params.get(name), NamedSharding)]
        params = {name: None if name in requests else self._param(value) for name, value in eqn.params.items()}
        made = with_inputs(eqn, invars).replace(outvars=outvars, params=params, ctx=_context(eqn.ctx))
        rewrite = self._rewrites.get(eqn.primitive, self._requested if requests else None)
        return [made] if rewrite is None else rewrite(eqn, made)

    def _param(self, value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return self.closed(value)
        if isinstance(value, Jaxpr):
            return self.open(value)
        if type(value) in (tuple, list):
            return type(value)(map(self._param, value))
        if isinstance(value, Mesh | AbstractMesh):
            return _mesh(value)
        if isinstance(value, NamedSharding):
            return value.update(mesh=_mesh(value.mesh))
        return value


def _mesh(mesh: Any) -> Any:
    """The mesh with Auto axes for its Explicit ones."""
    if AxisType.Explicit not in mesh.axis_types:
        return mesh
    types = tuple(AxisType.Auto if kind is AxisType.Explicit else kind for kind in mesh.axis_types)
    return mesh.update(axis_types=types)


def _aval(aval: Any) -> Any:
    if isinstance(aval, AbstractRef):
        return aval.update(inner_aval=_aval(aval.inner_aval))
    if not isinstance(aval, ShapedArray) or AxisType.Explicit not in aval.sharding.mesh.axis_types:
        return aval
    sharding = NamedSharding(_mesh(aval.sharding.mesh), P(*[None] * aval.ndim))
    return aval.update(sharding=sharding)


def _context(context: Any) -> Any:
    """The context in which an equation was traced, over Auto axes."""
    if AxisType.Explicit not in context.cur_abstract_mesh.axis_types:
        return context
    with context.manager, jax.sharding.use_abstract_mesh(_mesh(context.cur_abstract_mesh)):
        return core.JaxprEqnContext()
