"""Sharded arrays as SVG: grids of cells, one color for each set of devices, with the dimensions on the sides."""

import math
from collections.abc import Sequence

from partjit.render.html import fragment, table
from partjit.render.markup import Markup, element
from partjit.render.numbers import counted
from partjit.render.piece_grid import Arrangement, Band, Panel, Piece, PieceGrid, arrange, name_devices, table_rows
from partjit.render.svg import label, picture, rect, text_width
from partjit.render.theme import COLORS

__all__ = ["html", "shade", "svg"]

_MARGIN = 16
_WIDEST = 1100  # of panels next to each other
_HEIGHT, _LOW = 30, 20  # of a cell, and of one in a tall grid
_NARROW, _WIDE = 40, 150  # the widths of cells
_SPACE = 2  # between cells
_LEFT_OUT = 24  # the size of the mark for cells that are left out
_BETWEEN = 28  # panels
_LINE = 18  # of text
_MOST = {"rows": 64, "bands": 48, "panels": 24}
_MOST_IN_TABLE = 1024
_NAME = 18  # characters
_HINT = 160  # characters of devices that a pointer shows


def shade(number: int, count: int) -> int:
    """The color in the theme of one of so many pieces.

    Where there are more pieces than colors, groups of pieces that follow each other have one color, and no two groups
    the same.

    Example:
        >>> [shade(number, 4) for number in range(4)]
        [0, 1, 2, 3]
        >>> shade(0, 4096), shade(511, 4096), shade(512, 4096), shade(4095, 4096)
        (0, 0, 1, 7)
    """
    return number // _together(count)


def _together(count: int) -> int:
    """How many of so many pieces have one color: as many in each group, which fill rows, if the groups stay small."""
    least = math.ceil(count / COLORS)
    return next((size for size in range(least, 2 * least) if count % size == 0), least)


