"""A `shard_map` with colocated calls, in a program: its equations outside, and what it stands over."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh

from partjit._jax.shard_maps import shard_map_body, shard_map_p
from partjit._jax.sources import source_site
from partjit.colocated.ir.shard_map import check_is_over_all_axes
from partjit.errors import ShardingError
from partjit.mesh import auto_twin
from partjit.plan.ir.control_flow import is_call
from partjit.plan.ir.flat import Flat, has_calls, live, names_of_calls, variables
from partjit.plan.passes.cost import cost_of
from partjit.plan.passes.cut import WORTH_A_DISPATCH
from partjit.plan.passes.forms import REPLICATED, Form
from partjit.plan.passes.manual import Body

__all__ = ["meshes_of_shard_maps", "opened_shard_map"]


def meshes_of_shard_maps(jaxpr: Any) -> Iterator[Mesh]:
    """The meshes that the shard_maps with calls in a jaxpr name the devices of."""
    for eqn in jaxpr.jaxpr.eqns if hasattr(jaxpr, "jaxpr") else jaxpr.eqns:
        jaxprs = [inner for inner in jaxprs_in_params(eqn.params) if has_calls(inner)]
        if jaxprs and eqn.primitive is shard_map_p and isinstance(eqn.params["mesh"], Mesh):
            yield auto_twin(eqn.params["mesh"])
        for inner in jaxprs:
            yield from meshes_of_shard_maps(inner)


def opened_shard_map(
    eqn: Any, used: Sequence[bool], opened: Callable[[Any], Flat], mesh: Mesh, consts: dict[Any, Any]
) -> tuple[list[Any], list[Any]]:
    """The equations of a `shard_map` that makes calls, and what its results are.

    Args:
        eqn: its equation.
        used: which of its results are needed.
        opened: opens nested programs in a closed jaxpr, but no loops and branches.
        mesh: that of the program.
        consts: the constants of the program, to which those of the body are added.

    Returns:
        The equations; scans among them may make calls, in shard_maps. And an atom for each result, None for those that
        are not needed.

    Raises:
        ValueError: a call in it cannot be made for each shard.
        ShardingError: it is over other devices than the program.
    """
    own = _mesh_of(eqn, mesh)
    check_is_over_all_axes(f"{_what(eqn)} calls {_names(eqn)}", own, eqn.params["newly_manual_axes"])
    flat = opened(shard_map_body(eqn))
    outvars = [atom for atom, flag in zip(flat.outvars, used, strict=True) if flag]
    body = Body(eqn, own, opened)
    for var, atom, spec in zip(flat.invars, eqn.invars, eqn.params["in_specs"], strict=True):
        body.put(var, Form(spec), atom)
    for var, value in flat.consts.items():
        array = REPLICATED.array_of(var, own)
        consts[array] = value
        body.put(var, REPLICATED, array)
    specs = [spec for spec, flag in zip(eqn.params["out_specs"], used, strict=True) if flag]
    wanted = [(atom, Form(spec)) for atom, spec in zip(outvars, specs, strict=True)]
    results = iter(body.run(live(outvars, flat.eqns)[0], _made_of_nothing(flat.eqns), wanted))
    return body.eqns, [next(results) if flag else None for flag in used]


def _mesh_of(eqn: Any, mesh: Mesh) -> Mesh:
    """The mesh of a `shard_map` in a program over another."""
    own = eqn.params["mesh"]
    if isinstance(own, Mesh):
        if {*own.devices.flat} != {*mesh.devices.flat}:
            raise ShardingError(
                f"{_what(eqn)} calls {_names(eqn)} and is over the devices {[d.id for d in own.devices.flat]}, but the "
                f"program runs on the devices {[d.id for d in mesh.devices.flat]}"
            )
        return auto_twin(own)
    if mesh.empty or own.shape_tuple != mesh.abstract_mesh.shape_tuple:
        here = "on no mesh" if mesh.empty else f"over the mesh {dict(mesh.shape)}"
        raise ShardingError(
            f"{_what(eqn)} calls {_names(eqn)} and is over the abstract mesh {dict(own.shape)}, but the program runs "
            f"{here}: enter the mesh of its devices around the program"
        )
    return mesh


def _made_of_nothing(eqns: Sequence[Any]) -> dict[Any, Sequence[Any]]:
    """The variables that are cheaply computed of literals and the position in the mesh, with the equations for it."""
    found: dict[Any, Sequence[Any]] = {}
    for eqn in eqns:
        # What else names an axis among its effects moves something along it.
        is_local = not eqn.effects or eqn.primitive.name == "axis_index"
        has_call = is_call(eqn) or any(map(has_calls, jaxprs_in_params(eqn.params)))
        if is_local and not has_call and all(var in found for var in variables(eqn.invars)):
            before = {id(made): made for var in variables(eqn.invars) for made in found[var]}
            made = [*before.values(), eqn]
            if sum(map(cost_of, made)) < WORTH_A_DISPATCH:
                found.update(dict.fromkeys(eqn.outvars, made))
    return found


def _names(eqn: Any) -> str:
    return ", ".join(names_of_calls(eqn))


def _what(eqn: Any) -> str:
    site = source_site(eqn.source_info)
    return "a shard_map" if site is None else "the shard_map at {}:{} in {}".format(*site)
