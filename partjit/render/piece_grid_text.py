"""Sharded arrays as text: boxes, a legend of the dimensions, a table.

A line is a list of (text, color) pairs, for terminals with colors; the color of a piece is its number.
"""

import textwrap
from collections.abc import Iterable, Sequence

from partjit.render.piece_grid import Arrangement, Band, Panel, PieceGrid, arrange, name_devices, table_rows

__all__ = ["Line", "lines", "plain", "table_lines"]

Line = list[tuple[str, int | None]]

_NARROWEST = 24
_MOST_ROWS = 16
_MOST_RULED = 12  # rows with a line between them
_MOST_BANDS = 4
_MOST_PANELS = 8
_MOST_IN_TABLE = 16
_GAP = 3  # the width of the mark for columns that are left out


def plain(drawn: Iterable[Line]) -> str:
    r"""Lines without their colors.

    Example:
        >>> plain([[("a", None), ("b", 3)], []])
        'ab\n'
    """
    return "\n".join("".join(text for text, _ in line).rstrip() for line in drawn)


def lines(grid: PieceGrid, width: int = 80, *, table: bool | None = None) -> list[Line]:
    """Draws an array as text in lines of at most so many characters, and at least 24.

    A table of the pieces follows if requested, by default for arrays of rank 3 and more.

    Example:
        >>> from partjit.render.piece_grid import Dimension, Piece
        >>> dim = Dimension("dim 0", "4 over x=2", ("0:2", "2:4"))
        >>> pieces = Piece((0,), (0, 1), 0), Piece((1,), (2, 3), 1)
        >>> print(plain(lines(PieceGrid("int8[4]", (), (dim,), "y=2", pieces), 40)))
        int8[4]
          → dim 0: 4 over x=2
          = copies over y=2
        <BLANKLINE>
          0:2   2:4
        ┌─────┬─────┐
        │ 0,1 │ 2,3 │
        └─────┴─────┘
    """
    width = max(width, _NARROWEST)
    found, cell = _arranged(grid, width)
    drawn = [*_wrapped(grid.title, width)]
    for fact in grid.notes:
        drawn += _wrapped(fact, width)
    drawn += _legend(grid, found, width)
    rows = sum(len(band.rows) for panel in found.panels if panel for band in panel.bands if band)
    is_open = rows > _MOST_RULED and found.rows is not None
    panels = [None if panel is None else _panel(panel, grid, cell, is_open) for panel in found.panels]
    for row in _side_by_side(panels, width):
        drawn += [[], *row]
    left_out = len(grid.pieces) - len(found.pieces)
    if left_out:
        drawn += [[], *_wrapped(f"{left_out} of {len(grid.pieces)} {grid.noun}s are left out", width)]
    amounts = any(piece.amount for piece in grid.pieces)
    if amounts and len(grid.dimensions) > 2 if table is None else table:
        drawn += [[], *table_lines(grid, width)]
    return [_clipped(line, width) for line in drawn]


