"""What nodes of a program there are, down to those in loops and branches."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

from jax.extend.core import Var

from partjit._jax.jaxprs import Atom
from partjit.plan.ir.nodes import AnyNode, Block, Branch, ColocatedCall, Fragment, Loop, Value

__all__ = ["blocks_of", "is_host", "known_number", "variables", "walk", "with_blocks"]

N = TypeVar("N", covariant=True)


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The variables among variables and literals."""
    return [atom for atom in atoms if isinstance(atom, Var)]


def is_host(node: AnyNode) -> bool:
    """Whether the host makes or drives it: a call, or a loop or branch with calls."""
    return isinstance(node, ColocatedCall | Loop | Branch)


def blocks_of(node: AnyNode) -> Sequence[Block]:
    """The blocks of a loop or branch; none for other nodes."""
    return node.blocks if isinstance(node, Loop | Branch) else ()


LoopOrBranch = TypeVar("LoopOrBranch", bound=Loop | Branch)


def with_blocks(node: LoopOrBranch, blocks: Iterable[Block], **changes: Any) -> LoopOrBranch:
    """A loop or branch with other blocks, and with other changes."""
    blocks = tuple(blocks)
    own = {"block": blocks[0]} if isinstance(node, Loop) else {"blocks": blocks}
    return dataclasses.replace(node, **own, **changes)


def walk(nodes: Iterable[N], *, into_fragments: bool = False) -> Iterator[N]:
    """All nodes, those in loops and branches among them, each after the node that contains it.

    Args:
        nodes: the nodes.
        into_fragments: whether those that fragments with calls are made of are among them as well.
    """
    for node in nodes:
        yield node
        if isinstance(node, Loop | Branch):
            for block in node.blocks:
                yield from walk(block.nodes, into_fragments=into_fragments)
        elif into_fragments and isinstance(node, Fragment):
            yield from walk(cast(Iterable[N], node.nodes), into_fragments=True)


def known_number(loop: Loop[Value, Value]) -> Value | None:
    """The carried value that is the number of the iteration, if calls or what the host computes read it."""
    if loop.counter is None or loop.trip_count is None:
        return None
    number = loop.outputs[loop.counter]
    readers = (node for node in walk(loop.block.nodes) if number in node.inputs)
    is_read = any(isinstance(node, ColocatedCall) or getattr(node, "by_one_device", False) for node in readers)
    return number if is_read else None
