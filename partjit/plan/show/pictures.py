"""A plan as a picture, and as a page: what is drawn, and what the tables list."""

import itertools
from collections.abc import Hashable, Iterator, Sequence

import networkx as nx

from partjit.plan.ir.nodes import ColocatedCall, Fragment, Loop, Node, Transfer, Value
from partjit.plan.ir.plan import PlanData
from partjit.plan.show.folding import LONG, repeats, shortened
from partjit.plan.show.graph import Costs, cost_of, critical_path, graph_of, said_of
from partjit.plan.show.source import emit
from partjit.primitive import keep_where
from partjit.render.dag import Edge, Graph, Vertex, draw
from partjit.render.html import code, fragment, table
from partjit.render.markup import Markup
from partjit.render.numbers import shown_bytes, shown_duration

__all__ = ["to_html", "to_svg"]

# Names of nodes are identifiers, so these are no node's.
_CARRIED, _ON, _NOTHING = "carried in", "carried on", "nothing to do"
_MOST_LISTED = 12


def to_svg(plan: PlanData, costs: Costs | None) -> str:
    """The graph of a plan as a picture; see `Plan.to_svg`."""
    return str(_picture(plan, costs))


def _picture(plan: PlanData, costs: Costs | None) -> Markup:
    critical = () if costs is None else critical_path(plan, costs)[0]
    # Constants, which come from nowhere, are left out.
    graph = graph_of(plan.nodes, plan.order, ("arguments", plan.inputs), ("results", plan.outputs))
    return draw(_Drawing(costs).graph(graph, "", critical), title=f"The plan of {plan.name}")


class _Drawing:
    """What is drawn of nodes whose costs may be known."""

    def __init__(self, costs: Costs | None) -> None:
        self._costs = costs

    def graph(self, graph: nx.DiGraph, title: str, critical: Sequence[str] = ()) -> Graph:
        """Nodes beside each other; `critical` is the chain of them that is emphasized."""
        steps, alike = {*itertools.pairwise(critical)}, dict[str, Vertex]()
        if self._costs is None and len(graph) > LONG:
            graph, alike = self._folded(graph)
        vertices = []
        for name in graph.nodes:
            node: Node | None = graph.nodes[name]["node"]
            if name in alike:
                vertices.append(alike[name])
            elif node is not None:
                vertices.append(self._vertex(node, is_strong=name in critical))
            elif graph.degree(name):
                vertices.append(Vertex(name, name, kind="end"))
        return Graph(tuple(vertices) or (Vertex(_NOTHING, _NOTHING, kind="end"),), tuple(_edges(graph, steps)), title)

    def _folded(self, graph: nx.DiGraph) -> tuple[nx.DiGraph, dict[str, Vertex]]:
        """The graph with nodes that repeat as one, named after the first of them; what is drawn for these."""
        names, alike, one_of = [*graph.nodes], dict[str, Vertex](), dict[str, str]()
        for repeat in repeats([_kind_of(name, graph.nodes[name]["node"]) for name in names]):
            all_of, shown = names[repeat.start : repeat.stop], names[repeat.start : repeat.start + repeat.period]
            one_of.update(dict.fromkeys(all_of, shown[0]))
            first = nx.DiGraph()
            first.add_nodes_from((name, graph.nodes[name]) for name in shown)  # a subgraph of networkx has no order
            first.add_edges_from((a, b, data) for a, b, data in graph.edges(shown, data=True) if b in first)
            inside = self.graph(first, "")
            tooltip = f"{shown[0]} to {all_of[-1]}: {repeat.times} times alike"
            alike[shown[0]] = Vertex(shown[0], f"{repeat.times} times alike", (), "alike", (inside,), tooltip)
        folded = nx.DiGraph()
        folded.add_nodes_from((name, graph.nodes[name]) for name in names if one_of.get(name, name) == name)
        for before, after, data in graph.edges(data=True):
            ends = one_of.get(before, before), one_of.get(after, after)
            if ends[0] == ends[1]:
                continue
            known = folded.edges[ends] if folded.has_edge(*ends) else {"kind": "order", "values": (), "nbytes": 0}
            new = tuple(value for value in data["values"] if value not in known["values"])
            kind = "data" if "data" in (known["kind"], data["kind"]) else "order"
            nbytes = known["nbytes"] + _nbytes(new)
            folded.add_edge(*ends, kind=kind, values=(*known["values"], *new), nbytes=nbytes)
        return folded, alike

    def _vertex(self, node: Node, *, is_strong: bool) -> Vertex:
        said = said_of(node)
        kind, parts = "group", ()
        if isinstance(node, Loop):
            block, carried, on = node.block, (_CARRIED, node.outputs), (_ON, node.block.outputs)
            parts = (self.graph(graph_of(block.nodes, block.order, carried, on), ""),)
        elif isinstance(node, Fragment | ColocatedCall | Transfer):
            kind = {Fragment: "fragment", ColocatedCall: "call", Transfer: "transfer"}[type(node)]
        else:
            parts = tuple(self.graph(graph_of(b.nodes, b.order), f"case {k}") for k, b in enumerate(node.blocks))
        title = node.callee.name if isinstance(node, ColocatedCall) else node.name
        lines = (said, *self._cost(node))
        return Vertex(node.name, title, lines, kind, parts, _tooltip(node, said), is_strong)

    def _cost(self, node: Node) -> Iterator[str]:
        if self._costs is not None and (callable(self._costs) or node.name in self._costs):
            yield shown_duration(cost_of(node, self._costs))


