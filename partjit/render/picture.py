"""A picture of an array or a mesh, for printing, rich and notebooks."""

import importlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from partjit.render.markup import Markup
from partjit.render.piece_grid import PieceGrid
from partjit.render.piece_grid_svg import html, shade, svg
from partjit.render.piece_grid_text import lines, plain
from partjit.render.theme import PALETTE, ink_on

__all__ = ["Picture"]

_WIDEST = 10_000


@dataclass(frozen=True, repr=False)
class Picture:
    """The picture of a grid of pieces.

    Attributes:
        grid: the grid.

    Example:
        >>> from partjit.render.piece_grid import Piece
        >>> Picture(PieceGrid("float32[]", (), (), "", (Piece((), (0,), 0),)))
        float32[]
        <BLANKLINE>
        ┌───┐
        │ 0 │
        └───┘
    """

    grid: PieceGrid

    def to_text(self, width: int | None = None, *, table: bool | None = None) -> str:
        """The picture as text.

        Args:
            width: the length of lines; by default that of the terminal.
            table: whether to list the pieces as well; by default if the array has more than two dimensions.

        Raises:
            TypeError, ValueError: `width` is no number of characters, or `table` neither True nor False.
        """
        if width is not None:
            if isinstance(width, bool) or not isinstance(width, int):
                raise TypeError(f"to_text: width must be a number of characters, but is of type {type(width).__name__}")
            if not 0 <= width <= _WIDEST:
                raise ValueError(f"to_text: width must be a number of characters from 0 to {_WIDEST}")
        if table is not None and not isinstance(table, bool):
            raise TypeError(f"to_text: table must be True, False or None, but is of type {type(table).__name__}")
        return plain(lines(self.grid, shutil.get_terminal_size().columns if width is None else width, table=table))

    def to_svg(self) -> Markup:
        """The picture as SVG, for light and dark pages."""
        return svg(self.grid)

    def to_html(self) -> Markup:
        """The picture with a table of its pieces, as a fragment of HTML."""
        return html(self.grid)

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.to_html()

    def __rich_console__(self, console: object, options: Any) -> Iterator[object]:
        # Only rich calls this, so it is installed.
        rich = importlib.import_module("rich.text")
        for line in lines(self.grid, options.max_width):
            yield rich.Text.assemble(
                *((part, _style(color, len(self.grid.pieces))) for part, color in line), no_wrap=True
            )


def _style(color: int | None, count: int) -> str:
    paper = "" if color is None else PALETTE[shade(color, count)]
    return f"{ink_on(paper)} on {paper}" if paper else ""
