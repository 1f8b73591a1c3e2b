"""SVG: shapes, text that is cut to fit, and the picture around them.

No element has an id, so any number of pictures fit into one page. Coordinates are pixels, from the top left.
"""

import functools
import itertools
import unicodedata
from collections.abc import Sequence

from partjit.render.markup import Attribute, Markup, element, join, number
from partjit.render.theme import STYLESHEET

__all__ = ["fit", "label", "path", "picture", "rect", "smooth", "text_width"]

Point = tuple[float, float]

# Widths of characters in ems, of the widest common sans-serif font of any system, so that text rather ends early.
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
    """The estimated width of a line of text in pixels; rather too wide than too narrow.

    Example:
        >>> text_width("mm") > text_width("ii") > 0
        True
    """
    return size * sum([_em(character, mono) for character in text])


@functools.lru_cache(maxsize=1024)
def _em(character: str, mono: bool) -> float:
    if unicodedata.combining(character):
        return 0.0
    if unicodedata.east_asian_width(character) in "WF":
        return 2 * _MONO if mono else 1.1
    return _MONO if mono else _WIDTHS.get(character, 0.63)


def fit(text: str, width: float, size: float = 12, *, mono: bool = False) -> str:
    """A line of text, or as much of its beginning as fits into a width, with an ellipsis; maybe nothing.

    Example:
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
        x: of its start, middle or end, as `anchor` says.
        y: its vertical center.
        text: the line; empty markup is returned if nothing of it fits.
        width: to which it is cut; all of it is then in the tooltip.
        size: of the font.
        anchor: "start", "middle" or "end".
        class_: its color: "pj-ink", "pj-muted", "pj-on3", ...
        mono, bold: the style of the font.

    Example:
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
    """A rectangle in the colors of a class such as "pj-panel pj-s-line", maybe with a `title` for a tooltip.

    Example:
        >>> rect(0, 0, 10, 5, class_="pj-c3")
        '<rect x="0" y="0" width="10" height="5" class="pj-c3"/>'
    """
    where: dict[str, Attribute] = {"x": x, "y": y, "width": width, "height": height, "rx": radius or None}
    return element("rect", *children, **where, class_=class_, **more)


def path(lines: Sequence[Sequence[Point]], *children: str, class_: str, **more: Attribute) -> Markup:
    """Polylines in one element, in the colors of a class such as "pj-none pj-s-line".

    Example:
        >>> path([[(0, 0), (5, 0)], [(0, 3), (5, 3.5)]], class_="pj-none pj-s-line")
        '<path d="M0 0L5 0M0 3L5 3.5" class="pj-none pj-s-line"/>'
    """
    drawn = "".join(
        "".join(f"{'L' if k else 'M'}{number(x)} {number(y)}" for k, (x, y) in enumerate(line)) for line in lines
    )
    return element("path", *children, d=drawn, class_=class_, **more)


def smooth(points: Sequence[Point]) -> str:
    """The `d` of a smooth path down through points.

    It begins and ends vertically and is monotone between two points: x is a monotone cubic of y (Fritsch and Carlson,
    1980).

    Example:
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
    """An SVG for a file or a page, with the stylesheet and a background; `title` is its label for screen readers.

    Example:
        >>> picture(80, 20, label(8, 10, "hello"), title="A greeting")[:60]
        '<svg xmlns="http://www.w3.org/2000/svg" class="pj" role="img'
    """
    return element(
        "svg",
        # The text of a style is markup in an SVG file and raw text in HTML, so it must not need escaping.
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
