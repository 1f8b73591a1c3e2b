"""Halo exchanges: the parts of neighbouring shards that a shard needs for windows that reach over its borders.

Shards are numbered along one dimension. XLA exchanges one dimension after the other, and sends halos that reach over
several shards in several collective-permutes.

Source: `PartitionedHlo::ReshardAsWindowedInput`, `ExchangeHalo` and `ExchangeHaloCompact` of
https://github.com/openxla/xla/tree/main/xla/service/spmd.
"""

import dataclasses
from collections.abc import Callable, Sequence

__all__ = ["Shift", "Window", "exchange", "part_read", "unread"]

_Function = Callable[[int], int]  # of the number of a shard


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """A window over one dimension, as in a convolution: slices and padding have windows of size 1.

    Attributes:
        size, stride, dilation: of the window.
        low, high: the padding of the dimension; negative where elements are cut off.
        base_dilation: the distance of the elements of the dimension.
    """

    size: int = 1
    stride: int = 1
    low: int = 0
    high: int = 0
    base_dilation: int = 1
    dilation: int = 1

    @property
    def is_trivial(self) -> bool:
        """Whether it leaves the dimension as it is."""
        return self == Window()


@dataclasses.dataclass(frozen=True)
class Shift:
    """A collective-permute along one dimension.

    Attributes:
        dim: the dimension.
        shape: of what a device sends.
        pairs: the numbers of the shards that send, and of those that receive.
        among: the shards of each dimension that take part: XLA leaves out those whose results are all padding.
    """

    dim: int
    shape: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    among: tuple[tuple[int, ...], ...] = ()


def exchange(shape: Sequence[int], shards: Sequence[int], windows: Sequence[Window]) -> list[Shift] | None:
    """The halo exchanges of an array; None if XLA gathers the dimensions with windows instead.

    Args:
        shape: the shape of the array.
        shards: the number of shards of each dimension.
        windows: the window over each dimension.

    Raises:
        NotImplementedError: XLA does not partition such windows.

    Example:
        >>> [(shift.shape, shift.pairs) for shift in exchange([8], [4], [Window(size=2, high=1)])]
        [((1,), ((1, 0), (2, 1), (3, 2)))]
    """
    local = [_ceil(n, count) for n, count in zip(shape, shards, strict=True)]
    found: list[Shift] = []
    plans = []
    for dim, (n, count, window) in enumerate(zip(shape, shards, windows, strict=True)):
        plan = _plan(n, local[dim], count, window) if count > 1 and not window.is_trivial else None
        if plan is not None and plan is not _IN_ONE:
            local[dim] = plan.input_shard
        plans.append(plan)
    among = tuple(
        (0,) if plan is _IN_ONE else tuple(map(plan.at, range(plan.count))) if plan is not None else tuple(range(count))
        for plan, count in zip(plans, shards, strict=True)
    )
    for dim, plan in enumerate(plans):
        if plan is not None and plan is not _IN_ONE:
            halos = plan.halos()
            if halos is None:
                return None
            for size, pairs in halos:
                sent = (*local[:dim], size, *local[dim + 1 :])
                found.append(Shift(dim, sent, tuple((plan.at(a), plan.at(b)) for a, b in pairs), among))
            local[dim] = plan.shard
    return found


