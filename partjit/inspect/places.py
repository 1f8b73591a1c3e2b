"""Where in a program something comes from, and what is known of a lowered module and its copies."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from jax.extend.mlir import ir
from jax.sharding import Mesh

from partjit.inspect.annotated import AnnotatedEquation
from partjit.inspect.inlining import ADDED, TAG
from partjit.inspect.user_lines import Site
from partjit.shardy import TensorSharding

__all__ = ["Known", "Origin", "Place", "SavedPlace", "saved"]

_TAG = re.compile(rf"{TAG}(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class SavedPlace:
    """Where something comes from: an equation, without what cannot be pickled.

    Attributes:
        number, primitive, trip_count, site, library, module, scope: as those of an `AnnotatedEquation`.
        bodies: the names of the jaxprs in it.
    """

    number: int
    primitive: str
    trip_count: int | None
    bodies: tuple[str, ...]
    site: Site | None
    library: Site | None
    module: str
    scope: str


Place: TypeAlias = AnnotatedEquation | SavedPlace


def saved(place: Place) -> SavedPlace:
    """An equation as a place."""
    return SavedPlace(
        place.number,
        place.primitive,
        place.trip_count,
        tuple(place.bodies),
        place.site,
        place.library,
        place.module,
        place.scope,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """What a module was lowered from.

    Attributes:
        name: the name of the program.
        mesh: its mesh.
        equations: its equations, by their numbers.
    """

    name: str
    mesh: Mesh
    equations: Sequence[Place]


class Known:
    """What attributes say that are read often, in a module and its copies: they share their context.

    Attributes:
        shardings: what attributes of sharding say.
        models: the models of operations; see `partjit.inspect.moves.rewriting`.
        captures: whether loops may capture anything; see `partjit.xla_rewrites.open_captured`.
    """

    def __init__(self) -> None:
        self.shardings: dict[ir.Attribute, TensorSharding] = {}
        self.models: dict[tuple[object, ...], Any] = {}
        self.captures = True
        self._locations: dict[ir.Attribute, tuple[list[int], bool]] = {}

    def tags(self, op: ir.Operation | ir.OpView) -> list[int]:
        """The numbers of the equations that an operation comes from, outermost first."""
        return self._read(op.location)[0]

    def is_added(self, op: ir.Operation | ir.OpView) -> bool:
        """Whether an operation stands for no equation."""
        return self._read(op.location)[1]

    def _read(self, location: ir.Location) -> tuple[list[int], bool]:
        key = location.attr
        if key not in self._locations:  # a text takes ten times as long as a look-up
            text = str(location)
            self._locations[key] = [int(number) for number in _TAG.findall(text)], ADDED in text
        return self._locations[key]
