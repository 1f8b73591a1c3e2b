"""The x coordinates of the vertices in ordered layers: long edges straight, neighbors close to each other."""

import graphlib
import itertools
import math
from collections.abc import Sequence

__all__ = ["spread", "x_coordinates"]

Neighbors = Sequence[Sequence[int]]


def spread(wanted: Sequence[float], weights: Sequence[float], distances: Sequence[float]) -> list[float]:
    """Positions in order, as near to the wanted ones as possible under least distances to the ones before.

    They minimize the weighted sum of squared errors: an isotonic regression by pooling adjacent violators. The first
    entry of `distances` is ignored.

    Example:
        >>> spread([0, 0, 9], [1, 1, 1], [0, 4, 4])
        [-2.0, 2.0, 9.0]
    """
    pools: list[tuple[float, float, int]] = []  # position of the first, weight, how many
    offset, offsets = 0.0, []
    for k, (want, weight) in enumerate(zip(wanted, weights, strict=True)):
        offset += distances[k] if k else 0.0
        offsets.append(offset)
        pools.append((float(want) - offset, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (left, left_weight, left_count), (right, right_weight, right_count) = pools[-2:]
            total = left_weight + right_weight
            middle = (left * left_weight + right * right_weight) / total
            pools[-2:] = [(middle, total, left_count + right_count)]
    starts = (position for position, _, count in pools for _ in range(count))
    return [start + offset for start, offset in zip(starts, offsets, strict=True)]


def x_coordinates(
    rows: Sequence[Sequence[int]],
    widths: Sequence[float],
    is_thin: Sequence[bool],
    pulls: Sequence[float],
    above: Neighbors,
    below: Neighbors,
    gap: float,
) -> list[float]:
    """The center of each vertex; the leftmost side of a vertex is at 0.

    Args:
        rows: the vertices of each row, from left to right.
        widths: of the vertices.
        is_thin: whether a vertex is a point of a long edge, which should not bend there.
        pulls: the weights with which vertices attract their neighbors.
        above, below: for each vertex its neighbors in the rows before and after.
        gap: between two vertices of a row.

    Example:
        >>> x_coordinates([[0], [1, 2]], [10] * 3, [False] * 3, [1] * 3, [[], [0], [0]], [[1, 2], [], []], gap=4)
        [12.0, 5.0, 19.0]
    """
    lines = _lines(rows, is_thin, pulls, above, below)
    line_of = {v: k for k, line in enumerate(lines) for v in line}
    right_of: list[dict[int, float]] = [{} for _ in lines]  # least distances to the lines at the right of each
    left_of: list[dict[int, float]] = [{} for _ in lines]  # the same for those at the left
    for row in rows:
        for u, v in itertools.pairwise(row):
            left, right = line_of[u], line_of[v]
            distance = max((widths[u] + widths[v]) / 2 + gap, right_of[left].get(right, 0.0))
            right_of[left][right] = left_of[right][left] = distance
    x = _compact(right_of, left_of)
    drawn_to: list[list[tuple[int, float]]] = [[] for _ in lines]
    for v, k in line_of.items():
        drawn_to[k] += ((line_of[u], pulls[u]) for u in (*above[v], *below[v]) if line_of[u] != k)
    weights = [sum(pull for _, pull in pulled) for pulled in drawn_to]
    movable = [k for k, weight in enumerate(weights) if weight]
    for sweep in range(16):
        moved = 0.0
        for k in movable if sweep % 2 else reversed(movable):
            wanted = sum([x[other] * pull for other, pull in drawn_to[k]]) / weights[k]
            low = max([x[other] + distance for other, distance in left_of[k].items()], default=-math.inf)
            high = min([x[other] - distance for other, distance in right_of[k].items()], default=math.inf)
            wanted = min(max(wanted, low), high)
            moved = max(moved, abs(wanted - x[k]))
            x[k] = wanted
        if moved < 0.5:
            break
    left = min((x[line_of[v]] - width / 2 for v, width in enumerate(widths)), default=0.0)
    return [x[line_of[v]] - left for v in range(len(widths))]


def _compact(right_of: Sequence[dict[int, float]], left_of: Sequence[dict[int, float]]) -> list[float]:
    """Positions of lines halfway between the leftmost and the rightmost ones that keep the distances."""
    order = [*graphlib.TopologicalSorter({k: before.keys() for k, before in enumerate(left_of)}).static_order()]
    leftmost, rightmost = [0.0] * len(order), [0.0] * len(order)
    for k in order:
        leftmost[k] = max((leftmost[other] + distance for other, distance in left_of[k].items()), default=0.0)
    width = max(leftmost, default=0.0)
    for k in reversed(order):
        rightmost[k] = min((rightmost[other] - distance for other, distance in right_of[k].items()), default=width)
    return [(low + high) / 2 for low, high in zip(leftmost, rightmost, strict=True)]


def _lines(
    rows: Sequence[Sequence[int]],
    is_thin: Sequence[bool],
    pulls: Sequence[float],
    above: Neighbors,
    below: Neighbors,
) -> list[list[int]]:
    """The vertices that are aligned: points of one edge, and boxes with their main neighbors below and above.

    As with Brandes and Koepf (2001), two vertices of neighboring rows may be aligned if their edge crosses no edge
    between two that are; so there are positions for all lines.
    """
    depths_down, depths_up = _depths(rows, is_thin, below), _depths(rows[::-1], is_thin, above)
    lines: dict[int, list[int]] = {}
    place = {v: i for row in rows for i, v in enumerate(row)}
    for row in rows:
        # Edges that should not bend come first, then the longest paths through the graph.
        pairs: list[tuple[bool, int, int, int]] = []
        for u in row:
            for v in below[u]:
                if is_thin[u] and is_thin[v]:
                    pairs.append((False, 0, u, v))
                elif v == _main(below[u], pulls, depths_down) and u == _main(above[v], pulls, depths_up):
                    pairs.append((True, -depths_down[v] - depths_up[u], u, v))
        taken: list[tuple[int, int]] = []
        for _, _, u, v in sorted(pairs, key=lambda pair: pair[:2]):
            at = place[u], place[v]
            if all((at[0] - other[0]) * (at[1] - other[1]) > 0 for other in taken):
                taken.append(at)
                lines[v] = lines.setdefault(u, [u])
                lines[v].append(v)
        for u in row:
            lines.setdefault(u, [u])
    return [*{id(line): line for line in lines.values()}.values()]


def _depths(rows: Sequence[Sequence[int]], is_thin: Sequence[bool], onward: Neighbors) -> list[int]:
    """The number of boxes on the longest path from each vertex to the last row."""
    depths = [0] * sum(len(row) for row in rows)
    for row in reversed(rows):
        for v in row:
            depths[v] = max((depths[u] for u in onward[v]), default=0) + (not is_thin[v])
    return depths


def _main(others: Sequence[int], pulls: Sequence[float], depths: Sequence[int]) -> int:
    """The one of several neighbors that a vertex should be aligned with; -1 if there is none."""
    strong = [v for v in others if pulls[v] >= 1]
    longest = max((depths[v] for v in strong), default=0)
    best = [v for v in strong if depths[v] == longest]
    return best[len(best) // 2] if len(best) % 2 else -1
