"""The way from one sharding to another, in steps each of which is one collective or none at all.

The steps are those that XLA's partitioner knows: to cut further (an axis not in use divides a dimension, nothing is
sent), to gather (the minor axis of a dimension), to hand over (the minor axis of a dimension becomes that of another,
an all-to-all), and to renumber (the axes of a dimension in another order, a collective-permute). It knows them for
dimensions that the axes divide without remainder.
"""

import collections
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import PartitionSpec as P

__all__ = ["way_between"]

_Dims = tuple[tuple[str, ...], ...]

# Of what may be done there is always more; whoever needs that many steps is better off with other specs.
_MOST_STEPS = 5
_MOST_STATES = 4000


def way_between(
    source: Sequence[tuple[str, ...]], target: Sequence[tuple[str, ...]], sizes: Mapping[str, int]
) -> tuple[P, ...]:
    """The specs in between, on a way of fewest steps on which no device ever holds more than at one of its ends.

    Args:
        source, target: the axes that divide each dimension, major to minor.
        sizes: how many devices each axis of the mesh has.

    Returns:
        The specs, without both ends; none if one step is enough, or if there is no such way of a few steps.

    Example:
        >>> way_between([(), ("x",)], [("y",), ()], {"x": 2, "y": 4})
        (P('y', 'x'),)
        >>> way_between([("y", "x"), ()], [("x",), ("y",)], {"x": 2, "y": 4})
        (P(('x', 'y'), None),)
    """
    rank = max(len(source), len(target))
    start, end = ((*map(tuple, dims), *[()] * (rank - len(dims))) for dims in (source, target))
    least = min(_parts(start, sizes), _parts(end, sizes))
    came_from: dict[_Dims, tuple[_Dims, str] | None] = {start: None}
    steps = {start: 0}
    queue = collections.deque([start])
    while queue and end not in came_from and len(came_from) < _MOST_STATES:
        dims = queue.popleft()
        if steps[dims] == _MOST_STEPS:
            break
        for kind, after in _steps(dims, sizes):
            if after not in came_from and _parts(after, sizes) >= least:
                came_from[after], steps[after] = (dims, kind), steps[dims] + 1
                queue.append(after)
    if end not in came_from:
        return ()
    way: list[_Dims] = []
    dims, last = end, ""
    while (step := came_from[dims]) is not None:
        before, kind = step
        # Several cuts, or several gathers, are one step.
        if dims != end and not (kind == last and kind in ("cut", "gather")):
            way.append(dims)
        dims, last = before, kind
    return tuple(P(*[axes[0] if len(axes) == 1 else (axes or None) for axes in dims]) for dims in reversed(way))


def _steps(dims: _Dims, sizes: Mapping[str, int]) -> Iterator[tuple[str, _Dims]]:
    used = {axis for axes in dims for axis in axes}

    def replaced(changes: dict[int, tuple[str, ...]]) -> _Dims:
        return tuple(changes.get(dim, axes) for dim, axes in enumerate(dims))

    for dim, axes in enumerate(dims):
        for axis in sizes:
            if axis not in used:
                yield "cut", replaced({dim: (*axes, axis)})
        for other, others in enumerate(dims):
            if axes and other != dim:
                yield "hand over", replaced({dim: axes[:-1], other: (*others, axes[-1])})
        for order in itertools.permutations(axes) if 2 <= len(axes) <= 4 else ():
            yield "renumber", replaced({dim: order})
        if axes:
            yield "gather", replaced({dim: axes[:-1]})


def _parts(dims: _Dims, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axes in dims for axis in axes)
