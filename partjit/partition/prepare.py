"""A flat program made ready to be cut: what its calls and its results ask for becomes equations where it has to."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import Mesh

from partjit import _compat
from partjit._compat import UnspecifiedValue, core
from partjit.colocated.primitive import colocated_call_p
from partjit.errors import ShardingError
from partjit.mesh import auto_twin
from partjit.partition.cut import Egress
from partjit.partition.flatten import Flat
from partjit.primitive import device_witness, sharding_constraint_p
from partjit.spec import ParsedPartitionSpec

__all__ = ["calls_of", "check_devices", "egresses_of", "variables", "with_stated_arguments"]


def check_devices(flat: Flat, mesh: Mesh) -> None:
    """Raises ShardingError if the specs of a call are on other devices than the program."""
    for eqn in calls_of(flat):
        callee = eqn.params["callee"]
        for what, shardings in (("in_specs", callee.in_shardings), ("out_specs", callee.out_shardings)):
            for sharding in shardings:
                if sharding is None or (what == "out_specs" and not callee.has_stated_results):
                    continue
                if mesh.empty or {*sharding.mesh.devices.flat} != {*mesh.devices.flat}:
                    here = "on no mesh" if mesh.empty else f"on the devices {[d.id for d in mesh.devices.flat]}"
                    raise ShardingError(
                        f"{what} of the colocated function {callee.name} name the devices "
                        f"{[d.id for d in sharding.mesh.devices.flat]}, but the program runs {here}"
                    )


def calls_of(flat: Flat) -> Iterator[Any]:
    """The equations that are colocated calls."""
    return (eqn for eqn in flat.eqns if eqn.primitive is colocated_call_p)


def with_stated_arguments(flat: Flat, in_shardings: list[Any], mesh: Mesh) -> Flat:
    """Constrains what calls want to have otherwise than it comes in; what comes in anyhow does so as they want it."""
    position = {var: i for i, var in enumerate(flat.invars)}
    produced = {var: eqn for eqn in calls_of(flat) for var in eqn.outvars}
    eqns = []
    for eqn in flat.eqns:
        wanted = eqn.params["callee"].in_shardings if eqn.primitive is colocated_call_p else ()
        invars = [*eqn.invars]
        for k, sharding in enumerate(wanted):
            var = invars[k]
            if sharding is None or not isinstance(var, core.Var):
                continue
            i = position.get(var)
            if i is not None and isinstance(in_shardings[i], UnspecifiedValue):
                in_shardings[i] = sharding
            elif var in produced or (i is not None and not in_shardings[i].is_equivalent_to(sharding, _rank(var))):
                spec = ParsedPartitionSpec.from_user_input(sharding, "in_specs")
                params = {"spec": spec, "mesh": mesh, "witness": device_witness(auto_twin(sharding.mesh))}
                invars[k] = _compat.new_var(var.aval)
                eqns.append(
                    core.new_jaxpr_eqn(
                        [var], [invars[k]], sharding_constraint_p, params, set(), eqn.source_info, eqn.ctx
                    )
                )
        eqns.append(eqn.replace(invars=invars) if invars != [*eqn.invars] else eqn)
    return dataclasses.replace(flat, eqns=tuple(eqns))


def egresses_of(flat: Flat, out_shardings: Sequence[Any]) -> tuple[list[Egress], dict[int, Any]]:
    """The results that pass through a fragment unchanged, and those that are a call's results as they are."""
    of_call = {var: (eqn, k) for eqn in calls_of(flat) for k, var in enumerate(eqn.outvars)}
    on_device = {a for eqn in flat.eqns if eqn.primitive is not colocated_call_p for a in variables(eqn.invars)}
    computed = {var for eqn in flat.eqns for var in eqn.outvars}
    egresses: list[Egress] = []
    direct: dict[int, Any] = {}  # result -> the sharding in which it leaves, or None
    leaves_as: dict[Any, Any] = {}
    for i, (atom, wanted) in enumerate(zip(flat.outvars, out_shardings, strict=True)):
        is_open = isinstance(wanted, UnspecifiedValue)
        if isinstance(atom, core.Var) and atom in of_call:
            eqn, k = of_call[atom]
            stated = eqn.params["callee"].out_shardings[k]
            is_kept = is_open or (stated is not None and stated.is_equivalent_to(wanted, _rank(atom)))
            as_is = stated if is_open else wanted
            if (is_kept or atom not in on_device) and atom not in leaves_as:  # a second time it is another array
                direct[i] = leaves_as[atom] = as_is
                continue
            egresses.append(Egress(atom, i))
        elif not isinstance(atom, core.Var) or atom not in computed:
            egresses.append(Egress(atom, i))
    return egresses, direct


def variables(atoms: Sequence[Any]) -> list[Any]:
    """The variables among atoms: those that are no literals."""
    return [atom for atom in atoms if isinstance(atom, core.Var)]


def _rank(atom: Any) -> int:
    return len(atom.aval.shape)
