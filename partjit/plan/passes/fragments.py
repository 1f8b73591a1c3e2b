"""From groups of equations to fragments: what each takes and returns, and the copies that calls read."""

import dataclasses
from collections.abc import Collection, Sequence

import jax
from jax.extend.core import DropVar, Var
from jax.sharding import Mesh, NamedSharding, Sharding

from partjit._jax.jaxprs import Atom, closed_jaxpr, new_var, type_of
from partjit._jax.shardings import MaybeSharding, in_memory_of_type, or_none, or_unspecified
from partjit.plan.ir.build import read, reading
from partjit.plan.ir.nodes import ColocatedCall, Equation, Forward, Fragment, Group, Value, VarBlock, VarNode
from partjit.plan.ir.walk import variables

__all__ = ["fragments", "is_copied_for_calls", "replicated", "shardings_of_fragment"]

_MOST_BYTES_COPIED = 2**14
"""Of an argument that a fragment copies in less time than it takes to pin it."""


def is_copied_for_calls(argument: Var) -> bool:
    """Whether a fragment copies an argument of a program for calls in less time than it takes to pin it."""
    aval = type_of(argument)
    is_number = any(jax.numpy.issubdtype(aval.dtype, kind) for kind in (jax.numpy.number, jax.numpy.bool_))
    return is_number and aval.size * aval.dtype.itemsize <= _MOST_BYTES_COPIED


def fragments(
    block: VarBlock,
    shardings: dict[Var, Sharding | None],
    out_shardings: Sequence[MaybeSharding],
    donated: Collection[Var],
    copied: Collection[Var],
    mesh: Mesh,
    default: Sharding | None,
) -> VarBlock:
    """Makes fragments of the groups of a block.

    A result that leaves a block is a variable of its own: another node reads it as well only if it has the sharding
    that this node needs, and is no call that may still run when the caller donates the result.

    Args:
        block: a block that is cut.
        shardings: of its variables, to which those of the variables made here are added.
        out_shardings: of its results, UNSPECIFIED where nothing is known.
        donated: its arguments that fragments may donate.
        copied: its arguments that a fragment copies for calls in less time than it takes to pin them.
        mesh: the mesh, maybe empty.
        default: the sharding of everything if there is no mesh, or None.
    """
    making = _Making(block, shardings, donated, copied)
    leaving: dict[int, Var] = {}
    for position, node in enumerate(block.nodes):
        if not isinstance(node, Group):
            making.nodes.append(reading(node, making.env))
            continue
        exports = _Exports(node)
        for i in sorted(i for var in exports.own for i in making.indices.get(var, ())):
            wanted = or_none(out_shardings[i]) or (default and in_memory_of_type(default, type_of(block.outputs[i])))
            if wanted is None and not node.inputs and not mesh.empty:
                wanted = replicated(mesh)  # nothing else would say on which devices it is
            leaving[i] = exports.add(block.outputs[i], new_var(block.outputs[i].aval))
            shardings[leaving[i]] = wanted
        making.add(position, node, exports)
    outputs = tuple(leaving.get(i, atom) for i, atom in enumerate(block.outputs))
    return dataclasses.replace(block, nodes=tuple(making.nodes), outputs=outputs)


class _Exports:
    """What a fragment returns: what it computes or is given, each with the variable that others know it by."""

    def __init__(self, group: Group) -> None:
        self.own = [var for var in group.outputs if not isinstance(var, DropVar)]
        self.forwarded = {node.outputs[0]: node.inputs[0] for node in group.nodes if isinstance(node, Forward)}
        self.pairs: list[tuple[Atom, Var]] = []

    def add(self, atom: Atom, outside: Var) -> Var:
        self.pairs.append((read(self.forwarded, atom), outside))
        return outside