def unread(
    before: Sequence[int],
    after: Sequence[int],
    shards: Sequence[int],
    windows: Sequence[Window],
    readers: Sequence[Sequence[Window]],
) -> set[int]:
    """The dimensions whose halos nobody reads: what slices of the result need is in the shards before the exchange.

    XLA takes such slices from these, and removes the exchange. The gradient of padding between elements is such a
    program.

    Args:
        before: the shape of the array.
        after: the shape of what the windows make of it.
        shards: the number of shards of each dimension, of both.
        windows: the window over each dimension.
        readers: those of each slice of the result.

    Raises:
        NotImplementedError: XLA may remove some of the exchange.

    Example:
        >>> unread([4], [3], [2], [Window(low=-1)], [[Window(stride=2)]])  # x[1:][::2]
        {0}
    """
    found = set[int]()
    for dim, (n, m, count, window) in enumerate(zip(before, after, shards, windows, strict=True)):
        if count == 1 or window.is_trivial or not readers:
            continue
        own = _ceil(n, count)
        plan = _plan(n, own, count, window)
        if plan is _IN_ONE or not plan.halos():
            continue
        read = [part_read(m, count, reader[dim]) for reader in readers]
        if all(part == (0, _ceil(m, count)) for part in read):
            continue
        if not plan.is_alike or plan.count < count or window != Window(low=window.low, high=window.high):
            raise NotImplementedError("XLA uses other parts of some shards than of others")
        # What the shard itself has is at these places of the result.
        start, limit = max(0, plan.left(0)), own + plan.left(0)
        if all(start <= first and last <= limit for first, last in read):
            found.add(dim)
    return found


