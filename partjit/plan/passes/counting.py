"""Loops that carry more values than those of the program: the number of the iteration, for example."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from partjit._jax.jaxprs import Atom, new_var
from partjit.plan.ir.build import Builder
from partjit.plan.ir.nodes import Block, VarLoop

__all__ = ["carrying", "counted"]


def carrying(loop: VarLoop, initial: Sequence[Atom], outputs: Sequence[Var]) -> VarLoop:
    """A loop that carries more values, which its block has already."""
    return dataclasses.replace(
        loop,
        inputs=(*loop.inputs, *initial),
        outputs=(*loop.outputs, *outputs),
        is_buffer=(*loop.is_buffer, *[False] * len(outputs)),
    )


def counted(loop: VarLoop, before: Builder) -> VarLoop:
    """With a carried value that is the number of the iteration."""
    (first,) = before.add(lambda: jax.lax.full((), 0, jnp.int32))
    counting = Builder(loop.eqn, dict(loop.block.consts))
    i = new_var(first.aval)
    (following,) = counting.add(lambda i: i + 1, i)
    block = Block(
        (*loop.block.inputs, i),
        (*loop.block.nodes, *counting.nodes),
        (*loop.block.outputs, following),
        counting.consts,
    )
    loop = dataclasses.replace(loop, block=block, counter=len(loop.outputs))
    return carrying(loop, [first], [new_var(first.aval)])
