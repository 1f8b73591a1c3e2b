"""A picture of an array or a mesh that shows itself wherever it is: printed, by rich, in a notebook."""

import importlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from partjit.render.markup import Markup
from partjit.render.piece_grid import PieceGrid
from partjit.render.piece_grid_svg import html, shade, svg
from partjit.render.piece_grid_text import Line, lines, plain
from partjit.render.theme import PALETTE, ink_on

__all__ = ["Picture"]

_WIDEST = 10_000


@dataclass(frozen=True, repr=False)
class Picture:
    """What a grid looks like.

    Attributes:
        grid: what there is to be seen.

    Example:
        >>> from partjit.render.picture import Picture
        >>> from partjit.render.piece_grid import PieceGrid, Piece
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
            width: how long a line may be; that of the terminal by default.
            table: whether the pieces are listed as well; by default if the array has more than two dimensions.

        Raises:
            TypeError, ValueError: `width` is no number of characters, or `table` neither True nor False.
        """
        if width is not None:
            width = _checked_width(width)
        if table is not None and not isinstance(table, bool):
            raise TypeError(f"to_text: table must be True, False or None, but is of type {type(table).__name__}")
        return plain(lines(self.grid, _terminal_width() if width is None else width, table=table))

    def to_svg(self) -> Markup:
        """The picture as an SVG file, which is legible on light and on dark pages."""
        return svg(self.grid)

    def to_html(self) -> Markup:
        """The picture with the list of its pieces, as a part of a page."""
        return html(self.grid)

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.to_html()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        # Only rich calls this, so it is there.
        make = importlib.import_module("rich.text").Text
        for line in lines(self.grid, options.max_width):
            yield _colored(make, line)


def _colored(make: Any, line: Line) -> Any:
    text = make(no_wrap=True)
    for part, color in line:
        if color is None:
            text.append(part)
        else:
            paper = PALETTE[shade(color)]
            text.append(part, f"{ink_on(paper)} on {paper}")
    return text


def _checked_width(width: Any) -> int:
    if isinstance(width, bool) or not isinstance(width, int):
        raise TypeError(f"to_text: width must be a number of characters, but is of type {type(width).__name__}")
    if not 0 <= width <= _WIDEST:
        raise ValueError(f"to_text: width must be a number of characters from 0 to {_WIDEST}")
    return width


def _terminal_width() -> int:
    return shutil.get_terminal_size().columns
