"""Putting programs together: jaxprs read into blocks, inlined, extended with functions of jax, and written again."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, DropVar, JaxprEqn, Literal, Var, jaxpr_as_fun, new_jaxpr_eqn
from jax.sharding import Mesh
from jax.typing import ArrayLike

from partjit._jax.jaxprs import Atom, closed_jaxpr, new_var, type_of, with_inputs
from partjit._jax.meshes import without_mesh
from partjit._jax.sources import nested_source_info
from partjit._jax.tracing import without_sharding
from partjit.mesh import auto_twin
from partjit.plan.ir.calls import orders_of
from partjit.plan.ir.nodes import (
    Block,
    Branch,
    ColocatedCall,
    Equation,
    Forward,
    Loop,
    VarBlock,
    VarBranch,
    VarLoop,
    VarNode,
)
from partjit.plan.ir.walk import variables, with_blocks
from partjit.primitive import device_witness, keep_where, sharding_constraint_p
from partjit.spec import ParsedPartitionSpec

__all__ = [
    "Builder",
    "constraint",
    "copied",
    "expanded",
    "jaxpr_of",
    "live",
    "read",
    "reading",
    "rebuilt",
    "with_loops",
]


N = TypeVar("N", bound=VarNode)


def read(env: Mapping[Var, Atom], atom: Atom) -> Atom:
    """What an environment has in the place of a variable or literal; itself if it has nothing."""
    return env.get(atom, atom) if isinstance(atom, Var) else atom


def reading(node: VarNode, env: Mapping[Var, Atom]) -> VarNode:
    """A node that reads what an environment has in the place of its inputs."""
    if not env or not any(isinstance(atom, Var) and atom in env for atom in node.inputs):
        return node
    return _replaced(node, env, node.outputs)


def _replaced(node: VarNode, env: Mapping[Var, Atom], outputs: Sequence[Var]) -> VarNode:
    inputs = [read(env, atom) for atom in node.inputs]
    if isinstance(node, Equation):
        return Equation(with_inputs(node.eqn, inputs).replace(outvars=[*outputs]))
    replaced = dataclasses.replace(node, inputs=tuple(inputs), outputs=tuple(outputs))
    return _capturing_once(replaced) if isinstance(replaced, Loop | Branch) else replaced


def _capturing_once(node: VarLoop | VarBranch) -> VarNode:
    """A loop or branch of which no variable is captured twice, where it was captured as two."""
    first: dict[Atom, int] = {}
    places = [first.setdefault(atom, i) if isinstance(atom, Var) else i for i, atom in enumerate(node.captured)]
    if places == [*range(len(places))]:
        return node
    kept = [place == i for i, place in enumerate(places)]

    def block_of(block: VarBlock) -> VarBlock:
        env: dict[Var, Atom] = {block.inputs[i]: block.inputs[place] for i, place in enumerate(places) if place != i}
        inputs = (*keep_where(block.inputs[: len(places)], kept), *block.inputs[len(places) :])
        return rebuilt(dataclasses.replace(block, inputs=inputs), [reading(inner, env) for inner in block.nodes], env)

    around = (node.inputs[:1], ()) if isinstance(node, Branch) else ((), node.initial)
    inputs = (*around[0], *keep_where(node.captured, kept), *around[1])
    return with_blocks(node, map(block_of, node.blocks), inputs=inputs)


def _fresh(var: Var) -> Var:
    return var if isinstance(var, DropVar) else new_var(var.aval)


def _copied(node: VarNode, env: dict[Var, Atom]) -> VarNode:
    """A node with fresh variables for what it computes, which are put into the environment."""
    outputs = [_fresh(var) for var in node.outputs]
    fresh = _replaced(node, env, outputs)
    env.update(zip(node.outputs, outputs, strict=True))
    return with_blocks(fresh, map(copied, fresh.blocks)) if isinstance(fresh, Loop | Branch) else fresh


def copied(block: VarBlock) -> VarBlock:
    """A block with fresh variables: two blocks made of one jaxpr share none."""
    fresh = {var: _fresh(var) for var in (*block.inputs, *block.consts)}
    env: dict[Var, Atom] = {**fresh}
    nodes = tuple(_copied(node, env) for node in block.nodes)
    consts = {fresh[var]: value for var, value in block.consts.items()}
    return Block(tuple(fresh[var] for var in block.inputs), nodes, tuple(read(env, a) for a in block.outputs), consts)


def rebuilt(block: VarBlock, nodes: Iterable[VarNode], env: Mapping[Var, Atom] | None = None) -> VarBlock:
    """A block with other nodes, and with what an environment has in the place of its outputs."""
    outputs = tuple(read(env or {}, atom) for atom in block.outputs)
    return dataclasses.replace(block, nodes=tuple(nodes), outputs=outputs)


def live(outputs: Iterable[Atom], nodes: Sequence[N]) -> tuple[list[N], set[Var]]:
    """The nodes that have effects or that something needs, and the variables that are needed."""
    needed = {*variables(outputs)}
    kept = []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.outputs) or orders_of(node):
            needed.update(variables(node.inputs))
            kept.append(node)
    return kept[::-1], needed


def constraint(atom: Atom, var: Var, spec: ParsedPartitionSpec, mesh: Mesh, like: JaxprEqn) -> JaxprEqn:
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

    def __init__(self, like: JaxprEqn, consts: dict[Var, ArrayLike] | None = None) -> None:
        self.like = like
        self.nodes: list[VarNode] = []
        self.consts: dict[Var, ArrayLike] = {} if consts is None else consts

    def add(self, fun: Callable[..., Any], *atoms: Atom) -> list[Atom]:
        """The results, flat, of a function of jax on these atoms."""
        avals = [without_sharding(type_of(atom)) for atom in atoms]
        with without_mesh():  # a mesh with Explicit axes would be in the types of its results
            jaxpr = jax.make_jaxpr(fun)(*avals)
        return self.inline(Block.of_jaxpr(jaxpr), atoms)

    def inline(self, block: VarBlock, atoms: Sequence[Atom]) -> list[Atom]:
        """The results of a block on these atoms; its loops and branches read no literals."""
        env = dict(zip(block.inputs, atoms, strict=True))
        driven = [var for node in block.nodes if isinstance(node, Loop | Branch) for var in variables(node.inputs)]
        for var in driven:  # in place of what a loop starts from, there has to be a variable
            if isinstance(atom := env.get(var), Literal):
                (env[var],) = self.add(jnp.copy, atom)
        for var, value in block.consts.items():
            env[var] = const = new_var(var.aval)
            self.consts[const] = value
        for node in block.nodes:
            fresh = _copied(node, env)
            if isinstance(fresh, Equation):
                info = nested_source_info(fresh.eqn.source_info, self.like.source_info)
                fresh = Equation(fresh.eqn.replace(source_info=info, ctx=self.like.ctx))
            elif isinstance(fresh, ColocatedCall):
                fresh = dataclasses.replace(fresh, eqn=fresh.eqn.replace(ctx=self.like.ctx))
            self.nodes.append(fresh)
        return [read(env, atom) for atom in block.outputs]

    def constrain(self, atom: Atom, spec: ParsedPartitionSpec, mesh: Mesh) -> Var:
        """A value constrained to a spec."""
        var = new_var(atom.aval)
        self.nodes.append(Equation(constraint(atom, var, spec, mesh, self.like)))
        return var


def expanded(
    block: VarBlock,
    is_expanded: Callable[[JaxprEqn], bool],
    expand: Callable[[Builder, Sequence[bool]], Mapping[Var, Atom]],
) -> VarBlock:
    """A block in which nodes take the place of some equations; the block itself if there are none.

    Args:
        block: the block.
        is_expanded: whether an equation is one of them.
        expand: given a builder for an equation and flags of the results that are needed, adds the nodes, and returns
            what there is in the place of the results.
    """
    if not any(isinstance(node, Equation) and is_expanded(node.eqn) for node in block.nodes):
        return block
    needed = live(block.outputs, block.nodes)[1]
    env: dict[Var, Atom] = {}
    nodes: list[VarNode] = []
    consts = dict(block.consts)
    for node in block.nodes:
        node = reading(node, env)
        if isinstance(node, Equation) and is_expanded(node.eqn):
            out = Builder(node.eqn, consts)
            env.update(expand(out, [var in needed for var in node.outputs]))
            nodes += out.nodes
        else:
            nodes.append(node)
    return rebuilt(dataclasses.replace(block, consts=consts), nodes, env)


def with_loops(block: VarBlock, change: Callable[[VarLoop, Builder], VarLoop]) -> VarBlock:
    """A block with changed loops, each after the nodes that the change adds to a builder; itself if it has no loops."""
    if not any(isinstance(node, Loop) for node in block.nodes):
        return block
    nodes: list[VarNode] = []
    consts = dict(block.consts)
    for node in block.nodes:
        if isinstance(node, Loop):
            before = Builder(node.eqn, consts)
            node = change(node, before)
            nodes += before.nodes
        nodes.append(node)
    return rebuilt(dataclasses.replace(block, consts=consts), nodes)


def jaxpr_of(block: VarBlock) -> ClosedJaxpr:
    """The closed jaxpr of a block, with jax's own loops and branches: for the partitioner, or to be traced again."""
    eqns: list[JaxprEqn] = []
    env: dict[Var, Atom] = {}
    consts = dict(block.consts)
    for node in block.nodes:
        if isinstance(node, Equation) and not env:
            eqns.append(node.eqn)
            continue
        inputs = [read(env, atom) for atom in node.inputs]
        if isinstance(node, Equation):
            eqns.append(with_inputs(node.eqn, inputs))
        elif isinstance(node, Forward):
            env[node.outputs[0]] = inputs[0]
        elif isinstance(node, ColocatedCall):
            params = {"callee": node.callee, "stream": node.stream}
            eqns.append(node.eqn.replace(invars=inputs, outvars=[*node.outputs], params=params))
        else:
            assert isinstance(node, Loop | Branch)  # blocks are not cut yet
            built = Builder(node.eqn, consts)
            results = built.add(_of_jax(node), *inputs)
            eqns += (made.eqn for made in built.nodes if isinstance(made, Equation))
            env.update(zip(node.outputs, results, strict=True))
    return closed_jaxpr(block.inputs, [read(env, atom) for atom in block.outputs], eqns, consts)


def _of_jax(node: VarLoop | Branch[Atom, Var]) -> Callable[..., Sequence[jax.Array]]:
    """A loop or branch as a function of its inputs."""
    runs = [jaxpr_as_fun(jaxpr_of(block)) for block in node.blocks]
    if isinstance(node, Branch):
        return lambda index, *captured: jax.lax.switch(index, runs, *captured)
    count, trip_count, (run,) = len(node.captured), node.trip_count, runs

    def loop(*args: jax.Array) -> Sequence[jax.Array]:
        captured, initial = args[:count], [*args[count:]]
        if trip_count is None:
            return jax.lax.while_loop(lambda carried: carried[0], lambda carried: run(*captured, *carried), initial)
        return jax.lax.fori_loop(0, trip_count, lambda _, carried: run(*captured, *carried), initial)

    return loop
