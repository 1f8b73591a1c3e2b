"""In which layer each vertex of a directed graph stands, and in which order: the first half of a layered drawing.

The steps are those of Sugiyama, Tagawa and Toda (1981): layers, then orders with few crossings.
"""

import bisect
from collections.abc import Sequence

__all__ = ["assign_layers", "count_crossings", "put_in_order"]

Neighbours = Sequence[Sequence[int]]


def assign_layers(widths: Sequence[float], above: Neighbours, below: Neighbours, most: float) -> list[int]:
    """The layer of each vertex, from 0: below those it follows, edges short, no layer much wider than `most`.

    Args:
        widths: of the vertices, which are numbered in a topological order.
        above: for each vertex those that have an edge to it.
        below: for each vertex those it has an edge to.
        most: how wide a layer with more than one vertex may be.

    Example:
        >>> from partjit.render.layer_assignment import assign_layers
        >>> assign_layers([1, 1, 1, 1], [[], [], [0], [1, 2]], [[2], [3], [3], []], most=2)
        [0, 1, 1, 2]
    """
    count = len(widths)
    height = [0] * count  # the longest way down: who has a long way goes first
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
    # A vertex with more edges down than up comes down as far as it can, and the other way round. What it moves to is
    # shorter in total, so this ends; a few rounds are nearly all of it.
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


def put_in_order(rows: Sequence[Sequence[int]], above: Neighbours, below: Neighbours) -> list[list[int]]:
    """The vertices of each row from left to right, so that few edges cross.

    Vertices are put where those are that they have edges with (Sugiyama's barycenters), down and up in turns, and the
    best of all orders is improved by exchanging neighbours.

    Args:
        rows: the vertices of each row; where nothing says otherwise, they keep this order.
        above: for each vertex those in the row before that it has an edge with.
        below: for each vertex those in the row after that it has an edge with.

    Example:
        >>> from partjit.render.layer_assignment import put_in_order
        >>> put_in_order([[0, 1], [2, 3]], [[], [], [1], [0]], [[3], [2], [], []])
        [[0, 1], [3, 2]]
    """
    order = [list(row) for row in rows]
    place = [0] * sum(len(row) for row in order)
    for row in order:
        _note(row, place)
    best, least = [list(row) for row in order], count_crossings(order, below, place)
    without_gain = 0
    for k in range(16):
        if not least or without_gain == 4:
            break
        towards, visited = (above, order[1:]) if k % 2 == 0 else (below, order[-2::-1])
        for row in visited:
            # Vertices without an edge that way stay where they are.
            centers = {v: sum([place[u] for u in towards[v]]) / len(towards[v]) for v in row if towards[v]}
            moved = iter(sorted(centers, key=lambda v: (centers[v], place[v])))
            row[:] = [next(moved) if v in centers else v for v in row]
            _note(row, place)
        crossings = count_crossings(order, below, place)
        without_gain += 1
        if crossings < least:
            best, least, without_gain = [list(row) for row in order], crossings, 0
    for row in best:
        _note(row, place)
    for _ in range(4):
        exchanged = [_exchange(row, above, below, place) for row in best] if least else []
        if not any(exchanged):
            break
    return best


def _note(row: Sequence[int], place: list[int]) -> None:
    for k, vertex in enumerate(row):
        place[vertex] = k


def _exchange(row: list[int], above: Neighbours, below: Neighbours, place: list[int]) -> bool:
    """Whether it helped to exchange neighbours of a row."""
    helped = False
    for k in range(len(row) - 1):
        left, right = row[k], row[k + 1]
        gain = 0
        for towards in (above, below):
            lefts, rights = ([place[u] for u in towards[v]] for v in (left, right))
            gain += sum((a > b) - (a < b) for a in lefts for b in rights)
        if gain > 0:
            row[k], row[k + 1] = right, left
            place[left], place[right] = k + 1, k
            helped = True
    return helped


def count_crossings(rows: Sequence[Sequence[int]], below: Neighbours, place: Sequence[int]) -> int:
    """How many pairs of edges between neighbouring rows cross.

    Args:
        rows: the vertices of each row, from left to right.
        below: for each vertex those in the row after that it has an edge with.
        place: the position of each vertex in its row.

    Example:
        >>> from partjit.render.layer_assignment import count_crossings
        >>> count_crossings([[0, 1], [2, 3]], [[3], [2], [], []], [0, 1, 0, 1])
        1
    """
    crossings = 0
    for row in rows:
        ends: list[int] = []  # of the edges further to the left
        for vertex in row:
            own = sorted([place[other] for other in below[vertex]])
            crossings += sum(len(ends) - bisect.bisect_right(ends, end) for end in own)
            for end in own:
                bisect.insort(ends, end)
    return crossings
