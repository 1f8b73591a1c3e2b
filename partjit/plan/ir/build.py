"""Putting programs together: jaxprs read into blocks, inlined, extended with functions of jax, and written again."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import DropVar, JaxprEqn, Var, jaxpr_as_fun, new_jaxpr_eqn
from jax.sharding import Mesh

from partjit._jax.jaxprs import closed_jaxpr, new_var
from partjit._jax.sources import nested_source_info
from partjit.mesh import auto_twin
from partjit.plan.ir.calls import orders_of
from partjit.plan.ir.nodes import (
    AnyNode,
    Block,
    Branch,
    ColocatedCall,
    Equation,
    Forward,
    Loop,
    variables,
)
from partjit.primitive import device_witness, sharding_constraint_p
from partjit.spec import ParsedPartitionSpec

__all__ = ["Builder", "constraint", "copied", "expanded", "jaxpr_of", "live", "read", "reading", "rebuilt"]


def read(env: Mapping[Any, Any], atom: Any) -> Any:
    """What an environment has in the place of a variable or literal; itself if it has nothing."""
    return env.get(atom, atom) if isinstance(atom, Var) else atom


def reading(node: Any, env: Mapping[Any, Any]) -> Any:
    """A node that reads what an environment has in the place of its inputs."""
    if not env or not any(isinstance(atom, Var) and atom in env for atom in node.inputs):
        return node
    return _replaced(node, [read(env, atom) for atom in node.inputs], node.outputs)


def _replaced(node: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    if isinstance(node, Equation):
        return Equation(node.eqn.replace(invars=[*inputs], outvars=[*outputs]))
    return dataclasses.replace(node, inputs=tuple(inputs), outputs=tuple(outputs))


def _fresh(var: Any) -> Any:
    return var if isinstance(var, DropVar) else new_var(var.aval)


def _copied(node: Any, env: dict[Any, Any]) -> Any:
    """A node with fresh variables for what it computes, which are put into the environment."""
    outputs = [_fresh(var) for var in node.outputs]
    fresh = _replaced(node, [read(env, atom) for atom in node.inputs], outputs)
    env.update(zip(node.outputs, outputs, strict=True))
    if isinstance(node, Loop):
        return dataclasses.replace(fresh, block=copied(node.block))
    if isinstance(node, Branch):
        return dataclasses.replace(fresh, blocks=tuple(map(copied, node.blocks)))
    return fresh


def copied(block: Block) -> Block:
    """A block with fresh variables: two blocks made of one jaxpr share none."""
    env: dict[Any, Any] = {var: _fresh(var) for var in (*block.inputs, *block.consts)}
    nodes = tuple(_copied(node, env) for node in block.nodes)
    consts = {env[var]: value for var, value in block.consts.items()}
    return Block(tuple(env[var] for var in block.inputs), nodes, tuple(read(env, a) for a in block.outputs), consts)


def rebuilt(block: Block, nodes: Iterable[AnyNode], env: Mapping[Any, Any] | None = None) -> Block:
    """A block with other nodes, and with what an environment has in the place of its outputs."""
    return dataclasses.replace(
        block, nodes=tuple(nodes), outputs=tuple(read(env or {}, atom) for atom in block.outputs)
    )


def live(outputs: Iterable[Any], nodes: Sequence[AnyNode]) -> tuple[list[AnyNode], set[Any]]:
    """The nodes that have effects or that something needs, and the variables that are needed."""
    needed = {*variables(outputs)}
    kept = []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.outputs) or orders_of(node):
            needed.update(variables(node.inputs))
            kept.append(node)
    return kept[::-1], needed


Expand = Callable[[JaxprEqn, Sequence[bool], dict[Any, Any]], tuple[Iterable[AnyNode], Mapping[Any, Any]]]
"""From an equation, flags of the results that are needed, and constants to which its own are added, to the nodes that
take its place and what they have in the place of its results."""


def expanded(block: Block, is_expanded: Callable[[Any], bool], expand: Expand) -> Block:
    """A block in which nodes take the place of some equations; the block itself if there are none."""
    if not any(map(is_expanded, block.nodes)):
        return block
    needed = live(block.outputs, block.nodes)[1]
    env: dict[Any, Any] = {}
    nodes: list[AnyNode] = []
    consts = dict(block.consts)
    for node in block.nodes:
        node = reading(node, env)
        if not is_expanded(node):
            nodes.append(node)
            continue
        made, results = expand(node.eqn, [var in needed for var in node.outputs], consts)
        nodes += made
        env.update(results)
    return rebuilt(dataclasses.replace(block, consts=consts), nodes, env)


def constraint(atom: Any, var: Any, spec: ParsedPartitionSpec, mesh: Mesh, like: Any) -> Any:
    """An equation that constrains a value to a spec.

    Args:
        atom, var: the value, and the variable of the constrained one.
        spec, mesh: the spec, and the mesh it is about if it names none itself.
        like: the equation that it replaces.
    """
    params = {"spec": spec, "mesh": auto_twin(mesh), "witness": device_witness(auto_twin(spec.mesh or mesh))}
    return new_jaxpr_eqn([atom], [var], sharding_constraint_p, params, set(), like.source_info, like.ctx)


class Builder:
    """Nodes being put together, in the place of an equation.

    Args:
        like: that equation; what is made here has its line in the user's code.
        consts: the constants of the block that the nodes go into, to which theirs are added.

    Attributes:
        nodes: what there is so far.
        consts: the variables that are constants, with their values.
    """

    def __init__(self, like: Any, consts: dict[Any, Any] | None = None) -> None:
        self.like = like
        self.nodes: list[Any] = []
        self.consts: dict[Any, Any] = {} if consts is None else consts

    def add(self, fun: Callable[..., Any], *atoms: Any) -> list[Any]:
        """The results, flat, of a function of jax on these atoms."""
        structs = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms]
        return self.inline(Block.of_jaxpr(jax.make_jaxpr(fun)(*structs)), atoms)

    def inline(self, block: Block, atoms: Sequence[Any]) -> list[Any]:
        """The results of a block on these atoms."""
        env = dict(zip(block.inputs, atoms, strict=True))
        for var, value in block.consts.items():
            env[var] = new_var(var.aval)
            self.consts[env[var]] = value
        for node in block.nodes:
            fresh = _copied(node, env)
            if isinstance(fresh, Equation):
                info = nested_source_info(fresh.eqn.source_info, self.like.source_info)
                fresh = Equation(fresh.eqn.replace(source_info=info, ctx=self.like.ctx))
            elif isinstance(fresh, ColocatedCall):
                fresh = dataclasses.replace(fresh, eqn=fresh.eqn.replace(ctx=self.like.ctx))
            self.nodes.append(fresh)
        return [read(env, atom) for atom in block.outputs]

    def constrain(self, atom: Any, spec: ParsedPartitionSpec, mesh: Mesh) -> Any:
        """A value constrained to a spec."""
        var = new_var(atom.aval)
        self.nodes.append(Equation(constraint(atom, var, spec, mesh, self.like)))
        return var


def jaxpr_of(block: Block) -> Any:
    """The closed jaxpr of a block, with jax's own loops and branches: for the partitioner, or to be traced again."""
    eqns: list[Any] = []
    env: dict[Any, Any] = {}
    consts = dict(block.consts)
    for node in block.nodes:
        if isinstance(node, Equation):
            eqns.append(reading(node, env).eqn)
        elif isinstance(node, Forward):
            env[node.outputs[0]] = read(env, node.inputs[0])
        elif isinstance(node, ColocatedCall):
            params = {"callee": node.callee, "stream": node.stream}
            inputs = [read(env, atom) for atom in node.inputs]
            eqns.append(node.eqn.replace(invars=inputs, outvars=[*node.outputs], params=params))
        else:
            built = Builder(node.eqn, consts)
            results = built.add(_of_jax(node), *(read(env, atom) for atom in node.inputs))
            eqns += (made.eqn for made in built.nodes)
            env.update(zip(node.outputs, results, strict=True))
    return closed_jaxpr(block.inputs, [read(env, atom) for atom in block.outputs], eqns, consts)


def _of_jax(node: Loop | Branch) -> Callable[..., Any]:
    """A loop or branch as a function of its inputs."""
    runs = [jaxpr_as_fun(jaxpr_of(block)) for block in node.blocks]
    if isinstance(node, Branch):
        return lambda index, *captured: jax.lax.switch(index, runs, *captured)
    count, trip_count, (run,) = len(node.captured), node.trip_count, runs

    def loop(*args: Any) -> Any:
        captured, initial = args[:count], [*args[count:]]
        if trip_count is None:
            return jax.lax.while_loop(lambda carried: carried[0], lambda carried: run(*captured, *carried), initial)
        return jax.lax.fori_loop(0, trip_count, lambda _, carried: run(*captured, *carried), initial)

    return loop
