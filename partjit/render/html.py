"""Fragments of HTML pages: pictures, source and tables that follow the reader's theme."""

from collections.abc import Callable, Mapping, Sequence

from partjit.render.markup import Markup, element, join
from partjit.render.theme import STYLESHEET

__all__ = ["code", "fragment", "table"]

Cell = str | float

# Pages around a fragment style tables and code as well, some of them with selectors as specific as one class.
_STYLE = """
div.pj{color:var(--pj-ink);background:var(--pj-back);padding:8px;border-radius:6px;font-size:13px;line-height:1.45}
div.pj svg{display:block}
div.pj pre.pj-code{color:var(--pj-ink);background:var(--pj-panel);border:1px solid var(--pj-line);border-radius:6px;
padding:8px 12px;margin:8px 0;overflow:auto;max-height:32em;font-size:12px;line-height:1.5;text-align:left}
div.pj div.pj-scroll{overflow:auto;max-height:32em;margin:8px 0}
div.pj table.pj-table{border-collapse:collapse;color:var(--pj-ink);background:none;margin:0}
div.pj table.pj-table caption{text-align:left;font-weight:600;padding:4px 0;color:var(--pj-ink);caption-side:top}
div.pj table.pj-table th,div.pj table.pj-table td{text-align:left;padding:2px 12px 2px 0;background:none;
border:0;border-bottom:1px solid var(--pj-line);white-space:nowrap;color:var(--pj-ink)}
div.pj table.pj-table th{color:var(--pj-muted);font-weight:500}
div.pj table.pj-table .pj-number{text-align:right;font-variant-numeric:tabular-nums}
"""


def fragment(*parts: str) -> Markup:
    """Parts below each other, as HTML for any page, with the stylesheet.

    Example:
        >>> fragment(code("x = 1"))[-46:]
        '<pre class="pj-code pj-mono">x = 1</pre></div>'
    """
    return element("div", Markup(f"<style>{STYLESHEET}{_STYLE}</style>"), *parts, class_="pj")


def code(source: str) -> Markup:
    """Source code.

    Example:
        >>> code("a < b")
        '<pre class="pj-code pj-mono">a &lt; b</pre>'
    """
    return element("pre", source, class_="pj-code pj-mono")


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    formats: Mapping[int, Callable[[float], str]] | None = None,
) -> Markup:
    """A table with a title; numbers are right-aligned, and formatted by the function for the position of their column.

    Example:
        >>> table("Counts", ("name", "count"), [("load", 3)]).count("<td")
        2
    """
    formats = formats or {}

    def cell(tag: str, k: int, value: Cell) -> Markup:
        column = [row[k] for row in rows] if tag == "th" else [value]
        is_number = any(not isinstance(other, str) for other in column)
        text = value if isinstance(value, str) else formats.get(k, "{:,}".format)(value)
        return element(tag, text, class_="pj-number" if is_number else None)

    def line(tag: str, values: Sequence[Cell]) -> Markup:
        return element("tr", *(cell(tag, k, value) for k, value in enumerate(values)))

    head = element("thead", line("th", columns))
    body = element("tbody", join(line("td", row) for row in rows))
    whole = element("table", element("caption", title), head, body, class_="pj-table")
    return element("div", whole, class_="pj-scroll")
