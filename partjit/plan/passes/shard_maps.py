"""`shard_map`s with colocated calls become `shard_map`s without, and calls between them."""

from collections.abc import Callable, Iterator, Sequence

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import Mesh

from partjit._jax.jaxprs import Atom
from partjit._jax.shard_maps import shard_map_body, shard_map_p
from partjit._jax.sources import at_site
from partjit.calls import has_calls, inner_jaxprs, makes_calls, names_of_calls
from partjit.colocated.ir.shard_map import check_is_over_all_axes
from partjit.devices import devices_of, has_devices_of
from partjit.errors import ShardingError
from partjit.mesh import auto_twin
from partjit.plan.ir.build import Builder, expanded, live
from partjit.plan.ir.nodes import Equation, VarBlock, VarNode
from partjit.plan.ir.walk import variables
from partjit.plan.passes.cost import amortizes_a_dispatch, cost_of
from partjit.plan.passes.forms import REPLICATED, Form
from partjit.plan.passes.manual import Body
from partjit.plan.passes.prune import prune
from partjit.primitive import keep_where

__all__ = ["meshes_of_shard_maps", "shard_maps"]


def meshes_of_shard_maps(jaxpr: Jaxpr) -> Iterator[Mesh]:
    """The meshes that the shard_maps with calls in a jaxpr name the devices of."""
    for eqn in jaxpr.eqns:
        jaxprs = [inner for inner in inner_jaxprs(eqn) if has_calls(inner)]
        if jaxprs and eqn.primitive is shard_map_p and isinstance(eqn.params["mesh"], Mesh):
            yield auto_twin(eqn.params["mesh"])
        for inner in jaxprs:
            yield from meshes_of_shard_maps(inner)


def shard_maps(block: VarBlock, mesh: Mesh, inlined: Callable[[ClosedJaxpr], VarBlock]) -> VarBlock:
    """Decomposes the `shard_map`s of a block that make calls; scans among what they become may make calls as well.

    Args:
        block: a block without anything that nothing needs.
        mesh: that of the program, maybe empty.
        inlined: what the passes before this one make of a closed jaxpr.

    Raises:
        ValueError: a call in one of them cannot be made for each shard.
        ShardingError: one of them is over other devices than the program.
    """

    def expand(out: Builder, used: Sequence[bool]) -> dict[Var, Atom]:
        return dict(zip(keep_where(out.like.outvars, used), _decomposed(out, used, inlined, mesh), strict=True))

    made = expanded(block, _is_shard_map_with_calls, expand)
    return made if made is block else prune(made)


def _is_shard_map_with_calls(eqn: JaxprEqn) -> bool:
    return eqn.primitive is shard_map_p and makes_calls(eqn)


def _decomposed(
    out: Builder, used: Sequence[bool], inlined: Callable[[ClosedJaxpr], VarBlock], mesh: Mesh
) -> list[Atom]:
    """Adds the nodes of a `shard_map`; gives its results that are used."""
    eqn = out.like
    own = _mesh_of(eqn, mesh)
    check_is_over_all_axes(f"{_what(eqn)} calls {_names(eqn)}", own, eqn.params["newly_manual_axes"])
    block = inlined(shard_map_body(eqn))
    outputs = keep_where(block.outputs, used)
    body = Body(out, own, inlined)
    for var, atom, spec in zip(block.inputs, eqn.invars, eqn.params["in_specs"], strict=True):
        body.put(var, Form(spec), atom)
    for var, value in block.consts.items():
        array = REPLICATED.array_of(var, own)
        out.consts[array] = value
        body.put(var, REPLICATED, array)
    wanted = [*zip(outputs, map(Form, keep_where(eqn.params["out_specs"], used)), strict=True)]
    return body.run(live(outputs, block.nodes)[0], _made_of_nothing(block.nodes), wanted)


def _mesh_of(eqn: JaxprEqn, mesh: Mesh) -> Mesh:
    """The mesh of a `shard_map` in a program over another."""
    own = eqn.params["mesh"]
    if isinstance(own, Mesh):
        if not has_devices_of(own, mesh, in_order=False):
            raise ShardingError(
                f"{_what(eqn)} calls {_names(eqn)} and is over {devices_of(own)}, but the program runs on "
                f"{devices_of(mesh)}"
            )
        return auto_twin(own)
    if mesh.empty or own.shape_tuple != mesh.abstract_mesh.shape_tuple:
        here = "on no mesh" if mesh.empty else f"over the mesh {dict(mesh.shape)}"
        raise ShardingError(
            f"{_what(eqn)} calls {_names(eqn)} and is over the abstract mesh {dict(own.shape)}, but the program runs "
            f"{here}: enter the mesh of its devices around the program"
        )
    return mesh


def _made_of_nothing(nodes: Sequence[VarNode]) -> dict[Var, Sequence[Equation]]:
    """The variables that are cheaply computed of literals and the position in the mesh, with the equations for it."""
    found: dict[Var, Sequence[Equation]] = {}
    for node in nodes:
        if not isinstance(node, Equation) or makes_calls(node.eqn):
            continue
        # What else names an axis among its effects moves something along it.
        is_local = not node.eqn.effects or node.eqn.primitive.name == "axis_index"
        if is_local and all(var in found for var in variables(node.inputs)):
            made = [*dict.fromkeys([*(made for var in variables(node.inputs) for made in found[var]), node])]
            if not amortizes_a_dispatch(sum(cost_of(each.eqn) for each in made)):
                found.update(dict.fromkeys(node.outputs, made))
    return found


def _names(eqn: JaxprEqn) -> str:
    return ", ".join(names_of_calls(inner_jaxprs(eqn)))


def _what(eqn: JaxprEqn) -> str:
    where = at_site(eqn.source_info)
    return f"the shard_map{where}" if where else "a shard_map"