def part_read(n: int, count: int, window: Window) -> tuple[int, int]:
    """Where the part of a shard that its windows need begins and ends.

    Args:
        n: the size of a dimension.
        count: the number of its shards.
        window: the window over it.

    Raises:
        NotImplementedError: it is another one for some shards, or they need parts of each other.

    Example:
        >>> part_read(12, 4, Window(low=-1, stride=3))
        (1, 2)
    """
    own = _ceil(n, count)
    if window.is_trivial:
        return 0, own
    plan = _plan(n, own, count, window)
    if (
        plan is _IN_ONE
        or plan.count < count
        or not plan.is_alike
        or plan.left(0) > 0
        or plan.shard - plan.left(0) > own
    ):
        raise NotImplementedError("XLA uses other parts of some shards than of others")
    return -plan.left(0), plan.shard - plan.left(0)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The exchange along one dimension.

    Attributes:
        base, count: the size and the number of shards that take part.
        input_shard, shard: the size of a shard before and after.
        explicit: the padding on the left.
        skipped: the first of the shards in the middle that take no part, and their number.
        start, limit: where the input of a shard begins and ends, in the padded dimension.
    """

    base: int
    count: int
    input_shard: int
    shard: int
    explicit: int
    skipped: tuple[int, int]
    start: _Function
    limit: _Function

    def at(self, k: int) -> int:
        """The number of a shard among all of them."""
        first, several = self.skipped
        return k + several if 0 <= first <= k else k

    def left(self, k: int) -> int:
        """What a shard needs of those before it."""
        return self.input_shard * k + self.explicit - self.start(k)

    def right(self, k: int) -> int:
        """What a shard needs of those after it."""
        return self.limit(k) - (self.input_shard * (k + 1) + self.explicit)

    @property
    def is_alike(self) -> bool:
        """Whether what a shard needs begins at the same place for all shards."""
        return len({self.left(k) for k in range(self.count)}) == 1

    def halos(self) -> "list[_Halo] | None":
        """The sizes of the halos, with the shards that send and receive."""
        everyone = range(self.count)
        if self.explicit == self.left(0):
            widest = max(max(map(self.left, everyone)), max(map(self.right, everyone)))
            largest = self.input_shard + max(self.left(k) + self.right(k) for k in everyone)
            if largest == self.shard and widest > 2 * self.shard:
                return None if 2 * largest >= self.count * self.input_shard else self._compact()
        return self._direct()

    def _direct(self) -> "list[_Halo] | None":
        """From all shards to those at the same distance."""
        own, count = self.input_shard, self.count
        left, right = max(map(self.left, range(1, count))), max(map(self.right, range(count - 1)))
        if left + right + own >= own * count and (left > own or right > own):
            return None
        begin, end = -max(map(self.left, range(count))), own + max(map(self.right, range(count)))
        if begin >= end:
            return None
        found = []
        for i in range(_ceil(left, own) - 1, -1, -1):
            if (-i - 1) * own < end and i < count - 1:
                size = min(left - own * i, own) - max(-i * own - end, 0)
                found.append((size, tuple((k - i - 1, k) for k in range(i + 1, count))))
        for i in range(min(max(begin - own, 0), max(right, 0)) // own, _ceil(right, own)):
            if i < count - 1:
                size = min(right - own * i, own) - max(begin - (i + 1) * own, 0)
                found.append((size, tuple((k, k - i - 1) for k in range(i + 1, count))))
        return found

    def _compact(self) -> "list[_Halo]":
        """Only what is used is sent: each permutation takes one piece of each shard, to shards of its own."""
        own, count = self.input_shard, self.count
        pieces: list[list[tuple[int, int, int, int]]] = [[] for _ in range(count)]  # offset, target, start, limit
        for k in range(count):
            first, last = k * own - self.left(k), (k + 1) * own + self.right(k)
            at = first
            while at < last:
                if at < 0 or at >= self.base:
                    at += min(last - at, -at) if at < 0 else last - at
                    continue
                start = at % own
                size = min(own - start, last - at)
                if at // own != k:
                    pieces[at // own].append((at - first, k, start, start + size))
                at += size
        for several in pieces:
            several.sort(key=lambda piece: piece[0])
        found = []
        taken = [0] * count
        while True:
            pairs: list[tuple[int, int]] = []
            begin, end = own, 0
            for source, several in enumerate(pieces):
                if taken[source] < len(several):
                    _, target, start, limit = several[taken[source]]
                    apart = (start == 0 and end == own and begin > limit) or (
                        limit == own and begin == 0 and end < start
                    )
                    if pairs and (apart or any(target == other for _, other in pairs)):
                        continue
                    pairs.append((source, target))
                    begin, end = min(begin, start), max(end, limit)
                    taken[source] += 1
            if not pairs:
                return found
            found.append((end - begin, tuple(pairs)))


_Halo = tuple[int, tuple[tuple[int, int], ...]]


_IN_ONE = _Plan(0, 1, 0, 0, 0, (-1, 0), int, int)
"""No exchange, as all that is used is in the first shard."""


def _plan(n: int, own: int, count: int, window: Window) -> _Plan:
    """The exchange along a dimension."""
    dilated = 1 + (window.size - 1) * window.dilation
    full = 1 + (n - 1) * window.base_dilation + window.low + window.high
    windows = _truncated(full - dilated, window.stride) + 1
    each = _ceil(windows, count)
    base, skipped = n, (-1, 0)
    few = windows < count and window.dilation == window.base_dilation == 1
    if few:
        useful = _ceil(n + window.high, own)
        if useful < count:
            count = max(useful, windows)
            if count == 1:
                return _IN_ONE
            base = own * count
            if not (base > n and window.high > 0) and window.high < 0 and full - window.low < own:
                own = full - window.low
                base = own * count
    explicit = _truncated(window.low, window.base_dilation)
    low = window.low - explicit * window.base_dilation
    if few and (empty := _truncated(-explicit, own) - windows) > 0:
        count -= empty
        skipped = windows, empty
        explicit += empty * own
        base = own * count
        if -explicit > own * (count - 1):
            skip = -explicit - own * (count - 1)
            own -= skip
            explicit += skip * count
            if full < own:
                explicit += (own - full) * (count - 1)
                own = full
            base = own * count
    if full < dilated or (window.stride != 1 and window.stride * each % window.base_dilation):
        raise NotImplementedError("XLA does not partition such a window")
    step, dilation = window.stride * each, window.base_dilation
    before = dilation - 1 - low
    size = window.stride * (each - 1) + dilated

    def start(k: int) -> int:
        return _truncated(step * k + before, dilation)

    def limit(k: int) -> int:
        return _truncated(step * k + before + size, dilation)

    shard = max(limit(k) - start(k) for k in range(count))
    return _Plan(base, count, own, shard, explicit, skipped, start, limit)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _truncated(number: int, divisor: int) -> int:
    """Division as in C, towards zero."""
    return number // divisor if number >= 0 else -(-number // divisor)
