"""Specs: how a user shards an array over a mesh, parsed.

A `PartitionSpec` is what the user wrote ("rows over `data`, columns over `model`"); a `ParsedPartitionSpec` is its
meaning: per dimension, the tuple of mesh axes it is sharded over, major to minor. Transformations insert axes into the
meaning but not into what the user wrote, so a `SpecSync` records whether the two still agree.

This is the first stage: nothing here depends on a mesh or on a value.
"""

import dataclasses
import enum
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath

from partjit import lazy
from partjit._jax.shardings import UNSPECIFIED, UnspecifiedValue
from partjit._jax.types import PyTree
from partjit.auto_specs import Auto
from partjit.checks import (
    abridged,
    flattened,
    items_of,
    require,
    require_flag,
    require_integer,
    require_mesh_type,
    require_text,
    shown,
    wrong_type,
)

if TYPE_CHECKING:
    from partjit.render import html
else:
    html = lazy.module("partjit.render.html")

__all__ = [
    "FROM_ARRAY",
    "FROM_GDA",
    "MAX_RANK",
    "UNSPECIFIED",
    "FromArray",
    "ParsedPartitionSpec",
    "Spec",
    "SpecSync",
    "parse_spec_tree",
]

UNCONSTRAINED: Final = P.UNCONSTRAINED


class SpecSync(enum.IntEnum):
    """How far the partitions of a spec still say what the user's spec says.

    Example:
        >>> spec = ParsedPartitionSpec.from_user_input(P("x"), "in_axis_resources")
        >>> [spec.sync.name, *(spec.insert_axis_partitions(0, axes).sync.name for axes in [(), ("y",)])]
        ['IN_SYNC', 'DIM_PERMUTE', 'OUT_OF_SYNC']
    """

    OUT_OF_SYNC = 0
    """Mesh axes were inserted: the user's spec says something else."""
    DIM_PERMUTE = 1
    """Dimensions without mesh axes were inserted: the user's spec is right up to the positions of the dimensions."""
    IN_SYNC = 2
    """The partitions are the user's spec."""


class FromArray(enum.Enum):
    """The type of `FROM_ARRAY`. An enumeration member stays the same object through pickling and copying."""

    FROM_ARRAY = "FROM_ARRAY"

    def __repr__(self) -> str:
        return self.value


FROM_ARRAY: Final = FromArray.FROM_ARRAY
"""An in spec: take the committed array's own sharding."""
FROM_GDA: Final = FROM_ARRAY
"""The name `FROM_ARRAY` had when distributed arrays were called GlobalDeviceArray."""

Partition: TypeAlias = Any
"""The mesh axes of a dimension, a tuple of names, or UNCONSTRAINED: jax has no type for that."""

