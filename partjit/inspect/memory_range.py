"""How far what XLA needs may be from an estimate of memory, and why.

Each uncertainty has bytes that may be needed less, and more. Those that are a small part of the estimate are within
what "about" says.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from partjit.inspect.buffer_assignment import Peak, aligned
from partjit.inspect.collectives import Collective, UnknownMove
from partjit.inspect.skeleton import Skeleton, Variable

__all__ = ["Range", "range_of"]

_LARGE_PART = 0.1
_OF_RANDOM = 1 << 8
"""Bytes that XLA may need for random numbers besides, however few."""
_COPIES_OF_RANDOM = 3


class Range(NamedTuple):
    """Between what bytes XLA's figure is.

    Attributes:
        at_least, at_most: the bounds; None if nothing bounds it from above. Both are the estimate if it is certain.
        reasons: what the figure depends on.
    """

    at_least: int
    at_most: int | None
    reasons: tuple[str, ...]


class _Uncertainty(NamedTuple):
    """What may be otherwise than estimated: the reason, and how many bytes less or more are needed then."""

    reason: str
    less: int
    more: float


def range_of(
    skeleton: Skeleton,
    peak: int,
    at_peak: Peak,
    predicted: tuple[Sequence[Collective], Iterable[UnknownMove]],
    size: Callable[[Variable], int],
    is_cpu: bool,
) -> Range:
    """The range of an estimate.

    Args:
        skeleton: the program.
        peak: the estimate.
        at_peak: what is alive then besides arguments and results.
        predicted: the collectives, and what XLA may move besides.
        size: the bytes of a variable on a device.
        is_cpu: whether it runs on CPUs.
    """
    found = [
        one
        for one in (*_of_moves(at_peak, *predicted), *_of_operations(skeleton, at_peak, size, is_cpu))
        if max(one.less, one.more) > _LARGE_PART * peak
    ]
    less, more = sum(one.less for one in found), sum(one.more for one in found)
    at_least = peak - min(less, at_peak.total)
    return Range(at_least, peak + int(more) if math.isfinite(more) else None, tuple(one.reason for one in found))


def _of_moves(at_peak: Peak, collectives: Iterable[Collective], moves: Iterable[UnknownMove]) -> Iterator[_Uncertainty]:
    of_moves = (
        one.bytes_at_most if one.needed_at_most is None else one.needed_at_most for one in moves if not one.is_of_cpus
    )
    moved = sum(of_moves)
    yield _Uncertainty("what XLA may move besides", moved, moved)
    alive = sum(aligned(one.nbytes) for one in at_peak.alive if one.is_gathered)
    gathered = sum(one.result_bytes for one in collectives if one.kind != "all-reduce")
    yield _Uncertainty("the lifetime of what collectives gather", alive, gathered)


def _of_operations(
    skeleton: Skeleton, at_peak: Peak, size: Callable[[Variable], int], is_cpu: bool
) -> Iterator[_Uncertainty]:
    random = sum(max(size(var), _OF_RANDOM) for var in skeleton.random)
    yield _Uncertainty("the workspace of random numbers", 0, _COPIES_OF_RANDOM * random)
    # XLA may keep them with their gaps instead of the sum.
    interleaved = sum(map(size, skeleton.interleaved))
    yield _Uncertainty("the parts of interleaved arrays, as those of associative scans", 0, interleaved)
    if skeleton.has_unrolled_loops:
        yield _Uncertainty("the iterations of unrolled loops, which XLA may run at once", 0, math.inf)
    for name, variables in skeleton.workspace.items():
        yield _Uncertainty(f"the workspace of {name}", 0, sum(map(size, variables)))
    if skeleton.narrow_products and is_cpu:  # what they read and compute is there once more, of twice the size
        more = 2 * (at_peak.total + max(map(size, skeleton.narrow_products)))
        yield _Uncertainty("the matrix products that the CPU computes in 32 bits", 0, more)
