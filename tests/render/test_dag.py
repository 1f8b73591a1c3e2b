"""Drawings of graphs: nothing overlaps, everything is there, all edges go down, and long ones are straight."""

import itertools
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partjit.render.coordinates import spread
from partjit.render.dag import KINDS, Edge, Graph, Vertex, arrange, draw
from partjit.render.layer_assignment import assign_layers, count_crossings, put_in_order
from partjit.render.layered import Wire, lay_out
from tests.census import features, sees

SVG = "{http://www.w3.org/2000/svg}"


@st.composite
def graphs(draw, depth=2, most=7):
    """Graphs without circles, of which some vertices hold graphs."""
    count = draw(st.integers(1, most))
    vertices = []
    for k in range(count):
        parts = ()
        if depth and draw(st.integers(0, 4)) == 0:
            parts = tuple(draw(st.lists(graphs(depth=depth - 1, most=3), min_size=1, max_size=2)))
        title = draw(st.text(st.characters(codec="utf-8", exclude_categories=("C", "M")), min_size=1, max_size=40))
        lines = tuple(draw(st.lists(st.just("12 equations"), max_size=2)))
        kind = "group" if parts else draw(st.sampled_from([*KINDS]))
        vertices.append(Vertex(f"v{k}", title, lines, kind, parts, is_strong=draw(st.booleans())))
    names = draw(st.permutations([vertex.name for vertex in vertices]))
    pairs = [(a, b) for k, b in enumerate(names) for a in names[:k]]
    edges = []
    for before, after in draw(st.lists(st.sampled_from(pairs), unique=True, max_size=12)) if pairs else []:
        size = draw(st.sampled_from(["", "4 B", "1234.5 MB"]))
        edges.append(Edge(before, after, size, draw(st.booleans()), draw(st.booleans())))
    return Graph(tuple(vertices), tuple(edges), draw(st.sampled_from(["", "case 0"])))


@features.register
def _(graph: Graph):
    """What a law of graphs sees."""
    shown = {
        "several vertices": len(graph.vertices) > 1,
        "an edge": bool(graph.edges),
        "a graph in a vertex": any(vertex.parts for vertex in graph.vertices),
    }
    return {feature for feature, is_there in shown.items() if is_there}


def overlap(one, other):
    (x, y, w, h), (u, v, s, t) = one, other
    return min(x + w, u + s) - max(x, u) > 1e-6 and min(y + h, v + t) - max(y, v) > 1e-6


def arranged_graphs(arranged):
    yield arranged
    for parts in arranged.parts:
        for _, _, part in parts:
            yield from arranged_graphs(part)


def pieces(points):
    """A route as straight pieces, near enough for what it may run through."""
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        yield (min(x0, x1), y0, abs(x1 - x0), y1 - y0)


def boxes_never_overlap(arranged):
    for one, other in itertools.combinations(arranged.boxes(), 2):
        assert not overlap(one, other)


def what_is_in_a_box_is_inside_of_it_side_by_side(arranged):
    for (_, _, width, height), parts in zip(arranged.boxes(), arranged.parts, strict=True):
        inner = [(x, y, part.width, part.height) for x, y, part in parts]
        assert all(x > 0 and x + w < width and y > 0 and y + h < height for x, y, w, h in inner)
        assert not any(overlap(one, other) for one, other in itertools.combinations(inner, 2))


def edges_go_down_from_box_to_box_and_through_none(arranged):
    boxes = {v.name: box for v, box in zip(arranged.graph.vertices, arranged.boxes(), strict=True)}
    assert len(arranged.drawing.routes) == len(arranged.graph.edges)
    for edge, route in zip(arranged.graph.edges, arranged.drawing.routes, strict=True):
        ys = [y for _, y in route.points]
        assert all(below >= above - 1e-6 for above, below in itertools.pairwise(ys))
        assert ys[-1] > ys[0]
        (x, y, width, height), (u, v, wide, _) = boxes[edge.before], boxes[edge.after]
        assert x <= route.points[0][0] <= x + width
        assert route.points[0][1] == pytest.approx(y + height)
        assert u <= route.points[-1][0] <= u + wide
        assert route.points[-1][1] == pytest.approx(v)
        for box in boxes.values():
            # Where it bends is between rows; beside boxes it is upright.
            for px, py, w, h in pieces(route.points):
                inside = (px, py, max(w, 1e-3), h)
                assert not overlap(inside, box), (inside, box, route.points, edge)


