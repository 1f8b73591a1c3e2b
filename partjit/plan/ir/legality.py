"""What is legal at each stage of a program, from the jaxpr to the plan.

A pass says at which stage it leaves a block, and `check_stage` looks whether that is so: always in the tests of partjit
and where the environment variable `PARTJIT_VERIFY_PASSES` is 1. It costs as much as planning. Without it only the plan
is verified, by `partjit.plan.ir.verify`.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence, Set

from jax.extend.core import Var

from partjit._jax.jaxprs import Atom
from partjit.calls import makes_calls
from partjit.plan.ir.nodes import (
    AnyNode,
    Block,
    Branch,
    ColocatedCall,
    Equation,
    Fragment,
    Group,
    Loop,
    Transfer,
    Value,
)
from partjit.plan.ir.walk import blocks_of

__all__ = ["STAGES", "PlanError", "Stage", "check_stage", "faults_of", "refuse", "verifies_passes"]


class PlanError(AssertionError):
    """A plan is broken: this is a fault of partjit, not of the program."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """What is legal at a stage.

    Attributes:
        nodes: the kinds of nodes.
        calls_in: the primitives whose equations may still make calls, inside of them.
        inside: the stage of the blocks of loops and branches.
        has_values: whether nodes read and give `Value`s, and have names; otherwise variables of jax.
    """

    nodes: tuple[type, ...]
    calls_in: tuple[str, ...] = ()
    inside: str = "structured"
    has_values: bool = False


_DRIVEN = (ColocatedCall, Loop, Branch)

STAGES = {
    "inlined": Stage((Equation, ColocatedCall), ("scan", "while", "cond", "shard_map")),
    "unmapped": Stage((Equation, ColocatedCall), ("scan", "while", "cond")),
    "structured": Stage((Equation, *_DRIVEN)),
    "cut": Stage((Group, *_DRIVEN)),
    "fragments": Stage((Fragment, *_DRIVEN)),
    "bound": Stage((Fragment, *_DRIVEN), inside="bound", has_values=True),
    "transferred": Stage((Fragment, Transfer, *_DRIVEN), inside="transferred", has_values=True),
}


def verifies_passes() -> bool:
    """Whether blocks are checked after each pass."""
    return os.environ.get("PARTJIT_VERIFY_PASSES", "0") not in ("", "0")


def check_stage(block: Block, stage: str, constants: Sequence[Value] = ()) -> None:
    """Checks what a pass made, if blocks are to be checked after each pass.

    Args:
        block: what it made.
        stage: the stage at which it leaves a block.
        constants: the values that come from nowhere.

    Raises:
        PlanError: it lists everything that is illegal.
    """
    if verifies_passes():
        refuse(f"a program at the stage {stage!r}", [*faults_of(block, stage, {*constants})])


def refuse(what: str, faults: Sequence[str], shown: object = "") -> None:
    """Raises PlanError if there are faults, with what it is about and all of them."""
    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults)
        reason = "is broken, which is a fault of partjit. Please report it with the program."
        raise PlanError(f"{what} {reason}\n{lines}\n{shown}".rstrip())


def faults_of(block: Block, stage: str, outside: Set[object]) -> Iterator[str]:
    """What is illegal in a block at a stage, given what is defined outside of it."""
    legal = STAGES[stage]
    defined = {*outside, *block.inputs, *block.consts}
    for node in block.nodes:
        what = _shown(node)
        if not isinstance(node, legal.nodes):
            yield f"{what} is a {type(node).__name__}"
        if isinstance(node, Equation) and node.eqn.primitive.name not in legal.calls_in and makes_calls(node.eqn):
            yield f"{what} makes calls"
        yield from (
            f"{what} reads {_shown(atom)} before it is there" for atom in _variables(node.inputs) if atom not in defined
        )
        yield from (f"{what} defines {_shown(atom)} again" for atom in node.outputs if atom in defined)
        if legal.has_values:
            atoms = (*node.inputs, *node.outputs)
            yield from (f"{what} has {atom} for a value" for atom in atoms if not isinstance(atom, Value))
        yield from _faults_of_blocks(node, legal, defined if legal.has_values else set())
        defined.update(node.outputs)
    yield from (f"the result {_shown(a)} is never defined" for a in _variables(block.outputs) if a not in defined)


def _faults_of_blocks(node: AnyNode, legal: Stage, outside: Set[object]) -> Iterator[str]:
    for inner in blocks_of(node):
        if isinstance(node, Loop | Branch) and len(inner.outputs) != len(node.outputs):
            yield f"{_shown(node)} is given {len(inner.outputs)} values instead of {len(node.outputs)}"
        if isinstance(node, Loop | Branch) and not legal.has_values:
            given = len(node.inputs) - isinstance(node, Branch)
            if len(inner.inputs) != given:
                yield f"a block of {_shown(node)} takes {len(inner.inputs)} values instead of {given}"
        if legal.has_values:  # what a block reads from around it is defined there
            inner = dataclasses.replace(inner, inputs=node.outputs if isinstance(node, Loop) else ())
        yield from faults_of(inner, legal.inside, outside)


def _variables(atoms: Iterable[Atom | Value]) -> list[Var | Value]:
    return [atom for atom in atoms if isinstance(atom, Var | Value)]


def _shown(what: AnyNode | Var | Value) -> str:
    if isinstance(what, Equation):
        return what.eqn.primitive.name
    return str(what) if isinstance(what, Var) else getattr(what, "name", "") or type(what).__name__