MAX_RANK: Final = 1024
"""No array has more dimensions; a number beyond would only ask for memory."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ParsedPartitionSpec:
    """The meaning of a `PartitionSpec`.

    Two parsed specs are equal when they partition every dimension alike and are equally in sync; how the user spelled
    them does not matter, nor do trailing unpartitioned dimensions.

    Attributes:
        unsafe_user_spec: what the user wrote. "Unsafe" because it may no longer be what `partitions` say; read
            `user_spec` instead.
        partitions: per dimension, the mesh axes it is sharded over, major to minor; `()` leaves the dimension unsharded
            and `UNCONSTRAINED` leaves it to the partitioner (in constraints, and for the batch of `jax.vmap`). Its
            length is the least rank of a value with this spec.
        sync: whether the partitions still are what the user wrote.
        mesh: the spec's own mesh (it came from a `NamedSharding`), or None for the program's mesh.
        memory_kind: the memory of its shards, or None for the default.
        reductions: what the `PartitionSpec` says of unreduced and reduced axes, by keyword; empty if it says nothing.
        abstract_mesh: the abstract mesh that it came with. It cannot decide where a program runs, so this is that of a
            program only where there is no other.

    Example:
        >>> spec = ParsedPartitionSpec.from_user_input(P("x", None, ("y", "z")), "in_axis_resources")
        >>> spec.partitions
        (('x',), (), ('y', 'z'))
        >>> spec.insert_axis_partitions(0, ()).partitions
        ((), ('x',), (), ('y', 'z'))
        >>> spec == ParsedPartitionSpec.from_user_input(P(["x"], (), ("y", "z"), None), "in_axis_resources")
        True

    Source: `ParsedPartitionSpec` of `jax.experimental.pjit` as of jax 0.2.26.
    """

    unsafe_user_spec: P | None
    partitions: tuple[Partition, ...]
    sync: SpecSync = SpecSync.IN_SYNC
    mesh: Mesh | None = None
    memory_kind: str | None = None
    reductions: tuple[tuple[str, Any], ...] = ()
    abstract_mesh: AbstractMesh | None = None

    def __post_init__(self) -> None:
        what = "ParsedPartitionSpec"
        if type(self.partitions) is not tuple:
            expected = "a tuple with, per dimension, a tuple of mesh axes or PartitionSpec.UNCONSTRAINED"
            object.__setattr__(self, "partitions", items_of(what, "partitions", self.partitions, expected))
        for dim, partition in enumerate(self.partitions):
            if type(partition) is not tuple or not _STR.issuperset(map(type, partition)):
                _check_partition(what, f"partitions[{dim}]", partition)
        if type(self.unsafe_user_spec) is not P:
            require(what, "unsafe_user_spec", self.unsafe_user_spec, P | None, "a PartitionSpec or None")
        require(what, "sync", self.sync, SpecSync, "a SpecSync")
        if self.mesh is not None:
            require_mesh_type(what, "mesh", self.mesh)
        if self.memory_kind is not None:
            require(what, "memory_kind", self.memory_kind, str, "the name of a memory, or None")

    @classmethod
    def from_user_input(
        cls, entry: P | NamedSharding | None, arg_name: str, *, allow_unconstrained_dims: bool = False
    ) -> "ParsedPartitionSpec":
        """Parses one leaf of a spec tree.

        Args:
            entry: a `PartitionSpec`, a `NamedSharding` (which brings its own mesh), or None for "replicated".
            arg_name: the user's name of the tree the leaf is in, for messages: `"in_axis_resources"`.
            allow_unconstrained_dims: whether `PartitionSpec.UNCONSTRAINED` entries are legal (in constraints).

        Raises:
            TypeError: `entry` is none of these.
            ValueError: a mesh axis is used twice, or a dimension is unconstrained where it may not be.
        """
        require_text("ParsedPartitionSpec.from_user_input", "arg_name", arg_name, "what the specs are called")
        require_flag("ParsedPartitionSpec.from_user_input", "allow_unconstrained_dims", allow_unconstrained_dims)
        if entry is None:
            return cls(None, ())
        if isinstance(entry, NamedSharding):
            mesh, abstract = (None, entry.mesh) if isinstance(entry.mesh, AbstractMesh) else (entry.mesh, None)
            parsed = cls.from_user_input(entry.spec, arg_name, allow_unconstrained_dims=allow_unconstrained_dims)
            return dataclasses.replace(parsed, mesh=mesh, memory_kind=entry.memory_kind, abstract_mesh=abstract)
        if not isinstance(entry, P):
            raise TypeError(
                f"{arg_name} leaf specifications are expected to be PartitionSpec instances or None, but got "
                f"{shown(entry)}"
                f"{_did_you_mean(entry)}"
            )
        partitions = tuple(_parse_partition(partition) for partition in entry.partitions)
        for dim, partition in enumerate(partitions):
            _check_partition(arg_name, f"{arg_name} entry {dim}", partition)
        if UNCONSTRAINED in partitions and not allow_unconstrained_dims:
            raise ValueError(
                f"Unconstrained dims are not allowed in {arg_name}, but got {entry}: say None to keep a dimension "
                "unsharded, leave the spec out (UNSPECIFIED) to let the partitioner choose, or use "
                "with_sharding_constraint inside the function"
            )
        axes = [axis for partition in partitions if partition is not UNCONSTRAINED for axis in partition]
        duplicates = sorted({axis for axis in axes if axes.count(axis) > 1})
        if duplicates:
            raise ValueError(
                f"A single {arg_name} specification can map every mesh axis to at most one positional dimension, but "
                f"{entry} has duplicate entries for {', '.join(f'`{axis}`' for axis in duplicates)}"
            )
        return cls(entry, partitions, reductions=_reductions(entry))

    @property
    def user_spec(self) -> P | None:
        """What the user wrote. Raises AssertionError once a transformation has altered the spec."""
        return self.unsynced_user_spec(SpecSync.IN_SYNC)

    def unsynced_user_spec(self, min_sync: SpecSync) -> P | None:
        """What the user wrote, if the spec is at least `min_sync` in sync; AssertionError otherwise."""
        require("unsynced_user_spec", "min_sync", min_sync, SpecSync, "a SpecSync")
        if self.sync < min_sync:
            raise AssertionError(
                f"{self!r} is {self.sync.name}, so it must not be shown as the user's {self.unsafe_user_spec}"
            )
        return self.unsafe_user_spec

    def insert_axis_partitions(self, dim: int, partition: Partition) -> "ParsedPartitionSpec":
        """This spec for a value with one more dimension.

        Args:
            dim: the position of the new dimension; missing dimensions before it are padded with `()`.
            partition: the mesh axes of the new dimension, `()` for none, or `UNCONSTRAINED`.

        Returns:
            A new spec, `OUT_OF_SYNC` after mesh axes were inserted, and at best `DIM_PERMUTE` otherwise.

        Raises:
            TypeError: `dim` is no number, or `partition` no tuple of axes.
            ValueError: `dim` is negative, or more than any rank.
        """
        dim = require_integer("insert_axis_partitions", "dim", dim, 0, MAX_RANK)
        _check_partition("insert_axis_partitions", "partition", partition)
        padded = self.partitions + ((),) * (dim - len(self.partitions))
        return dataclasses.replace(
            self,
            partitions=(*padded[:dim], partition, *padded[dim:]),
            sync=min(self.sync, SpecSync.DIM_PERMUTE if partition in ((), UNCONSTRAINED) else SpecSync.OUT_OF_SYNC),
        )

    @property
    def partition_spec(self) -> P:
        """The partitions as a `PartitionSpec` jax understands."""
        entries = (p if p is UNCONSTRAINED else p[0] if len(p) == 1 else p or None for p in self.partitions)
        return P(*entries, **dict(self.reductions))

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """All mesh axes the spec names, in order of the dimensions."""
        return tuple(axis for partition in self.partitions if partition is not UNCONSTRAINED for axis in partition)

    @property
    def reduction_axes(self) -> tuple[Hashable, ...]:
        """The mesh axes that the spec calls unreduced or reduced."""
        both = dict(self.reductions)
        return tuple(axis for which in ("unreduced", "reduced") for axis in both.get(which, ()))

    @property
    def unconstrained_dims(self) -> frozenset[int]:
        """The dimensions left to the partitioner."""
        return frozenset(i for i, partition in enumerate(self.partitions) if partition is UNCONSTRAINED)

    def named_sharding(self, mesh: Mesh) -> NamedSharding:
        """The sharding with this spec in a program on `mesh` (its own mesh takes precedence).

        Raises:
            TypeError: `mesh` is no mesh.
            ValueError: the spec names an axis that the mesh does not have.
        """
        require_mesh_type("named_sharding", "mesh", mesh, or_abstract=True)
        return NamedSharding(self.mesh or mesh, self.partition_spec, memory_kind=self.memory_kind)

    @property
    def _meaning(self) -> tuple[object, ...]:
        partitions = self.partitions
        while partitions and partitions[-1] == ():
            partitions = partitions[:-1]
        return partitions, self.sync, self.mesh, self.memory_kind, self.reductions

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParsedPartitionSpec) and self._meaning == other._meaning

    def __hash__(self) -> int:
        return hash(self._meaning)

    def __len__(self) -> int:
        return len(self.partitions)

    def __getitem__(self, dim: int) -> Partition:
        return self.partitions[dim]

    def __iter__(self) -> Iterator[Partition]:
        return iter(self.partitions)

    def __str__(self) -> str:
        return str(self.partition_spec)

    def _repr_html_(self) -> str:
        over = ["left to the partitioner" if p is UNCONSTRAINED else ", ".join(p) or "unsharded" for p in self]
        sync = "" if self.sync is SpecSync.IN_SYNC else f" ({self.sync.name})"
        rows = [[f"dim {dim}", axes] for dim, axes in enumerate(over)]
        return html.fragment(html.table(f"{self}{sync}", ["", "sharded over"], rows))

    def __repr__(self) -> str:
        mesh = "" if self.mesh is None else f", mesh={self.mesh}"
        memory = "" if self.memory_kind is None else f", memory_kind={self.memory_kind!r}"
        return f"ParsedPartitionSpec(partitions={self.partitions}, sync={self.sync.name}{mesh}{memory})"


Spec = ParsedPartitionSpec | UnspecifiedValue
"""The spec of a value of a program: parsed, or UNSPECIFIED where the partitioner chooses."""


def parse_spec_tree(
    tree: PyTree, arg_name: str, *, allow_unconstrained_dims: bool = False, allow_auto: bool = False
) -> PyTree:
    """Parses every leaf of a tree of specs.

    Args:
        tree: any pytree of `PartitionSpec`, `NamedSharding`, None, `UNSPECIFIED` and, for inputs, `FROM_ARRAY`.
        arg_name: the user's name of the tree, for messages; that of a tree of in specs starts with "in_".
        allow_unconstrained_dims: whether `UNCONSTRAINED` dimensions are legal.
        allow_auto: whether `AUTO` is, which stays as it is.

    Returns:
        The same tree with `ParsedPartitionSpec`, `UNSPECIFIED` or `FROM_ARRAY` leaves.

    Raises:
        TypeError, ValueError: as `ParsedPartitionSpec.from_user_input`, with the path of the leaf.
    """

    def parse(path: KeyPath, leaf: Any) -> Spec | FromArray | Auto:
        if isinstance(leaf, UnspecifiedValue) or (allow_auto and isinstance(leaf, Auto)):
            return leaf
        if leaf is FROM_ARRAY:
            if arg_name.startswith("in_"):
                return leaf
            raise ValueError(
                f"{arg_name}{jax.tree_util.keystr(path)} cannot be FROM_ARRAY: only an argument has a sharding of its "
                "own to take"
            )
        try:
            return ParsedPartitionSpec.from_user_input(
                leaf, arg_name, allow_unconstrained_dims=allow_unconstrained_dims
            )
        except (TypeError, ValueError) as error:
            if not path:
                raise
            raise type(error)(f"{error} (at {arg_name}{jax.tree_util.keystr(path)})") from None

    leaves, structure = flattened(tree, arg_name, is_leaf=lambda leaf: leaf is None)
    return structure.unflatten([parse(path, leaf) for path, leaf in leaves])


def _parse_partition(entry: object) -> Partition:
    if entry is None:
        return ()
    if entry is UNCONSTRAINED:
        return entry
    return tuple(entry) if isinstance(entry, list | tuple) else (entry,)


def _reductions(spec: Any) -> tuple[tuple[str, Any], ...]:
    """What a spec says of unreduced and reduced axes: how `pickle` makes it again, which knows of every keyword."""
    if not (spec.unreduced or spec.reduced):
        return ()
    return tuple(spec.__getnewargs_ex__()[1].items())


_STR = frozenset({str})


def _check_partition(where: str, name: str, partition: Partition) -> None:
    if partition is UNCONSTRAINED:
        return
    expected = "a tuple of mesh axes, () for none"
    require(where, name, partition, tuple, expected)
    for axis in partition:
        if not isinstance(axis, Hashable) or axis is None:
            raise wrong_type(where, name, partition, f"{expected}; an axis is named by a str or another hashable value")


def _did_you_mean(entry: object) -> str:
    if isinstance(entry, str):
        return f"; did you mean PartitionSpec({abridged(entry)})?"
    if isinstance(entry, jax.sharding.Sharding):
        return (
            f"; of jax's shardings only NamedSharding says how mesh axes map to dimensions, not {type(entry).__name__}"
        )
    return ""
