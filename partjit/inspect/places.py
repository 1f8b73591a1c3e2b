"""Where in a program something comes from, and what is known of a lowered module and its copies."""

import dataclasses
from collections.abc import Sequence, Set
from typing import Any, TypeAlias

from jax.extend.mlir import ir
from jax.sharding import Mesh

from partjit.inspect.annotated import AnnotatedEquation
from partjit.inspect.inlining import ADDED, names_in, tags_in
from partjit.inspect.marks import is_mark
from partjit.inspect.moves.unused import unused_in_copies
from partjit.inspect.user_lines import Site
from partjit.shardy import ReadShardings, TensorSharding, nested

__all__ = ["Known", "Origin", "Place", "SavedPlace", "known_of_copies", "saved"]


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
        models: the models of operations, by their kinds and shardings; see `partjit.inspect.moves.rewriting`.
        moved: what operations with these models move, and reshards, by their types and shardings.
        written: shardings as attributes.
        staying: whether an operation is merged with no equal one, by its location and the shardings of its operands and
            results; see `partjit.inspect.moves.merging`.
        collectives: the collectives that Shardy has inserted, by what they depend on; see `partjit.inspect.predicted`.
        captures: whether loops may capture anything; see `partjit.xla_rewrites.open_captured`.
        unused: the operations that may be unused, by their locations; None if that is not known. See
            `partjit.inspect.moves.unused`.
        kinds: the kinds of operations, by their locations and by what they have in common.

    Args:
        has_own_locations: whether no two operations of the module have one location; see `known_of_copies`.
    """

    def __init__(self, has_own_locations: bool = False) -> None:
        self.shardings = ReadShardings()
        self.models: dict[tuple[object, ...], Any] = {}
        self.moved: dict[tuple[object, ...], Any] = {}
        self.written: dict[TensorSharding, ir.Attribute] = {}
        self.staying: dict[tuple[object, ...], bool] = {}
        self.collectives: dict[tuple[object, ...], Any] = {}
        self.captures = True
        self.unused: Set[ir.Attribute] | None = None
        self.kinds: dict[object, Any] = {}
        self.has_own_locations = has_own_locations
        self._locations: dict[ir.Attribute, tuple[list[int], bool]] = {}

    def own_location(self, op: ir.Operation) -> ir.Attribute | None:
        """What identifies an operation among those of the module and its copies; None if nothing does."""
        return op.location.attr if self.has_own_locations else None

    def kind(self, op: ir.Operation) -> Any:
        """The kind of an operation, if it is known."""
        return self.kinds.get(op.location.attr) if self.has_own_locations else None

    def tags(self, op: ir.Operation | ir.OpView) -> list[int]:
        """The numbers of the equations that an operation comes from, outermost first."""
        return self._read(op.location)[0]

    def is_added(self, op: ir.Operation | ir.OpView) -> bool:
        """Whether an operation stands for no equation."""
        return self._read(op.location)[1]

    def _read(self, location: ir.Location) -> tuple[list[int], bool]:
        key = location.attr
        if key not in self._locations:
            names = names_in(location)
            self._locations[key] = tags_in(names), ADDED in names
        return self._locations[key]


def known_of_copies(lowered: Any) -> Known:
    """What is known of a module that is copied again and again, which is nothing yet.

    Its operations get locations that no others have. Their copies have them as well, so that what is known of an
    operation does not have to be read from its attributes and operands.
    """
    known = Known(has_own_locations=True)
    with lowered.context:
        for k, op in enumerate(nested(lowered.operation)):
            op.location = ir.Location.name(f"partjit.op{k}", op.location)
        copy = lowered.operation.clone()
        for op in [op for op in nested(copy) if is_mark(op)]:
            op.erase()
        known.unused = unused_in_copies(copy)
    return known
