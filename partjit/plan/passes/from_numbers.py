"""Predicates that follow from numbers among the arguments, such as that of a step: the host computes them.

A call that is made in every hundredth step is in a branch without results, whose predicate is a few operations on the
number of the step. If that is a Python number, the host knows the predicate at once, without any device if it is of
integers. Otherwise one CPU device computes it, which takes a fraction of what all of them take to dispatch a program,
or to ask in each step whether to call. An accelerator would compute it after all that it was given before.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from jax.extend.core import Literal, Var

from partjit._jax.jaxprs import Atom, type_of
from partjit.plan.ir.integers import is_computed_by_host
from partjit.plan.ir.nodes import Branch, Equation, VarBlock, VarNode, variables

__all__ = ["Numbers", "operations_on_numbers"]

_MOST = 64
"""How many operations are few."""

_KINDS = frozenset("biuf")
"""The kinds of dtypes of numbers."""


class Numbers(NamedTuple):
    """The arguments of a program that the host has as numbers.

    Attributes:
        variables: these.
        by_host_alone: whether they tell a predicate only if the host computes it of integers: no device is asked.
    """

    variables: frozenset[Var] = frozenset()
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
    if not numbers.variables:
        return set()
    maker = {var: i for i, node in enumerate(block.nodes) for var in node.outputs}
    readers: dict[Var, set[int]] = {}
    for i, node in enumerate(block.nodes):
        for var in variables(node.inputs):
            readers.setdefault(var, set()).add(i)
    known = {*numbers.variables, *block.consts}
    leaving = {*variables(block.outputs)}
    found: set[int] = set()
    for branch in branches:
        own = _operations(block, branch.inputs[0], maker, known)
        if numbers.by_host_alone and not all(_is_by_host(block.nodes[i]) for i in own):
            continue
        position = block.nodes.index(branch)
        made = [var for i in own for var in block.nodes[i].outputs]
        given = leaving.union(variables(branch.captured))
        if given.isdisjoint(made) and all(readers.get(var, set()) <= own | {position} for var in made):
            found |= own
    return found


def _operations(block: VarBlock, predicate: Atom, maker: dict[Var, int], known: Collection[Var]) -> set[int]:
    """The few equations that compute a predicate from what is known; the empty set if there is more to it."""
    found: set[int] = set()
    left = [predicate]
    while left:
        atom = left.pop()
        if not _is_number(atom):
            return set()
        if isinstance(atom, Literal) or atom in known:
            continue
        position = maker.get(atom)
        node = None if position is None else block.nodes[position]
        if position is None or not isinstance(node, Equation) or node.eqn.effects or len(found) == _MOST:
            return set()
        if position not in found:
            if not all(map(_is_number, node.outputs)):
                return set()
            found.add(position)
            left += node.inputs
    return found


def _is_by_host(node: VarNode) -> bool:
    return isinstance(node, Equation) and is_computed_by_host(node.eqn)


def _is_number(atom: Atom) -> bool:
    aval = type_of(atom)
    return getattr(aval, "shape", None) == () and getattr(aval.dtype, "kind", "") in _KINDS
