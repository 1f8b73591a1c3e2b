"""Kinds of operations, all of which have one model if they are sharded alike."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from partjit.inspect.moves.model import Model, Operation
from partjit.inspect.moves.tiles import Unmodelled

__all__ = ["NONE", "UNMODELLED", "Kind", "model_of"]


class Kind(NamedTuple):
    """What operations have in common that have one model if their operands and results are sharded alike.

    Attributes:
        number: of the kind.
        sizes: of the axes of the mesh, those that are manual around them left out.
        is_modelled_alone: whether the model does not look at other operations.
    """

    number: int
    sizes: Mapping[str, int]
    is_modelled_alone: bool


NONE, UNMODELLED = (Model(operands=(), results=()) for _ in range(2))  # nothing is moved; it is not known


def model_of(find: Callable[[Operation], Model | None], operation: Operation) -> Model:
    """The model of an operation; `NONE` if nothing is moved, `UNMODELLED` if it is not known what."""
    sharded = [tensor for tensor in (*operation.operands, *operation.results) if tensor.is_sharded]
    if not sharded or any(0 in tensor.shape for tensor in operation.results):
        return NONE
    if any(tensor.sharding.mesh != "mesh" for tensor in sharded):
        return NONE
    try:
        return find(operation) or NONE
    except Unmodelled:
        return UNMODELLED
