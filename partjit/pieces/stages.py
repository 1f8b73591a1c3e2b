"""The stages of a program that takes and returns pieces: traced, lowered, compiled.

Each has what the stage of the program of arrays has, and says what that says; only what is passed and returned are
pieces.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding

from partjit._jax.types import PyTree, PyTreeDef
from partjit.compile import Traced
from partjit.errors import ShardingError
from partjit.pieces.boxes import local_shape_of, local_sharding_of
from partjit.pieces.calls import is_global, of_pieces, pieces_of
from partjit.trace import with_static

__all__ = ["LocalCompiled", "LocalLowered", "LocalTraced"]


class _Stage:
    """A stage of the program of arrays, with what is known of the pieces.

    Attributes:
        of_arrays: the stage of the program of arrays.
    """

    def __init__(self, of_arrays: Any, pieces: "_Pieces") -> None:
        self.of_arrays = of_arrays
        self._pieces = pieces

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of_arrays, name)

    def __repr__(self) -> str:
        return f"<of pieces: {self.of_arrays!r}>"

    @property
    def out_info(self) -> PyTree:
        """A tree like the result, of the types of the pieces.

        Raises:
            ShardingError: an out spec is UNSPECIFIED: what the partitioner chooses is not known yet.
        """
        return jax.tree.map(_type_of_piece, self.of_arrays.out_info)


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """The arguments of a compiled program.

    Attributes:
        shardings: that of the array of which each is a piece; None for one that is passed as it is.
        tree: their structure.
        host: positions and names of arguments that only colocated functions get.
    """

    shardings: Sequence[NamedSharding | None]
    tree: PyTreeDef
    host: frozenset[int | str]

    def arrays_of(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[Sequence[PyTree], dict[str, PyTree]]:
        """The arguments with arrays in the place of pieces; others than expected are left to the program to refuse."""
        dynamic = tuple(arg for i, arg in enumerate(args) if i not in self.host)
        leaves, tree = jax.tree.flatten((dynamic, {name: arg for name, arg in kwargs.items() if name not in self.host}))
        if tree != self.tree:
            return args, kwargs
        arrays = [
            leaf if isinstance(leaf, Tracer) or is_global(leaf) else of_pieces(leaf, sharding)
            for leaf, sharding in zip(leaves, self.shardings, strict=True)
        ]
        objects = (
            *((i, arg, type(arg)) for i, arg in enumerate(args) if i in self.host),
            *((name, arg, type(arg)) for name, arg in kwargs.items() if name in self.host),
        )
        return with_static(tree, arrays, objects)


class LocalTraced(_Stage):
    """A traced program of pieces."""

    def __init__(self, of_arrays: Traced, shardings: Sequence[NamedSharding | None]) -> None:
        host = frozenset(key for key, _ in of_arrays.program.host)
        super().__init__(of_arrays, _Pieces(shardings, of_arrays.in_tree, host))

    def lower(self, **options: Any) -> "LocalLowered":
        """Lowers it, as the program of arrays does."""
        return LocalLowered(self.of_arrays.lower(**options), self._pieces)


class LocalLowered(_Stage):
    """A lowered program of pieces."""

    def compile(self, *args: Any, **options: Any) -> "LocalCompiled":
        """Compiles it, as the program of arrays does."""
        return LocalCompiled(self.of_arrays.compile(*args, **options), self._pieces)


class LocalCompiled(_Stage):
    """A compiled program, to be called with pieces like those it was compiled for."""

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """The pieces of the results.

        Raises:
            TypeError, ValueError: as the program of arrays, for arguments that it was not compiled for.
        """
        # Other processes have to know of a piece that is refused, as they do of what the program of arrays refuses.
        failing_everywhere = getattr(self.of_arrays, "failing_everywhere", contextlib.nullcontext)
        with failing_everywhere():
            args_of_arrays, kwargs_of_arrays = self._pieces.arrays_of(args, kwargs)
        return pieces_of(self.of_arrays(*args_of_arrays, **kwargs_of_arrays))


def _type_of_piece(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = struct.sharding
    if not isinstance(sharding, NamedSharding):
        raise ShardingError(
            "what piece of a result a process has is known from its out spec alone, which is UNSPECIFIED: give it one, "
            "or see the result of a call"
        )
    return jax.ShapeDtypeStruct(
        local_shape_of(struct.shape, sharding),
        struct.dtype,
        sharding=local_sharding_of(sharding),
        weak_type=struct.weak_type,
    )