def labels_overlap_nothing_but_edges(arranged):
    labels = []
    for edge, route in zip(arranged.graph.edges, arranged.drawing.routes, strict=True):
        assert (route.label is None) == (not edge.label)
        if route.label is not None:
            width = 5 * len(edge.label)
            labels.append((route.label[0] - width / 2, route.label[1] - 5, width, 10))
    for one, other in itertools.combinations([*labels, *arranged.boxes()], 2):
        assert not overlap(one, other)


def everything_is_within_the_picture(arranged):
    for x, y, width, height in arranged.boxes():
        assert x >= -1e-6
        assert x + width <= arranged.width + 1e-6
        assert y >= -1e-6
        assert y + height <= arranged.height + 1e-6
    for route in arranged.drawing.routes:
        assert all(-1e-6 <= x <= arranged.width + 1e-6 for x, _ in route.points)


LAWS = [boxes_never_overlap, what_is_in_a_box_is_inside_of_it_side_by_side]
LAWS += [edges_go_down_from_box_to_box_and_through_none, labels_overlap_nothing_but_edges]


@sees("several vertices", "an edge", "a graph in a vertex")
@settings(max_examples=40)
@given(graphs())
def test_a_graph_is_laid_out_by_the_laws(graph):
    arranged = arrange(graph)
    everything_is_within_the_picture(arranged)
    for part in arranged_graphs(arranged):
        for law in LAWS:
            law(part)


def count(graph):
    """How many vertices and edges there are, at all depths."""
    inner = [count(part) for vertex in graph.vertices for part in vertex.parts]
    return len(graph.vertices) + sum(n for n, _ in inner), len(graph.edges) + sum(m for _, m in inner)


@sees("several vertices", "an edge", "a graph in a vertex")
@settings(max_examples=40)
@given(graphs())
def test_a_picture_is_well_formed_deterministic_and_has_everything(graph):
    drawn = draw(graph, title="<a> & 'b'")
    assert drawn == draw(graph, title="<a> & 'b'")
    root = ET.fromstring(drawn)
    vertices, edges = count(graph)
    strokes = [item.attrib["class"] for item in root.iter(f"{SVG}path") if "d" in item.attrib]
    legend = 2  # lines in the legend
    lines = [class_ for class_ in strokes if "pj-none" in class_]
    assert edges <= len(lines) <= edges + legend
    boxes = [item for item in root.iter(f"{SVG}rect") if "pj-s-line" not in item.attrib["class"]]
    assert vertices < len(boxes) <= vertices + 1 + len(KINDS)
    assert " id=" not in drawn


def test_a_chain_is_straight_and_beside_it_runs_what_passes_it():
    names = [f"v{k}" for k in range(6)]
    edges = [Edge(a, b, "4 B") for a, b in itertools.pairwise(names)] + [Edge("v0", "v5", "8 B")]
    arranged = arrange(Graph(tuple(Vertex(name, name) for name in names), tuple(edges)))
    assert len({x for x, _ in arranged.drawing.centers}) == 1
    # The long edge is upright except at its ends.
    xs = [x for x, _ in arranged.drawing.routes[-1].points]
    assert len({round(x, 6) for x in xs[2:-2]}) == 1


def test_what_is_symmetric_is_drawn_symmetrically():
    vertices = tuple(Vertex(name, "same") for name in "abcd")
    arranged = arrange(Graph(vertices, tuple(Edge(*pair) for pair in ("ab", "ac", "bd", "cd"))))
    (a, _), (b, _), (c, _), (d, _) = arranged.drawing.centers
    assert a == pytest.approx(d) == pytest.approx((b + c) / 2)


