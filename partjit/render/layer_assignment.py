"""The layers of the vertices of a directed graph, and their orders: the first half of a layered drawing.

The steps are those of Sugiyama, Tagawa and Toda (1981): layers, then orders with few crossings.
"""

import bisect
from collections.abc import Sequence

__all__ = ["assign_layers", "count_crossings", "put_in_order"]

Neighbors = Sequence[Sequence[int]]


def assign_layers(widths: Sequence[float], above: Neighbors, below: Neighbors, most: float) -> list[int]:
    """The layer of each vertex, from 0: below its predecessors, with short edges.

    Args:
        widths: of the vertices, which are numbered in a topological order.
        above, below: the predecessors and successors of each vertex.
        most: the width of a layer with more than one vertex.

    Example:
        >>> assign_layers([1, 1, 1, 1], [[], [], [0], [1, 2]], [[2], [3], [3], []], most=2)
        [0, 1, 1, 2]
    """
    count = len(widths)
    height = [0] * count  # the longest path down: vertices with long paths go first
    for k in reversed(range(count)):
        height[k] = max((height[other] + 1 for other in below[k]), default=0)
    layers = [0] * count
    room: list[float] = []
    for k in sorted(range(count), key=lambda k: (-height[k], k)):  # a topological order too
        layer = max((layers[other] + 1 for other in above[k]), default=0)
        while layer < len(room) and room[layer] < widths[k]:
            layer += 1
        room += [most] * (layer + 1 - len(room))
        layers[k] = layer
        room[layer] -= widths[k]
    # A vertex with more edges down than up moves down as far as it can, and vice versa. Each move shortens the edges,
    # so this ends; a few rounds do most of it.
    for _ in range(8):
        before = list(layers)
        for k in reversed(range(count)):
            if len(below[k]) > len(above[k]):
                _move(k, range(min(layers[other] for other in below[k]) - 1, layers[k], -1), layers, room, widths)
        for k in range(count):
            if len(above[k]) > len(below[k]):
                _move(k, range(max(layers[other] for other in above[k]) + 1, layers[k]), layers, room, widths)
        if layers == before:
            break
    used = {layer: k for k, layer in enumerate(sorted(set(layers)))}
    return [used[layer] for layer in layers]


def _move(k: int, wanted: range, layers: list[int], room: list[float], widths: Sequence[float]) -> None:
    """Moves a vertex to the first of the layers that has room for it."""
    for layer in wanted:
        if room[layer] >= widths[k]:
            room[layers[k]] += widths[k]
            room[layer] -= widths[k]
            layers[k] = layer
            return


def put_in_order(rows: Sequence[Sequence[int]], above: Neighbors, below: Neighbors) -> list[list[int]]:
    """The vertices of each row from left to right, so that few edges cross.

    Vertices move to the barycenters of their neighbors (Sugiyama), down and up alternately, and the best of all orders
    is improved by exchanging neighbors.

    Args:
        rows: the vertices of each row in their initial order.
        above, below: for each vertex its neighbors in the rows before and after.

    Example:
        >>> put_in_order([[0, 1], [2, 3]], [[], [], [1], [0]], [[3], [2], [], []])
        [[0, 1], [3, 2]]
    """
    order = [list(row) for row in rows]
    position = [0] * sum(len(row) for row in order)
    for row in order:
        _note(row, position)
    best, least = [list(row) for row in order], count_crossings(order, below, position)
    without_gain = 0
    for k in range(16):
        if not least or without_gain == 4:
            break
        towards, visited = (above, order[1:]) if k % 2 == 0 else (below, order[-2::-1])
        for row in visited:
            # Vertices without an edge that way stay where they are.
            centers = {v: sum([position[u] for u in towards[v]]) / len(towards[v]) for v in row if towards[v]}
            moved = iter(sorted(centers, key=lambda v: (centers[v], position[v])))
            row[:] = [next(moved) if v in centers else v for v in row]
            _note(row, position)
        crossings = count_crossings(order, below, position)
        without_gain += 1
        if crossings < least:
            best, least, without_gain = [list(row) for row in order], crossings, 0
    for row in best:
        _note(row, position)
    for _ in range(4):
        exchanged = [_exchange(row, above, below, position) for row in best] if least else []
        if not any(exchanged):
            break
    return best


def _note(row: Sequence[int], position: list[int]) -> None:
    for k, vertex in enumerate(row):
        position[vertex] = k


def _exchange(row: list[int], above: Neighbors, below: Neighbors, position: list[int]) -> bool:
    """Exchanges neighbors of a row where that saves crossings; returns whether it did."""
    helped = False
    for k in range(len(row) - 1):
        left, right = row[k], row[k + 1]
        gain = 0
        for towards in (above, below):
            lefts, rights = ([position[u] for u in towards[v]] for v in (left, right))
            gain += sum((a > b) - (a < b) for a in lefts for b in rights)
        if gain > 0:
            row[k], row[k + 1] = right, left
            position[left], position[right] = k + 1, k
            helped = True
    return helped


def count_crossings(rows: Sequence[Sequence[int]], below: Neighbors, position: Sequence[int]) -> int:
    """The number of crossings of edges between neighboring rows.

    Args:
        rows: the vertices of each row, from left to right.
        below: for each vertex its neighbors in the row after.
        position: the position of each vertex in its row.

    Example:
        >>> count_crossings([[0, 1], [2, 3]], [[3], [2], [], []], [0, 1, 0, 1])
        1
    """
    crossings = 0
    for row in rows:
        ends: list[int] = []  # of the edges further to the left
        for vertex in row:
            own = sorted([position[other] for other in below[vertex]])
            crossings += sum(len(ends) - bisect.bisect_right(ends, end) for end in own)
            for end in own:
                bisect.insort(ends, end)
    return crossings