def _arranged(grid: PieceGrid, width: int) -> tuple[Arrangement, int]:
    """The arrangement that fits into lines of a width, and the width of a cell."""
    most = {"rows": _MOST_ROWS, "bands": _MOST_BANDS, "panels": _MOST_PANELS}
    full = arrange(grid, columns=len(grid.pieces) or 1, **most)
    labels_of_rows = [""] if full.rows is None else grid.dimensions[full.rows].labels
    gutter = max(map(len, labels_of_rows), default=-1) + 1  # as `_panel` has it
    count = 1 if full.columns is None else len(grid.dimensions[full.columns].labels)
    cell = 1
    for room in (28, 18, 12, 8):  # ever shorter names, until all columns fit
        names = [name_devices(piece.devices, grid.remote, room) for piece in grid.pieces]
        labels = () if full.columns is None else grid.dimensions[full.columns].labels
        cell = max(map(len, [*names, *labels]), default=1) + 2
        if count * (cell + 1) + 1 + gutter <= width:
            return full, cell
    fit = max(1, (width - gutter - 1) // (cell + 1))
    if full.rows is not None and len(grid.dimensions[full.rows].labels) > 1:
        fit = max(1, (width - gutter - 1 - (_GAP + 1)) // (cell + 1))
    return arrange(grid, columns=fit, **most), min(cell, width - gutter - 2)


def _legend(grid: PieceGrid, found: Arrangement, width: int) -> list[Line]:
    drawn = []
    for k, dim in enumerate(grid.dimensions):
        mark = "→" if k == found.columns else "↓" if k == found.rows else "#" if k in found.across else "·"
        drawn += _wrapped(f"  {mark} {dim.name}: {dim.text}", width)
    if grid.copies:
        drawn += _wrapped(f"  = copies over {grid.copies}", width)
    return drawn


def _panel(panel: Panel, grid: PieceGrid, cell: int, is_open: bool) -> list[Line]:
    drawn: list[Line] = []
    if panel.caption:
        drawn.append([(panel.caption, None)])
    gutter = max((len(row[0]) for band in panel.bands if band for row in band.rows if row), default=-1) + 1
    for band in panel.bands:
        if band is None:
            drawn.append([(" " * gutter + " ⋮", None)])
        else:
            drawn += _band(band, grid, cell, gutter, is_open)
    return drawn


def _band(band: Band, grid: PieceGrid, cell: int, gutter: int, is_open: bool) -> list[Line]:
    widths = [_GAP if label is None else cell for label in band.columns]
    margin = " " * gutter
    drawn: list[Line] = []
    if any(band.columns):
        labels = [_centered(label or "", width) for label, width in zip(band.columns, widths, strict=True)]
        drawn.append([(f"{margin} {' '.join(labels)}", None)])

    def rule(left: str, between: str, right: str) -> Line:
        return [(f"{margin}{left}{between.join('─' * width for width in widths)}{right}", None)]

    drawn.append(rule("┌", "┬", "┐"))
    for number, row in enumerate(band.rows):
        if number and not is_open:
            drawn.append(rule("├", "┼", "┤"))
        label, pieces = row or ("", [None] * len(widths))
        line: Line = [(f"{label:>{max(0, gutter - 1)}}{' ' if gutter else ''}│", None)]
        for column, piece, width in zip(band.columns, pieces, widths, strict=True):
            if row is None or column is None:
                line.append((_centered("⋮" if column is not None else "⋱" if row is None else "⋯", width), None))
            elif piece is None:
                line.append((" " * width, None))
            else:
                name = name_devices(piece.devices, grid.remote, width - 2)
                line.append(
                    (_centered(f"({name})" if piece.is_empty and len(name) <= width - 2 else name, width), piece.color)
                )
            line.append(("│", None))
        drawn.append(line)
    return [*drawn, rule("└", "┴", "┘")]


def _side_by_side(panels: Sequence[list[Line] | None], width: int) -> list[list[Line]]:
    """Panels in rows of as many as fit."""
    rows: list[list[Line]] = []
    used = width
    for panel in panels:
        block: list[Line] = [[("⋮", None)]] if panel is None else panel
        own = max((_length(line) for line in block), default=0)
        if used + 3 + own > width or not rows:
            rows.append([[*line] for line in block])
            used = own
            continue
        row = rows[-1]
        row += [[] for _ in range(len(block) - len(row))]
        for k, line in enumerate(block):
            row[k] = [*row[k], (" " * (used + 3 - _length(row[k])), None), *line]
        used += 3 + own
    return rows


def table_lines(grid: PieceGrid, width: int = 80) -> list[Line]:
    """The pieces as a table: their part of each dimension, bytes, and devices.

    Example:
        >>> from partjit.render.piece_grid import Dimension, Piece
        >>> dim = Dimension("dim 0", "4 over x=2", ("0:2", "2:4"))
        >>> pieces = Piece((0,), (0, 1), 0, "2 B"), Piece((1,), (2, 3), 1, "2 B")
        >>> print(plain(table_lines(PieceGrid("int8[4]", (), (dim,), "", pieces))))
        dim 0   holds   devices
        0:2     2 B     0,1
        2:4     2 B     2,3
    """
    rows = table_rows(grid, _MOST_IN_TABLE)
    widths = [max(map(len, column)) for column in zip(*(cells for cells, _ in rows), strict=True)]
    drawn: list[Line] = []
    for cells, color in rows:
        *before, last = cells
        line: Line = [("   ".join(f"{text:<{w}}" for text, w in zip(before, widths, strict=False)) + "   ", None)]
        drawn.append(_clipped([*line, (last, color)], width))
    return drawn


def _wrapped(text: str, width: int) -> list[Line]:
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return [[(line, None)] for line in textwrap.wrap(text, width, subsequent_indent=indent, drop_whitespace=True)]


def _centered(text: str, width: int) -> str:
    return (text if len(text) <= width else text[: max(0, width - 1)] + "…").center(width)


def _length(line: Line) -> int:
    return sum(len(text) for text, _ in line)


def _clipped(line: Line, width: int) -> Line:
    room = width
    if _length(line) <= room:
        return line
    clipped: Line = []
    for text, color in line:
        if len(text) >= room:
            return [*clipped, (text[: room - 1] + "…", color)]
        clipped.append((text, color))
        room -= len(text)
    return clipped
