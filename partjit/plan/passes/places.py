"""Where each value at the cut lies: where somebody said, and otherwise where the partitioner would have it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.extend.core import Var
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from partjit._jax.shardings import UnspecifiedValue
from partjit.colocated.devices import colocated_sharding
from partjit.plan.ir.control_flow import loop_p
from partjit.plan.ir.flat import Flat
from partjit.plan.passes.prepare import calls_of, results_of_hosts
from partjit.plan.passes.shardings import home_of, propagate

__all__ = ["or_none", "places_of"]


def or_none(sharding: Any) -> Any:
    """None for UNSPECIFIED."""
    return None if isinstance(sharding, UnspecifiedValue) else sharding


def places_of(
    flat: Flat,
    crossing: Mapping[Any, Any],
    direct: Mapping[int, Any],
    in_shardings: Sequence[Any],
    out_shardings: Sequence[Any],
    mesh: Mesh,
    home: Any = None,
) -> tuple[dict[Any, Any], Any]:
    """The sharding of each variable that crosses from one step to another, and that of everything else.

    Args:
        flat: the program.
        crossing: the variables that some step reads from outside.
        direct: the results that are a call's as they are, with the sharding in which they leave, or None.
        in_shardings, out_shardings: what is known of arguments and results.
        mesh: the mesh, maybe empty. Without one the places are None, unless the arguments are bound to a device.
        home: the place of everything in what surrounds a block without a mesh.

    Returns:
        The places; and that of everything without a mesh, or None.
    """
    results = [*results_of_hosts(flat)]
    if mesh.empty:
        if home is None:
            home, is_bound = home_of(in_shardings)
            home = home if is_bound or colocated_sharding(home) != home else None
        own = zip(flat.invars, map(or_none, in_shardings), strict=True)
        return {**dict.fromkeys([*crossing, *results], home), **dict(own)}, home
    places = _stated(flat, direct, mesh)
    inputs = {*flat.invars}
    unknown = [v for v in dict.fromkeys([*crossing, *results]) if v not in places and v not in inputs]
    is_open = [isinstance(sharding, UnspecifiedValue) for sharding in in_shardings]
    if unknown or any(var in crossing for var, flag in zip(flat.invars, is_open, strict=True) if flag):
        ins, chosen = propagate(flat, in_shardings, out_shardings, mesh, unknown)
        places.update(zip(unknown, chosen, strict=True))
        in_shardings = [new if flag else old for old, new, flag in zip(in_shardings, ins, is_open, strict=True)]
    places.update(zip(flat.invars, map(or_none, in_shardings), strict=True))
    _agree_on_carried(flat, inputs, places)
    return places, None


def _agree_on_carried(flat: Flat, inputs: Collection[Any], places: dict[Any, Any]) -> None:
    """What a loop starts from lies where its results do; an argument of this program is there already.

    A stack is not divided between its slices, even if it leaves so: each is written by all devices.
    """
    for eqn in flat.eqns:
        if eqn.primitive is loop_p:
            carried = zip(eqn.invars[eqn.params["captured"] :], eqn.outvars, eqn.params["is_buffer"], strict=True)
            for initial, result, is_buffer in carried:
                if initial in inputs:
                    places[result] = places[initial]
                    continue
                place = places[result]
                if is_buffer and place.spec:
                    places[result] = place.update(spec=P(None, *place.spec[1:]))
                places[initial] = places[result]


def _stated(flat: Flat, direct: Mapping[int, Any], mesh: Mesh) -> dict[Any, Any]:
    """What results of the program that are a call's, and the specs of calls, say."""
    devices = {*mesh.devices.flat}
    places = {flat.outvars[i]: sharding for i, sharding in direct.items() if sharding is not None}
    for eqn in calls_of(flat):
        callee = eqn.params["callee"]
        for var, sharding in zip(eqn.outvars, callee.out_shardings, strict=True):
            # What an earlier call outside of programs returned may have been elsewhere.
            if sharding is not None and {*sharding.mesh.devices.flat} == devices:
                places.setdefault(var, sharding)
        for var, sharding in zip(eqn.invars, callee.in_shardings, strict=True):
            if sharding is not None and isinstance(var, Var):
                places.setdefault(var, sharding)
    return places
