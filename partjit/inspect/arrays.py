"""Pictures of sharded arrays: which device holds which piece, at any rank."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding

from partjit.checks import require_mesh_type, shown, wrong_type
from partjit.inspect.tiles import Cut, Tiles, tiles_of
from partjit.mesh import ambient_or_abstract_mesh
from partjit.mesh import picture as mesh_picture
from partjit.render.numbers import counted, shown_bytes
from partjit.render.picture import Picture
from partjit.render.piece_grid import Dimension, Piece, PieceGrid, grouping

__all__ = ["ArrayPicture", "draw_array", "draw_mesh", "picture_of"]


@dataclass(frozen=True, repr=False)
class ArrayPicture(Picture):
    """The picture of an array over devices: text when printed, colored by rich, SVG in a notebook.

    Attributes:
        shape: that of the array.

    See `draw_array`.
    """

    shape: tuple[int, ...]
    _tiles: Tiles = field(compare=False)

    @functools.cached_property
    def pieces(self) -> tuple[tuple[tuple[slice, ...], tuple[int, ...]], ...]:
        """The slices of each piece, and the ids of the devices that hold a copy of it."""
        cuts = self._tiles.cuts
        numbers, holders = _holders(self._tiles, _numbers(self._tiles.parts, cuts))
        places = _places(numbers, cuts).T.tolist()
        return tuple(
            (tuple(slice(*cuts[dim][k]) for dim, k in enumerate(place)), ids)
            for place, ids in zip(places, holders, strict=True)
        )


def draw_array(x: object, spec: object = None, mesh: Mesh | AbstractMesh | None = None) -> ArrayPicture:
    """Shows which device holds which piece of an array, without waiting for the array.

    Args:
        x: an array, anything else with a shape, dtype and sharding (a `jax.ShapeDtypeStruct`, a pending array), or a
            shape.
        spec: the sharding to draw instead of its own: a `Sharding`, a spec, or an `OpSharding` of XLA or its text.
        mesh: the mesh of a spec; by default that of `x`, else the ambient one.

    Returns:
        A picture: `print` it, show it with rich, leave it at the end of a notebook's cell, or save its `to_svg()`.

    Raises:
        TypeError: `x` has no shape, `spec` is no sharding, or `mesh` no mesh.
        ValueError: `x` has no sharding and there is no `spec`, or it does not fit.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from jax.sharding import NamedSharding
        >>> from partjit import Mesh, P
        >>> from partjit.inspect.arrays import draw_array
        >>> mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
        >>> x = jax.device_put(jnp.zeros((8, 6)), NamedSharding(mesh, P("data")))
        >>> print(draw_array(x))
        float32[8,6] as P('data') on (data=4, model=2)
        192 B in 4 pieces of [2,6]: 48 B on each of 8 devices, 2 copies of each piece
          ↓ dim 0: 8 over data=4
          → dim 1: 6 unsharded
          = copies over model=2
        <BLANKLINE>
              0:6
            ┌─────┐
        0:2 │ 0,1 │
            ├─────┤
        2:4 │ 2,3 │
            ├─────┤
        4:6 │ 4,5 │
            ├─────┤
        6:8 │ 6,7 │
            └─────┘
    """
    if mesh is not None:
        require_mesh_type("draw_array", "mesh", mesh, or_abstract=True)
    shape, dtype, own = _read(x)
    if spec is None:
        if own is None:
            raise ValueError(_no_sharding(x))
        spec = own
    elif mesh is None and isinstance(own, NamedSharding):
        mesh = own.mesh
    return picture_of(shape, dtype, tiles_of(shape, spec, mesh))


def draw_mesh(mesh: Mesh | AbstractMesh | None = None) -> Picture:
    """Shows the devices of a mesh along its axes; of an abstract mesh, which has none, their positions.

    Of more than 64 devices, neighbours are one cell.

    Args:
        mesh: by default the ambient one, or else that of `jax.sharding.use_abstract_mesh`.

    Raises:
        TypeError: `mesh` is no mesh.
        ValueError: there is none.

    Example:
        >>> import jax
        >>> import numpy as np
        >>> from partjit import Mesh
        >>> from partjit.inspect.arrays import draw_mesh
        >>> print(draw_mesh(Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))))
        mesh (data=2, model=4) of 8 cpu devices
          ↓ data: 2 (Auto)
          → model: 4 (Auto)
        <BLANKLINE>
            0   1   2   3
          ┌───┬───┬───┬───┐
        0 │ 0 │ 1 │ 2 │ 3 │
          ├───┼───┼───┼───┤
        1 │ 4 │ 5 │ 6 │ 7 │
          └───┴───┴───┴───┘
    """
    found = (
        ambient_or_abstract_mesh() if mesh is None else require_mesh_type("draw_mesh", "mesh", mesh, or_abstract=True)
    )
    if found.empty:
        raise ValueError("draw_mesh: the mesh is empty: give one, or set it with partjit.set_mesh")
    return mesh_picture(found)


def _read(x: Any) -> tuple[tuple[int, ...], np.dtype | None, Sharding | None]:
    """The shape, dtype and sharding of the argument, as far as it has them."""
    if isinstance(x, tuple | list):
        shape, dtype, own = x, None, None
    elif hasattr(x, "shape") and hasattr(x, "dtype"):
        shape, dtype, own = x.shape, x.dtype, _sharding_of(x)
    else:
        shape = dtype = own = None
    is_shape = isinstance(shape, tuple | list)
    if not is_shape or any(isinstance(size, bool) or not isinstance(size, int | np.integer) for size in shape):
        remedy = "put a number onto devices with jax.device_put first, or map over a tree with jax.tree.map"
        raise wrong_type("draw_array", "x", x, "an array, a jax.ShapeDtypeStruct or a shape", remedy)
    if any(size < 0 for size in shape):
        raise ValueError(f"draw_array: x must be a shape of sizes of at least 0, but is {shown(shape)}")
    return tuple(map(int, shape)), dtype, own


def _sharding_of(x: object) -> Sharding | None:
    if not isinstance(x, Tracer):
        return getattr(x, "sharding", None)
    # The type of a traced value has its sharding over Explicit axes only.
    sharding = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def _no_sharding(x: object) -> str:
    if isinstance(x, Tracer):
        return (
            "draw_array: this value is traced, and its sharding is decided when the program is compiled: draw the "
            "program's result, or give a sharding: draw_array(x, spec, mesh)"
        )
    if isinstance(x, jax.ShapeDtypeStruct):
        how = "make it with one, jax.ShapeDtypeStruct(..., sharding=...)"
    else:
        how = "put it onto devices with jax.device_put"
    kind = "a shape" if isinstance(x, tuple | list) else f"this {type(x).__name__}"
    return f"draw_array: {kind} has no sharding: {how}, or give one: draw_array(x, spec, mesh)"


def picture_of(shape: tuple[int, ...], dtype: np.dtype | None, tiles: Tiles, most: int = 64) -> ArrayPicture:
    """The picture of an array with these tiles, of at most so many cells."""
    pieces = _Pieces.of(tiles)
    unit = None if dtype is None else dtype.itemsize
    sizes = pieces.lengths.prod(axis=0)
    steps = grouping([len(cuts) for cuts in tiles.cuts], len(sizes), most)
    cells = _cells(tiles, pieces, sizes, steps, unit)
    notes = [_sizes(shape, pieces, sizes, unit), *tiles.notes]
    if math.prod(steps) > 1:
        notes.append(f"a cell is a group of {' x '.join(map(str, steps))} pieces")
    grid = PieceGrid(
        f"{'' if dtype is None else dtype}[{','.join(map(str, shape))}] {tiles.sharding}",
        tuple(notes),
        tuple(_dimension(*of) for of in zip(range(len(shape)), shape, tiles.cuts, tiles.over, steps, strict=True)),
        tiles.copies,
        cells,
        tiles.remote,
        "piece" if math.prod(steps) == 1 else "cell",
    )
    return ArrayPicture(grid, shape, tiles)


@dataclass(frozen=True)
class _Pieces:
    """The pieces of an array, in order.

    Attributes:
        at: for each dimension their parts of it.
        lengths: and the lengths of these.
        counts: how many devices hold each.
    """

    at: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    @staticmethod
    def of(tiles: Tiles) -> "_Pieces":
        numbers, counts = np.unique(_numbers(tiles.parts, tiles.cuts), return_counts=True)
        at = _places(numbers, tiles.cuts)
        lengths = [np.array([stop - start for start, stop in cuts])[k] for k, cuts in zip(at, tiles.cuts, strict=True)]
        return _Pieces(at, np.array(lengths, np.int64).reshape(at.shape), counts)


def _numbers(parts: npt.NDArray[np.int64], cuts: Sequence[Sequence[object]]) -> npt.NDArray[np.int64]:
    """The numbers of pieces from their parts of each dimension."""
    numbers = np.zeros(parts.shape[1], np.int64)
    for part, of in zip(parts, cuts, strict=True):
        numbers = numbers * len(of) + part
    return numbers


def _places(numbers: npt.NDArray[np.int64], cuts: Sequence[Sequence[object]]) -> npt.NDArray[np.int64]:
    """Their parts of each dimension."""
    places = np.empty((len(cuts), len(numbers)), np.int64)
    for dim in reversed(range(len(cuts))):
        numbers, places[dim] = np.divmod(numbers, len(cuts[dim]))
    return places


def _holders(tiles: Tiles, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], list[tuple[int, ...]]]:
    """The different ones among numbers of the devices, and the ascending ids of the devices that have each."""
    order = np.lexsort((tiles.ids, numbers))
    ordered = numbers[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    return ordered[starts], [tuple(ids.tolist()) for ids in np.split(tiles.ids[order], starts[1:])]


def _cells(
    tiles: Tiles, pieces: _Pieces, sizes: npt.NDArray[np.int64], steps: Sequence[int], unit: int | None
) -> tuple[Piece, ...]:
    """The cells of the grid, each with so many pieces along each dimension."""
    each = np.array(steps, np.int64).reshape([-1, 1])
    cuts = [range(-(-len(of) // step)) for of, step in zip(tiles.cuts, steps, strict=True)]
    numbers, holders = _holders(tiles, _numbers(tiles.parts // each, cuts))
    members = np.searchsorted(numbers, _numbers(pieces.at // each, cuts))
    counts, elements = np.bincount(members), np.zeros(len(numbers), np.int64)
    np.add.at(elements, members, sizes)
    # Devices that hold the same piece have one color, the same one in all pictures over the same devices.
    colors = {k: color for color, k in enumerate(sorted(range(len(holders)), key=lambda k: holders[k][0]))}
    of_pieces = [f", {count} pieces" if math.prod(steps) > 1 else "" for count in counts.tolist()]
    return tuple(
        Piece(tuple(position), holders[k], colors[k], _amount(size, unit) + of_pieces[k], not size)
        for k, (position, size) in enumerate(zip(_places(numbers, cuts).T.tolist(), elements.tolist(), strict=True))
    )


def _dimension(dim: int, size: int, cuts: Sequence[Cut], over: str, step: int) -> Dimension:
    how = f"over {over}" if over else "unsharded" if len(cuts) == 1 else f"in {len(cuts)} parts"
    groups = [cuts[k : k + step] for k in range(0, len(cuts), step)]
    return Dimension(f"dim {dim}", f"{size} {how}", tuple(f"{group[0][0]}:{group[-1][1]}" for group in groups))


def _amount(size: int, unit: int | None) -> str:
    return shown_bytes(size * unit) if unit is not None else counted(size, "element")


def _sizes(shape: tuple[int, ...], pieces: _Pieces, sizes: npt.NDArray[np.int64], unit: int | None) -> str:
    """The sizes of the pieces and the numbers of their copies, in one sentence."""
    devices, count, most = int(pieces.counts.sum()), len(sizes), int(np.argmax(sizes))
    largest = f"[{','.join(map(str, pieces.lengths[:, most].tolist()))}]"
    up_to = "up to " if (pieces.lengths != pieces.lengths[:, :1]).any() else ""
    each = _amount(int(sizes[most]), unit)
    text = f"{_amount(math.prod(shape), unit)} in "
    if count == 1:
        return f"{text}one piece" + (f", a copy on each of {devices} devices" if devices > 1 else "")
    text += f"{count} pieces of {up_to}{largest}: {up_to}{each} on each of {devices} devices"
    low, high = int(pieces.counts.min()), int(pieces.counts.max())
    if high == 1:
        return text
    return f"{text}, {high if low == high else f'{low} to {high}'} copies of each piece"
