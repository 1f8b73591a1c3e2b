"""Predicates that follow from numbers among the arguments, such as that of a step: the host computes them.

A call that is made in every hundredth step is in a branch without results, whose predicate is a few operations on the
number of the step. If that is a Python number, the host knows the predicate at once, without any device if it is of
integers. Otherwise one CPU device computes it, which takes a fraction of what all of them take to dispatch a program,
or to ask in each step whether to call. An accelerator would compute it after all that it was given before.

The number of the step may also be an array that the program returns counted up, as a part of the state. The host then
counts along: of the array that it gets in the next step, it knows the number before the devices have computed it.
"""

import dataclasses
from collections.abc import Collection, Iterable
from typing import NamedTuple

from jax.extend.core import Literal, Var

from partjit._jax.jaxprs import Atom, closed_jaxpr, new_var, type_of
from partjit.plan.ir.integers import is_computed_by_host
from partjit.plan.ir.nodes import Branch, Equation, VarBlock, VarNode
from partjit.plan.ir.plan import Counted
from partjit.plan.ir.walk import variables

__all__ = ["Numbers", "counted", "counters_among", "operations_on_numbers", "with_own_predicates"]

_MOST = 64
"""How many operations are few."""

_KINDS = frozenset("biuf")
"""The kinds of dtypes of numbers."""


class Numbers(NamedTuple):
    """The arguments of a program whose numbers the host knows.

    Attributes:
        variables: those that it has as numbers.
        counters: the arrays of integers that it counts along. They tell a predicate only if the host computes it.
        by_host_alone: whether that is so of the others as well: no device is asked.
    """

    variables: frozenset[Var] = frozenset()
    counters: frozenset[Var] = frozenset()
    by_host_alone: bool = False


def operations_on_numbers(block: VarBlock, branches: Iterable[Branch], numbers: Numbers) -> set[int]:
    """The positions of the equations that compute predicates from numbers, and nothing else that is read.

    Args:
        block: a block with equations.
        branches: those of its branches whose predicates are meant.
        numbers: the inputs that are numbers.

    Returns:
        The empty set unless that is all that some of the predicates depend on.
    """
    chains = _Chains(block, numbers)
    readers: dict[Var, set[int]] = {}
    for i, node in enumerate(block.nodes):
        for var in variables(node.inputs):
            readers.setdefault(var, set()).add(i)
    leaving = {*variables(block.outputs)}
    found: set[int] = set()
    for branch in branches:
        own = chains.predicate(branch)
        if not own:
            continue
        position = block.nodes.index(branch)
        made = [var for i in own for var in block.nodes[i].outputs]
        given = leaving.union(variables(branch.captured))
        if given.isdisjoint(made) and all(readers.get(var, set()) <= own | {position} for var in made):
            found |= own
    return found


def with_own_predicates(block: VarBlock, numbers: Numbers) -> VarBlock:
    """The block, in which nothing else reads what computes the predicates that follow from numbers.

    What others read is computed a second time: `state.step + 1` is a result, and tells whether to log.
    """
    if not numbers.variables | numbers.counters:
        return block
    chains = _Chains(block, numbers)
    nodes: list[VarNode] = []
    for node in block.nodes:
        own = chains.predicate(node) if isinstance(node, Branch) and not node.on_devices else None
        if own and isinstance(node, Branch) and operations_on_numbers(block, [node], numbers) != own:
            env: dict[Var, Atom] = {}
            for equation in (block.nodes[i] for i in sorted(own)):
                assert isinstance(equation, Equation)
                read = [env.get(atom, atom) if isinstance(atom, Var) else atom for atom in equation.inputs]
                outs = [new_var(var.aval) for var in equation.outputs]
                env.update(zip(equation.outputs, outs, strict=True))
                nodes.append(Equation(equation.eqn.replace(invars=read, outvars=outs)))
            predicate = node.inputs[0]
            assert isinstance(predicate, Var)
            node = dataclasses.replace(node, inputs=(env[predicate], *node.inputs[1:]))
        nodes.append(node)
    return dataclasses.replace(block, nodes=tuple(nodes))


