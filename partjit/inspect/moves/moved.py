"""What stands for operations and reshards once it is written out what XLA's partitioner moves for them."""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

from jax.extend.mlir import ir

from partjit.inspect.moves.model import Transfer

__all__ = ["CALL", "Moved", "most_sent", "moved_by"]

CALL = "partjit.moves"
"""The name of the calls that stand for operations."""


@dataclasses.dataclass(frozen=True, eq=False)
class Moved:
    """An operation that XLA's partitioner moves data for, or a reshard.

    Attributes:
        name: of the operation: `stablehlo.slice`.
        transfers: what is moved, besides the reshards of operands and results; None if that is not modelled.
        bound: bytes that a device sends at most if it is not.
        needed: bytes that a device needs for it at most then; None if these are as many.
        dtypes: the names of the dtypes of its arrays if it is not.
        collectives: what these are in a program, by the equations that they are of and how often they run.
    """

    name: str
    transfers: tuple[Transfer, ...] | None
    bound: int = 0
    needed: int | None = None
    dtypes: frozenset[str] = frozenset()
    collectives: dict[Hashable, Any] = dataclasses.field(default_factory=dict)


def moved_by(op: ir.Operation) -> int | None:
    """The number of what an operation stands for, if it is a call that a `Writing` made."""
    if op.name != "stablehlo.custom_call" or ir.StringAttr(op.attributes["call_target_name"]).value != CALL:
        return None
    return int(ir.StringAttr(op.attributes["backend_config"]).value)


def most_sent(transfers: Sequence[Transfer]) -> int:
    """The bytes that a device sends at most for these."""
    steps = ((step.kind, math.prod(step.result) * tensor.itemsize) for step, tensor in transfers)
    return sum(2 * nbytes if kind == "all-reduce" else nbytes for kind, nbytes in steps)
