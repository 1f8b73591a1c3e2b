"""A layered drawing of a directed graph: boxes in rows, edges that go down between them, labels on the edges.

Rows of boxes and rows of labels alternate, so that labels do not overlap anything. An edge passes each row at a point
with some distance to its neighbors, and vertically beside boxes, so it never crosses one.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import networkx as nx

from partjit.render.coordinates import spread, x_coordinates
from partjit.render.layer_assignment import assign_layers, put_in_order

__all__ = ["LayeredDrawing", "Route", "Wire", "lay_out"]

_BESIDE = 18.0  # between two vertices of a row
_WIDEST = 1500.0  # of a row of several boxes
_SHARED = 0.25  # the pull of edges that run together; that of a single edge is 1

Point = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Wire:
    """An edge.

    Attributes:
        before, after: the positions of its boxes.
        label: the width and height of its label; zeros without one.
        style: edges of one style that leave one box, or arrive at one, may run together for a while.
    """

    before: int
    after: int
    label: tuple[float, float] = (0.0, 0.0)
    style: str = ""


@dataclasses.dataclass(frozen=True)
class Route:
    """The points of an edge, from its first box down to its last, and the center of its label if it has one."""

    points: tuple[Point, ...]
    label: Point | None


@dataclasses.dataclass(frozen=True)
class LayeredDrawing:
    """The centers of the boxes, the routes of the edges, and the total size."""

    centers: tuple[Point, ...]
    routes: tuple[Route, ...]
    width: float
    height: float


class _Line:
    """A line through points, without those inside of a vertical segment."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def go(self, x: float, y: float) -> None:
        points = self.points
        if len(points) > 1 and points[-2][0] == points[-1][0] == x:
            points[-1] = (x, y)
        elif not points or points[-1] != (x, y):
            points.append((x, y))


class _Points:
    """The vertices of all rows: boxes, labels, and points where edges pass rows."""

    def __init__(self, sizes: Sequence[tuple[float, float]], rows: Sequence[int]) -> None:
        self.sizes = [*sizes]
        self.rows = [*rows]
        self.is_thin = [False] * len(sizes)
        self.pulls = [1.0] * len(sizes)
        self.above: list[list[int]] = [[] for _ in sizes]
        self.below: list[list[int]] = [[] for _ in sizes]

    def add(self, row: int, size: tuple[float, float], *, is_thin: bool, pull: float) -> int:
        self.sizes.append(size)
        self.rows.append(row)
        self.is_thin.append(is_thin)
        self.pulls.append(pull)
        self.above.append([])
        self.below.append([])
        return len(self.sizes) - 1

    def join(self, chain: Sequence[int]) -> None:
        for u, v in itertools.pairwise(chain):
            if v not in self.below[u]:
                self.below[u].append(v)
                self.above[v].append(u)


def lay_out(
    sizes: Sequence[tuple[float, float]],
    wires: Sequence[Wire],
    first: Sequence[int] = (),
    last: Sequence[int] = (),
) -> LayeredDrawing:
    """Draws a graph.

    Args:
        sizes: the width and height of each box.
        wires: the edges.
        first, last: the boxes without edges to them, or from them, that belong at the top, or at the bottom.

    Raises:
        ValueError: the edges form a cycle.

    Example:
        >>> drawing = lay_out([(40, 20), (40, 20)], [Wire(0, 1)])
        >>> drawing.centers
        ((20.0, 10.0), (20.0, 60.0))
    """
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(sizes)))
    graph.add_edges_from((wire.before, wire.after) for wire in wires)
    if not nx.is_directed_acyclic_graph(graph):
        cycle = [before for before, _ in nx.find_cycle(graph)]
        raise ValueError(f"the edges of a layered drawing all go down, but these form a cycle: boxes {cycle}")
    layers = _layers(sizes, graph, first, last)
    points = _Points(sizes, [2 * layer for layer in layers])
    chains = _chains(points, wires, layers)
    count = max(points.rows, default=-1) + 1
    rows: list[list[int]] = [[] for _ in range(count)]
    # In depth-first order, connected vertices are next to each other from the start.
    for v in nx.dfs_preorder_nodes(nx.DiGraph({u: points.below[u] for u in range(len(points.rows))})):
        rows[points.rows[v]].append(v)
    ordered = put_in_order(rows, points.above, points.below)
    widths = [width for width, _ in points.sizes]
    x = x_coordinates(ordered, widths, points.is_thin, points.pulls, points.above, points.below, _BESIDE)
    ports = _ports(points, x, len(sizes))
    tops, bottoms = _heights(points, ordered, x)
    middles = [(top + bottom) / 2 for top, bottom in zip(tops, bottoms, strict=True)]

    def at(v: int) -> Point:
        return x[v], middles[points.rows[v]]

    routes = []
    for chain, labelled in chains:
        line = _Line()
        for u, v in itertools.pairwise(chain):
            out, into = ports.get((u, v, 0), x[u]), ports.get((u, v, 1), x[v])
            if u < len(sizes):
                line.go(out, middles[points.rows[u]] + sizes[u][1] / 2)
            if points.rows[u] % 2 == 0:
                line.go(out, bottoms[points.rows[u]])
            # Beside boxes an edge is vertical; beside labels it need not be.
            line.go(into, (tops if points.rows[v] % 2 == 0 else middles)[points.rows[v]])
            if v < len(sizes):
                line.go(into, middles[points.rows[v]] - sizes[v][1] / 2)
        routes.append(Route(tuple(line.points), None if labelled is None else at(labelled)))
    width = max((x[v] + size[0] / 2 for v, size in enumerate(points.sizes)), default=0.0)
    return LayeredDrawing(
        tuple(at(v) for v in range(len(sizes))), tuple(routes), width, bottoms[-1] if bottoms else 0.0
    )


