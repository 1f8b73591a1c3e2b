"""How XLA partitions a gather or a scatter: in groups of devices, by what these have of one of its arrays.

Devices are grouped by what they have of the batch dimensions, of the operand's dimensions of which pieces have all, of
those that are indexed, or of the rows of the indices. Within a group it is the same with fewer dimensions; at last the
group replicates what it has. Which way comes first is tried: each is followed by replication, and the one whose largest
operation is the smallest is taken.

Source: `gather_scatter_handler.cc` of XLA, and `EvaluatePartitionCost` of its `spmd_partitioner_util.h`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from partjit.inspect.moves.device_grouping import (
    Grouped,
    combined,
    combined_in_names,
    grouped_by_copies,
    matched,
    propagated,
    replicated,
    replicated_on,
)
from partjit.inspect.moves.indexed_dims import IndexedDims
from partjit.inspect.moves.partitioned import Array, Resharded, summed, within
from partjit.inspect.moves.resharding import is_swap, reshard
from partjit.inspect.moves.tiles import Step, Tiles, Unmodelled

__all__ = ["Indexing", "Partitioning", "partition"]

OPERAND, INDICES, PREDICATES = "operand", "indices", "predicates"


@dataclasses.dataclass(frozen=True, eq=False)
class Indexing:
    """A gather or a scatter, as a group of devices has it.

    Attributes:
        dims: its dimensions.
        slices: how much of each dimension of the operand a piece has.
        operand, indices: its arrays.
        pieces: the updates of a scatter; of a gather the result, in the sharding that is wanted.
        result: the sharding that is wanted of the result of a scatter.
        sums: whether parts of the result of a scatter can be combined.
        named: the sizes of the axes of the mesh where its shardings are over named axes, of which others are not.
    """

    dims: IndexedDims
    slices: tuple[int, ...]
    operand: Array
    indices: Array
    pieces: Array
    result: Tiles | None = None
    sums: bool = False
    named: Mapping[str, int] | None = None

    def combined(self, more: Tiles, tiles: Tiles, *, in_names: bool = False) -> Tiles | None:
        """A sharding with that of other dimensions as well; None if there is none.

        Args:
            more: that of other dimensions.
            tiles: the sharding.
            in_names: whether it is known that both are over named axes, where others are.
        """
        found = combined(more, tiles)
        if self.named is None:
            return found
        named = combined_in_names(more, tiles, self.named)
        if in_names or found == named:
            return named
        raise Unmodelled  # XLA combines tiles, or names

    def grouped(self, operand: Grouped, indices: Grouped, pieces: Grouped) -> "Indexing":
        """What each group of devices has of it."""
        updates = self.pieces if self.result is None else self.pieces.resharded(pieces.ungrouped())
        return dataclasses.replace(
            self,
            operand=_within(self.operand, operand),
            indices=_within(self.indices, indices),
            pieces=updates.grouped(pieces, pieces.part(updates.shape)),
            result=None if self.result is None else operand.inner,
            named=None,
        )

    def finished(
        self, found: "Partitioning", operand: Grouped, pieces: Grouped, *, in_names: bool = False
    ) -> "Partitioning":
        """What groups have computed, resharded as it is wanted; perhaps from a sharding over named axes."""
        grouped, wanted, shape = pieces, self.pieces.tiles, self.pieces.shape
        if self.result is not None:
            grouped, wanted, shape = operand, self.result, self.operand.shape
        made = grouped.ungrouped()
        swaps = self.named is None or in_names or not is_swap(made, wanted)
        last = self.steps(OPERAND, reshard(made, wanted, shape, swaps=swaps))
        return dataclasses.replace(found, made=made if swaps else None, last=tuple(last))

    def steps(self, name: str, steps: Iterable[Step]) -> list[tuple[str, Step]]:
        """Steps in each row of devices, and what they are about."""
        return [(name, step) for step in within([*steps], self.operand.rows)]


def _within(array: Array, grouped: Grouped) -> Array:
    return array.resharded(grouped.ungrouped()).grouped(grouped, grouped.part(array.shape))


@dataclasses.dataclass(frozen=True, eq=False)
class Partitioning:
    """What is moved.

    Attributes:
        operand, indices, pieces: the reshards of these.
        steps: what is moved besides, and of which array.
        nbytes: of the arrays of the operation on a device.
        made: the sharding in which the result is computed; None if XLA forgets it.
        last: the reshard of it to the one that is wanted.
        rows: the groups of devices in the end.
    """

    operand: tuple[Resharded, ...]
    indices: tuple[Resharded, ...]
    pieces: tuple[Resharded, ...]
    steps: tuple[tuple[str, Step], ...]
    nbytes: int
    made: Tiles | None
    rows: npt.NDArray[np.int64]
    last: tuple[tuple[str, Step], ...] = ()

    def then(self, steps: Iterable[tuple[str, Step]] = ()) -> "Partitioning":
        """The same with more of what is moved at the end."""
        return dataclasses.replace(self, steps=(*self.steps, *self.last, *steps), last=())

    def of_computed(self, name: str, before: Array) -> "Partitioning":
        """The same, where one of the arrays is computed from what was resharded like this before."""
        made: tuple[Resharded, ...] = getattr(self, name)
        steps = [(name, step) for one in made for step in one.steps]
        return dataclasses.replace(self, **{name: before.made, "steps": (*steps, *self.steps)})


_Way = Callable[[Indexing, bool], Partitioning | None]


def partition(one: Indexing, *, in_turn: bool = True) -> Partitioning:
    """What XLA moves.

    Args:
        one: the operation.
        in_turn: whether one way after the other is taken, until everything is grouped.

    Raises:
        Unmodelled: it reshards in a way that is not modelled.
    """
    for way in (_by_batch, *_in_order(one)) if in_turn else ():
        if (found := way(one, in_turn)) is not None:
            return found
    operand, indices = one.operand.replicated(), one.indices.replicated()
    updates = one.pieces if one.result is None else one.pieces.replicated()
    nbytes = sum(math.prod(array.shape) * array.itemsize for array in (operand, indices, updates))
    result = one.pieces if one.result is None else one.operand
    whole = replicated(len(result.shape), result.tiles.devices.size)
    return Partitioning(operand.made, indices.made, updates.made, (), nbytes, whole, operand.rows)


def _in_order(one: Indexing) -> list[_Way]:
    """The other ways, that of the least memory and of the least that is sent first."""
    costs: list[tuple[tuple[float, float], _Way]] = []
    for way in (_by_windows, _by_indexed, _by_rows):
        if (found := way(one, False)) is not None:
            costs.append((_cost(one, found), way))
    return [way for _, way in sorted(costs, key=lambda cost: cost[0])]


def _cost(one: Indexing, found: Partitioning) -> tuple[float, float]:
    """The bytes of the largest operation, and those sent, as XLA estimates them."""
    sizes = {OPERAND: one.operand.itemsize, INDICES: one.indices.itemsize, PREDICATES: 1}
    steps = [(sizes[name], step) for name, step in (*found.steps, *found.last)]
    for made, array in ((found.operand, one.operand), (found.indices, one.indices), (found.pieces, one.pieces)):
        steps += [(array.itemsize, step) for each in made[len(array.made) :] for step in each.steps]
    memory = [_needed(step) * size for size, step in steps]
    return max([found.nbytes, *memory]), sum(_sent(step) * size for size, step in steps)


def _needed(step: Step) -> int:
    """The elements that a collective has at once: a sum is made where its operand is."""
    return math.prod(step.result) + (0 if step.kind == "all-reduce" else math.prod(step.operand))


def _sent(step: Step) -> float:
    if step.kind == "all-reduce":
        return 2 * math.prod(step.result)
    if step.kind == "collective-permute":
        return math.prod(step.result)
    return math.prod(step.result) * (1 - 1 / step.groups.group_size)


def _by_batch(one: Indexing, in_turn: bool) -> Partitioning | None:
    """Groups by what they have of the batch dimensions."""
    here, there, where = ([*dims] for dims in zip(*one.dims.batches, strict=True)) if one.dims.batches else ([], [], [])
    found = matched(one.operand.tiles, one.indices.tiles, here, there)
    if found is None:
        return None
    one = dataclasses.replace(one, operand=one.operand.resharded(found[0]), indices=one.indices.resharded(found[1]))
    pieces = propagated(one.indices.tiles, one.dims.rows, one.dims.ndims[2])
    passed = propagated(replicated_on(one.operand.tiles, here), one.dims.whole(one.slices), one.dims.ndims[2])
    more = one.combined(passed, pieces)
    pieces = more or pieces
    if one.result is not None:
        updates = one.pieces if more else dataclasses.replace(one.pieces, swaps=True)  # that is over named axes
        one = dataclasses.replace(one, pieces=updates.resharded(pieces))
    of_indices = Grouped.of(one.indices.tiles, there)
    of_operand = Grouped.of(one.operand.tiles, here).aligned(of_indices)
    of_pieces = Grouped.of(pieces, where).aligned(of_indices)
    found = partition(one.grouped(of_operand, of_indices, of_pieces), in_turn=in_turn)
    return one.finished(found.then(), of_operand, of_pieces)


def _by_windows(one: Indexing, in_turn: bool) -> Partitioning | None:
    """Groups by what they have of the operand's dimensions of which pieces have all."""
    pairs = one.dims.whole(one.slices)
    counts = one.operand.tiles.counts
    if math.prod(counts[here] for here, _ in pairs) == 1:
        return None
    own = propagated(one.operand.tiles, pairs, one.dims.ndims[2])
    dims = [dim for dim, n in enumerate(own.counts) if n > 1]
    of_pieces = Grouped.of(one.combined(one.pieces.tiles, own) or own, dims)
    of_operand = Grouped.of(one.operand.tiles, [here for here, _ in pairs]).aligned(of_pieces)
    of_indices = grouped_by_copies(one.indices.tiles, len(of_pieces.groups), one.dims.of_indices()).aligned(of_pieces)
    local = one.operand.tiles.local(one.operand.shape)
    passed = {here: local[here] for here, _ in pairs}
    inner = one.grouped(of_operand, of_indices, of_pieces)
    inner = dataclasses.replace(inner, slices=tuple(passed.get(dim, n) for dim, n in enumerate(one.slices)))
    in_names = one.result is None
    return one.finished(partition(inner, in_turn=in_turn).then(), of_operand, of_pieces, in_names=in_names)


