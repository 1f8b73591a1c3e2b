"""The legend of a picture, in as few rows as fit."""

from collections.abc import Sequence

from partjit.render.markup import Markup, element, join, number
from partjit.render.svg import label, text_width

__all__ = ["legend"]

_SIZE, _SWATCH, _ROW = 10.5, 24.0, 19.0


def legend(entries: Sequence[tuple[str, str]], room: float) -> tuple[Markup, float, float]:
    """A legend of rows that are at most `room` wide: its picture, its width and its height.

    Each entry is a swatch of 18 x 12 pixels, which is empty for a remark, and its meaning.

    Example:
        >>> from partjit.render.svg import rect
        >>> legend([(rect(0, 0, 18, 12, class_="pj-c0"), "first")], 400)[2]
        12.0
    """
    x = y = widest = 0.0
    drawn = []
    for swatch, meaning in entries:
        before = _SWATCH if swatch else 0.0
        width = before + text_width(meaning, _SIZE)
        if x and x + width > room:
            x, y = 0.0, y + _ROW
        text = label(before, 6, meaning, size=_SIZE, class_="pj-muted")
        drawn.append(element("g", swatch, text, transform=f"translate({number(x)} {number(y)})"))
        widest = max(widest, x + width)
        x += width + 16
    return join(drawn), widest, y + 12