def _layers(
    sizes: Sequence[tuple[float, float]], graph: nx.DiGraph, first: Sequence[int], last: Sequence[int]
) -> list[int]:
    numbers = {v: k for k, v in enumerate(nx.lexicographical_topological_sort(graph))}
    above: list[list[int]] = [[numbers[u] for u in graph.predecessors(v)] for v in numbers]
    below: list[list[int]] = [[numbers[u] for u in graph.successors(v)] for v in numbers]
    found = assign_layers([sizes[v][0] + _BESIDE for v in numbers], above, below, _WIDEST)
    layers = [found[numbers[v]] for v in range(len(sizes))]
    for v in first:
        layers[v] = layers[v] if graph.in_degree(v) else 0
    for v in last:
        layers[v] = layers[v] if graph.out_degree(v) else max(layers)
    used = {layer: k for k, layer in enumerate(sorted(set(layers)))}
    return [used[layer] for layer in layers]


def _chains(points: _Points, wires: Sequence[Wire], layers: Sequence[int]) -> list[tuple[tuple[int, ...], int | None]]:
    """The vertices of each edge, and the one that is its label."""
    leaving, arriving = ({}, {})  # how many edges of a style a box has on each side
    for wire in wires:
        for sides, box in ((leaving, wire.before), (arriving, wire.after)):
            sides[box, wire.style] = sides.get((box, wire.style), 0) + 1
    trunks: dict[tuple[int, str, bool, int], int] = {}  # the points of edges that run together
    chains: list[tuple[tuple[int, ...], int | None]] = []
    for wire in wires:
        top, bottom = 2 * layers[wire.before], 2 * layers[wire.after]
        from_above = leaving[wire.before, wire.style] >= arriving[wire.after, wire.style]
        hub = wire.before if from_above else wire.after
        # The label is where the edge is on its own: next to the box that it does not share with others.
        own = bottom - 1 if from_above else top + 1
        is_alone = max(leaving[wire.before, wire.style], arriving[wire.after, wire.style]) == 1
        is_short = bottom - top == 2
        label = points.add(own, wire.label, is_thin=is_alone, pull=1.0 if is_alone or is_short else _SHARED)
        chain = [wire.before]
        for row in range(top + 1, bottom):
            if row == own:
                chain.append(label)
                continue
            key = (hub, wire.style, from_above, row)
            if key not in trunks:
                trunks[key] = points.add(row, (2.0, 0.0), is_thin=True, pull=_SHARED)
            chain.append(trunks[key])
        chain.append(wire.after)
        points.join(chain)
        chains.append((tuple(chain), label if wire.label[0] else None))
    return chains


def _ports(points: _Points, x: list[float], boxes: int) -> dict[tuple[int, int, int], float]:
    """The x of edges at boxes: straight above or below their next point if possible, at a distance from each other."""
    ports: dict[tuple[int, int, int], float] = {}
    for box in range(boxes):
        half = points.sizes[box][0] / 2
        for end, others in ((0, points.below[box]), (1, points.above[box])):
            if not others:
                continue
            others = sorted(others, key=lambda v: (x[v], v))
            reach = half - min(12.0, half / 2)
            apart = min(14.0, 2 * reach / len(others))
            low, high = x[box] - reach, x[box] + reach
            slack = [(len(others) - 1 - k) * apart for k in range(len(others))]
            wanted = [min(max(x[v], low), high) for v in others]
            for k, position in enumerate(spread(wanted, [1.0] * len(others), [apart] * len(others))):
                position = min(max(position, low + k * apart), high - slack[k])
                ports[(box, others[k], 0) if end == 0 else (others[k], box, 1)] = position
    return ports


def _heights(points: _Points, ordered: Sequence[Sequence[int]], x: Sequence[float]) -> tuple[list[float], list[float]]:
    """The top and bottom of each row, with more room between rows where edges go far to the side."""
    tops, bottoms, y = [], [], 0.0
    for row in ordered:
        height = max((points.sizes[v][1] for v in row), default=0.0)
        tops.append(y)
        bottoms.append(y + height)
        far = max((abs(x[u] - x[v]) for u in row for v in points.below[u]), default=0.0)
        y += height + min(15.0 + 0.05 * far, 56.0)
    return tops, bottoms