def _by_indexed(one: Indexing, in_turn: bool) -> Partitioning | None:
    """Groups by what they have of the operand's indexed dimensions; each leaves out what others have."""
    operand, indices, pieces = one.operand, one.indices, one.pieces
    dims = one.dims.single(one.slices, operand.tiles.counts)
    if not dims:
        return None
    of_operand = Grouped.of(operand.tiles, dims)
    count = len(of_operand.groups)

    def of_rows(tiles: Tiles) -> Grouped:
        return grouped_by_copies(tiles, count, one.dims.of_indices()).aligned(of_operand)

    def of_their(tiles: Tiles) -> Grouped:
        return grouped_by_copies(tiles, count, one.dims.of_pieces(one.slices)).aligned(of_operand)

    there = [(piece, row) for row, piece in one.dims.rows]
    of_indices, of_pieces = of_rows(indices.tiles), of_their(pieces.tiles)
    if of_pieces.inner.is_replicated and not of_indices.inner.is_replicated:
        of_pieces = of_their(propagated(indices.tiles, one.dims.rows, one.dims.ndims[2]))
    if of_indices.inner.is_replicated and not of_pieces.inner.is_replicated:
        of_indices = of_rows(propagated(pieces.tiles, there, one.dims.ndims[1]))
    indices = indices.resharded(of_indices.ungrouped())
    one = dataclasses.replace(one, indices=dataclasses.replace(indices, made=()))
    inner = one.grouped(of_operand, of_indices, of_pieces)
    found = partition(inner, in_turn=in_turn).then().of_computed(INDICES, indices)
    if one.result is None:
        wanted = propagated(of_pieces.ungrouped(), there, one.dims.ndims[1])
        mask = one.steps(PREDICATES, reshard(indices.tiles, wanted, indices.shape))
        local = inner.pieces.tiles.local(inner.pieces.shape)
        sums = [(OPERAND, step) for step in summed(operand.tiles, [*dims], local, operand.rows)]
        found = found.then([*mask, *sums])
    return one.finished(found, of_operand, of_pieces)


