"""How XLA partitions a product of two arrays: in groups of devices, until each dimension is sharded in one way.

Devices are grouped by what they have of the dimensions of a batch, of one operand and the result, or of what is summed
over. Within a group it is the same with fewer dimensions. At last one operand is resharded as the other one is, or as
the result; or all of it is replicated. At first only such groups are tried as need no device in another place.

XLA may compute a product in a loop that sends parts of an operand around, if that operand is large (100 GB on CPUs).
That is not modelled.

Source: `PartitionDot` and what it calls, of XLA's `dot_handler.cc`.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from partjit.inspect.moves.device_grouping import Grouped, replicated, replicated_on, reshaped
from partjit.inspect.moves.other_operand import grouped_other
from partjit.inspect.moves.partitioned import Array, summed
from partjit.inspect.moves.product_dims import ProductDims
from partjit.inspect.moves.sums import sums_of
from partjit.inspect.moves.tiles import Tiles, Unmodelled
from partjit.inspect.moves.ungrouped_products import Create, Created, Partitioning, Result, created, in_one

__all__ = ["partition"]

_Shape = tuple[int, ...]


def partition(
    operands: tuple[Tiles, Tiles],
    shapes: tuple[_Shape, _Shape],
    itemsizes: tuple[int, int, int],
    dims: ProductDims,
    shape: _Shape,
    result: Tiles,
) -> Partitioning:
    """What XLA moves for a product.

    Args:
        operands: the shardings of the operands.
        shapes: their shapes.
        itemsizes: bytes of an element of each operand and of the result.
        dims: which dimensions of the operands and the result are the same.
        shape: that of the result.
        result: its sharding.

    Raises:
        Unmodelled: it reshards in a way that is not modelled.
    """
    rows = np.arange(result.devices.size)[None]
    lhs, rhs = (Array(of, size, tiles, rows) for of, size, tiles in zip(shapes, itemsizes[:2], operands, strict=True))

    def create(left: Array, right: Array) -> Created:
        locals_ = left.tiles.local(left.shape), right.tiles.local(right.shape)
        sizes = {o: locals_[0][a] for a, _, o in dims.batch}
        sizes |= {o: locals_[k][own] for k in (0, 1) for own, o in dims.own[k]}
        return [], tuple(sizes.get(dim, n) for dim, n in enumerate(shape))

    return _partitioned(lhs, rhs, Result(shape, result, itemsizes[2]), dims, create)


def _partitioned(lhs: Array, rhs: Array, result: Result, dims: ProductDims, create: Create) -> Partitioning:
    for strict in (True, False):
        if (found := _attempt(lhs, rhs, result, dims, create, strict)) is not None:
            return found
    if dims.is_spatial:
        found = created(lhs.replicated(), rhs.replicated(), create)
        return found.then(result.from_(replicated(len(result.shape), result.tiles.devices.size), lhs))
    # Both operands as the result is sharded.
    both = [operand.resharded(dims.of_operand(k, result.tiles)) for k, operand in enumerate((lhs, rhs))]
    return created(both[0], both[1], create)


def _attempt(
    lhs: Array, rhs: Array, result: Result, dims: ProductDims, create: Create, strict: bool
) -> Partitioning | None:
    """The first way that applies; if `strict`, of those in which groups have the devices that they have."""
    if (found := in_one(lhs, rhs, result, dims, create, may_reshard=False)) is not None:
        return found
    for way in (_by_batch, _by_own, _by_contracted):
        if (found := way(lhs, rhs, result, dims, create, strict)) is not None:
            return found
    if lhs.tiles.is_replicated and rhs.tiles.is_replicated and result.tiles.is_partial:
        ndim = len(result.shape)
        grouped = Grouped.of(result.tiles, (ndim,))
        return _partitioned(
            _all_of(lhs, grouped),
            _all_of(rhs, grouped),
            Result(result.shape, grouped.inner, result.itemsize),
            dims,
            create,
        )
    return in_one(lhs, rhs, result, dims, create, may_reshard=True)


def _all_of(array: Array, grouped: Grouped) -> Array:
    """What is replicated, as each group has it."""
    inner = replicated(len(array.shape), grouped.groups.shape[1])
    return array.grouped(dataclasses.replace(grouped, inner=inner), array.shape)


def _by_batch(
    lhs: Array, rhs: Array, result: Result, dims: ProductDims, create: Create, strict: bool
) -> Partitioning | None:
    """Groups by what they have of the batch dimensions."""
    wanted, tiles = result.tiles, (lhs.tiles, rhs.tiles)
    parts = dims.parts(tiles, wanted)
    if parts.result_batch == 1 or parts.result_batch not in parts.batch:
        return None
    of_batch = tuple(tuple(pair[k] for pair in dims.batch) for k in range(3))
    lefts, rights = (Grouped.of(tiles[k], of_batch[k]) for k in (0, 1))
    groups = Grouped.of(wanted, of_batch[2])
    matches = all(lhs.tiles.counts[a] == rhs.tiles.counts[b] for a, b, _ in dims.batch)
    if matches and (not strict or rhs.tiles == rights.aligned(lefts).ungrouped()):
        if lhs.nbytes > rhs.nbytes:
            rights = rights.aligned(lefts)
            rhs = rhs.resharded(rights.ungrouped())
        else:
            lefts = lefts.aligned(rights)
            lhs = lhs.resharded(lefts.ungrouped())
        counts = {o: lhs.tiles.counts[a] for a, _, o in dims.batch}
        groups = Grouped.of(reshaped(wanted, counts), of_batch[2]).aligned(lefts)
        inner = [one.grouped(g, g.part(one.shape)) for one, g in ((lhs, lefts), (rhs, rights))]
    else:
        inner = []
        for k, one in enumerate((lhs, rhs)):
            made = _as_result_batch(one, k, dims, parts, wanted, groups, strict)
            if made is None:
                return None
            inner.append(made)
    found = _partitioned(inner[0], inner[1], result.grouped(groups), dims, create)
    return found.then(result.from_(groups.ungrouped(), lhs))


def _as_result_batch(
    one: Array, k: int, dims: ProductDims, parts: "ProductDims.Parts", wanted: Tiles, groups: Grouped, strict: bool
) -> Array | None:
    """An operand of which each group has the part of the batch dimensions that it has of the result."""
    batch = tuple(pair[k] for pair in dims.batch)
    if one.tiles.is_replicated:
        parted = dataclasses.replace(groups, dims=batch)
        return _all_of(dataclasses.replace(one, shape=parted.part(one.shape)), groups)
    shape, size = [*one.tiles.devices.shape], one.tiles.devices.size
    for pair in dims.batch:
        shape[pair[k]] = wanted.counts[pair[2]]
    if (more := math.prod(shape)) > size:
        ratio, rest = divmod(more, size)
        own, contracted = parts.own[k], parts.contracted
        if rest:
            return None
        if one.tiles.is_partial and shape[-1] % ratio == 0:
            shape[-1] //= ratio
        elif ratio == own and (ratio != contracted[k] or contracted[k] == contracted[1 - k]):
            for dim, _ in dims.own[k]:
                shape[dim] = 1
        elif ratio == contracted[k]:
            for pair in dims.contracted:
                shape[pair[k]] = 1
        else:
            return None
    if math.prod(shape) != size:
        return None
    grouped = Grouped.of(Tiles.of(one.tiles.devices.reshape(shape)), batch).aligned(groups)
    target = grouped.ungrouped()
    if strict and one.tiles != target:
        return None
    return one.resharded(target).grouped(grouped, grouped.part(one.shape))


def _by_own(
    lhs: Array, rhs: Array, result: Result, dims: ProductDims, create: Create, strict: bool
) -> Partitioning | None:
    """Groups by what they have of the own dimensions of one operand, which the result has as well."""
    wanted, both = result.tiles, (lhs, rhs)
    parts = dims.parts((lhs.tiles, rhs.tiles), wanted)
    may = [parts.own[k] == parts.result_own[k] > 1 for k in (0, 1)]
    if any(may):
        which = 0 if may[0] and (not may[1] or parts.own[0] * rhs.nbytes < parts.own[1] * lhs.nbytes) else 1
        pairs = dims.own[which]
    else:
        which = next((k for k in (0, 1) if parts.own[k] > 1 and parts.result_own[k] > 1), None)
        if which is None:
            return None
        counts = both[which].tiles.counts
        pairs = tuple((own, o) for own, o in dims.own[which] if counts[own] == wanted.counts[o] > 1)
    if not pairs:
        return None
    one, other = both[which], both[1 - which]
    groups = Grouped.of(wanted, tuple(o for _, o in pairs))
    own = {dim: wanted.counts[o] for dim, o in pairs}
    grouped = Grouped.of(reshaped(one.tiles, own), tuple(own)).aligned(groups)
    if strict and one.tiles != grouped.ungrouped():
        return None
    limit = math.prod(wanted.local(result.shape)) * result.itemsize
    found = grouped_other(other, which, dims, parts, groups, limit)
    if found is None and not other.tiles.is_replicated and not dims.is_spatial:
        raise Unmodelled  # XLA infers what would fit best
    if found is None:
        other = other.replicated()
    inner = one.resharded(grouped.ungrouped()).grouped(grouped, grouped.part(one.shape))
    beside = _in_groups(other, found, groups)
    left, right = (inner, beside) if which == 0 else (beside, inner)
    return _partitioned(left, right, result.grouped(groups), dims, create)


def _in_groups(other: Array, found: Grouped | None, groups: Grouped) -> Array:
    """The other operand, of which each group has all."""
    ndim = len(other.shape)
    if found is None or other.tiles.is_replicated:
        return _all_of(other, groups)
    target = found.ungrouped()
    if found.dims == (ndim,):
        return other.resharded(target).grouped(found, other.shape)
    if not other.tiles.is_partial or not _are_same_groups(Grouped.of(target, found.dims), found):
        other = other.resharded(target)
    whole = other.resharded(replicated_on(other.tiles, [dim for dim in found.dims if dim < ndim]))
    return whole.grouped(found, other.shape)


def _are_same_groups(one: Grouped, other: Grouped) -> bool:
    if one.groups.shape != other.groups.shape:
        return False
    return all({*a} == {*b} for a, b in zip(one.groups.tolist(), other.groups.tolist(), strict=True))


def _by_contracted(
    lhs: Array, rhs: Array, result: Result, dims: ProductDims, create: Create, strict: bool
) -> Partitioning | None:
    """Groups by what they have of what is summed over."""
    parts = dims.parts((lhs.tiles, rhs.tiles), result.tiles)
    if min(parts.contracted) == 1:
        return None
    if parts.contracted[0] == parts.contracted[1]:
        found = _summed_in_groups(lhs, rhs, dims.contracted, result, dims, create, strict)
        if found is not None:
            return found
    pairs = tuple((a, b) for a, b in dims.contracted if lhs.tiles.counts[a] == rhs.tiles.counts[b] > 1)
    return _summed_in_groups(lhs, rhs, pairs, result, dims, create, strict) if pairs else None


def _summed_in_groups(
    lhs: Array,
    rhs: Array,
    pairs: Sequence[tuple[int, int]],
    result: Result,
    dims: ProductDims,
    create: Create,
    strict: bool,
) -> Partitioning | None:
    of = tuple(tuple(pair[k] for pair in pairs) for k in (0, 1))
    count = math.prod(lhs.tiles.counts[a] for a in of[0])
    if lhs.nbytes > rhs.nbytes:
        lefts = Grouped.of(lhs.tiles, of[0])
        other = reshaped(rhs.tiles, {b: lhs.tiles.counts[a] for a, b in pairs})
        rights = Grouped.of(other, of[1]).aligned(lefts)
        if strict and rhs.tiles != rights.ungrouped():
            return None
        rhs = rhs.resharded(rights.ungrouped())
    else:
        rights = Grouped.of(rhs.tiles, of[1])
        other = reshaped(lhs.tiles, {a: rhs.tiles.counts[b] for a, b in pairs})
        lefts = Grouped.of(other, of[0]).aligned(rights)
        if strict and lhs.tiles != lefts.ungrouped():
            return None
        lhs = lhs.resharded(lefts.ungrouped())
    sums = sums_of(result, lefts, rights, dims, count)
    shape, ndim, of_lhs, rows = result.shape, len(result.shape), lefts.ungrouped(), lhs.rows
    sliced = {dim: result.tiles.counts[dim] for dim in sums.dims if dim < ndim}

    def create_sum(left: Array, right: Array) -> Created:
        steps, local = create(left, right)
        if not sums.dims:
            return [*steps, *summed(of_lhs, [*of[0]], local, rows)], local
        first = summed(sums.outer, [*sliced], local, rows)
        local = tuple(-(-n // sliced.get(dim, 1)) for dim, n in enumerate(local))
        more = summed(sums.outer, [ndim], local, rows) if ndim in sums.dims else []
        return [*steps, *first, *more], local

    inner = Result(tuple(-(-n // sliced.get(dim, 1)) for dim, n in enumerate(shape)), sums.inner, result.itemsize)
    both = [one.grouped(g, g.part(one.shape)) for one, g in ((lhs, lefts), (rhs, rights))]
    found = _partitioned(both[0], both[1], inner, dims, create_sum)
    return found.then(result.from_(sums.outer, lhs))
