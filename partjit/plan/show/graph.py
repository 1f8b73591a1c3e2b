"""A plan as a graph: to be looked at, drawn and measured."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import networkx as nx

from partjit.checks import require, require_number
from partjit.plan.ir.nodes import Block, Branch, ColocatedCall, Fragment, Loop, Node, Transfer, Value
from partjit.plan.ir.plan import PlanData
from partjit.plan.show.source import said_of_fragment
from partjit.render.numbers import counted, shown_bytes

__all__ = ["Costs", "as_graph", "cost_of", "critical_path", "graph_of", "said_of", "to_mermaid"]

Costs: TypeAlias = Mapping[str, float] | Callable[[Node], float]
"""Seconds per node: by name, or a function of the node."""


def as_graph(plan: PlanData) -> nx.DiGraph:
    """The graph of a plan; see `Plan.graph`."""
    inputs = (*plan.inputs, *(value for value, _ in plan.constants))
    graph = graph_of(plan.nodes, plan.order, ("arguments", inputs), ("results", plan.outputs))
    graph.graph["name"] = plan.name
    return graph


def graph_of(
    nodes: Sequence[Node],
    order: Sequence[tuple[str, str]],
    first: tuple[str, Sequence[Value]] | None = None,
    last: tuple[str, Sequence[Value]] | None = None,
) -> nx.DiGraph:
    """The graph of the nodes of one level: of a plan, an iteration, or a branch.

    Args:
        nodes: in the order in which they are taken up; values that none of them makes come from outside.
        order: pairs of names of which the second may only begin when the first has ended.
        first: the vertex for the source of values, and these values.
        last: the vertex for the target of values, and these values.
    """
    graph = nx.DiGraph()
    producer: dict[Value, str] = {}
    if first is not None:
        graph.add_node(first[0], node=None)
        producer.update(dict.fromkeys(first[1], first[0]))
    for node in nodes:
        graph.add_node(node.name, node=node)
        for value in node.inputs:
            if value in producer:
                _add_value(graph, producer[value], node.name, value)
        producer.update(dict.fromkeys(node.outputs, node.name))
    if last is not None:
        graph.add_node(last[0], node=None)
        for value in last[1]:
            if value in producer:
                _add_value(graph, producer[value], last[0], value)
    for before, after in order:
        if not graph.has_edge(before, after):
            graph.add_edge(before, after, kind="order", values=(), nbytes=0)
    return graph


def _add_value(graph: nx.DiGraph, before: str, after: str, value: Value) -> None:
    if not graph.has_edge(before, after):
        graph.add_edge(before, after, kind="data", values=(), nbytes=0)
    edge = graph.edges[before, after]
    if value not in edge["values"]:
        edge["values"] += (value,)
        edge["nbytes"] += value.nbytes


def critical_path(plan: PlanData, costs: Costs | None) -> tuple[tuple[str, ...], float]:
    """The chain of nodes that takes longest; see `Plan.critical_path`."""

    def cost(node: Node) -> float:
        return 1.0 if costs is None else cost_of(node, costs)

    if costs is not None:
        require_costs("critical_path", costs)
    graph = as_graph(plan)
    best: dict[str, tuple[float, tuple[str, ...]]] = {}
    for name in nx.lexicographical_topological_sort(graph):
        total, path = max((best[before] for before in graph.predecessors(name)), default=(0.0, ()))
        node = graph.nodes[name]["node"]
        best[name] = (total, path) if node is None else (total + cost(node), (*path, name))
    total, path = max(best.values(), default=(0.0, ()))
    return path, total


def require_costs(where: str, costs: object) -> None:
    """Raises TypeError unless these may be costs of nodes."""
    if not callable(costs):
        expected = "seconds by the name of a node, a mapping, or a function of a node"
        require(where, "costs", costs, Mapping, expected)


def cost_of(node: Node, costs: Costs) -> float:
    """What a node costs, in seconds; TypeError or ValueError if that is no number."""
    cost = costs(node) if callable(costs) else costs.get(node.name, 0.0)
    return require_number("Plan", f"costs of {node.name}", cost, "a number of seconds")


def to_mermaid(plan: PlanData) -> str:
    """The graph as a Mermaid flowchart; see `Plan.to_mermaid`."""
    graph = as_graph(plan)
    lines = ["flowchart TD"]
    for name in graph.nodes:
        node: Node | None = graph.nodes[name]["node"]
        lines += [f"  {name}([{name}])"] if node is None else (f"  {line}" for line in _drawn(node))
    lines += (f"  {line}" for line in _drawn_edges(graph))
    return "\n".join(lines)


def _drawn(node: Node) -> Iterator[str]:
    """The lines that draw a node; loops and branches are boxes around what is in them."""
    if isinstance(node, Fragment):
        yield f'{node.name}["{node.name}<br/>{said_of(node)}"]'
    elif isinstance(node, ColocatedCall):
        yield f'{node.name}("{node.callee.name}<br/>{said_of(node)}")'
    elif isinstance(node, Transfer):
        yield f'{node.name}[/"{node.name}"/]'
    else:
        yield f'subgraph {node.name}["{node.name}: {said_of(node)}"]'
        if isinstance(node, Loop):
            yield from (f"  {line}" for line in _drawn_block(node.block))
        for k, block in enumerate(node.blocks if isinstance(node, Branch) else ()):
            yield f'  subgraph {node.name}_{k}["{k}"]'
            yield from (f"    {line}" for line in _drawn_block(block) or [f"{node.name}_{k}_nothing[nothing]"])
            yield "  end"
        yield "end"


def _drawn_block(block: Block) -> list[str]:
    lines = [line for node in block.nodes for line in _drawn(node)]
    return [*lines, *_drawn_edges(graph_of(block.nodes, block.order))]


def _drawn_edges(graph: nx.DiGraph) -> Iterator[str]:
    for before, after, data in graph.edges(data=True):
        if data["kind"] == "order":
            yield f"{before} -.-> {after}"
        else:
            yield f'{before} -->|"{shown_bytes(data["nbytes"])}"| {after}'


def said_of(node: Node) -> str:
    """What pictures say of a node below its name."""
    if isinstance(node, Fragment):
        return said_of_fragment(node)
    if isinstance(node, ColocatedCall):
        return node.where
    if isinstance(node, Transfer):
        return shown_bytes(sum(value.nbytes for value in node.inputs))
    if isinstance(node, Branch):
        return f"one of {len(node.blocks)}"
    return f"while {node.outputs[0].name}" if node.trip_count is None else counted(node.trip_count, "iteration")
