"""A picture: shapes, text that is cut to fit, and the frame around them.

Nothing has an id, so any number of pictures can stand in one page. Coordinates are pixels, from the top left.
"""

import itertools
import unicodedata
from collections.abc import Sequence

from partjit.render.markup import Attribute, Markup, element, join, number
from partjit.render.theme import STYLESHEET

__all__ = ["fit", "label", "path", "picture", "rect", "smooth", "text_width"]

Point = tuple[float, float]

# Widths of characters in ems: those of the widest common sans-serif font of a system, so that text rather ends early.
_WIDTHS = {
    **dict.fromkeys("il.,:;'|!j", 0.31),
    **dict.fromkeys('ftr()[]{}I/\\- "`', 0.4),
    **dict.fromkeys("mwM%", 0.95),
    **dict.fromkeys("W@", 1.02),
    **dict.fromkeys("ABCDGHKNOQRUVXYZ&", 0.75),
    **dict.fromkeys("+<=>~\u2026\u2192\u00d7", 0.84),
}
_MONO = 0.605


def text_width(text: str, size: float = 12, *, mono: bool = False) -> float:
    """About how wide a line of text is; rather too wide than too narrow.

    Args:
        text: one line.
        size: the height of the font.
        mono: whether all characters are of one width.

    Returns:
        Pixels.

    Example:
        >>> from partjit.render.svg import text_width
        >>> text_width("mm") > text_width("ii") > 0
        True
    """
    return size * sum(_em(character, mono) for character in text)


def _em(character: str, mono: bool) -> float:
    if unicodedata.combining(character):
        return 0.0
    if unicodedata.east_asian_width(character) in "WF":
        return 2 * _MONO if mono else 1.1
    return _MONO if mono else _WIDTHS.get(character, 0.63)


def fit(text: str, width: float, size: float = 12, *, mono: bool = False) -> str:
    """A text, or as much of its beginning as fits, with an ellipsis.

    Args:
        text: one line.
        width: how much room there is. Where there is none for a character and an ellipsis, nothing is left.
        size: the height of the font.
        mono: whether all characters are of one width.

    Example:
        >>> from partjit.render.svg import fit
        >>> fit("short", 100), fit("a very long name", 60), fit("no room", 5)
        ('short', 'a very l…', '')
    """
    if text_width(text, size, mono=mono) <= width:
        return text
    room = width - size * _em("…", mono)
    kept = 0
    for character in text:
        room -= size * _em(character, mono)
        if room < 0:
            break
        kept += 1
    beginning = text[:kept].rstrip()
    return f"{beginning}…" if beginning else ""


def label(
    x: float,
    y: float,
    text: str,
    *,
    width: float | None = None,
    size: float = 12,
    anchor: str = "start",
    class_: str = "pj-ink",
    mono: bool = False,
    bold: bool = False,
) -> Markup:
    """A line of text.

    Args:
        x: where it starts, or its middle or end, as `anchor` says.
        y: the middle of its height.
        text: what it says.
        width: how much room there is; what does not fit is cut off, and all of it is in the tooltip.
        size: the height of the font.
        anchor: "start", "middle" or "end".
        class_: its colour: "pj-ink", "pj-muted", "pj-on3", ...
        mono: whether all characters are of one width.
        bold: whether it stands out.

    Returns:
        The element; nothing if nothing fits.

    Example:
        >>> from partjit.render.svg import label
        >>> label(10, 20, "a < b")
        '<text x="10" y="20" dy="0.35em" font-size="12" class="pj-ink">a &lt; b</text>'
    """
    shown = text if width is None else fit(text, width, size, mono=mono)
    if not shown:
        return Markup()
    classes = class_ + (" pj-mono" if mono else "") + (" pj-bold" if bold else "")
    # A tooltip is the first child, where all viewers look for it.
    title = [] if shown == text else [element("title", text)]
    where: dict[str, Attribute] = {"x": x, "y": y, "dy": "0.35em", "font_size": size}
    return element("text", *title, shown, **where, text_anchor=None if anchor == "start" else anchor, class_=classes)


