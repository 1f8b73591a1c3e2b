"""A propagated module read once, for all that look at its operations.

To ask an operation through the bindings takes about as long as a model of it, so that names and shardings are read in
one walk.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from jax.extend.mlir import ir

from partjit.shardy import Shardings, TensorSharding, nested

__all__ = ["Walk", "walk_of"]


class Walk(NamedTuple):
    """The operations of a module, each after those in it, as they were when it was read.

    Attributes:
        ops: the operations.
        names: their names.
        shardings: the shardings of the results of operations, where these have an annotation over the mesh of the
            program. Results of one operation are on one mesh.
    """

    ops: list[ir.Operation]
    names: list[str]
    shardings: Mapping[ir.Value, TensorSharding]

    def named(self, *names: str) -> list[ir.Operation]:
        """The operations of these names."""
        return [op for op, name in zip(self.ops, self.names, strict=True) if name in names]

    def without(self, removed: Collection[ir.Operation]) -> "Walk":
        """The rest, when these were erased."""
        if not removed:
            return self
        left = [(op, name) for op, name in zip(self.ops, self.names, strict=True) if op not in removed]
        return Walk([op for op, _ in left], [name for _, name in left], self.shardings)


def walk_of(module: ir.Module, shardings: Shardings) -> Walk:
    """Reads a module with these shardings."""
    ops = nested(module.operation)
    found: dict[ir.Value, TensorSharding] = {}
    for op in ops:
        of_results = shardings.on(op)
        if not of_results or of_results[0].mesh != "mesh":
            continue
        if len(of_results) == 1:
            found[op.result] = of_results[0]
        else:
            found.update(zip(op.results, of_results, strict=False))
    return Walk(ops, [op.name for op in ops], found)