def svg(grid: PieceGrid) -> Markup:
    """Draws an array as SVG.

    Example:
        >>> svg(PieceGrid("float32[]", (), (), "", (Piece((), (0,), 0),))).count("<rect")
        2
    """
    cell = _cell_width(grid)
    found = arrange(grid, columns=max(4, min(32, int(_WIDEST // (cell + _SPACE)))), **_MOST)
    panels = [_Grid(panel, grid, found, cell) for panel in found.panels]
    left_out = len(grid.pieces) - len(found.pieces)
    words = [(grid.title, True), *((text, False) for text in [*grid.notes, *_beside(grid, found)])]
    if len(grid.pieces) > COLORS:
        together = _together(len(grid.pieces))
        most = f"{'up to ' if len(grid.pieces) % together else ''}{counted(together, grid.noun)}"
        words.append((f"a color is a group of {most}, in the order of devices", False))
    if left_out:
        words.append((f"{left_out} of {len(grid.pieces)} {grid.noun}s are left out", False))
    needed = max(text_width(text, 13 if is_title else 12, mono=is_title) for text, is_title in words)
    width = min(max(needed, max(panel.width for panel in panels)), max(_WIDEST, *(panel.width for panel in panels)))
    body: list[Markup] = []
    y = _MARGIN + _LINE / 2
    for text, is_title in words:
        body.append(
            label(
                _MARGIN,
                y,
                text,
                width=width,
                size=13 if is_title else 12,
                mono=is_title,
                bold=is_title,
                class_="pj-ink" if is_title else "pj-muted",
            )
        )
        y += _LINE + (2 if is_title else 0)
    x, y, lowest, widest = 0.0, y + 4, 0.0, 0.0
    for panel in panels:
        if x and x + panel.width > width:
            x, y, lowest = 0.0, y + lowest + _BETWEEN, 0.0
        body.append(element("g", *panel.draw(), transform=f"translate({_MARGIN + x:g} {y:g})"))
        widest, lowest = max(widest, x + panel.width), max(lowest, panel.height)
        x += panel.width + _BETWEEN
    return picture(
        math.ceil(max(width, widest) + 2 * _MARGIN), math.ceil(y + lowest + _MARGIN), *body, title=grid.title
    )


def _cell_width(grid: PieceGrid) -> float:
    """One width for all cells: that of the longest name or label."""
    names = (name_devices(piece.devices, grid.remote, _NAME) for piece in grid.pieces)
    labels = (text for dim in grid.dimensions for text in dim.labels)
    widest = max(
        max((text_width(name, 12, mono=True) for name in names), default=0) + 12,
        max((text_width(text, 11, mono=True) for text in labels), default=0) + 6,
    )
    return round(min(max(_NARROW, widest), _WIDE))


def _sentence(grid: PieceGrid, dim: int | None) -> str:
    return "" if dim is None else f"{grid.dimensions[dim].name}: {grid.dimensions[dim].text}"


def _beside(grid: PieceGrid, found: Arrangement) -> list[str]:
    """The dimensions that are not labelled on the sides of the grid."""
    words = []
    for k in range(len(grid.dimensions)):
        sentence = _sentence(grid, k)
        if k in found.across:
            words.append(f"{sentence}, a grid for each part")
        elif k == found.rows:
            words += [f"↓ {sentence}"] if not _is_on_side(grid, found) else []
        elif k != found.columns:
            words.append(sentence)
    return words + ([f"copies over {grid.copies}"] if grid.copies else [])


def _is_on_side(grid: PieceGrid, found: Arrangement) -> bool:
    """Whether there are enough rows for the name of their dimension beside them."""
    rows = max((len(band.rows) for panel in found.panels if panel for band in panel.bands if band), default=0)
    if found.rows is None:
        return False
    # The text may extend into the margin and the line of labels.
    return text_width(_sentence(grid, found.rows), 11) <= rows * (_row_height(rows) + _SPACE) + 2 * _LINE


def _row_height(rows: int) -> float:
    return _HEIGHT if rows <= 24 else _LOW


class _Grid:
    """One panel, at the origin."""

    def __init__(self, panel: Panel | None, grid: PieceGrid, found: Arrangement, cell: float) -> None:
        self.panel, self.grid, self.cell = panel, grid, cell
        self.column_title = _sentence(grid, found.columns)
        self.row_title = _sentence(grid, found.rows) if _is_on_side(grid, found) else ""
        bands = [band for band in panel.bands if band] if panel else []
        rows = [row for band in bands for row in band.rows]
        self.row_height = _row_height(len(rows))
        row_labels = max((text_width(row[0], 11, mono=True) for row in rows if row), default=0)
        self.left = (_LINE if self.row_title else 0) + (row_labels + 8 if row_labels else 0)
        self.top = (_LINE if panel and panel.caption else 0) + (_LINE if self.column_title else 0)
        inside = max((sum(self._column(text) + _SPACE for text in band.columns) for band in bands), default=_LEFT_OUT)
        heads = [text_width(panel.caption, 12), self.left + text_width(self.column_title, 11) + 4] if panel else [0]
        self.width = max(self.left + inside, min(max(heads), _WIDEST))
        self.height = self.top + sum(self._band_height(band) for band in panel.bands) if panel else _HEIGHT

    def _column(self, text: str | None) -> float:
        return _LEFT_OUT if text is None else self.cell

    def _row(self, row: object) -> float:
        return _LEFT_OUT if row is None else self.row_height

    def _band_height(self, band: Band | None) -> float:
        if band is None:
            return _LEFT_OUT
        labels = _LINE if any(band.columns) else 0
        return labels + sum(self._row(row) + _SPACE for row in band.rows) + 4

    def draw(self) -> list[Markup]:
        if self.panel is None:
            return [label(_LEFT_OUT / 2, _HEIGHT / 2, "⋯", anchor="middle", class_="pj-muted")]
        drawn = []
        if self.panel.caption:
            drawn.append(label(0, _LINE / 2, self.panel.caption, width=self.width, bold=True))
        if self.column_title:
            drawn.append(
                label(
                    self.left,
                    self.top - _LINE / 2,
                    self.column_title,
                    width=self.width - self.left,
                    size=11,
                    class_="pj-muted",
                )
            )
        y = self.top
        for band in self.panel.bands:
            if band is None:
                drawn.append(label(self.left, y + _LEFT_OUT / 2, "⋮", class_="pj-muted"))
            else:
                drawn += self._band(band, y)
            y += self._band_height(band)
        if self.row_title:
            middle = (self.top + _LINE + y) / 2
            turned = f"rotate(-90 {_LINE / 2:g} {middle:g})"
            drawn.append(
                element(
                    "g",
                    label(_LINE / 2, middle, self.row_title, size=11, anchor="middle", class_="pj-muted"),
                    transform=turned,
                )
            )
        return drawn

    def _band(self, band: Band, y: float) -> list[Markup]:
        drawn = []
        if any(band.columns):
            x = self.left
            for text in band.columns:
                own = self._column(text)
                drawn.append(_middle(x, y, own, _LINE, text or "", 11, "pj-muted"))
                x += own + _SPACE
            y += _LINE
        for row in band.rows:
            height = self._row(row)
            if row and row[0]:
                drawn.append(
                    label(self.left - 6, y + height / 2, row[0], size=11, anchor="end", mono=True, class_="pj-muted")
                )
            x = self.left
            cells: Sequence[Piece | None] = row[1] if row else [None] * len(band.columns)
            for text, piece in zip(band.columns, cells, strict=True):
                own = self._column(text)
                if piece is not None:
                    drawn.append(self._piece(piece, x, y, own, height))
                elif row is None or text is None:
                    mark = "⋮" if text is not None else "⋱" if row is None else "⋯"
                    drawn.append(_middle(x, y, own, height, mark, 12, "pj-muted"))
                x += own + _SPACE
            y += height + _SPACE
        return drawn

    def _piece(self, piece: Piece, x: float, y: float, width: float, height: float) -> Markup:
        grid = self.grid
        color = shade(piece.color, len(grid.pieces))
        name = name_devices(piece.devices, grid.remote, _NAME)
        is_plain = piece.is_empty or grid.remote.issuperset(piece.devices)
        parts = [f"{dim.name} = {dim.labels[part]}" for dim, part in zip(grid.dimensions, piece.position, strict=True)]
        holders = (
            f"{'devices' if len(piece.devices) > 1 else 'device'} {name_devices(piece.devices, grid.remote, _HINT)}"
        )
        hint = element("title", ", ".join(part for part in [*parts, piece.amount, holders] if part))
        shape = rect(
            x + is_plain / 2,
            y + is_plain / 2,
            width - is_plain,
            height - is_plain,
            radius=3,
            class_="pj-panel pj-s-muted pj-dashed" if is_plain else f"pj-c{color}",
            data_devices=name_devices(piece.devices, room=_HINT),
        )
        strip = [rect(x + 3, y + 4, 4, height - 8, radius=2, class_=f"pj-c{color}")] if is_plain else []
        text = f"({name})" if piece.is_empty else name
        ink = "pj-ink" if is_plain else f"pj-on{color}"
        return element("g", hint, shape, *strip, _middle(x, y, width, height, text, 12, ink))


def _middle(x: float, y: float, width: float, height: float, text: str, size: float, class_: str) -> Markup:
    return label(x + width / 2, y + height / 2, text, width=width, size=size, anchor="middle", class_=class_, mono=True)


def html(grid: PieceGrid) -> Markup:
    """Draws an array as a part of a page: the SVG, and below it a folded table of the pieces.

    Example:
        >>> "<details>" in html(PieceGrid("float32[]", (), (), "", (Piece((), (0,), 0),)))
        True
    """
    header, *rows = [cells for cells, _ in table_rows(grid, _MOST_IN_TABLE)]
    count = counted(len(grid.pieces), grid.noun)
    listed = table("", header, rows)
    return fragment(svg(grid), element("details", element("summary", count, class_="pj-muted"), listed))