def rect(
    x: float, y: float, width: float, height: float, *children: str, radius: float = 0, class_: str, **more: Attribute
) -> Markup:
    """A rectangle.

    Args:
        x, y, width, height: where it is.
        children: a `title` for a tooltip, if anything.
        radius: that of its corners.
        class_: its colours: "pj-panel pj-s-line" for instance.
        more: attributes.

    Example:
        >>> from partjit.render.svg import rect
        >>> rect(0, 0, 10, 5, class_="pj-c3")
        '<rect x="0" y="0" width="10" height="5" class="pj-c3"/>'
    """
    where: dict[str, Attribute] = {"x": x, "y": y, "width": width, "height": height, "rx": radius or None}
    return element("rect", *children, **where, class_=class_, **more)


def path(lines: Sequence[Sequence[Point]], *children: str, class_: str, **more: Attribute) -> Markup:
    """Straight lines from point to point, as many as wanted in one element.

    Args:
        lines: the points of each line.
        children: a `title` for a tooltip, if anything.
        class_: its colours: "pj-none pj-s-line" for instance.
        more: attributes.

    Example:
        >>> from partjit.render.svg import path
        >>> path([[(0, 0), (5, 0)], [(0, 3), (5, 3.5)]], class_="pj-none pj-s-line")
        '<path d="M0 0L5 0M0 3L5 3.5" class="pj-none pj-s-line"/>'
    """
    drawn = "".join(
        "".join(f"{'L' if k else 'M'}{number(x)} {number(y)}" for k, (x, y) in enumerate(line)) for line in lines
    )
    return element("path", *children, d=drawn, class_=class_, **more)


def smooth(points: Sequence[Point]) -> str:
    """The `d` of a path that goes down through points without corners.

    It begins and ends upright and goes neither further to a side nor up between two points: x is a monotone cubic of y
    (Fritsch and Carlson, 1980).

    Args:
        points: the one further down later.

    Example:
        >>> from partjit.render.svg import smooth
        >>> smooth([(0, 0), (0, 9), (6, 18)])
        'M0 0L0 9C0 12 6 15 6 18'
    """
    steps = [(x1 - x0) / (y1 - y0 or 1.0) for (x0, y0), (x1, y1) in itertools.pairwise(points)]
    inner = [2 * a * b / (a + b) if a * b > 0 else 0.0 for a, b in itertools.pairwise(steps)]
    slopes = [0.0, *inner, 0.0]
    drawn = [f"M{number(points[0][0])} {number(points[0][1])}"]
    for k, ((x0, y0), (x1, y1)) in enumerate(itertools.pairwise(points)):
        if x0 == x1:
            drawn.append(f"L{number(x1)} {number(y1)}")
        else:
            third = (y1 - y0) / 3
            bends = (x0 + slopes[k] * third, y0 + third, x1 - slopes[k + 1] * third, y1 - third, x1, y1)
            drawn.append("C" + " ".join(map(number, bends)))
    return "".join(drawn)


def picture(width: float, height: float, *body: str, title: str) -> Markup:
    """An SVG that stands for itself or in a page, with the stylesheet and a background.

    Args:
        width, height: how large it is; where there is less room it is scaled down.
        body: what is in it.
        title: what it shows, for those who cannot see it.

    Example:
        >>> from partjit.render.svg import label, picture
        >>> picture(80, 20, label(8, 10, "hello"), title="A greeting")[:60]
        '<svg xmlns="http://www.w3.org/2000/svg" class="pj" role="img'
    """
    return element(
        "svg",
        # Text of a style is read as markup in an SVG file and as raw text in HTML: it must need no escaping.
        Markup(f"<style>{STYLESHEET}</style>"),
        rect(0, 0, width, height, radius=6, class_="pj-back"),
        join(body),
        xmlns="http://www.w3.org/2000/svg",
        class_="pj",
        role="img",
        aria_label=title,
        width=width,
        height=height,
        viewBox=f"0 0 {number(width)} {number(height)}",
    )
