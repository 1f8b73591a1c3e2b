"""Inlining: nested programs that make calls are put in the place of their equations, and calls become nodes.

Nested programs are `pjit` and `jax.jit`, functions with custom derivatives or batching rules, `jax.checkpoint`, and
what a linear solve evaluates. Those without calls stay as they are. What their specs say of arguments and results
becomes constraints.
"""

from collections.abc import Sequence
from typing import TypeAlias, cast

from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Var
from jax.sharding import Mesh, NamedSharding
from jax.typing import ArrayLike

from partjit._jax.jaxprs import (
    Atom,
    called_jaxpr,
    control_flow_kind,
    nested_shardings,
    new_var,
    solving,
    type_of,
    with_inputs,
)
from partjit._jax.shard_maps import shard_map_p
from partjit._jax.shardings import MaybeSharding, UnspecifiedValue
from partjit._jax.sources import at_site, nested_source_info
from partjit.calls import inner_jaxprs, makes_calls, names_of_calls
from partjit.colocated.ir.primitive import colocated_call_p
from partjit.colocated.runtime.streams import Stream
from partjit.plan.ir.build import constraint, read
from partjit.plan.ir.nodes import Block, ColocatedCall, Equation, VarBlock, VarNode
from partjit.primitive import pjit_p
from partjit.spec import ParsedPartitionSpec

__all__ = ["inline", "specs_of_nested"]

Spec: TypeAlias = tuple[ParsedPartitionSpec, Mesh] | None


def inline(block: VarBlock, caller: Stream | None) -> VarBlock:
    """Inlines nested programs in a block as far as its calls are.

    Args:
        block: equations.
        caller: the stream of the caller, if the program names it as well, so that both are one order.

    Raises:
        ValueError: a call is where the host cannot make it.
    """
    inlining = _Inlining(caller, dict(block.consts))
    env: dict[Var, Atom] = {}
    for node in block.nodes:
        assert isinstance(node, Equation)
        if env or node.eqn.primitive is colocated_call_p or makes_calls(node.eqn):
            inlining.add([node.eqn], env, None)
        else:  # most equations of a long program
            inlining.nodes.append(node)
    outputs = tuple(read(env, atom) for atom in block.outputs)
    return Block(block.inputs, tuple(inlining.nodes), outputs, inlining.consts)


class _Inlining:
    """The nodes of a block while nested programs are inlined into it."""

    def __init__(self, caller: Stream | None, consts: dict[Var, ArrayLike]) -> None:
        self._caller = caller
        self.nodes: list[VarNode] = []
        self.consts = consts

    def add(self, eqns: Sequence[JaxprEqn], env: dict[Var, Atom], outer: JaxprEqn | None) -> None:
        """Adds equations.

        Args:
            eqns: the equations.
            env: what takes the place of variables; what these compute is put into it.
            outer: the equation in whose place they come; None if they are those of the block itself.
        """
        for original in eqns:
            eqn = original
            if outer is not None or (env and any(isinstance(a, Var) and a in env for a in eqn.invars)):
                eqn = _renamed(eqn, env, outer)
            eqn = solving(eqn) if makes_calls(eqn) else eqn
            if eqn.primitive is colocated_call_p:
                stream = self._caller if eqn.params["stream"] is None else eqn.params["stream"]
                self.nodes.append(
                    ColocatedCall(eqn, tuple(eqn.invars), tuple(eqn.outvars), eqn.params["callee"], stream)
                )
            elif not makes_calls(eqn) or eqn.primitive is shard_map_p or control_flow_kind(eqn):
                self.nodes.append(Equation(eqn))
            elif eqn.primitive is pjit_p:
                jaxpr, mesh = eqn.params["jaxpr"], eqn.params["mesh"]
                in_specs, out_specs = (
                    [None if isinstance(spec, UnspecifiedValue) else (spec, mesh) for spec in eqn.params[which]]
                    for which in ("in_specs", "out_specs")
                )
                results = self._nested(eqn, (jaxpr.jaxpr, jaxpr.consts), in_specs, out_specs)
                env.update(zip(original.outvars, results, strict=True))
            elif (called := called_jaxpr(eqn)) is not None:
                env.update(zip(original.outvars, self._nested(eqn, called, *specs_of_nested(eqn)), strict=True))
            else:
                raise _out_of_reach(eqn)

    def _nested(
        self,
        eqn: JaxprEqn,
        called: tuple[Jaxpr, Sequence[ArrayLike]],
        in_specs: Sequence[Spec],
        out_specs: Sequence[Spec],
    ) -> list[Atom]:
        """Adds what an equation calls; gives the atoms of its results."""
        jaxpr, values = called
        env: dict[Var, Atom] = {}
        for var, value in zip(jaxpr.constvars, values, strict=True):
            env[var] = const = new_var(var.aval)
            self.consts[const] = value
        for var, atom, spec in zip(jaxpr.invars, eqn.invars, in_specs, strict=True):
            env[var] = atom
            if spec is not None and type_of(var).ndim and isinstance(atom, Var):
                env[var] = constrained = new_var(var.aval)
                self.nodes.append(Equation(constraint(atom, constrained, *spec, eqn)))
        self.add(jaxpr.eqns, env, eqn)
        results = [read(env, atom) for atom in jaxpr.outvars]
        for k, (var, spec) in enumerate(zip(eqn.outvars, out_specs, strict=True)):
            if spec is not None and type_of(var).ndim and not isinstance(var, DropVar):
                self.nodes.append(Equation(constraint(results[k], var, *spec, eqn)))
                results[k] = var
        return results


def _renamed(eqn: JaxprEqn, env: dict[Var, Atom], outer: JaxprEqn | None) -> JaxprEqn:
    invars = [read(env, atom) for atom in eqn.invars]
    if outer is None:
        return with_inputs(eqn, invars)
    fresh = [var if isinstance(var, DropVar) else new_var(var.aval) for var in eqn.outvars]
    env.update(zip(eqn.outvars, fresh, strict=True))
    info = nested_source_info(eqn.source_info, outer.source_info)
    return with_inputs(eqn, invars).replace(outvars=fresh, source_info=info)


def specs_of_nested(eqn: JaxprEqn) -> tuple[list[Spec], list[Spec]]:
    """The specs, with their meshes, that a nested `jax.jit` has for arguments and results; None where it has none."""
    in_shardings, out_shardings = nested_shardings(eqn) or ([None] * len(eqn.invars), [None] * len(eqn.outvars))
    return [*map(_spec, in_shardings)], [*map(_spec, out_shardings)]


def _spec(sharding: MaybeSharding | None) -> Spec:
    if not isinstance(sharding, NamedSharding):
        return None
    return ParsedPartitionSpec.from_user_input(sharding, "a nested jax.jit"), cast(Mesh, sharding.mesh)


def _out_of_reach(eqn: JaxprEqn) -> ValueError:
    names = names_of_calls(inner_jaxprs(eqn))
    where = f"a {eqn.primitive.name}{at_site(eqn.source_info)}"
    return ValueError(
        f"the colocated function{'s' if len(names) > 1 else ''} {', '.join(names)} "
        f"{'are' if len(names) > 1 else 'is'} called inside of {where}: a program can make calls in nested pjit, jit, "
        "custom_jvp, custom_vjp, custom_vmap and checkpoint, in scan, while_loop, fori_loop, cond and switch, and in "
        "shard_map, but not there. Call it before or after"
    )