def test_edges_that_leave_one_box_run_together():
    names = "abcdef"
    far = [Edge("a", name) for name in names[2:]]
    chain = [Edge(x, y) for x, y in itertools.pairwise(names)]
    routes = arrange(Graph(tuple(Vertex(n, n) for n in names), (*chain, *far))).drawing.routes
    assert len({route.points[:2] for route in routes[len(chain) :]}) == 1


def test_arguments_stand_at_the_top_and_results_at_the_bottom():
    vertices = (
        Vertex("step", "step"),
        Vertex("results", "results", kind="end"),
        Vertex("log", "log", kind="call"),
        Vertex("arguments", "arguments", kind="end"),
    )
    edges = (Edge("step", "results"), Edge("step", "log"), Edge("log", "x"), Edge("arguments", "x"))
    arranged = arrange(Graph((*vertices, Vertex("x", "x")), edges))
    heights = {vertex.name: y for vertex, (_, y) in zip(arranged.graph.vertices, arranged.drawing.centers, strict=True)}
    assert heights["arguments"] == min(heights.values())
    assert heights["results"] == max(heights.values())


def test_many_boxes_that_nothing_orders_do_not_make_one_long_row():
    arranged = arrange(Graph(tuple(Vertex(f"v{k}", f"fragment_{k}") for k in range(100))))
    assert arranged.width < 1700
    assert arranged.height > 300


def test_a_long_title_is_cut_and_is_in_the_tooltip():
    drawn = draw(Graph((Vertex("a", "x" * 200),)), title="t")
    assert f"<title>{'x' * 200}</title>" in drawn
    assert float(re.search(r'viewBox="0 0 ([\d.]+)', drawn)[1]) < 500


def test_two_hundred_boxes_are_all_drawn():
    vertices, edges = [], []
    for k in range(200):
        vertices.append(Vertex(f"v{k}", f"fragment_{k}", ("12 equations",)))
        edges += [Edge(f"v{j}", f"v{k}", "16.4 kB") for j in {k - 1, k - 3, k - 7, 0} if 0 <= j < k]
    graph = Graph(tuple(vertices), tuple(edges))
    drawn = ET.fromstring(draw(graph, title="t"))
    texts = {element.text for element in drawn.iter(f"{SVG}text")}
    assert {f"fragment_{k}" for k in range(200)} <= texts


def test_what_cannot_be_drawn_says_why():
    a, b = Vertex("a", "a"), Vertex("b", "b")
    with pytest.raises(ValueError, match=r"layered drawing all go down, but these form a cycle: boxes \[0, 1\]"):
        arrange(Graph((a, b), (Edge("a", "b"), Edge("b", "a"))))
    with pytest.raises(ValueError, match=r"the edge a -> c names no vertex of its graph: \['c'\]"):
        arrange(Graph((a, b), (Edge("a", "c"),)))
    with pytest.raises(ValueError, match=r"unique in a graph, but these are repeated: \['a'\]"):
        arrange(Graph((a, a)))


# The steps of the layout

rows = st.lists(st.integers(1, 5), min_size=2, max_size=4)


@st.composite
def layered(draw):
    """Rows, and edges between neighbouring ones."""
    sizes = draw(rows)
    numbered, start = [], 0
    for size in sizes:
        numbered.append([*range(start, start + size)])
        start += size
    above, below = [[] for _ in range(start)], [[] for _ in range(start)]
    for upper, lower in itertools.pairwise(numbered):
        for u, v in itertools.product(upper, lower):
            if draw(st.booleans()):
                below[u].append(v)
                above[v].append(u)
    return numbered, above, below


def places(rows):
    place = {v: k for row in rows for k, v in enumerate(row)}
    return [place[v] for v in range(len(place))]


def crossings_by_hand(rows, below):
    place = places(rows)
    edges = [(k, place[u], place[v]) for k, row in enumerate(rows) for u in row for v in below[u]]
    return sum(k == m and (a - c) * (b - d) < 0 for (k, a, b), (m, c, d) in itertools.combinations(edges, 2))


