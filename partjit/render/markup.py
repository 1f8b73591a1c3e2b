"""Elements of SVG and HTML as text: plain strings are escaped, `Markup` is not."""

import functools
import re
from collections.abc import Iterable

__all__ = ["Markup", "element", "escape", "join", "number"]

Attribute = str | float | None

# What XML allows nowhere, not even escaped: control characters, halves of surrogate pairs, and two code points.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"})
_PLAIN = re.compile("[\t\n\r\u0020!\u0023-\u0025(-;=?-\ud7ff]*")  # most texts
# HTML parses `<td/>` as an opening tag, so only these may be self-closing.
_EMPTY = frozenset({"br", "circle", "ellipse", "hr", "line", "meta", "path", "polygon", "polyline", "rect", "use"})


class Markup(str):
    """Text that is SVG or HTML."""

    __slots__ = ()


def escape(text: str) -> Markup:
    """Escapes a text for elements and attributes.

    Example:
        >>> escape("x < y & 'z'")
        'x &lt; y &amp; &#39;z&#39;'
    """
    if _PLAIN.fullmatch(text):
        return Markup(text)
    return Markup(_FORBIDDEN.sub("\ufffd", text).translate(_ESCAPES))


def number(value: float) -> str:
    """A coordinate, with at most two digits after the point.

    Example:
        >>> number(3.0), number(0.125), number(-0.001)
        ('3', '0.12', '0')
    """
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def join(parts: Iterable[str]) -> Markup:
    """Concatenates parts; plain text is escaped.

    Example:
        >>> join(["a < ", element("b", "c")])
        'a &lt; <b>c</b>'
    """
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


@functools.lru_cache(maxsize=256)
def _attribute(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


def element(tag: str, *children: str, **attributes: Attribute) -> Markup:
    """An element with children, of which plain text is escaped.

    An underscore in the name of an attribute becomes a hyphen, one at its end (`class_`) is dropped; None leaves the
    attribute out.

    Example:
        >>> element("g", element("rect", x=1, rx=2.5), "a < b", class_="pj-ink", data_k=None)
        '<g class="pj-ink"><rect x="1" rx="2.5"/>a &lt; b</g>'
    """
    written = "".join(
        f' {_attribute(name)}="{escape(value) if isinstance(value, str) else number(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    if not children and tag in _EMPTY:
        return Markup(f"<{tag}{written}/>")
    return Markup(f"<{tag}{written}>{join(children)}</{tag}>")
