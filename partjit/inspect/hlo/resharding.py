"""The path from one sharding to another, in steps of at most one collective each.

The steps are those of XLA's partitioner: to slice (an unused axis shards a dimension, nothing is sent), to gather (the
minor axis of a dimension), to exchange (the minor axis of a dimension becomes that of another, an all-to-all), and to
permute (the axes of a dimension in another order, a collective-permute). It takes them for dimensions that the axes
divide without remainder.
"""

import collections
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import PartitionSpec as P

__all__ = ["resharding_path"]

_Dims = tuple[tuple[str, ...], ...]

# The search space is unbounded; where more steps are needed, other specs are the better remedy.
_MOST_STEPS = 5
_MOST_STATES = 4000


def resharding_path(
    source: Sequence[tuple[str, ...]], target: Sequence[tuple[str, ...]], sizes: Mapping[str, int]
) -> tuple[P, ...]:
    """The specs between two shardings, on a path of fewest steps without shards larger than those at both ends.

    Args:
        source, target: the axes that shard each dimension, major to minor.
        sizes: of the axes of the mesh.

    Returns:
        The specs, without both ends; none if one step is enough, or if there is no such path of a few steps.

    Example:
        >>> resharding_path([(), ("x",)], [("y",), ()], {"x": 2, "y": 4})
        (P('y', 'x'),)
        >>> resharding_path([("y", "x"), ()], [("x",), ("y",)], {"x": 2, "y": 4})
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
    path: list[_Dims] = []
    dims, last = end, ""
    while (step := came_from[dims]) is not None:
        before, kind = step
        # Several slices, or several gathers, are one step.
        if dims != end and not (kind == last and kind in ("slice", "gather")):
            path.append(dims)
        dims, last = before, kind
    return tuple(P(*[axes[0] if len(axes) == 1 else (axes or None) for axes in dims]) for dims in reversed(path))


def _steps(dims: _Dims, sizes: Mapping[str, int]) -> Iterator[tuple[str, _Dims]]:
    used = {axis for axes in dims for axis in axes}

    def replaced(changes: dict[int, tuple[str, ...]]) -> _Dims:
        return tuple(changes.get(dim, axes) for dim, axes in enumerate(dims))

    for dim, axes in enumerate(dims):
        for axis in sizes:
            if axis not in used:
                yield "slice", replaced({dim: (*axes, axis)})
        for other, others in enumerate(dims):
            if axes and other != dim:
                yield "exchange", replaced({dim: axes[:-1], other: (*others, axes[-1])})
        for order in itertools.permutations(axes) if 2 <= len(axes) <= 4 else ():
            yield "permute", replaced({dim: order})
        if axes:
            yield "gather", replaced({dim: axes[:-1]})


def _parts(dims: _Dims, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axes in dims for axis in axes)