def counters_among(block: VarBlock, candidates: Iterable[Var], numbers: Collection[Var]) -> frozenset[Var]:
    """The arguments of a program that are integers, and whose next number the program returns.

    Args:
        block: the program, inlined.
        candidates: those of its inputs that are arrays.
        numbers: those of them that are numbers.
    """
    counters = frozenset(var for var in candidates if _is_integer(var))
    while counters:
        chains = _Chains(block, Numbers(frozenset(numbers), counters))
        read = {var for atom in block.outputs for var in chains.counters(atom)}
        if read == counters:
            break
        counters = frozenset(read)
    return counters


def counted(block: VarBlock, numbers: Numbers) -> Counted | None:
    """What the host counts along in a program; None if that tells no predicate."""
    chains = _Chains(block, numbers)
    branches = [node for node in block.nodes if isinstance(node, Branch) and not node.on_devices]
    told = operations_on_numbers(block, branches, numbers)
    needed = numbers.counters.intersection(var for i in told for var in variables(block.nodes[i].inputs))
    if not needed:
        return None
    results: list[int] = []
    while True:  # what they are counted up by has to be known as well, and nothing else is asked for
        found = [i for i, atom in enumerate(block.outputs) if not needed.isdisjoint(chains.counters(atom))]
        if found == results:
            break
        results = found
        needed = needed.union(*(chains.counters(block.outputs[i]) for i in results))
    atoms = [block.outputs[i] for i in results]
    operations = {i for atom in atoms for i in chains.operations(atom) or ()}
    eqns = [node.eqn for i, node in enumerate(block.nodes) if i in operations and isinstance(node, Equation)]
    read = needed.union(variables([*(atom for eqn in eqns for atom in eqn.invars), *atoms]))
    consts = {var: block.consts[var] for var in block.consts if var in read}
    arguments = [i for i, var in enumerate(block.inputs) if var in read]
    jaxpr = closed_jaxpr([block.inputs[i] for i in arguments], atoms, eqns, consts)
    return Counted(jaxpr, tuple(arguments), tuple(results))


class _Chains:
    """The few equations of a block that compute something from the numbers among its arguments, and from nothing else.

    Args:
        block: the block.
        numbers: those of its inputs that the host knows.
    """

    def __init__(self, block: VarBlock, numbers: Numbers) -> None:
        self._block = block
        self._numbers = numbers
        self._known = {*numbers.variables, *numbers.counters, *block.consts}
        self._maker = {var: i for i, node in enumerate(block.nodes) for var in node.outputs}

    def predicate(self, branch: Branch[Atom, Var]) -> set[int]:
        """The positions of those that compute the predicate of a branch; the empty set unless it follows so."""
        numbers = self._numbers
        found = self.operations(branch.inputs[0]) if numbers.variables or numbers.counters else None
        if not found:
            return set()
        is_by_host = numbers.by_host_alone or not numbers.counters.isdisjoint(self._read(found))
        return found if not is_by_host or all(map(self._is_by_host, found)) else set()

    def counters(self, result: Atom) -> set[Var]:
        """The counters from which the host computes a result that is an integer; none if it does not."""
        found = self.operations(result) if _is_integer(result) else None
        if found is None or not all(map(self._is_by_host, found)):
            return set()
        return {*self._read(found), *variables([result])} & self._numbers.counters

    def operations(self, result: Atom) -> set[int] | None:
        """The positions of the equations that compute a number; None if there is more to it, or many are."""
        found: set[int] = set()
        left = [result]
        while left:
            atom = left.pop()
            if not _is_number(atom):
                return None
            if isinstance(atom, Literal) or atom in self._known:
                continue
            position = self._maker.get(atom)
            node = None if position is None else self._block.nodes[position]
            if position is None or not isinstance(node, Equation) or node.eqn.effects or len(found) == _MOST:
                return None
            if position not in found:
                if not all(map(_is_number, node.outputs)):
                    return None
                found.add(position)
                left += node.inputs
        return found

    def _read(self, positions: Iterable[int]) -> set[Var]:
        return {var for i in positions for var in variables(self._block.nodes[i].inputs)}

    def _is_by_host(self, position: int) -> bool:
        node = self._block.nodes[position]
        return isinstance(node, Equation) and is_computed_by_host(node.eqn)


def _is_integer(atom: Atom) -> bool:
    return _is_number(atom) and type_of(atom).dtype.kind in "biu"


def _is_number(atom: Atom) -> bool:
    aval = type_of(atom)
    return getattr(aval, "shape", None) == () and getattr(aval.dtype, "kind", "") in _KINDS
