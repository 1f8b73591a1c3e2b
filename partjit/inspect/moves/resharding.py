"""How XLA's partitioner gets an array from one sharding to another: the first of several ways that applies.

The ways are: another order of devices; dimensions that swap axes; slices of what is replicated; gathers; combinations
of these; where none applies, the array is replicated in full first.

Source: `PartitionedHlo::ReshardNoCache` of XLA's `spmd_partitioner.cc`.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from partjit.inspect.device_groups import DeviceGroups
from partjit.inspect.moves.tiles import Step, Tiles, Unmodelled

__all__ = ["Hop", "can_swap", "hops", "is_swap", "reshard"]

_Shape = tuple[int, ...]


class Hop(NamedTuple):
    """A sharding that XLA remembers on the way to another one, and what is moved to get there."""

    target: Tiles
    steps: list[Step]


def reshard(source: Tiles, target: Tiles, shape: _Shape, *, swaps: bool = True) -> list[Step]:
    """The collectives that get an array of this shape from one sharding to another.

    Args:
        source, target: the shardings.
        shape: the shape of the array.
        swaps: whether dimensions may swap axes; see `is_swap`.

    Raises:
        Unmodelled: XLA moves the borders of uneven shards, or groups of devices in different orders.
    """
    return [step for hop in hops(source, target, shape, swaps=swaps) for step in hop.steps]


def hops(source: Tiles, target: Tiles, shape: _Shape, *, swaps: bool = True) -> list[Hop]:
    """The same by the shardings in between that XLA remembers. The last one is the target. Raises the same."""
    found = _reshard(source, target, shape, in_full=True, swaps=swaps)
    assert found is not None
    return found


def can_swap(source: Tiles, target: Tiles) -> bool:
    """Whether dimensions swap axes."""
    return _swaps(source, target) is not None


def is_swap(source: Tiles, target: Tiles) -> bool:
    """Whether dimensions swap axes while some devices have the same shard.

    XLA does so only if both shardings are in one form: over named axes, or over tiles of devices.
    """
    if source == target or not source.is_partial or source.devices.shape == target.devices.shape:
        return False
    return _swaps(source, target) is not None


def _reshard(source: Tiles, target: Tiles, shape: _Shape, *, in_full: bool, swaps: bool = True) -> list[Hop] | None:
    """None if only full replication is left, and that is not allowed."""
    if source == target or source.is_replicated:
        return [Hop(target, [])]
    if source.devices.shape == target.devices.shape:
        return [Hop(target, [_permutation(source, target, shape)])]
    if target.is_replicated:
        return [Hop(target, _gather(source, source.counts, shape, shape))]
    if swaps and (pairs := _swaps(source, target)) is not None:
        return [Hop(target, _swap(source, target, pairs, shape))]
    if source.is_partial and (between := _compatible(source, target)) is not None:
        return [Hop(target, [*_sliced(source, between, shape), *_ordered(between, target, shape)])]
    if target.is_partial and (between := _compatible(target, source)) is not None:
        return [Hop(target, [*_ordered(source, between, shape), *_gathered(between, target, shape)])]
    if source.is_partial != target.is_partial and _is_shifted(source, target):
        raise Unmodelled
    for way in (_split, _without_a_dimension, _with_copies):
        if (found := way(source, target, shape)) is not None:
            if not swaps:
                raise Unmodelled
            if found[0] is not None:
                return found[0]
            break
    if any(a == b > 1 for a, b in zip(source.counts, target.counts, strict=True)):
        return [Hop(target, _in_groups(source, target, shape))]
    if not in_full:
        return None
    whole = Tiles.of(np.sort(source.devices, axis=None).reshape([*(1 for _ in shape), -1]))
    return [Hop(whole, _gather(source, source.counts, shape, shape)), Hop(target, [])]


def _permutation(source: Tiles, target: Tiles, shape: _Shape) -> Step:
    pairs = np.stack([source.devices.ravel(), target.devices.ravel()], axis=1)
    local = source.local(shape)
    return Step("collective-permute", DeviceGroups(pairs), local, local)


def _ordered(source: Tiles, target: Tiles, shape: _Shape) -> list[Step]:
    return [] if source == target else [_permutation(source, target, shape)]


def _swaps(source: Tiles, target: Tiles) -> list[tuple[int, int]] | None:
    """Pairs of dimensions that swap their numbers of shards, one after the other; None if the numbers are others."""
    of_source: dict[int, list[int]] = {}
    of_target: dict[int, list[int]] = {}
    for dim, (a, b) in enumerate(zip(source.counts, target.counts, strict=True)):
        if a != b:
            of_source.setdefault(a, []).append(dim)
            of_target.setdefault(b, []).append(dim)
    if not of_source or {n: len(dims) for n, dims in of_source.items()} != {n: len(d) for n, d in of_target.items()}:
        return None
    pairs = []
    counts = target.counts

    def remove(count: int, dim: int, among: dict[int, list[int]]) -> None:
        among[count] = [other for other in among[count] if other != dim]
        if not among[count]:
            del among[count]

    while of_source:
        count = min(of_source)
        to = of_source[count][-1]
        wanted = counts[to]
        if wanted == count:
            remove(count, to, of_source)
            remove(count, to, of_target)
            continue
        candidates = of_source[wanted]
        if count != 1 and wanted % count:
            return None
        better = [dim for dim in candidates if (counts[dim] != 1 if count == 1 else counts[dim] == count)]
        dim = better[0] if better else candidates[-1]
        pairs.append((dim, to))
        remove(wanted, to, of_target)
        of_source[count][-1] = dim
        remove(wanted, dim, of_source)
    return pairs


def _swap(source: Tiles, target: Tiles, pairs: list[tuple[int, int]], shape: _Shape) -> list[Step]:
    """All-to-alls that swap pairs of dimensions: one for all that have nothing to do with each other, if several."""
    steps: list[Step] = []
    together: list[tuple[int, int]] = []
    for dim, to in sorted(pairs, key=lambda pair: pair[1]):
        if not {dim, to} & {*itertools.chain(*together)} and not (
            shape[dim] % source.counts[dim] or shape[to] % target.counts[to]
        ):
            together.append((dim, to))
    rest = [[pair] for pair in sorted(pairs, key=lambda pair: pair[1]) if pair not in together]
    for several in [together, *rest] if len(together) > 1 else [[pair] for pair in pairs]:
        swapped = source.swapped(several)
        sent, received, factors = [*source.local(shape)], [*swapped.local(shape)], [1] * len(shape)
        for dim, to in several:
            factors[to] = source.counts[dim] // source.counts[to]
            if shape[dim] % math.lcm(source.counts[dim], swapped.counts[dim]) or shape[to] % swapped.counts[to]:
                if source.counts[to] > 1:
                    raise Unmodelled
                # It is padded before, and sliced afterwards.
                sent[to], received[dim] = received[to] * factors[to], sent[dim] * factors[to]
        groups = swapped.groups(factors)
        steps.append(Step("all-to-all", groups, tuple(sent), tuple(received)))
        source = swapped
    return [*steps, *_ordered(source, target, shape)]


def _compatible(partial: Tiles, tiled: Tiles) -> Tiles | None:
    """The sharding with the numbers of shards of `tiled` that a slice of `partial` has; None if it cannot have them."""
    factors = [b // a for a, b in zip(partial.counts, tiled.counts, strict=True) if b % a == 0]
    if len(factors) < len(partial.counts):
        return None
    coarse = np.sort(tiled.merged(factors).devices, axis=-1)
    if np.array_equal(coarse, np.sort(partial.devices, axis=-1)):
        return tiled
    expanded = [dim for dim, factor in enumerate(factors) if factor > 1]
    if partial.copies % math.prod(factors):
        return None
    ndim = len(factors)
    devices = partial.devices.reshape([*partial.counts, *(factors[dim] for dim in expanded), -1])
    order = [axis for dim in range(ndim) for axis in (dim, *([ndim + expanded.index(dim)] if dim in expanded else []))]
    devices = devices.transpose([*order, ndim + len(expanded)])
    return Tiles.of(devices.reshape([*tiled.counts, -1]))


def _sliced(source: Tiles, target: Tiles, shape: _Shape) -> list[Step]:
    """Nothing, unless the borders of shards are elsewhere."""
    for n, a, b in zip(shape, source.counts, target.counts, strict=True):
        if 1 < a < b and -(-n // a) < -(-n // b) * b // a:
            raise Unmodelled
    return []


def _gathered(source: Tiles, target: Tiles, shape: _Shape) -> list[Step]:
    """The gathers of some dimensions, or of parts of them."""
    for n, a, b in zip(shape, source.counts, target.counts, strict=True):
        if 1 < b < a and -(-n // a) * a // b > -(-n // b):
            raise Unmodelled
    factors = tuple(a // b for a, b in zip(source.counts, target.counts, strict=True))
    return _gather(source, factors, shape, target.local(shape))


def _gather(source: Tiles, factors: Sequence[int], shape: _Shape, wanted: _Shape) -> list[Step]:
    """Gathers of so many neighbouring shards each, from the last dimension: few elements are summed instead.

    Source: `PartitionedHlo::ReplicatePartial`.
    """
    local = source.local(shape)
    parts = {dim: count for dim, count in enumerate(factors) if count > 1}
    copies = [dim for dim in parts if wanted[dim] == local[dim]]
    sums = [dim for dim in parts if dim not in copies and wanted[dim] <= parts[dim] // 2]
    steps = []

    def over(dims: Sequence[int]) -> DeviceGroups:
        return source.groups([factors[dim] if dim in dims else 1 for dim in range(len(factors))])

    if copies:
        steps.append(Step("all-reduce", over(copies), local, local))
    for dim in reversed(parts):
        if dim not in copies and dim not in sums:
            before, local = local, (*local[:dim], local[dim] * parts[dim], *local[dim + 1 :])
            steps.append(Step("all-gather", over([dim]), before, local))
    full = tuple(wanted[dim] if dim in parts else n for dim, n in enumerate(local))
    steps += [Step("all-reduce", over([dim]), full, full) for dim in sums]
    return steps


def _is_shifted(source: Tiles, target: Tiles) -> bool:
    """Whether one is the other with dimensions shifted by one, which XLA treats in a way of its own."""
    partial, tiled = (source, target) if source.is_partial else (target, source)
    return partial.counts[0] == 1 and (*partial.counts[1:], partial.copies) == tiled.counts


_Found = tuple[list[Hop] | None]


def _split(source: Tiles, target: Tiles, shape: _Shape) -> _Found | None:
    """A part of the axes of a dimension moves to another, or is gathered: that part is a dimension of its own then."""
    if source.copies != target.copies and (source.is_partial or target.is_partial):
        return None
    ones, others = [], []
    for dim, (a, b) in enumerate(zip(source.counts, target.counts, strict=True)):
        low, high = sorted((a, b))
        if low != high and low == 1:
            ones.append(dim)
        elif low != high and high % low == 0 and -(-shape[dim] // low) * low % high == 0:
            others.append(dim)
    a, b = source.counts, target.counts
    found = [dim for dim in others if any(a[dim] * a[one] == b[dim] * b[one] for one in ones)]
    found = found or [dim for dim in others if a[dim] > b[dim]]
    if not found:
        return None
    dim = found[0]
    size = min(a[dim], b[dim])
    if shape[dim] % a[dim]:
        raise Unmodelled
    before, after = source.split(dim, size), target.split(dim, size)
    inner = source.local(shape)[dim] * before.counts[dim + 1]
    split_shape = (*shape[:dim], shape[dim] // inner, inner, *shape[dim + 1 :])
    if inner % after.counts[dim + 1]:
        raise Unmodelled
    found = _reshard(before, after, split_shape, in_full=False)
    return (found and [Hop(target, [step for hop in found for step in hop.steps])],)


def _without_a_dimension(source: Tiles, target: Tiles, shape: _Shape) -> _Found | None:
    """One dimension is gathered first."""
    if not target.is_partial:
        return None
    copies = source.copies if source.is_partial else 1
    for dim, count in enumerate(source.counts):
        if count > 1 and count * copies == target.copies:
            between = source.merged([count if other == dim else 1 for other in range(len(source.counts))])
            first = hops(source, between, shape)
            rest = _reshard(between, target, shape, in_full=False)
            return (None if rest is None else [*first, *rest],)
    return None


def _with_copies(source: Tiles, target: Tiles, shape: _Shape) -> _Found | None:
    """What is replicated is sliced first."""
    if not source.is_partial or target.is_partial:
        return None
    for dim, (a, b) in enumerate(zip(source.counts, target.counts, strict=True)):
        if a == 1 != b and b % source.copies == 0:
            between = Tiles.of(np.swapaxes(source.devices, dim, -1))
            first = hops(source, between, shape)
            rest = _reshard(between, target, shape, in_full=False)
            return (None if rest is None else [*first, *rest],)
    return None


def _in_groups(source: Tiles, target: Tiles, shape: _Shape) -> list[Step]:
    """The devices of equal shards of some dimensions reshard the others among themselves."""
    equal = [dim for dim, (a, b) in enumerate(zip(source.counts, target.counts, strict=True)) if a == b > 1]
    ones, others = source.grouped(equal), target.grouped(equal)
    row_of, place_of = np.empty((2, ones.size), np.int64)
    row_of[ones], place_of[ones] = np.indices(ones.shape)
    places = place_of[others]
    of_target, last = places[0], list[Step]()
    if {*map(frozenset, ones.tolist())} != {*map(frozenset, others.tolist())}:
        # Other devices have equal shards: the groups reshard as if they were the target's, and are permuted then.
        of_target, last = np.arange(ones.shape[1]), _ordered(target.regrouped(equal, ones), target, shape)
    elif (row_of[others] != np.arange(len(ones))[:, None]).any() or (places != places[0]).any():
        raise Unmodelled
    counts = [[1 if dim in equal else n for dim, n in enumerate(of.counts)] for of in (source, target)]
    inner = [
        Tiles.of(np.reshape(numbers, [*count, -1]))
        for numbers, count in zip((np.arange(ones.shape[1]), of_target), counts, strict=True)
    ]
    local = tuple(n if dim in equal else shape[dim] for dim, n in enumerate(source.local(shape)))
    steps = reshard(inner[0], inner[1], local)
    return [*(dataclasses.replace(step, groups=step.groups.within(ones)) for step in steps), *last]