def _by_rows(one: Indexing, in_turn: bool) -> Partitioning | None:
    """Groups by what they have of the rows of the indices; the results of scatters are combined."""
    if one.indices.tiles.is_replicated and one.result is None:
        return None
    pairs = one.dims.passing
    back = propagated(one.pieces.tiles, [(there, here) for here, there in pairs], one.dims.ndims[1])
    if (better := one.combined(back, one.indices.tiles, in_names=one.result is None)) is not None:
        one = dataclasses.replace(one, indices=one.indices.resharded(better))
    own = propagated(one.indices.tiles, pairs, one.dims.ndims[2])
    if own.is_replicated:
        return None
    rows = [here for here, _ in pairs]
    more = one.combined(one.pieces.tiles, own, in_names=one.result is None)
    is_update = in_turn and one.result is not None and not one.pieces.tiles.is_replicated
    if is_update and one.named is not None and one.pieces.tiles != (more or own):
        raise Unmodelled  # XLA may replicate updates over named axes at first
    of_pieces = Grouped.of(more or own, [there for _, there in pairs])
    of_indices = Grouped.of(one.indices.tiles, rows)
    count = len(of_indices.groups)
    if len(of_pieces.groups) != count:
        raise Unmodelled
    order = one.dims.of_operand(one.slices, one.operand.tiles.counts)
    of_operand = grouped_by_copies(one.operand.tiles, count, order).aligned(of_pieces)
    of_indices = of_indices.aligned(of_pieces)
    if one.result is None:
        inner = one.grouped(of_operand, of_indices, of_pieces)
        return one.finished(partition(inner, in_turn=in_turn).then(), of_operand, of_pieces, in_names=True)
    if not one.sums:
        return None
    operand = one.operand.resharded(of_operand.ungrouped())
    one = dataclasses.replace(one, operand=dataclasses.replace(operand, made=()))
    inner = one.grouped(of_operand, of_indices, of_pieces)
    found = partition(inner, in_turn=in_turn).then().of_computed(OPERAND, operand)
    local = inner.operand.tiles.local(inner.operand.shape)
    sums = [(OPERAND, step) for step in summed(one.indices.tiles, rows, local, operand.rows)]
    return one.finished(found.then(sums), of_operand, of_pieces)
