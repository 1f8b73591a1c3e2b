"""Which buffers share memory, as XLA assigns them: how much a program needs besides arguments and results.

A buffer that is no longer alive when a result is written may be in the memory of that result, if it is not larger. What
is left is packed by the times at which it is alive.

Source: `BufferAssigner::AssignBuffersForComputations` of XLA.
"""

import bisect
import collections
import dataclasses
from collections.abc import Sequence

from partjit.inspect.buffer_lifetimes import Buffer

__all__ = ["Peak", "aligned", "peak_of"]

_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Peak:
    """Bytes that are alive at once, besides arguments and results.

    Attributes:
        saved: of what the forward pass computes and the backward pass uses.
        others: of everything else.
        alive: the buffers that are alive then.
    """

    saved: int = 0
    others: int = 0
    alive: Sequence[Buffer] = ()

    @property
    def total(self) -> int:
        """Of all."""
        return self.saved + self.others


def peak_of(buffers: Sequence[Buffer], aliased: int = 0) -> Peak:
    """The most that is alive at once of buffers that are neither arguments nor results.

    Args:
        buffers: of a program.
        aliased: the bytes of results that are written to donated arguments.
    """
    temporaries = _without_space_in_results(buffers, aliased)
    changes: dict[int, int] = collections.defaultdict(int)
    for buffer in temporaries:
        nbytes = aligned(buffer.nbytes)
        changes[buffer.start] += nbytes
        changes[buffer.end] -= nbytes
    most = now = at = 0
    for time in sorted(changes):
        now += changes[time]
        if now > most:
            most, at = now, time
    alive = [buffer for buffer in temporaries if buffer.start <= at < buffer.end]
    saved = sum(aligned(buffer.nbytes) for buffer in alive if buffer.is_saved)
    return Peak(saved, most - saved, alive)


def aligned(nbytes: int) -> int:
    """The bytes that a buffer of this size takes."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _without_space_in_results(buffers: Sequence[Buffer], aliased: int) -> list[Buffer]:
    """The temporary buffers that are not in the memory of results, which are written later."""
    results = sorted((buffer for buffer in buffers if buffer.is_result), key=lambda one: one.nbytes)
    kept = []
    for one in reversed(results):  # donated arguments have the memory of the largest
        if aliased >= one.nbytes:
            aliased -= one.nbytes
        else:
            kept.append(one)
    kept.reverse()
    sizes = [one.nbytes for one in kept]
    spaces: list[list[tuple[int, int]]] = [[(one.start, one.end)] for one in kept]
    left = []
    for buffer in sorted((one for one in buffers if not one.is_result), key=lambda one: -one.nbytes):
        for k in range(bisect.bisect_left(sizes, buffer.nbytes), len(kept)):
            if all(buffer.end <= start or end <= buffer.start for start, end in spaces[k]):
                spaces[k].append((buffer.start, buffer.end))
                break
        else:
            left.append(buffer)
    return left