@sees("different examples", "several elements")
@given(layered())
def test_orders_keep_the_rows_and_never_add_crossings(drawn):
    rows, above, below = drawn
    ordered = put_in_order(rows, above, below)
    assert [sorted(row) for row in ordered] == rows
    assert count_crossings(rows, below, places(rows)) == crossings_by_hand(rows, below)
    assert crossings_by_hand(ordered, below) <= crossings_by_hand(rows, below)


@sees("different examples")
@given(st.integers(2, 12), st.data())
def test_a_tree_is_drawn_without_crossings(count, data):
    parents = [data.draw(st.integers(0, k - 1)) for k in range(1, count)]
    depth = [0]
    for parent in parents:
        depth.append(depth[parent] + 1)
    rows = [[v for v in range(count) if depth[v] == d] for d in range(max(depth) + 1)]
    above = [[], *([parent] for parent in parents)]
    below = [[k for k in range(count) if above[k] == [v]] for v in range(count)]
    assert crossings_by_hand(put_in_order(rows, above, below), below) == 0


@sees("different examples", "several elements")
@given(st.permutations(range(25)))
def test_edges_that_need_not_cross_do_not(order):
    above, below = [[] for _ in range(50)], [[] for _ in range(50)]
    for u, v in enumerate(order):
        below[u].append(25 + v)
        above[25 + v].append(u)
    ordered = put_in_order([[*range(25)], [*range(25, 50)]], above, below)
    assert crossings_by_hand(ordered, below) == 0


@sees("different examples", "several elements")
@given(st.lists(st.tuples(st.floats(-50, 50), st.floats(0.1, 9), st.floats(0, 20)), min_size=1, max_size=9))
def test_spread_positions_keep_their_distance_and_are_the_best(items):
    wanted, weights, apart = (list(column) for column in zip(*items, strict=True))
    found = spread(wanted, weights, apart)
    assert all(b - a >= gap - 1e-6 for (a, b), gap in zip(itertools.pairwise(found), apart[1:], strict=True))

    def off(positions):
        return sum(w * (p - q) ** 2 for p, q, w in zip(positions, wanted, weights, strict=True))

    # Moving some neighbours that touch a little to a side, as far as that is allowed, is no better.
    for i, j in itertools.combinations(range(len(found) + 1), 2):
        for step in (-0.01, 0.01):
            moved = [p + (step if i <= k < j else 0) for k, p in enumerate(found)]
            if all(b - a >= gap - 1e-9 for (a, b), gap in zip(itertools.pairwise(moved), apart[1:], strict=True)):
                assert off(moved) >= off(found) - 1e-6


@sees("different examples")
@given(st.integers(1, 15), st.data())
def test_layers_go_down_and_are_no_wider_than_they_may_be(count, data):
    pairs = [(a, b) for b in range(count) for a in range(b)]
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    above = [[a for a, b in edges if b == v] for v in range(count)]
    below = [[b for a, b in edges if a == v] for v in range(count)]
    layers = assign_layers([1] * count, above, below, most=3)
    assert all(layers[a] < layers[b] for a, b in edges)
    assert sorted(set(layers)) == [*range(max(layers) + 1)]
    assert all(layers.count(layer) <= 3 for layer in layers)


@sees("different examples")
@settings(deadline=None)
@given(st.integers(2, 30), st.data())
def test_a_layout_keeps_everything_apart(count, data):
    pairs = [(a, b) for b in range(count) for a in range(b)]
    wires = [Wire(a, b, (40, 12)) for a, b in data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=60))]
    layout = lay_out([(60, 30)] * count, wires)
    boxes = [(x - 30, y - 15, 60, 30) for x, y in layout.centers]
    labels = [(r.label[0] - 20, r.label[1] - 6, 40, 12) for r in layout.routes]
    for one, other in itertools.combinations([*boxes, *labels], 2):
        assert not overlap(one, other)


def test_nothing_can_be_laid_out():
    assert lay_out([], []).width == 0
    ET.fromstring(draw(Graph(()), title="nothing"))
