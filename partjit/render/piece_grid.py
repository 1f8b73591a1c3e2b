"""A sharded array as a grid of pieces, and its arrangement on a page: what is a row, a column, or left out.

Text and SVG are drawn from the same arrangement. A mesh is such a grid as well, whose pieces are its devices.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "Arrangement",
    "Band",
    "Dimension",
    "Panel",
    "Piece",
    "PieceGrid",
    "arrange",
    "grouping",
    "keep",
    "name_devices",
    "table_rows",
]


@dataclass(frozen=True)
class Dimension:
    """One dimension of an array.

    Attributes:
        name: "dim 0".
        text: its size and the axes that shard it: "16 over data=4".
        labels: one for each of its parts, in order: "0:4".
    """

    name: str
    text: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Piece:
    """A piece of an array and the devices that hold it.

    Attributes:
        position: its part of each dimension.
        devices: the ids of those that hold a copy, ascending.
        color: a number that pieces on the same devices share.
        amount: its size, in words: "4 B".
        is_empty: whether it has no elements.
    """

    position: tuple[int, ...]
    devices: tuple[int, ...]
    color: int
    amount: str = ""
    is_empty: bool = False


@dataclass(frozen=True)
class PieceGrid:
    """A sharded array.

    Attributes:
        title: a line.
        facts: remarks, a sentence each.
        dimensions: of the array.
        copies: the axes along which it is replicated: "model=2"; empty if there are none.
        pieces: at most one for each position.
        remote: the ids of devices of other processes, which get a star.
        noun: the name of a piece.
    """

    title: str
    facts: tuple[str, ...]
    dimensions: tuple[Dimension, ...]
    copies: str
    pieces: tuple[Piece, ...]
    remote: frozenset[int] = frozenset()
    noun: str = "piece"

    @property
    def notes(self) -> tuple[str, ...]:
        """The facts, and the meanings of the signs in the picture."""
        signs = []
        if self.remote:
            signs.append("* on another process")
        if any(piece.is_empty for piece in self.pieces):
            signs.append("( ) without elements")
        return (*self.facts, *signs)


@dataclass(frozen=True)
class Band:
    """A table of pieces with a label for each of its columns and rows; None for those left out."""

    columns: tuple[str | None, ...]
    rows: tuple[tuple[str, tuple[Piece | None, ...]] | None, ...]


@dataclass(frozen=True)
class Panel:
    """The table for one combination of the other sharded dimensions; a single row may be broken into several bands.

    Attributes:
        caption: the combination; empty if there is only one.
        bands: from top to bottom; None for those left out.
    """

    caption: str
    bands: tuple[Band | None, ...]


@dataclass(frozen=True)
class Arrangement:
    """An arrangement of pieces on a page.

    Attributes:
        rows, columns: the dimension along each, or None.
        across: the other sharded dimensions; each combination of their parts has a panel.
        panels: None for those left out.
    """

    rows: int | None
    columns: int | None
    across: tuple[int, ...]
    panels: tuple[Panel | None, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces that are shown, from the top left."""
        bands = [band for panel in self.panels if panel for band in panel.bands if band]
        return tuple(piece for band in bands for row in band.rows if row for piece in row[1] if piece)


