"""Opening a program: nested programs that contain colocated calls are put in the place of their equations.

Nested programs are `pjit` and `jax.jit`, functions with custom derivatives, and `jax.checkpoint`. Those without calls
stay whole. What their specs say of arguments and results becomes constraints. Then what nobody needs is left out, and
equal pure calls become one.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from partjit import _compat
from partjit._compat import UNSPECIFIED, UnspecifiedValue, core
from partjit.colocated.primitive import colocated_call_p
from partjit.colocated.streams import Stream
from partjit.mesh import auto_twin
from partjit.primitive import device_witness, pjit_p, sharding_constraint_p
from partjit.spec import ParsedPartitionSpec

__all__ = ["Flat", "flatten", "has_calls", "streams_of"]


@dataclasses.dataclass(frozen=True)
class Flat:
    """A program whose colocated calls all stand at its top level.

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


@_compat.weakref_cache
def has_calls(jaxpr: Any) -> bool:
    """Whether there is a colocated call in a jaxpr, at any depth."""
    return any(
        eqn.primitive is colocated_call_p or any(has_calls(inner) for inner in core.jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
    )


@_compat.weakref_cache
def streams_of(jaxpr: Any) -> frozenset[Stream]:
    """The streams that a jaxpr itself puts calls on, at any depth."""
    own = {eqn.params["stream"] for eqn in jaxpr.eqns if eqn.primitive is colocated_call_p}
    nested = (streams_of(inner) for eqn in jaxpr.eqns for inner in core.jaxprs_in_params(eqn.params))
    return frozenset(own - {None}).union(*nested)


def flatten(jaxpr: Any, caller: Stream | None = None) -> Flat:
    """Opens a closed jaxpr as far as its calls are.

    Args:
        jaxpr: the closed jaxpr.
        caller: the stream of the caller, if the program names it as well, so that both are one order.

    Raises:
        ValueError: a call stands in a loop, a branch or a `shard_map`.
    """
    inner = jaxpr.jaxpr
    consts = dict(zip(inner.constvars, jaxpr.consts, strict=True))
    eqns = [_on_stream(caller, eqn) for eqn in _opened(inner.eqns, consts)]
    outvars = tuple(inner.outvars)
    return Flat(tuple(inner.invars), *_merged(outvars, _live(outvars, eqns)), consts)


def _on_stream(caller: Stream | None, eqn: Any) -> Any:
    if caller is None or eqn.primitive is not colocated_call_p or eqn.params["stream"] is not None:
        return eqn
    return eqn.replace(params={**eqn.params, "stream": caller})


def _opened(eqns: Sequence[Any], consts: dict[Any, Any]) -> Iterator[Any]:
    for eqn in eqns:
        if eqn.primitive is colocated_call_p or not any(has_calls(j) for j in core.jaxprs_in_params(eqn.params)):
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
        elif (called := _compat.called_jaxpr(eqn)) is not None:
            in_shardings, out_shardings = _compat.nested_shardings(eqn) or (None, None)
            yield from _inlined(
                eqn, called, _specs(in_shardings, eqn.invars), _specs(out_shardings, eqn.outvars), consts
            )
        else:
            raise _in_control_flow(eqn)


def _specs(shardings: Any, variables: Sequence[Any]) -> list[Any]:
    """The specs, with their meshes, that a nested `jax.jit` brings along."""
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
        env[var] = _compat.new_var(var.aval)
        consts[env[var]] = value
    for var, atom, spec in zip(jaxpr.invars, eqn.invars, in_specs, strict=True):
        env[var] = atom
        if spec is not None and var.aval.ndim and isinstance(atom, core.Var):
            env[var] = _compat.new_var(var.aval)
            yield _constraint(atom, env[var], spec, eqn)

    def read(atom: Any) -> Any:
        return env[atom] if isinstance(atom, core.Var) else atom

    def renamed() -> Iterator[Any]:
        for inner in jaxpr.eqns:
            outvars = [var if isinstance(var, core.DropVar) else _compat.new_var(var.aval) for var in inner.outvars]
            invars = [read(atom) for atom in inner.invars]
            env.update(zip(inner.outvars, outvars, strict=True))
            source_info = _compat.nested_name(inner.source_info, eqn.source_info)
            yield inner.replace(invars=invars, outvars=outvars, source_info=source_info)

    yield from _opened([*renamed()], consts)
    for var, atom, spec in zip(eqn.outvars, jaxpr.outvars, out_specs, strict=True):
        if not isinstance(var, core.DropVar):
            yield _constraint(read(atom), var, spec, eqn)


def _constraint(atom: Any, var: Any, spec: Any, eqn: Any) -> Any:
    """An equation that gives a value another name, constrained to a spec if there is one."""
    if spec is None or not var.aval.ndim:
        return core.new_jaxpr_eqn([atom], [var], _same_p, {}, set(), eqn.source_info, eqn.ctx)
    parsed, mesh = spec
    params = {"spec": parsed, "mesh": auto_twin(mesh), "witness": device_witness(parsed.mesh or mesh)}
    return core.new_jaxpr_eqn([atom], [var], sharding_constraint_p, params, set(), eqn.source_info, eqn.ctx)


class _Same:
    """Stands for an equation that only renames; `_merged` takes it out."""


_same_p: Any = _Same()


def _live(outvars: Sequence[Any], eqns: Sequence[Any]) -> list[Any]:
    """The equations that have effects or that somebody needs."""
    needed = {var for var in outvars if isinstance(var, core.Var)}
    live = []
    for eqn in reversed(eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed.update(atom for atom in eqn.invars if isinstance(atom, core.Var))
            live.append(eqn)
    return live[::-1]


def _merged(outvars: Sequence[Any], eqns: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Without renaming, and with one equation for equal pure calls."""
    env: dict[Any, Any] = {}
    made: dict[Any, Any] = {}
    kept = []

    def read(atom: Any) -> Any:
        return env.get(atom, atom) if isinstance(atom, core.Var) else atom

    for eqn in eqns:
        if eqn.primitive is _same_p:
            env[eqn.outvars[0]] = read(eqn.invars[0])
            continue
        if any(isinstance(atom, core.Var) and atom in env for atom in eqn.invars):
            eqn = eqn.replace(invars=[read(atom) for atom in eqn.invars])
        if eqn.primitive is colocated_call_p and eqn.params["callee"].is_pure:
            key = (eqn.params["callee"], *(a if isinstance(a, core.Var) else (a.aval, repr(a.val)) for a in eqn.invars))
            first = made.setdefault(key, eqn)
            if first is not eqn:
                env.update(zip(eqn.outvars, first.outvars, strict=True))
                continue
        kept.append(eqn)
    return tuple(read(atom) for atom in outvars), tuple(kept)


def _in_control_flow(eqn: Any) -> ValueError:
    names = sorted({*_names(eqn)})
    site = _compat.source_site(eqn.source_info)
    where = "" if site is None else " at {}:{} in {}".format(*site)
    return ValueError(
        f"the colocated function{'s' if len(names) > 1 else ''} {', '.join(names)} "
        f"{'are' if len(names) > 1 else 'is'} called inside of a {eqn.primitive.name}{where}: a program can make "
        "calls at its top level and in nested pjit, jit, custom_jvp, custom_vjp and checkpoint, but not in loops, "
        "branches and shard_map. Call it before or after, or let a Python loop over programs drive it"
    )


def _names(eqn: Any) -> Iterator[str]:
    if eqn.primitive is colocated_call_p:
        yield eqn.params["callee"].name
    for jaxpr in core.jaxprs_in_params(eqn.params):
        for inner in jaxpr.eqns:
            yield from _names(inner)
