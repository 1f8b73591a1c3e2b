"""A flat program made ready to be cut: what its calls and its results ask for becomes equations where it has to."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jax.extend.core import DropVar, Var, new_jaxpr_eqn
from jax.sharding import Mesh

from partjit._jax.jaxprs import new_var
from partjit._jax.shardings import UNSPECIFIED, UnspecifiedValue
from partjit.colocated.ir.primitive import colocated_call_p
from partjit.errors import ShardingError
from partjit.mesh import auto_twin
from partjit.plan.ir.control_flow import branch_p, is_host, is_separate, loop_p
from partjit.plan.ir.flat import Flat, variables
from partjit.plan.passes.cut import Egress
from partjit.primitive import device_witness, sharding_constraint_p
from partjit.spec import ParsedPartitionSpec

__all__ = ["calls_of", "check_devices", "egresses_of", "results_of_hosts", "with_stated_arguments"]

Block = Literal["program", "turn", "branch"]


def check_devices(flat: Flat, mesh: Mesh) -> None:
    """Raises ShardingError if the specs of a call are on other devices than the program."""
    for eqn in calls_of(flat):
        callee = eqn.params["callee"]
        for what, shardings in (("in_specs", callee.in_shardings), ("out_specs", callee.out_shardings)):
            for sharding in shardings:
                if sharding is None or (what == "out_specs" and not callee.options.has_out_specs):
                    continue
                own = [*sharding.mesh.devices.flat]
                if mesh.empty or own != [*mesh.devices.flat]:
                    here = "on no mesh" if mesh.empty else f"on the devices {[d.id for d in mesh.devices.flat]}"
                    order = ", in this order" if {*own} == {*mesh.devices.flat} else ""
                    raise ShardingError(
                        f"{what} of the colocated function {callee.name} name the devices {[d.id for d in own]}, but "
                        f"the program runs {here}{order}"
                    )


def calls_of(flat: Flat) -> Iterator[Any]:
    """The equations that are colocated calls."""
    return (eqn for eqn in flat.eqns if eqn.primitive is colocated_call_p)


def with_stated_arguments(flat: Flat, in_shardings: list[Any], mesh: Mesh, out_shardings: Sequence[Any] = ()) -> Flat:
    """Constrains the arguments of calls to the shardings in their specs, where they would not have them anyhow.

    Args:
        flat: a program or block.
        in_shardings: of its arguments; those left open are set to what the first call says.
        mesh: the mesh, maybe empty.
        out_shardings: of its results, UNSPECIFIED where nothing is said; none if nothing is said of any.
    """
    known = _Known(flat, in_shardings, out_shardings)
    eqns = []
    for eqn in flat.eqns:
        wanted = eqn.params["callee"].in_shardings if eqn.primitive is colocated_call_p else ()
        invars = [*eqn.invars]
        for k, sharding in enumerate(wanted):
            var = invars[k]
            if sharding is None or known.agrees(var, sharding):
                continue
            spec = ParsedPartitionSpec.from_user_input(sharding, "in_specs")
            params = {"spec": spec, "mesh": mesh, "witness": device_witness(auto_twin(sharding.mesh))}
            invars[k] = new_var(var.aval)
            eqns.append(
                new_jaxpr_eqn([var], [invars[k]], sharding_constraint_p, params, set(), eqn.source_info, eqn.ctx)
            )
        eqns.append(eqn.replace(invars=invars) if invars != [*eqn.invars] else eqn)
    in_shardings[:] = [known.sharding_of[var] for var in flat.invars]
    return dataclasses.replace(flat, eqns=tuple(eqns))


class _Known:
    """The shardings that values of a block are going to have between its steps, as `places_of` decides.

    Attributes:
        sharding_of: for each variable its sharding; it is missing or UNSPECIFIED where a call may still choose it.
    """

    def __init__(self, flat: Flat, in_shardings: Sequence[Any], out_shardings: Sequence[Any]) -> None:
        self._consts = flat.consts
        self._of_hosts = results_of_hosts(flat)
        self.sharding_of = dict(zip(flat.invars, in_shardings, strict=True))
        self._leaves_as: dict[Any, list[Any]] = {}
        for atom, wanted in zip(flat.outvars, out_shardings, strict=False):
            if isinstance(atom, Var) and not isinstance(wanted, UnspecifiedValue):
                self._leaves_as.setdefault(atom, []).append(wanted)
        for eqn in calls_of(flat):
            stated = zip(eqn.outvars, eqn.params["callee"].out_shardings, strict=True)
            self.sharding_of.update((var, sharding) for var, sharding in stated if sharding is not None)

    def agrees(self, atom: Any, sharding: Any) -> bool:
        """Whether an argument of a call has a sharding without a constraint; if it can, it will have it."""
        if not isinstance(atom, Var) or atom in self._consts:
            return True  # each call has constants of its own
        if atom in self._of_hosts and not self._host_agrees(atom, sharding):
            return False
        here = self.sharding_of.get(atom, UNSPECIFIED)
        if isinstance(here, UnspecifiedValue):
            self.sharding_of[atom] = here = sharding
        return here.is_equivalent_to(sharding, _rank(atom))

    def _host_agrees(self, var: Any, sharding: Any) -> bool:
        """Whether a result of a call, loop or branch, which leaves the block as it is, has it."""
        eqn, k = self._of_hosts[var]
        if eqn.primitive is loop_p and eqn.params["is_buffer"][k] and not _is_whole_stack(sharding):
            return False
        return all(wanted.is_equivalent_to(sharding, _rank(var)) for wanted in self._leaves_as.get(var, ()))


def results_of_hosts(flat: Flat) -> dict[Any, tuple[Any, int]]:
    """The results of calls, loops and branches, each with its equation and its position."""
    hosts = (eqn for eqn in flat.eqns if is_host(eqn))
    return {v: (eqn, k) for eqn in hosts for k, v in enumerate(eqn.outvars) if not isinstance(v, DropVar)}


def egresses_of(
    flat: Flat, in_shardings: Sequence[Any], out_shardings: Sequence[Any], block: Block
) -> tuple[list[Egress], dict[int, Any]]:
    """The results that pass through a fragment unchanged, and those that are a call's, loop's or branch's as they are.

    Args:
        flat: the program.
        in_shardings, out_shardings: of its arguments and results; UNSPECIFIED where nothing is said.
        block: what it is: the whole "program", a "turn" of a loop, or a "branch".

    Returns:
        The former; and for the latter the sharding in which each leaves, or None.
    """
    of_hosts = results_of_hosts(flat)
    on_device = {a for eqn in flat.eqns if not is_host(eqn) for a in variables(eqn.invars)}
    computed = {var for eqn in flat.eqns for var in eqn.outvars}
    comes_in_as = dict(zip(flat.invars, in_shardings, strict=True))
    egresses: list[Egress] = []
    direct: dict[int, Any] = {}
    leaves_as: dict[Any, Any] = {}
    for i, (atom, wanted) in enumerate(zip(flat.outvars, out_shardings, strict=True)):
        is_open = isinstance(wanted, UnspecifiedValue)
        if isinstance(atom, Var) and atom in of_hosts:
            eqn, k = of_hosts[atom]
            if eqn.primitive is loop_p or eqn.primitive is branch_p:
                stated = None
                is_kept = is_open or _may_lie_as(eqn, k, wanted, comes_in_as)
                is_kept &= block != "program" or is_separate(eqn, k)
            else:
                callee = eqn.params["callee"]
                stated = callee.out_shardings[k]
                is_kept = is_open or (stated is not None and stated.is_equivalent_to(wanted, _rank(atom)))
                # A thread puts an array in its place as well, but shards only mean something in their own sharding.
                is_kept |= atom not in on_device and (stated is None or not callee.returns_shards)
            if is_kept and atom not in leaves_as:  # a second time it is another array
                direct[i] = leaves_as[atom] = stated if is_open else wanted
                continue
            egresses.append(Egress(atom, i))
        elif not isinstance(atom, Var):
            egresses.append(Egress(atom, i))
        elif block == "branch" and atom in comes_in_as and (is_open or comes_in_as[atom] == wanted):
            direct[i] = None if is_open else wanted
        elif atom not in computed:
            egresses.append(Egress(atom, i))
    return egresses, direct


def _may_lie_as(eqn: Any, k: int, wanted: Any, comes_in_as: dict[Any, Any]) -> bool:
    """Whether a result of a loop or branch can be had in a sharding, without moving it afterwards."""
    if eqn.primitive is branch_p:
        return True
    initial = eqn.invars[eqn.params["captured"] :][k]
    if initial in comes_in_as:
        return comes_in_as[initial] == wanted
    return not eqn.params["is_buffer"][k] or _is_whole_stack(wanted)


def _is_whole_stack(sharding: Any) -> bool:
    """Whether a stack may be sharded so in a loop: its slices are written one after the other, each by all devices."""
    return not getattr(sharding, "spec", ()) or sharding.spec[0] is None


def _rank(atom: Any) -> int:
    return len(atom.aval.shape)
