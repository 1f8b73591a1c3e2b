"""From variables to values: each gets a name and its sharding, and constants that calls read become values."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from jax.extend.core import Var
from jax.sharding import Mesh, Sharding
from jax.typing import ArrayLike

from partjit._jax.jaxprs import Atom, type_of
from partjit._jax.sources import source_site
from partjit.colocated.devices import colocated_sharding
from partjit.plan.ir.calls import Order, orders_of
from partjit.plan.ir.names import Names
from partjit.plan.ir.nodes import (
    Block,
    Branch,
    ColocatedCall,
    Fragment,
    Loop,
    Node,
    Value,
    ValueBlock,
    VarBlock,
    VarNode,
)
from partjit.plan.ir.walk import is_host, variables, walk, with_blocks
from partjit.plan.passes.fragments import replicated

__all__ = ["Bound", "bind", "captured_by"]


@dataclasses.dataclass(frozen=True)
class Bound:
    """A program whose nodes read and give values.

    Attributes:
        block: its nodes.
        constants: the values that calls read and that never change, with what they are.
        on_devices: for each value that is on the hosts of accelerators its sharding once it is moved to these.
    """

    block: ValueBlock
    constants: dict[Value, ArrayLike]
    on_devices: dict[Value, Sharding]


def bind(
    block: VarBlock,
    shardings: Mapping[Var, Sharding | None],
    paths: Sequence[str],
    result_paths: Sequence[str],
    mesh: Mesh,
    names: Names,
) -> Bound:
    """Names the values and nodes of a program.

    Args:
        block: the program, made of fragments.
        shardings: of the variables in it.
        paths, result_paths: the key paths of its arguments and results.
        mesh: the mesh, maybe empty.
        names: those that are taken already; more are taken.
    """
    binding = _Binding(shardings, mesh, names)
    binding.name_inputs(block, paths)
    wanted: dict[Var, str] = {}
    for var, path in zip(variables(block.outputs), result_paths, strict=True):
        wanted.setdefault(var, "out" if path == "result" else path.replace("result", "out", 1))
    return Bound(binding.block(block, wanted), binding.constants, binding.on_devices)


class _Binding:
    def __init__(self, shardings: Mapping[Var, Sharding | None], mesh: Mesh, names: Names) -> None:
        self._shardings = shardings
        self._mesh = mesh
        self._names = names
        self._value_of: dict[Var, Value] = {}
        self._consts: Mapping[Var, ArrayLike] = {}
        self._site: tuple[str, int, str] | None = None  # of the loop or branch around what is named
        self.constants: dict[Value, ArrayLike] = {}
        self.on_devices: dict[Value, Sharding] = {}

    def name_inputs(self, block: VarBlock, paths: Sequence[str]) -> None:
        """Names the arguments of the program."""
        for var, path in zip(block.inputs, paths, strict=True):
            self._make(var, self._names.take(path))

    def block(self, block: VarBlock, wanted: Mapping[Var, str]) -> ValueBlock:
        """A block whose inputs have values; `wanted` are names of its results."""
        outer, self._consts = self._consts, block.consts
        results = {*variables(block.outputs)}
        nodes = tuple(self._node(node, results, wanted) for node in block.nodes)
        self._consts = outer
        return Block(self._values(block.inputs), nodes, self._values(block.outputs), order=_order(nodes))

    def _make(self, var: Var, name: str, sharding: Sharding | None = None) -> Value:
        value = self._value_of[var] = Value(name, type_of(var), sharding or self._shardings.get(var))
        return value

    def _values(self, atoms: Iterable[Atom]) -> tuple[Value, ...]:
        return tuple(self._value_of[var] for var in variables(atoms))

    def _read(self, atom: Atom, sharding: Sharding | None = None) -> Value:
        """The value of what a call, loop or branch reads; a constant gets that sharding, or is replicated."""
        if isinstance(atom, Var) and atom not in self._consts:
            return self._value_of[atom]
        value = Value(self._names.take("constant"), type_of(atom), sharding or replicated(self._mesh))
        self.constants[value] = self._consts[atom] if isinstance(atom, Var) else atom.val
        return value

    def _node(self, node: VarNode, results: Collection[Var], wanted: Mapping[Var, str]) -> Node:
        if isinstance(node, Fragment):
            return self._fragment(node, results, wanted)
        if isinstance(node, ColocatedCall):
            return self._call(node, results, wanted)
        assert isinstance(node, Loop | Branch)  # the block is cut
        return self._loop_or_branch(node, wanted)

    def _named(self, wanted: str | None) -> str:
        return self._names.fresh() if wanted is None else self._names.take(wanted)

    def _fragment(self, node: Fragment, results: Collection[Var], wanted: Mapping[Var, str]) -> Node:
        name = self._names.fragment()
        inputs = self._values(node.inputs)
        inside = node.jaxpr.jaxpr
        given = dict(zip(inside.invars, inputs, strict=True))
        outputs = []
        for atom, var in zip(inside.outvars, node.outputs, strict=True):
            if var not in results and isinstance(atom, Var) and atom in given:
                outputs.append(self._make(var, self._names.take(given[atom].name + "_copy")))
            else:
                outputs.append(self._make(var, self._named(wanted.get(var))))
        return dataclasses.replace(node, name=name, inputs=inputs, outputs=tuple(outputs))

    def _call(self, node: ColocatedCall, results: Collection[Var], wanted: Mapping[Var, str]) -> Node:
        callee = node.callee
        name = self._names.take(callee.name.rpartition(".")[2])
        inputs = tuple(map(self._read, node.inputs, callee.in_shardings))
        outputs = []
        for k, var in enumerate(node.outputs):
            value_name = self._names.take(wanted.get(var) or (f"{name}_{k}" if k else f"{name}_result"))
            sharding = self._shardings.get(var)
            # What only leaves is moved to the devices by the thread of the call.
            host = None if sharding is None or var in results else colocated_sharding(sharding)
            outputs.append(self._make(var, value_name, host))
            if sharding is not None and host is not None and host != sharding:
                self.on_devices[outputs[-1]] = sharding
        site = source_site(node.eqn.source_info) or self._site or callee.definition.function.defined_at
        return dataclasses.replace(node, name=name, inputs=inputs, outputs=tuple(outputs), site=site)

    def _loop_or_branch(self, node: Loop | Branch, wanted: Mapping[Var, str]) -> Node:
        is_loop = isinstance(node, Loop)
        outer, self._site = self._site, source_site(node.eqn.source_info) or self._site
        name = self._names.take("loop" if is_loop else "branch")
        outputs = tuple(self._make(var, self._named(wanted.get(var))) for var in node.outputs)
        first = () if is_loop else (self._read(node.inputs[0]),)
        given = [*map(self._read, node.captured), *(outputs if is_loop else ())]
        blocks = []
        for block in node.blocks:
            self._value_of.update(zip(block.inputs, given, strict=True))
            blocks.append(self.block(block, {}))
        self._site = outer
        captured = captured_by(blocks, outputs if is_loop else (), self.constants)
        initial = self._values(node.initial) if is_loop else ()
        assert not is_loop or len(initial) == len(outputs), "a loop starts from variables"
        inputs = (*first, *captured, *initial)
        return with_blocks(node, blocks, name=name, outputs=outputs, inputs=inputs)


def captured_by(blocks: Sequence[ValueBlock], carried: Sequence[Value], constants: Collection[Value]) -> list[Value]:
    """The values that blocks read from outside, once each, besides what is carried and constants."""
    own = {*carried, *constants}
    found: dict[Value, None] = {}
    for block in blocks:
        nodes = [*walk(block.nodes)]
        own.update(value for node in nodes for value in node.outputs)
        found.update((value, None) for node in nodes for value in node.inputs)
        found.update((value, None) for value in block.outputs)
    return [value for value in found if value not in own]


def _order(nodes: Sequence[Node]) -> tuple[tuple[str, str], ...]:
    """The pairs of names of calls, loops and branches of which one follows the other in an order that both keep."""
    last: dict[Order, str] = {}
    pairs: dict[tuple[str, str], None] = {}
    for node in nodes:
        for order in orders_of(node) if is_host(node) else ():
            if order in last:
                pairs[last[order], node.name] = None
            last[order] = node.name
    return tuple(pairs)
