"""Opening a program: nested programs that contain colocated calls are put in the place of their equations.

Nested programs are `pjit` and `jax.jit`, functions with custom derivatives, and `jax.checkpoint`. Those without calls
stay whole. What their specs say of arguments and results becomes constraints. Loops and branches with calls become
such that the host drives, whose bodies are opened as well. Then what nobody needs is left out, and equal pure calls
become one.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import DropVar, Var, jaxprs_in_params, new_jaxpr_eqn
from jax.sharding import Mesh

from partjit._jax.jaxprs import called_jaxpr, control_flow_kind, nested_shardings, new_var
from partjit._jax.shard_maps import shard_map_p
from partjit._jax.shardings import UNSPECIFIED, UnspecifiedValue
from partjit._jax.sources import at_site
from partjit.colocated.ir.primitive import colocated_call_p
from partjit.colocated.runtime.streams import Stream
from partjit.mesh import auto_twin
from partjit.plan.ir.flat import Equations, Flat, has_calls, live, names_of_calls, renamed
from partjit.plan.passes.loops import add_branch, add_scan, add_while, own_initial_values
from partjit.plan.passes.shard_maps import opened_shard_map
from partjit.primitive import device_witness, pjit_p, sharding_constraint_p
from partjit.spec import ParsedPartitionSpec

__all__ = ["constraint", "flatten", "specs_of_nested"]


def flatten(jaxpr: Any, mesh: Mesh, caller: Stream | None = None) -> Flat:
    """Opens a closed jaxpr as far as its calls are.

    Args:
        jaxpr: the closed jaxpr.
        mesh: the mesh of the program, maybe empty.
        caller: the stream of the caller, if the program names it as well, so that both are one order.

    Raises:
        ValueError: a call stands where the host cannot make it.
    """
    flat = Flat.of_jaxpr(jaxpr)
    eqns, needed = live(flat.outvars, [_on_stream(caller, eqn) for eqn in _opened(flat.eqns, flat.consts)])
    eqns, needed = live(flat.outvars, [*_without_shard_maps(eqns, needed, flat.consts, mesh, caller)])

    def body(jaxpr: Any) -> Flat:
        return flatten(jaxpr, mesh, caller)

    outvars, eqns = _with_control_flow(flat.outvars, eqns, needed, flat.consts, body, mesh)
    outvars, eqns = _merged(outvars, live(outvars, eqns)[0])
    return own_initial_values(Flat(flat.invars, outvars, eqns, flat.consts))


def _with_control_flow(
    outvars: Sequence[Any],
    eqns: Sequence[Any],
    needed: set[Any],
    consts: dict[Any, Any],
    flat: Callable[[Any], Flat],
    mesh: Mesh,
) -> tuple[tuple[Any, ...], list[Any]]:
    """Without renaming, and with loops and branches that the host drives in the place of jax's with calls in them."""
    renaming = _Renaming()
    opened: list[Any] = []
    for eqn in renaming.resolved(eqns):
        kind = control_flow_kind(eqn)
        if kind is None or not any(has_calls(jaxpr) for jaxpr in jaxprs_in_params(eqn.params)):
            opened.append(eqn)
            continue
        out = Equations(eqn, consts)
        used = [var in needed for var in eqn.outvars]
        if kind == "scan":
            renaming.env |= add_scan(eqn, flat(eqn.params["jaxpr"]), used, mesh, out)
        elif kind == "while":
            renaming.env |= add_while(eqn, flat(eqn.params["cond_jaxpr"]), flat(eqn.params["body_jaxpr"]), used, out)
        else:
            renaming.env |= add_branch(eqn, [flat(branch) for branch in eqn.params["branches"]], out)
        opened += out.eqns
    return tuple(renaming.read(atom) for atom in outvars), opened


def _without_shard_maps(
    eqns: Sequence[Any], needed: set[Any], consts: dict[Any, Any], mesh: Mesh, caller: Stream | None
) -> Iterator[Any]:
    """With shard_maps and calls between them in the place of those with calls in them."""

    def body(jaxpr: Any) -> Flat:
        flat = Flat.of_jaxpr(jaxpr)
        eqns, _ = live(flat.outvars, [_on_stream(caller, eqn) for eqn in _opened(flat.eqns, flat.consts)])
        outvars, eqns = _merged(flat.outvars, eqns)
        return Flat(flat.invars, outvars, eqns, flat.consts)

    for eqn in eqns:
        if eqn.primitive is not shard_map_p or not has_calls(eqn.params["jaxpr"]):
            yield eqn
            continue
        used = [var in needed for var in eqn.outvars]
        opened, results = opened_shard_map(eqn, used, body, mesh, consts)
        yield from opened
        results = zip(eqn.outvars, results, strict=True)
        yield from (constraint(atom, var, None, eqn) for var, atom in results if atom is not None)


def _on_stream(caller: Stream | None, eqn: Any) -> Any:
    if caller is None or eqn.primitive is not colocated_call_p or eqn.params["stream"] is not None:
        return eqn
    return eqn.replace(params={**eqn.params, "stream": caller})