def arrange(grid: PieceGrid, *, columns: int, rows: int, bands: int, panels: int) -> Arrangement:
    """Arranges the pieces of an array.

    Up to rank 2 the dimensions are rows and columns; of more, those with most parts are, and each combination of the
    others has a panel. A single row continues in another band below it. At most so many columns, rows, bands and panels
    are shown; the middle ones are left out.

    Example:
        >>> dim = Dimension("dim 0", "8 over x=4", ("0:2", "2:4", "4:6", "6:8"))
        >>> pieces = tuple(Piece((k,), (k,), k) for k in range(4))
        >>> found = arrange(PieceGrid("a row", (), (dim,), "", pieces), columns=3, rows=9, bands=9, panels=9)
        >>> [band.columns for panel in found.panels for band in panel.bands]
        [('0:2', '2:4', '4:6'), ('6:8',)]
    """
    dims = grid.dimensions
    sharded = [k for k, dim in enumerate(dims) if len(dim.labels) != 1]
    shown = [*range(len(dims))]
    if len(dims) > 2:
        shown = sorted(sorted(sharded, key=lambda k: -len(dims[k].labels))[:2])
    along = shown[-1] if shown else None
    down = shown[0] if len(shown) == 2 else None
    across = tuple(k for k in sharded if k not in shown)
    at = {piece.position: piece for piece in grid.pieces}

    sizes = [len(dims[k].labels) for k in across]

    def labels(dim: int | None) -> Sequence[str]:
        return ("",) if dim is None else dims[dim].labels

    def piece(other: Sequence[int], row: int, column: int) -> Piece | None:
        position = [0] * len(dims)
        for k, part in [*zip(across, other, strict=True), (down, row), (along, column)]:
            if k is not None:
                position[k] = part
        return at.get(tuple(position))

    def band(other: Sequence[int], shown: Sequence[int | None]) -> Band:
        return Band(
            tuple(None if c is None else labels(along)[c] for c in shown),
            tuple(
                None
                if r is None
                else (labels(down)[r], tuple(None if c is None else piece(other, r, c) for c in shown))
                for r in keep(len(labels(down)), rows)
            ),
        )

    def panel(number: int) -> Panel:
        other = [number // math.prod(sizes[k + 1 :]) % size for k, size in enumerate(sizes)]
        caption = ", ".join(f"{dims[k].name} = {dims[k].labels[part]}" for k, part in zip(across, other, strict=True))
        count = len(labels(along))
        if len(labels(down)) > 1 or count <= columns:
            return Panel(caption, (band(other, keep(count, columns)),))
        starts = keep(math.ceil(count / columns), bands)
        return Panel(
            caption,
            tuple(
                None if k is None else band(other, range(k * columns, min(count, (k + 1) * columns))) for k in starts
            ),
        )

    chosen = tuple(None if k is None else panel(k) for k in keep(math.prod(sizes), panels))
    return Arrangement(down, along, across, chosen)


def grouping(counts: Sequence[int], pieces: int, most: int = 64) -> tuple[int, ...]:
    """How many parts of each dimension a cell has, so that pieces that are many are few cells.

    The dimension with the most cells is grouped first, by as small a factor as it has.

    Args:
        counts: the parts of each dimension.
        pieces: how many pieces there are.
        most: how many cells there may be.

    Example:
        >>> grouping([8, 4], 32), grouping([512, 8], 4096), grouping([521], 521)
        ((1, 1), (64, 1), (9,))
    """
    steps = [1] * len(counts)
    cells = [*counts]
    while pieces > most and math.prod(cells) > most:
        dim = max(range(len(cells)), key=lambda k: cells[k])
        factor = next((n for n in (2, 3, 5, 7) if cells[dim] % n == 0), None)
        room = max(1, most * cells[dim] // math.prod(cells))
        steps[dim] = -(-counts[dim] // room) if factor is None else steps[dim] * factor
        cells[dim] = -(-counts[dim] // steps[dim])
    return tuple(steps)


def keep(count: int, most: int) -> list[int | None]:
    """The positions of the first and last ones of so many, with None between for those left out.

    Example:
        >>> keep(3, 4), keep(9, 4)
        ([0, 1, 2], [0, 1, None, 7, 8])
    """
    if count <= most:
        return [*range(count)]
    first = (most + 1) // 2
    return [*range(first), None, *range(count - (most - first), count)]


def table_rows(grid: PieceGrid, most: int) -> list[tuple[list[str], int | None]]:
    """The pieces as a table with a header: their part of each dimension, size and devices; each row with its color."""
    rows: list[tuple[list[str], int | None]] = [([*(dim.name for dim in grid.dimensions), "holds", "devices"], None)]
    for k in keep(len(grid.pieces), most):
        if k is None:
            rows.append((["⋮"] * (len(grid.dimensions) + 2), None))
            continue
        piece = grid.pieces[k]
        parts = [dim.labels[part] for dim, part in zip(grid.dimensions, piece.position, strict=True)]
        rows.append(([*parts, piece.amount, name_devices(piece.devices, grid.remote)], piece.color))
    return rows


def name_devices(ids: Sequence[int], remote: frozenset[int] = frozenset(), room: int | None = None) -> str:
    """The ascending ids of devices: consecutive ones as ranges, remote ones with a star.

    If they need more characters than there is room for, a pattern or the first id stands for them.

    Example:
        >>> name_devices([0, 1, 2, 3, 6]), name_devices([0, 1, 2, 3], frozenset({2, 3}))
        ('0-3,6', '0,1,2*,3*')
        >>> name_devices(range(0, 512, 8), room=12), name_devices([0, 1, 5, 9, 12, 14], room=9)
        ('0,8,…,504', '0,… (6)')
    """
    own, others = ([k for k in ids if k not in remote], [k for k in ids if k in remote]) if remote else (ids, ())
    names = _ranges(tuple(own)) + tuple(f"{name}*" for name in _ranges(tuple(others)))
    if room is None or 2 * len(names) - 1 <= room:
        full = ",".join(names)
        if room is None or len(full) <= room:
            return full
    forms = []
    if len(names) > 3 and not (own and others) and _is_regular(tuple(ids)):
        forms.append(f"{names[0]},{names[1]},…,{names[-1]}")
    first = f"{ids[0]}{'*' * (ids[0] in remote)}"
    forms += [f"{first},… ({len(ids)})", f"{first},…"]
    return next((form for form in forms if len(form) <= room), forms[-1])


@functools.lru_cache(maxsize=1024)
def _runs(ids: tuple[int, ...]) -> list[tuple[int, int]]:
    """First and last of each run of consecutive ids."""
    if not ids:
        return []
    if ids[-1] - ids[0] == len(ids) - 1:
        return [(ids[0], ids[-1])]
    breaks = [k for k, (before, after) in enumerate(itertools.pairwise(ids), 1) if after - before != 1]
    return [(ids[start], ids[end - 1]) for start, end in itertools.pairwise([0, *breaks, len(ids)])]


@functools.lru_cache(maxsize=1024)
def _ranges(ids: tuple[int, ...]) -> tuple[str, ...]:
    runs = _runs(ids)
    if len(runs) == 1 and len(ids) == 2:
        return tuple(map(str, ids))  # as short as a range, and plainer
    return tuple(f"{first}-{last}" if last > first else str(first) for first, last in runs)


@functools.lru_cache(maxsize=1024)
def _is_regular(ids: tuple[int, ...]) -> bool:
    """Whether all runs have the same length and distance."""
    runs = _runs(ids)
    return len({last - first for first, last in runs}) == 1 and (
        len({after[0] - before[0] for before, after in itertools.pairwise(runs)}) == 1
    )