def _kind_of(name: str, node: Node | None) -> Hashable:
    """What is equal for nodes that look alike but for their names: fragments and calls of equal types."""
    if not isinstance(node, Fragment | ColocatedCall):
        return name
    what = len(node.jaxpr.eqns) if isinstance(node, Fragment) else (node.callee.name, node.where)
    return type(node), what, *(str(value) for value in (*node.inputs, *node.outputs))


def _tooltip(node: Node, said: str) -> str:
    lines = [f"{node.name}: {said}"]
    if isinstance(node, ColocatedCall):
        lines = [f"{node.name}: {node.callee.name}, {said}", f"called at {_site(node)}"]
    for what, values in (("in", node.inputs), ("out", node.outputs)):
        lines += (f"{what}  {line}" for line in _listed(values))
    return "\n".join(lines)


def _edges(graph: nx.DiGraph, strong: set[tuple[str, str]]) -> Iterator[Edge]:
    for before, after, data in graph.edges(data=True):
        is_order = data["kind"] == "order"
        said = ["order without data"] if is_order else _listed(data["values"])
        tooltip = "\n".join([f"{before} \u2192 {after}", *said])
        size = "" if is_order else shown_bytes(data["nbytes"])
        yield Edge(before, after, size, is_order, (before, after) in strong, tooltip)


def _listed(values: Sequence[Value]) -> list[str]:
    lines = [f"{value.name}: {value}, {shown_bytes(value.nbytes)}" for value in values[:_MOST_LISTED]]
    return lines + ([f"and {len(values) - _MOST_LISTED} more"] if len(values) > _MOST_LISTED else [])


def _nbytes(values: Sequence[Value]) -> int:
    return sum(value.nbytes for value in values)


def _site(call: ColocatedCall) -> str:
    file, line, function = call.site
    return f"{file}:{line} in {function}"


def to_html(plan: PlanData) -> str:
    """The picture of a plan, its source, and tables of what is in it; see `Plan._repr_html_`."""
    fragments: list[tuple[str | int, ...]] = []
    calls: list[tuple[str | int, ...]] = []
    for node in (*plan.fragments, *plan.calls):
        sizes = _nbytes(node.inputs), _nbytes(node.outputs)
        if isinstance(node, Fragment):
            donated = [value.name for value in keep_where(node.inputs, node.donated)]
            fragments.append((node.name, len(node.jaxpr.eqns), *sizes, ", ".join(donated)))
        elif isinstance(node, ColocatedCall):
            calls.append((node.name, node.callee.name, node.where, *sizes, _site(node)))
    parts = [_picture(plan, None), code(shortened(emit(plan, most_names=_MOST_LISTED)))]
    if fragments:
        columns = ("fragment", "equations", "in", "out", "donated")
        parts.append(table("Fragments", columns, fragments, {2: shown_bytes, 3: shown_bytes}))
    if calls:
        columns = ("call", "function", "runs", "in", "out", "called at")
        parts.append(table("Calls", columns, calls, {3: shown_bytes, 4: shown_bytes}))
    return str(fragment(*parts))
