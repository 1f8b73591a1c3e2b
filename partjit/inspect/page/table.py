"""Tables of a page, which its script makes sortable and searchable."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from partjit.render.markup import Markup, element, join
from partjit.render.numbers import shown_bytes, shown_count
from partjit.render.theme import COLORS

__all__ = ["Amount", "amount", "chip", "colored_spec", "nbytes", "rows_table"]


class Amount(NamedTuple):
    """A cell with a number.

    Attributes:
        text: as it is shown.
        value: the number it is sorted by; None if unknown.
    """

    text: str
    value: float | None


Cell = str | Amount


def nbytes(size: float | None) -> Amount:
    """A cell with a number of bytes."""
    return Amount("?", None) if size is None else Amount(shown_bytes(size), size)


def amount(count: float | None) -> Amount:
    """A cell with a count."""
    if count is None:
        return Amount("?", None)
    return Amount(f"{count:,}" if isinstance(count, int) else shown_count(count), count)


def rows_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    filters: Sequence[int] = (),
    total: int | None = None,
    is_searched: bool = True,
    groups: Sequence[tuple[str, int]] = (),
) -> Markup:
    """A table.

    Args:
        title: its label for screen readers.
        columns: the names of the columns.
        rows: their cells. A click on a row opens the first link in it.
        filters: the columns whose values, separated by commas, filter the rows.
        total: the column of bytes whose sum over the visible rows is shown.
        is_searched: whether it has a search field.
        groups: the titles of groups of columns, and the number of columns in each.

    Example:
        >>> rows_table("sizes", ("what", "bytes"), [("x < y", nbytes(2000))])[-97:]
        '<tbody><tr><td>x &lt; y</td><td class="pj-r" data-v="2000">2.0 kB</td></tr></tbody></table></div>'
    """
    listed = [*rows]
    is_number = [any(isinstance(row[k], Amount) for row in listed) for k in range(len(columns))]
    head = (
        element("th", name, scope="col", class_="pj-r" if right else None)
        for name, right in zip(columns, is_number, strict=True)
    )
    above = [element("th", text, scope="colgroup", colspan=span) for text, span in groups]
    body = (element("tr", *map(_cell, row)) for row in listed)
    table = element(
        "table",
        element("thead", *([element("tr", *above, class_="pj-groups")] if above else []), element("tr", *head)),
        element("tbody", join(body)),
        class_="pj-rows",
        aria_label=title,
        data_filters=" ".join(map(str, filters)) or None,
        data_total=None if total is None else str(total),
        data_search="" if is_searched else None,
    )
    return element("div", table, class_="pj-wide")


def _cell(cell: Cell) -> Markup:
    if not isinstance(cell, Amount):
        return element("td", cell)
    value = None if cell.value is None or not math.isfinite(cell.value) else f"{cell.value:.12g}"
    return element("td", cell.text, class_="pj-r", data_v=value)


_QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")


def colored_spec(spec: str, axes: Sequence[str]) -> Markup:
    """The text of a spec, each axis in the color of its position among the axes of the mesh.

    Example:
        >>> colored_spec("P('x', None)", ["w", "x"])
        'P(<span class="pj-x1">x</span>, None)'
    """
    parts, end = [], 0
    for match in _QUOTED.finditer(spec):
        quoted = match[1] if match[1] is not None else match[2]
        parts += [spec[end : match.start()], chip(re.sub(r"\\(.)", r"\1", quoted), axes)]
        end = match.end()
    return join([*parts, spec[end:]])


def chip(axis: str, axes: Sequence[str], text: str = "") -> Markup:
    """The name of an axis of the mesh, or of a part of one ("data:(1)2"), or another text, in the color of the axis."""
    name = axis if axis in axes else axis.partition(":")[0]
    color = f"pj-x{axes.index(name) % COLORS}" if name in axes else "pj-x"
    return element("span", text or axis, class_=color)