def _opened(eqns: Sequence[Any], consts: dict[Any, Any]) -> Iterator[Any]:
    for eqn in eqns:
        if eqn.primitive is colocated_call_p or not any(has_calls(j) for j in jaxprs_in_params(eqn.params)):
            yield eqn
        elif eqn.primitive is pjit_p:
            jaxpr = eqn.params["jaxpr"]
            mesh = eqn.params["mesh"]
            yield from _inlined(
                eqn,
                (jaxpr.jaxpr, jaxpr.consts),
                [None if isinstance(s, UnspecifiedValue) else (s, mesh) for s in eqn.params["in_specs"]],
                [None if isinstance(s, UnspecifiedValue) else (s, mesh) for s in eqn.params["out_specs"]],
                consts,
            )
        elif (called := called_jaxpr(eqn)) is not None:
            yield from _inlined(eqn, called, *specs_of_nested(eqn), consts)
        elif control_flow_kind(eqn) is not None or eqn.primitive is shard_map_p:
            yield eqn
        else:
            raise _out_of_reach(eqn)


def specs_of_nested(eqn: Any) -> tuple[list[Any], list[Any]]:
    """The specs, with their meshes, that a nested `jax.jit` has for arguments and results; None where it has none."""
    in_shardings, out_shardings = nested_shardings(eqn) or (None, None)
    return _specs(in_shardings, eqn.invars), _specs(out_shardings, eqn.outvars)


def _specs(shardings: Any, variables: Sequence[Any]) -> list[Any]:
    return [
        None
        if isinstance(sharding, UnspecifiedValue) or not hasattr(sharding, "spec")
        else (ParsedPartitionSpec.from_user_input(sharding, "a nested jax.jit"), sharding.mesh)
        for sharding in (shardings if shardings is not None else [UNSPECIFIED] * len(variables))
    ]


def _inlined(
    eqn: Any, called: Any, in_specs: Sequence[Any], out_specs: Sequence[Any], consts: dict[Any, Any]
) -> Iterator[Any]:
    jaxpr, values = called
    env: dict[Any, Any] = {}
    for var, value in zip(jaxpr.constvars, values, strict=True):
        env[var] = new_var(var.aval)
        consts[env[var]] = value
    for var, atom, spec in zip(jaxpr.invars, eqn.invars, in_specs, strict=True):
        env[var] = atom
        if spec is not None and var.aval.ndim and isinstance(atom, Var):
            env[var] = new_var(var.aval)
            yield constraint(atom, env[var], spec, eqn)

    def read(atom: Any) -> Any:
        return env[atom] if isinstance(atom, Var) else atom

    yield from _opened([*renamed(jaxpr.eqns, env, eqn)], consts)
    for var, atom, spec in zip(eqn.outvars, jaxpr.outvars, out_specs, strict=True):
        if not isinstance(var, DropVar):
            yield constraint(read(atom), var, spec, eqn)


def constraint(atom: Any, var: Any, spec: Any, eqn: Any) -> Any:
    """An equation that gives a value another name, constrained to a spec if there is one.

    Args:
        atom, var: the value, and the name.
        spec: the spec and its mesh, or None.
        eqn: the equation in whose place it stands.
    """
    if spec is None or not var.aval.ndim:
        return new_jaxpr_eqn([atom], [var], _same_p, {}, set(), eqn.source_info, eqn.ctx)
    parsed, mesh = spec
    params = {"spec": parsed, "mesh": auto_twin(mesh), "witness": device_witness(parsed.mesh or mesh)}
    return new_jaxpr_eqn([atom], [var], sharding_constraint_p, params, set(), eqn.source_info, eqn.ctx)


class _Same:
    """Stands for an equation that only renames, until all nested programs are opened."""


_same_p: Any = _Same()


class _Renaming:
    """What stands for variables while equations are replaced.

    Attributes:
        env: what stands for a variable, where that is not itself.
    """

    def __init__(self) -> None:
        self.env: dict[Any, Any] = {}

    def read(self, atom: Any) -> Any:
        """What stands for an atom."""
        return self.env.get(atom, atom) if isinstance(atom, Var) else atom

    def resolved(self, eqns: Sequence[Any]) -> Iterator[Any]:
        """The equations that do more than rename, one after another, of what stands for their arguments by then."""
        for eqn in eqns:
            if eqn.primitive is _same_p:
                self.env[eqn.outvars[0]] = self.read(eqn.invars[0])
            elif any(isinstance(atom, Var) and atom in self.env for atom in eqn.invars):
                yield eqn.replace(invars=[self.read(atom) for atom in eqn.invars])
            else:
                yield eqn


def _merged(outvars: Sequence[Any], eqns: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Without renaming, and with one equation for equal pure calls."""
    renaming = _Renaming()
    made: dict[Any, Any] = {}
    kept = []
    for eqn in renaming.resolved(eqns):
        if eqn.primitive is colocated_call_p and eqn.params["callee"].is_pure:
            key = (eqn.params["callee"], *(a if isinstance(a, Var) else (a.aval, repr(a.val)) for a in eqn.invars))
            first = made.setdefault(key, eqn)
            if first is not eqn:
                renaming.env.update(zip(eqn.outvars, first.outvars, strict=True))
                continue
        kept.append(eqn)
    return tuple(renaming.read(atom) for atom in outvars), tuple(kept)


def _out_of_reach(eqn: Any) -> ValueError:
    names = names_of_calls(eqn)
    where = at_site(eqn.source_info)
    return ValueError(
        f"the colocated function{'s' if len(names) > 1 else ''} {', '.join(names)} "
        f"{'are' if len(names) > 1 else 'is'} called inside of a {eqn.primitive.name}{where}: a program can make calls "
        "in nested pjit, jit, custom_jvp, custom_vjp and checkpoint, in scan, while_loop, fori_loop, cond and switch, "
        "and in shard_map, but not there. Call it before or after"
    )
