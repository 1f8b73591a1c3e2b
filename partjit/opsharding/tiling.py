"""The content of an `OpSharding`, independent of its form."""

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from partjit.errors import UnrepresentableShardingError
from partjit.opsharding.superdims import Digit

__all__ = ["Kind", "MalformedShardingError", "Tiling", "named_tiling", "tiled"]


class MalformedShardingError(UnrepresentableShardingError):
    """A sharding contradicts itself, or a text is none.

    Attributes:
        expected: what should be there, in words; empty if that is not known.
        field: the argument of `tiled` that is wrong; empty if none is by itself.
        span: the part of a text that is wrong, as start and stop, if that is known.
    """

    def __init__(self, problem: str, expected: str = "", field: str = "", span: tuple[int, int] | None = None) -> None:
        super().__init__(f"this is no sharding: {problem}")
        self.expected, self.field, self.span = expected, field, span


class Kind(enum.IntEnum):
    """The types of an `OpSharding`, by their numbers in its wire format."""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3  # the proto calls it OTHER
    MANUAL = 4
    UNKNOWN = 5
    UNREDUCED = 6


class Tiling(NamedTuple):
    """The content of one `OpSharding`.

    The tiles form a grid with one dimension per dimension of the value, followed by one per subgroup: within a subgroup
    of kind REPLICATED the devices hold copies of one tile. Which device holds which tile is either `devices` or, as the
    iota form, `arange(n).reshape(reshape_dims).transpose(transpose_perm)`, both read in the order of the grid.

    Attributes:
        kind: its type.
        grid: the sizes of the dimensions of the grid, subgroups included; empty unless TILED.
        subgroups: the kinds of the last dimensions of the grid.
        devices: the device of each tile, or None for the iota form.
        reshape_dims, transpose_perm: the iota form, empty if there are `devices`.
        elements: of a TUPLE, each a `Tiling`.
        shard_group: whether it is tied to the sharding of other values.
    """

    kind: Kind
    grid: tuple[int, ...] = ()
    subgroups: tuple[Kind, ...] = ()
    devices: tuple[int, ...] | None = None
    reshape_dims: tuple[int, ...] = ()
    transpose_perm: tuple[int, ...] = ()
    elements: "tuple[Tiling, ...]" = ()
    shard_group: bool = False

    @property
    def assignment(self) -> np.ndarray:
        """The device of each tile, in the order of the grid."""
        if self.devices is not None:
            return np.array(self.devices)
        return np.arange(math.prod(self.grid)).reshape(self.reshape_dims).transpose(self.transpose_perm)

    def __str__(self) -> str:
        if self.kind is Kind.TUPLE:
            return "{" + ", ".join(map(str, self.elements)) + "}"
        if self.kind is not Kind.TILED:
            return "{" + self.kind.name.lower() + "}"
        if self.devices is None:
            perm = self.transpose_perm
            transposed = f"T({','.join(map(str, perm))})" if len(perm) > 1 else ""
            devices = f"<=[{','.join(map(str, self.reshape_dims))}]{transposed}"
        else:
            devices = ",".join(map(str, self.devices[:16])) + (",..." if len(self.devices) > 16 else "")
        subgroups = ""
        if self.subgroups == (Kind.REPLICATED,):
            subgroups = " last_tile_dim_replicate"
        elif self.subgroups:
            subgroups = f" last_tile_dims={{{', '.join(kind.name.lower() for kind in self.subgroups)}}}"
        return f"{{devices=[{','.join(map(str, self.grid))}]{devices}{subgroups}}}"


def tiled(
    grid: Sequence[int],
    subgroups: tuple[Kind, ...],
    devices: Sequence[int],
    reshape_dims: Sequence[int],
    transpose_perm: Sequence[int],
) -> Tiling:
    """The tiling with these fields, of which those of the unused form are empty.

    Raises:
        MalformedShardingError: they are inconsistent.
    """
    if not grid or min(grid) < 1 or len(subgroups) > len(grid):
        expected = "numbers of at least 1" if len(subgroups) <= len(grid) else ""
        problem = f"its grid of tiles is {[*grid]} and has {len(subgroups)} subgroups"
        raise MalformedShardingError(problem, expected, "grid")
    count = math.prod(grid)
    if reshape_dims:
        perm = transpose_perm or range(len(reshape_dims))
        if len(devices):
            raise MalformedShardingError("it has both a list of devices and an iota form")
        if min(reshape_dims) < 1 or math.prod(reshape_dims) != count:
            problem = f"its grid {[*grid]} has {count} tiles, but {[*reshape_dims]} are assigned"
            expected = f"sizes whose product is {count}, the number of tiles"
            raise MalformedShardingError(problem, expected, "reshape_dims")
        if sorted(perm) != [*range(len(reshape_dims))]:
            problem = f"{[*perm]} does not permute {len(reshape_dims)} dimensions"
            expected = f"each of the numbers from 0 to {len(reshape_dims) - 1} once"
            raise MalformedShardingError(problem, expected, "transpose_perm")
        return Tiling(Kind.TILED, tuple(grid), subgroups, None, tuple(reshape_dims), tuple(perm))
    if len(devices) != count:
        problem = f"its grid {[*grid]} has {count} tiles, but {len(devices)} devices are listed"
        raise MalformedShardingError(problem, f"{count} devices, one for each tile", "devices")
    if max(devices) >= 1 << 63:
        problem = "the number of a device does not fit into 64 bits"
        raise MalformedShardingError(problem, "the numbers of devices", "devices")
    return Tiling(Kind.TILED, tuple(grid), subgroups, tuple(devices))


def named_tiling(
    sizes: Sequence[int],
    devices: Sequence[int],
    dims: Sequence[Sequence[Digit]],
    unreduced: Sequence[Digit],
    manual: Sequence[Digit],
) -> Tiling:
    """The tiling whose grid has the digits of `dims`, then those of each kind of subgroup."""
    named = [digit for digits in (*dims, unreduced, manual) for digit in digits if digit[0] > 1]
    rest = math.prod(sizes)
    replicated = []
    for size, stride in sorted(named, key=lambda digit: -digit[1]):
        if rest % (size * stride):
            raise MalformedShardingError("it names an axis of its mesh twice")
        if rest > size * stride:
            replicated.append((rest // (size * stride), size * stride))
        rest = stride
    if rest > 1:
        replicated.append((rest, 1))
    groups = [(Kind.UNREDUCED, unreduced), (Kind.MANUAL, manual), (Kind.REPLICATED, replicated)]
    groups = [(kind, digits) for kind, digits in groups if digits]
    order = [*named, *replicated]
    if not named:
        return Tiling(Kind.REPLICATED)
    by_stride = sorted(order, key=lambda digit: -digit[1])
    perm = tuple(by_stride.index(digit) for digit in order)
    grid = [math.prod(size for size, _ in digits) for digits in (*dims, *(digits for _, digits in groups))]
    subgroups = tuple(kind for kind, _ in groups)
    reshape = tuple(size for size, _ in by_stride)
    if not devices:
        return tiled(grid, subgroups, (), reshape, perm)
    if len(devices) != math.prod(sizes):
        raise MalformedShardingError(f"its mesh {[*sizes]} lists {len(devices)} devices")
    listed = np.array(devices).reshape(reshape).transpose(perm).ravel().tolist()
    return tiled(grid, subgroups, listed, (), ())