class _Making:
    """Fragments being made of a block.

    Attributes:
        env: what is read in the place of variables.
        indices: for each variable which results of the block it is.
        nodes: what there is so far.
    """

    def __init__(
        self,
        block: VarBlock,
        shardings: dict[Var, Sharding | None],
        donated: Collection[Var],
        copied: Collection[Var],
    ) -> None:
        self._block = block
        self._shardings = shardings
        self._donated = donated
        self._copied = copied
        self._readers: dict[Var, list[int]] = {}
        for position, node in enumerate(block.nodes):
            for var in dict.fromkeys(variables(node.inputs)):
                self._readers.setdefault(var, []).append(position)
        self.indices: dict[Var, list[int]] = {}
        for i, var in enumerate(variables(block.outputs)):  # there are no literals left
            self.indices.setdefault(var, []).append(i)
        self.env: dict[Var, Atom] = {}
        self.nodes: list[VarNode] = []
        self._arguments = {var: i for i, var in enumerate(block.inputs)}

    def add(self, position: int, group: Group, exports: _Exports) -> None:
        """Adds the fragment of a group that returns these results, and what other nodes read."""
        for var in exports.own:
            if var in self._readers:
                self._export(var, exports)
        # A call that may still run reads a copy of what is donated, and of what is copied along with what it waits for.
        beside = self._read_beside(position, exports)
        copies = {}
        for var in dict.fromkeys([*group.inputs, *beside]):
            later = [reader for reader in self._readers[var] if reader > position]
            if (var in self._donated or var in beside) and later and all(map(self._may_still_run, later)):
                copies[var] = exports.add(var, new_var(var.aval))
                self._shardings[copies[var]] = self._shardings[var]
        eqns = [node.eqn for node in group.nodes if isinstance(node, Equation)]
        atoms = [atom for atom, _ in exports.pairs]
        used = variables([*(atom for eqn in eqns for atom in eqn.invars), *atoms])
        consts = {var: self._block.consts[var] for var in used if var in self._block.consts}
        # C++ dispatches a first fragment only if that takes arguments in the order in which the program does.
        taken = tuple(dict.fromkeys([*group.inputs, *copies]))
        if self._arguments.keys() >= {*taken}:
            taken = tuple(sorted(taken, key=self._arguments.__getitem__))
        jaxpr = closed_jaxpr(taken, atoms, eqns, consts)
        inputs = tuple(read(self.env, var) for var in taken)
        outputs = tuple(outside for _, outside in exports.pairs)
        fragment = Fragment(jaxpr, inputs, outputs, group.cost, (False,) * len(inputs))
        self.nodes.append(dataclasses.replace(fragment, by_one_device=group.by_one_device))
        self.env.update(copies)

    def _read_beside(self, position: int, exports: _Exports) -> list[Var]:
        """The arguments to be copied that calls read beside what the group at a position computes.

        Calls with results are left alone: the calling thread may run them.
        """
        own = {*exports.own}
        readers = {reader for var in own for reader in self._readers.get(var, ()) if reader > position}
        calls = [node for i in sorted(readers) if isinstance(node := self._block.nodes[i], ColocatedCall)]
        inputs = [var for call in calls if not call.outputs for var in variables(call.inputs)]
        return [var for var in inputs if var in self._copied and var not in self.env]

    def _export(self, var: Var, exports: _Exports) -> None:
        sharding = self._shardings[var]
        shared = next((out for atom, out in exports.pairs if atom is var and self._agrees(out, sharding)), None)
        if shared is None or any(map(self._may_still_run, self._readers[var])):
            exports.add(var, var)
            return
        self._shardings[shared] = self._shardings[shared] or sharding
        self.env[var] = shared

    def _agrees(self, leaving: Var, sharding: Sharding | None) -> bool:
        own = self._shardings[leaving]
        # The partitioner says P("data") where a user says P("data", None), and nothing of axes of size 1.
        return own is None or sharding is None or own.is_equivalent_to(sharding, type_of(leaving).ndim)

    def _may_still_run(self, position: int) -> bool:
        node = self._block.nodes[position]
        return isinstance(node, ColocatedCall) and not node.is_inline


def shardings_of_fragment(
    fragment: Fragment[Value, Value], mesh: Mesh
) -> tuple[tuple[MaybeSharding, ...], tuple[MaybeSharding, ...]]:
    """The shardings of all arguments and of all results of the jaxpr of a fragment, in a program on this mesh."""
    numbers = [replicated(mesh)] * fragment.numbers
    given, outputs = ([value.sharding for value in values] for values in (fragment.inputs, fragment.outputs))
    before = [value.sharding for value in fragment.gathered] or numbers
    return tuple(map(or_unspecified, [*numbers, *given])), tuple(map(or_unspecified, [*before, *outputs]))


def replicated(mesh: Mesh) -> NamedSharding | None:
    """The sharding of what every device of a mesh has; None without a mesh."""
    return None if mesh.empty else NamedSharding(mesh, jax.sharding.PartitionSpec())
