"""A propagated module read once, for all that look at its operations.

To ask an operation through the bindings takes about as long as a model of it, so that names and shardings are read in
one walk.
"""

from collections.abc import Collection, Mapping
from itertools import compress
from typing import NamedTuple

from jax.extend.mlir import ir

from partjit.shardy import Shardings, TensorSharding, main_of, nested

__all__ = ["Walk", "walk_of"]


class Walk(NamedTuple):
    """The operations of a module, each after those in it, as they were when it was read.

    Attributes:
        ops: the operations.
        names: their names.
        shardings: the shardings of the arguments of the program and of the results of operations, where these have an
            annotation over the mesh of the program, and of arrays that StableHLO's operations of one result compute
            without one, which are replicated. Results of one operation are on one mesh.
    """

    ops: list[ir.Operation]
    names: list[str]
    shardings: Mapping[ir.Value, TensorSharding]

    def named(self, *names: str) -> list[ir.Operation]:
        """The operations of these names."""
        if {*names}.isdisjoint(self.names):
            return []  # as of most names
        return [op for op, name in zip(self.ops, self.names, strict=True) if name in names]

    def without(self, removed: Collection[ir.Operation]) -> "Walk":
        """The rest, when these were erased."""
        if not removed:
            return self
        stays = [op not in removed for op in self.ops]
        return Walk([*compress(self.ops, stays)], [*compress(self.names, stays)], self.shardings)


def walk_of(module: ir.Module, shardings: Shardings) -> Walk:
    """Reads a module with these shardings."""
    ops = nested(module.operation)
    names = [op.name for op in ops]
    arguments = zip(main_of(module).regions[0].blocks[0].arguments, shardings.of_arguments(), strict=True)
    found: dict[ir.Value, TensorSharding] = {
        value: sharding for value, sharding in arguments if sharding is not None and sharding.mesh == "mesh"
    }
    found.update(shardings.of_operations(ops, names))
    return Walk(ops, names, found)
