"""Gantt charts: lanes of bars over an axis of time.

The size of a chart is limited, however many bars there are: those that are too narrow to be visible are merged.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from partjit.render.legend import legend
from partjit.render.markup import Markup, element, join, number
from partjit.render.numbers import shown_duration
from partjit.render.svg import label, path, picture, rect, text_width

__all__ = ["KINDS", "Bar", "draw", "merge", "stack", "ticks"]

KINDS: Mapping[str, tuple[str, str]] = {
    "program": ("grey", "program, as its caller sees it"),
    "fragment": ("blue", "fragment on the devices"),
    "call": ("orange", "call of Python"),
    "transfer": ("teal", "transfer"),
    "wait": ("grey", "wait for a call"),
    "process wait": ("blue", "wait for another process"),
}
"""Accent and legend of each kind of bar. A wait is hatched."""

_WAITS = ("wait", "process wait")
_ROW, _GAP, _SIZE = 18.0, 3.0, 10.5
_NARROW = 0.5


@dataclasses.dataclass(frozen=True)
class Bar:
    """A span of time.

    Attributes:
        start, end: in seconds.
        lane: the lane in which it is drawn.
        kind: one of `KINDS`.
        title: its title.
        tooltip: its tooltip.
        is_open: whether it has not ended; its end is that of the chart.
        is_faint: whether it is shown for comparison only.
        count: the number of bars that are merged in it.
        group: the group of lanes that its lane belongs to, if there are groups.
    """

    start: float
    end: float
    lane: str
    kind: str
    title: str
    tooltip: str = ""
    is_open: bool = False
    is_faint: bool = False
    count: int = 1
    group: str = ""


def ticks(start: float, end: float, most: int) -> list[float]:
    """At most so many round times in an interval, at distances of 1, 2 or 5 times a power of ten.

    Example:
        >>> ticks(0, 0.7, 5)
        [0.0, 0.2, 0.4, 0.6]
    """
    if not end > start:
        return [start]
    power = math.floor(math.log10((end - start) / most))
    for size in (1, 2, 5, 10, 20):  # the last one if the interval is just as long as a power of ten times `most`
        digits = max(0, -power)
        step = size * 10.0**power
        first, last = math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9)
        if last - first < most:
            return [round(k * step, digits) for k in range(first, last + 1)]
    return [start]


def stack(bars: Iterable[Bar]) -> list[list[Bar]]:
    """Bars of a lane in rows without overlaps; nested bars are below the bar around them.

    Example:
        >>> waits = [Bar(k, k + 1, "caller", "wait", "load") for k in (1, 3)]
        >>> [len(row) for row in stack([Bar(0, 9, "caller", "program", "step"), *waits])]
        [1, 2]
    """
    rows: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: (bar.start, -bar.end)):
        within = [k for k, row in enumerate(rows) if row[-1].end > bar.start and row[-1].end >= bar.end]
        row = next((row for row in rows[within[-1] + 1 if within else 0 :] if row[-1].end <= bar.start), None)
        if row is None:
            rows.append([bar])
        else:
            row.append(bar)
    return rows


def merge(row: Sequence[Bar], narrow: float) -> list[Bar]:
    """Bars of a row in order, with adjacent ones that are shorter than `narrow` seconds merged.

    Example:
        >>> row = [Bar(k, k + 0.25, "a", "call", "x") for k in range(3)] + [Bar(9, 20, "a", "call", "y")]
        >>> [(bar.start, bar.end, bar.count) for bar in merge(row, narrow=1)]
        [(0, 2.25, 3), (9, 20, 1)]
    """
    merged: list[Bar] = []
    run: list[Bar] = []
    for bar in [*row, None]:
        is_next = bar is not None and bar.end - bar.start < narrow and (not run or bar.start - run[-1].end < narrow)
        if run and not is_next:
            merged.append(_together(run))
            run = []
        if bar is not None and bar.end - bar.start < narrow:
            run.append(bar)
        elif bar is not None:
            merged.append(bar)
    return merged


def _together(bars: Sequence[Bar]) -> Bar:
    if len(bars) == 1:
        return bars[0]
    seconds: dict[str, float] = {}
    for bar in bars:
        seconds[bar.kind] = seconds.get(bar.kind, 0.0) + bar.end - bar.start
    kind = max(seconds, key=lambda kind: seconds[kind])
    tooltip = f"{len(bars):,} that are too short to be visible, {shown_duration(math.fsum(seconds.values()))} together"
    is_faint = all(bar.is_faint for bar in bars)
    return Bar(bars[0].start, bars[-1].end, bars[0].lane, kind, "", tooltip, False, is_faint, len(bars), bars[0].group)


def draw(
    bars: Sequence[Bar],
    *,
    title: str,
    lanes: Sequence[str] = (),
    critical: Sequence[Bar] = (),
    window: tuple[float, float] | None = None,
    width: float = 960,
    groups: Sequence[str] = (),
    caption: str = "",
) -> Markup:
    """The picture, as SVG with an axis and a legend.

    Args:
        bars: in any order.
        title: the title above it.
        lanes: the order of the lanes; others come last, by their first bars.
        critical: the highlighted bars, one after another.
        window: the interval of time that is drawn; by default all of it.
        width: of the picture, in pixels.
        groups: the order of the groups of lanes, each below its name.
        caption: a line below the title.

    Example:
        >>> "load" in draw([Bar(0, 0.25, "stream io", "call", "load")], title="one call")
        True
    """
    start, end = window or (min((b.start for b in bars), default=0.0), max((b.end for b in bars), default=0.0))
    labels = min(max((text_width(lane, 11.5) for lane in {bar.lane for bar in bars}), default=40.0), 170.0)
    top = 44.0 if not caption else 60.0
    chart = _Chart(start, max(end, start + 1e-9), width, labels, top)
    shown = [chart.clipped(bar) for bar in bars if bar.end >= start and bar.start <= end]
    by_lane: dict[tuple[str, str], list[Bar]] = {(group, lane): [] for group in groups or ("",) for lane in lanes}
    for bar in shown:
        by_lane.setdefault((bar.group, bar.lane), []).append(bar)
    y, drawn, rows_of, merged, last_group = top, [], {}, 0, ""
    strong = {chart.clipped(bar) for bar in critical}
    for (group, lane), of_lane in by_lane.items():
        if not of_lane:
            continue
        if group != last_group:
            drawn.append(path([[(12, y), (width - 12, y)]], class_="pj-s-grey", stroke_width=1.2))
            drawn.append(label(12, y + _ROW / 2, group, width=width - 24, size=11.5, bold=True))
            y, last_group = y + _ROW, group
        rows = stack(of_lane)
        height = len(rows) * _ROW + 2 * _GAP
        drawn.append(path([[(chart.left, y), (width - 12, y)]], class_="pj-s-line"))
        drawn.append(label(12, y + _GAP + _ROW / 2, lane, width=chart.left - 20, size=11.5, class_="pj-ink"))
        for k, row in enumerate(rows):
            for bar in merge(row, _NARROW / chart.scale):
                rows_of[bar] = y + _GAP + k * _ROW
                merged += bar.count if bar.count > 1 else 0
                drawn.append(chart.bar(bar, rows_of[bar], is_strong=bar in strong))
        y += height
    grid = chart.axis(y)
    chain = chart.chain([(bar, rows_of[bar]) for bar in map(chart.clipped, critical) if bar in rows_of])
    explained, _, height = legend(_entries(shown, bool(critical), merged), width - 24)
    footer = element("g", explained, transform=f"translate(12 {number(y + 16)})")
    head = label(12, 18, title, width=width - 24, bold=True)
    if caption:
        head = join([head, label(12, 34, caption, width=width - 24, size=_SIZE, class_="pj-muted")])
    return picture(width, y + height + 28, head, grid, *drawn, chain, footer, title=title)


class _Chart:
    """The scale of time."""

    def __init__(self, start: float, end: float, width: float, labels: float, top: float) -> None:
        self.top = top
        self.start, self.end, self.left, self.right = start, end, labels + 28, width - 12
        self.scale = (self.right - self.left) / (end - start)

    def x(self, time: float) -> float:
        return self.left + (time - self.start) * self.scale

    def clipped(self, bar: Bar) -> Bar:
        return dataclasses.replace(bar, start=max(bar.start, self.start), end=min(bar.end, self.end))

    def axis(self, bottom: float) -> Markup:
        """Vertical lines at round times since the start, with labels."""
        span = self.end - self.start
        unit, size = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if span >= s), ("\u00b5s", 1e-6))
        drawn = []
        for tick in ticks(0, span / size, max(2, int((self.right - self.left) / 80))):
            x = self.x(self.start + tick * size)
            drawn.append(path([[(x, self.top - 6), (x, bottom)]], class_="pj-s-line", stroke_width=0.7))
            anchor = "middle" if x < self.right - 20 else "end"
            drawn.append(label(x, self.top - 13, f"{tick:g} {unit}", size=10, anchor=anchor, class_="pj-muted"))
        return join(drawn)

    def bar(self, bar: Bar, y: float, *, is_strong: bool) -> Markup:
        accent, _ = KINDS[bar.kind]
        x, width = self.x(bar.start), max((bar.end - bar.start) * self.scale, _NARROW)
        top, height = y + 1.5, _ROW - 3
        outline = "pj-s-red" if is_strong else f"pj-s-{accent}"
        fill = "pj-back" if bar.kind in _WAITS else f"pj-{accent}-tint"
        stroke = 1.6 if is_strong else 0.8
        if width < 2.5:  # only the outline would be visible
            fill, outline, stroke = "pj-red" if is_strong else f"pj-{accent}", "", 0.0
        shape = rect(
            x, top, width, height, radius=min(2.5, width / 3), class_=f"{fill} {outline}".strip(), stroke_width=stroke
        )
        parts = [element("title", bar.tooltip or bar.title), shape]
        if bar.kind in _WAITS and width >= 2.5:
            parts.append(path(_hatching(x, top, width, height), class_=f"pj-s-{accent}", stroke_width=0.8))
        if bar.is_open and width >= 12:
            tip = [(x + width - 6, top + 3), (x + width - 2, top + height / 2), (x + width - 6, top + height - 3)]
            parts.append(path([tip], class_=f"pj-none pj-s-{accent}"))
        clear = " pj-clear-back" if bar.kind in _WAITS else ""
        parts.append(label(x + 4, y + _ROW / 2, bar.title, width=width - 8, size=_SIZE, class_=f"pj-ink{clear}"))
        return element("g", *parts, opacity=0.35 if bar.is_faint else None)

    def chain(self, bars: Sequence[tuple[Bar, float]]) -> Markup:
        """Lines from the end of each bar to the start of the next."""
        lines = []
        for (before, y0), (after, y1) in itertools.pairwise(bars):
            x0, x1 = self.x(before.end), self.x(after.start)
            down, up = (y0 + _ROW - 1.5, y1 + 1.5) if y1 > y0 else (y0 + 1.5, y1 + _ROW - 1.5)
            if y0 == y1:
                down = up = y0 + _ROW / 2
            lines.append([(x0, down), (x0, up), (x1, up)] if y0 != y1 else [(x0, down), (x1, up)])
        return path(lines, class_="pj-none pj-s-red", stroke_width=1.4) if lines else Markup()


def _hatching(x: float, y: float, width: float, height: float) -> list[list[tuple[float, float]]]:
    """Diagonal lines over a rectangle."""
    # A pattern would need an id, which has to be unique in a page.
    step, lines = 6.0, []
    for k in range(1, math.ceil((width + height) / step)):
        # A line of constant x + y, from the lower left to the upper right.
        across = k * step
        low, high = max(0.0, across - height), min(width, across)
        if high > low:
            lines.append([(x + low, y + across - low), (x + high, y + across - high)])
    return lines


def _entries(bars: Sequence[Bar], is_critical: bool, merged: int) -> list[tuple[Markup, str]]:
    """The entries of the legend."""
    kinds = {bar.kind for bar in bars}
    entries: list[tuple[Markup, str]] = []
    for kind, (accent, meaning) in KINDS.items():
        if kind in kinds:
            fill = "pj-back" if kind in _WAITS else f"pj-{accent}-tint"
            swatch = [rect(0, 0, 18, 12, radius=2, class_=f"{fill} pj-s-{accent}", stroke_width=0.8)]
            if kind in _WAITS:
                swatch.append(path(_hatching(0, 0, 18, 12), class_=f"pj-s-{accent}", stroke_width=0.8))
            entries.append((join(swatch), meaning))
    if is_critical:
        line = path([[(0, 6), (18, 6)]], class_="pj-none pj-s-red", stroke_width=1.6)
        entries.append((line, "critical path"))
    if merged:
        entries.append((Markup(), f"{merged:,} spans narrower than half a pixel are merged"))
    return entries
