"""Values in the body of a `shard_map`, as arrays outside of it."""

import dataclasses
import math
from collections.abc import Sequence

from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from partjit._jax.jaxprs import Atom, new_var, type_of
from partjit._jax.shard_maps import type_over_mesh

__all__ = ["REPLICATED", "Form"]


@dataclasses.dataclass(frozen=True)
class Form:
    """How an array over the mesh has the values of the shards as its shards.

    Attributes:
        spec: the mesh axes that the array is sharded over.
        added: a dimension that the shards of the array have, of size 1, and the value has not; or None.
    """

    spec: P
    added: int | None = None

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes that the array is sharded over."""
        return frozenset().union(*self._sharded_dims())

    def shard_of(self, value: Atom) -> tuple[int, ...]:
        """The shape of a shard of the array of a value."""
        shape = type_of(value).shape
        return shape if self.added is None else (*shape[: self.added], 1, *shape[self.added :])

    def array_of(self, value: Atom, mesh: Mesh) -> Var:
        """A variable for the array of a value."""
        shape = [*self.shard_of(value)]
        for dim, axes in enumerate(self._sharded_dims()):
            shape[dim] *= math.prod(mesh.shape[axis] for axis in axes)
        return new_var(type_over_mesh(type_of(value), tuple(shape)))

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """The sharding of the array."""
        return NamedSharding(mesh, self.spec)

    @property
    def of_slices(self) -> "Form | None":
        """The form of the slices along dimension 0 if this is that of the stack; None if that dimension is sharded."""
        if self.added == 0 or (self.spec and self.spec[0] is not None):
            return None
        return Form(P(*self.spec[1:]), None if self.added is None else self.added - 1)

    @property
    def of_stack(self) -> "Form":
        """The form of a stack along dimension 0 if this is that of its slices."""
        return Form(P(None, *self.spec), None if self.added is None else self.added + 1) if self.spec else self

    def _sharded_dims(self) -> Sequence[Sequence[str]]:
        return [() if names is None else names if isinstance(names, tuple) else (names,) for names in self.spec]


REPLICATED = Form(P())
