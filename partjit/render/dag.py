"""Pictures of directed graphs whose vertices may contain graphs: rows of boxes, edges that all go down."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from partjit.render.layered import LayeredDrawing, Point, Wire, lay_out
from partjit.render.legend import legend
from partjit.render.markup import Attribute, Markup, element, join, number
from partjit.render.svg import label, path, picture, rect, smooth, text_width

__all__ = ["KINDS", "ArrangedGraph", "Edge", "Graph", "Vertex", "arrange", "draw"]

KINDS: Mapping[str, tuple[str, float, str]] = {
    "fragment": ("blue", 3.0, "fragment, compiled by XLA"),
    "call": ("orange", 13.0, "call of Python"),
    "transfer": ("teal", 0.0, "transfer"),
    "group": ("grey", 8.0, "loop or branch, driven by the host"),
    "alike": ("grey", 4.0, "several that are alike, drawn once"),
    "end": ("grey", 15.0, "arguments and results"),
}
"""Accent, corner radius and legend of each kind of vertex."""

_TITLE, _LINE = 12.0, 10.5
_SIDE, _INSIDE = 10.0, 12.0
_LONGEST = 230.0


@dataclasses.dataclass(frozen=True)
class Vertex:
    """A box.

    Attributes:
        name: its name in edges, unique in its graph.
        title: its title.
        lines: smaller lines below that.
        kind: one of `KINDS`.
        parts: the graphs in it, next to each other.
        tooltip: its tooltip.
        is_strong: whether it is highlighted.
    """

    name: str
    title: str
    lines: tuple[str, ...] = ()
    kind: str = "fragment"
    parts: "tuple[Graph, ...]" = ()
    tooltip: str = ""
    is_strong: bool = False


@dataclasses.dataclass(frozen=True)
class Edge:
    """An arrow from one vertex of a graph to another; a dotted one if it carries an order only."""

    before: str
    after: str
    label: str = ""
    is_order: bool = False
    is_strong: bool = False
    tooltip: str = ""


@dataclasses.dataclass(frozen=True)
class Graph:
    """Vertices and edges; `title` is shown above them if the graph is one of several in a vertex.

    Example:
        >>> graph = Graph((Vertex("a", "load", kind="call"), Vertex("b", "step")), (Edge("a", "b", "4 kB"),))
        >>> draw(graph, title="two steps")[:4]
        '<svg'
    """

    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...] = ()
    title: str = ""


@dataclasses.dataclass(frozen=True)
class ArrangedGraph:
    """A graph with coordinates, relative to its own corner.

    Attributes:
        graph: the graph.
        drawing: the coordinates of its vertices and edges.
        sizes: the width and height of each vertex.
        parts: for each vertex the graphs in it, with their corners relative to the vertex.
    """

    graph: Graph
    drawing: LayeredDrawing
    sizes: tuple[tuple[float, float], ...]
    parts: "tuple[tuple[tuple[float, float, ArrangedGraph], ...], ...]"

    @property
    def width(self) -> float:
        """The width, including the title."""
        return max(self.drawing.width, text_width(self.graph.title, _LINE, mono=True))

    @property
    def height(self) -> float:
        """The height, without the title."""
        return self.drawing.height

    def boxes(self) -> Iterator[tuple[float, float, float, float]]:
        """The left, top, width and height of each vertex."""
        for (x, y), (width, height) in zip(self.drawing.centers, self.sizes, strict=True):
            yield x - width / 2, y - height / 2, width, height


def arrange(graph: Graph) -> ArrangedGraph:
    """Computes the coordinates of a graph.

    Raises:
        ValueError: the edges form a cycle, or name no vertex, or two vertices have one name.

    Example:
        >>> [*arrange(Graph((Vertex("a", "load"),))).boxes()][0][:2]
        (0.0, 0.0)
    """
    index = {vertex.name: k for k, vertex in enumerate(graph.vertices)}
    if len(index) < len(graph.vertices):
        twice = sorted(name for name, n in Counter(vertex.name for vertex in graph.vertices).items() if n > 1)
        raise ValueError(f"the names of vertices must be unique in a graph, but these are repeated: {twice}")
    for edge in graph.edges:
        if missing := [name for name in (edge.before, edge.after) if name not in index]:
            raise ValueError(f"the edge {edge.before} -> {edge.after} names no vertex of its graph: {missing}")
    measured = [_measure(vertex) for vertex in graph.vertices]
    sizes = tuple((width, height) for width, height, _ in measured)
    wires = [
        Wire(
            index[edge.before],
            index[edge.after],
            (text_width(edge.label, _LINE) + 4, _LINE + 3) if edge.label else (0, 0),
            "order" if edge.is_order else "data",
        )
        for edge in graph.edges
    ]
    ends = [k for k, vertex in enumerate(graph.vertices) if vertex.kind == "end"]
    return ArrangedGraph(graph, lay_out(sizes, wires, ends, ends), sizes, tuple(parts for _, _, parts in measured))


def _measure(vertex: Vertex) -> tuple[float, float, tuple[tuple[float, float, ArrangedGraph], ...]]:
    """The width and height of a vertex, and the graphs in it."""
    text = max(
        min(text_width(vertex.title, _TITLE, mono=True), _LONGEST),
        *(min(text_width(line, _LINE), _LONGEST) for line in vertex.lines),
        30.0,
    )
    top = 14.0 + _TITLE + (_LINE + 4) * len(vertex.lines)
    if not vertex.parts:
        return text + 2 * _SIDE, top, ()
    x, parts = _INSIDE, []
    arranged = [arrange(part) for part in vertex.parts]
    inset = 26.0 if any(part.title for part in vertex.parts) else 0.0  # titles, and a frame around each
    for part in arranged:
        frame = _SIDE if inset else 0.0
        parts.append((x + frame, top + inset, part))
        x += part.width + 2 * frame + _INSIDE
    height = top + inset + max(part.height for part in arranged) + (_SIDE if inset else 0.0) + _INSIDE
    return max(x, text + 2 * _SIDE), height, tuple(parts)


def draw(graph: Graph, *, title: str) -> Markup:
    """The picture of a graph, as SVG with a legend; `title` is its label for screen readers.

    Raises:
        ValueError: as `arrange` does.

    Example:
        >>> "sample" in draw(Graph((Vertex("a", "sample", kind="call"),)), title="one call")
        True
    """
    arranged = arrange(graph)
    margin = 16.0
    explained, legend_width, legend_height = legend(_entries(graph), max(arranged.width, 420.0))
    width = max(arranged.width, legend_width) + 2 * margin
    left = (width - arranged.width) / 2
    body = _shifted(left, margin, _drawn(arranged, 0))
    below = _shifted((width - legend_width) / 2, margin + arranged.height + 14, explained)
    return picture(width, arranged.height + 2 * margin + 14 + legend_height, body, below, title=title)


def _drawn(arranged: ArrangedGraph, depth: int) -> Markup:
    drawing = arranged.drawing
    # Highlighted edges are drawn last, over others on the same route.
    routed = sorted(zip(arranged.graph.edges, drawing.routes, strict=True), key=lambda pair: pair[0].is_strong)
    arrows = [_arrow(edge, route.points) for edge, route in routed]
    # The outline of a label hides the edge behind it.
    clear = "pj-clear-back" if depth % 2 == 0 else "pj-clear-panel"
    labels = []
    for edge, route in routed:
        if route.label is not None:
            class_ = f"{'pj-red' if edge.is_strong else 'pj-muted'} {clear}"
            labels.append(label(*route.label, edge.label, size=_LINE, anchor="middle", class_=class_))
    boxes = [
        _box(vertex, corner, parts, depth)
        for vertex, corner, parts in zip(arranged.graph.vertices, arranged.boxes(), arranged.parts, strict=True)
    ]
    return join([*arrows, *labels, *boxes])


def _box(
    vertex: Vertex,
    corner: tuple[float, float, float, float],
    parts: Sequence[tuple[float, float, ArrangedGraph]],
    depth: int,
) -> Markup:
    x, y, width, height = corner
    accent, radius, _ = KINDS[vertex.kind]
    fill = ("pj-panel" if depth % 2 == 0 else "pj-back") if vertex.parts else f"pj-{accent}-tint"
    outline = "pj-s-red" if vertex.is_strong else f"pj-s-{accent}"
    frame = rect(
        x, y, width, height, radius=radius, class_=f"{fill} {outline}", stroke_width=2 if vertex.is_strong else 1
    )
    middle, room = x + width / 2, width - 2 * _SIDE + 2
    at = y + 7 + _TITLE / 2
    text = [label(middle, at, vertex.title, width=room, anchor="middle", mono=True, bold=True)]
    for k, line in enumerate(vertex.lines):
        below = at + 3 + (_LINE + 4) * (k + 1)
        text.append(label(middle, below, line, width=room, size=_LINE, anchor="middle", class_="pj-muted"))
    inside = []
    for part_x, part_y, part in parts:
        if part.graph.title or len(parts) > 1:
            wide, high = part.width + 2 * _SIDE, height - (part_y - 26) - _INSIDE
            inside.append(rect(x + part_x - _SIDE, y + part_y - 26, wide, high, radius=5, class_="pj-none pj-s-line"))
            inside.append(
                label(x + part_x, y + part_y - 13, part.graph.title, size=_LINE, class_="pj-muted", mono=True)
            )
        inside.append(_shifted(x + part_x + (part.width - part.drawing.width) / 2, y + part_y, _drawn(part, depth + 1)))
    tooltip = [element("title", vertex.tooltip)] if vertex.tooltip else []
    return join([element("g", *tooltip, frame, *text), *inside])


def _arrow(edge: Edge, points: Sequence[Point]) -> Markup:
    tip_x, tip_y = points[-1]
    way = smooth([*points[:-1], (tip_x, tip_y - 5)])  # it ends inside of the head, which touches the box
    color = "red" if edge.is_strong else "grey"
    style: dict[str, Attribute] = {"stroke_width": 2.0 if edge.is_strong else 1.2}
    dashes = " pj-dashed" if edge.is_order else ""
    line = element("path", d=way, class_=f"pj-none pj-s-{color}{dashes}", **style)
    head = path([[(tip_x, tip_y), (tip_x - 3.5, tip_y - 7), (tip_x + 3.5, tip_y - 7)]], class_=f"pj-{color}")
    return element("g", element("title", edge.tooltip or f"{edge.before} \u2192 {edge.after}"), line, head)


def _entries(graph: Graph) -> list[tuple[Markup, str]]:
    """The entries of the legend."""
    kinds = {vertex.kind for part in _graphs(graph) for vertex in part.vertices}
    edges = [edge for part in _graphs(graph) for edge in part.edges]
    entries: list[tuple[Markup, str]] = []
    for kind, (accent, radius, meaning) in KINDS.items():
        if kind in kinds:
            fill = "pj-panel" if kind == "group" else f"pj-{accent}-tint"
            swatch = rect(0, 0, 18, 12, radius=min(radius, 6.0), class_=f"{fill} pj-s-{accent}")
            entries.append((swatch, meaning))
    if any(edge.is_order for edge in edges):
        entries.append((path([[(0, 6), (18, 6)]], class_="pj-none pj-s-grey pj-dashed"), "order without data"))
    if any(edge.is_strong for edge in edges) or any(v.is_strong for part in _graphs(graph) for v in part.vertices):
        line = path([[(0, 6), (18, 6)]], class_="pj-none pj-s-red", stroke_width=2)
        entries.append((line, "critical path"))
    return entries


def _graphs(graph: Graph) -> Iterator[Graph]:
    yield graph
    for vertex in graph.vertices:
        for part in vertex.parts:
            yield from _graphs(part)


def _shifted(x: float, y: float, what: Markup) -> Markup:
    return element("g", what, transform=f"translate({number(x)} {number(y)})")
