"""The reshards that are left of those that a program needs, and how each is made.

XLA remembers how it has resharded a value: there and back is nothing, and twice is once. What it makes of it on the way
to another sharding, such as copies on all devices, it remembers as well.

XLA's products leave their operands and results in shardings over tiles of devices, where others are over named axes.
From the one form to the other, dimensions do not swap axes while some devices have the same shard.

Source: `PartitionedHlo::Reshard` and `HandleDotHelper` of XLA.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from partjit._jax import RELEASE
from partjit.inspect.moves.model import Tensor, Transfer, definition
from partjit.inspect.moves.resharding import hops, is_swap, reshard
from partjit.inspect.moves.tiles import Step, Unmodelled, over_axes, tiles_of
from partjit.shardy import TensorSharding

__all__ = ["DISTINCT", "FORGOTTEN", "PREPARED", "REMEMBERED", "Reshard", "Reshards", "is_of_scalar", "transfers_of"]

DISTINCT = "partjit.distinct"
"""An attribute of reshards that are not merged with all equal ones."""

FORGOTTEN = "partjit.forgotten"
"""An attribute of reshards of whose operands XLA does not know any more how they were sharded."""

PREPARED = "partjit.prepared"
"""An attribute of reshards of which it is known already what is moved: the number of that."""

REMEMBERED = "partjit.remembered"
"""An attribute of calls: the name of a reshard of the result that is made already."""

_HAS_FORMS = RELEASE >= (0, 12)
_Sizes = tuple[tuple[str, int], ...]


class Reshard(NamedTuple):
    """A reshard that is made.

    Attributes:
        op: the operation.
        swaps: whether dimensions may swap axes.
    """

    op: ir.Operation
    swaps: bool = True


class Reshards:
    """What XLA remembers of the reshards of a program.

    Args:
        sharding_of: gives the sharding of a value.
        sizes_of: gives the sizes of the axes that are not manual around an operation.
        attribute_of: gives a sharding as an attribute.
        is_product: whether an operation is a product, or stands for one.
    """

    def __init__(
        self,
        sharding_of: Callable[[ir.Value], TensorSharding],
        sizes_of: Callable[[ir.Operation], Mapping[str, int]],
        attribute_of: Callable[[TensorSharding], ir.Attribute],
        is_product: Callable[[ir.Operation], bool],
    ) -> None:
        self._sharding_of, self._sizes_of, self._attribute_of = sharding_of, sizes_of, attribute_of
        self._is_product = is_product
        self._orders: dict[ir.Block, dict[ir.Operation, int]] = {}

    def left(self, ops: Sequence[ir.Operation]) -> list[Reshard]:
        """The reshards that are left of these, in the order of the program; the rest is erased."""
        made: dict[Any, ir.Value] = {}
        for op in ops:
            value, result = op.operands[0], op.results[0]
            before = definition(value, "sdy.reshard")
            is_known = before is not None and FORGOTTEN not in before.attributes and PREPARED not in op.attributes
            is_known = is_known and not _is_returned(result)
            if _is_remembered(op):
                result.replace_all_uses_with(value)
                continue
            if before is not None and is_known and self._sharding_of(before.operands[0]) == self._sharding_of(result):
                result.replace_all_uses_with(before.operands[0])
                continue
            key = value, op.attributes["sharding"], op.block, op.attributes.get(DISTINCT)
            if key in made:
                result.replace_all_uses_with(made[key])
            made.setdefault(key, result)
        used = list[ir.Operation]()
        for op in reversed(ops):
            if next(iter(op.results[0].uses), None):
                used.append(op)
            else:
                op.erase()
        return [*self._by_hops(used[::-1])]

    def _by_hops(self, ops: Sequence[ir.Operation]) -> Iterator[Reshard]:
        """These reshards, and those to the shardings in between, each of which XLA makes once."""
        made: dict[Any, ir.Value] = {}
        for op in ops:
            value = op.operands[0]
            if not value.type.shape:
                yield Reshard(op)
                continue
            before, after = map(self._sharding_of, (value, op.results[0]))
            is_simple = before.mesh.startswith("maximal_mesh") or not any(before.axes) or is_of_scalar(value)
            if is_simple or DISTINCT in op.attributes:
                yield Reshard(op)
                continue
            if (value, op.block, after) in made:
                op.results[0].replace_all_uses_with(made[value, op.block, after])
                op.erase()
                continue
            made[value, op.block, after] = op.results[0]
            sizes = (*self._sizes_of(op).items(),)
            swaps = not (_HAS_FORMS and _is_swap(before, after, sizes) and self._is_over_tiles(value, op))
            for stop in _stops(before, after, tuple(value.type.shape), sizes, swaps):
                key = op.operands[0], op.block, stop
                if key not in made:
                    with op.context, op.location, ir.InsertionPoint(op):
                        between = sdy.ReshardOp(op.operands[0], self._attribute_of(stop))
                    made[key] = between.result
                    yield Reshard(between.operation)
                op.operands[0] = made[key]
            last = op.operands[0], op.block, after
            if last in made and made[last] != op.results[0]:
                op.results[0].replace_all_uses_with(made[last])
                made[value, op.block, after] = made[last]
                op.erase()
                continue
            made[last] = op.results[0]
            yield Reshard(op, swaps)

    def _is_over_tiles(self, value: ir.Value, op: ir.Operation) -> bool:
        """Whether a product has left a value in a sharding over tiles before this reshard is made."""
        owner: Any = value.owner
        if (owner if isinstance(owner, ir.Block) else owner.operation.block) != op.block:
            return False  # a loop gets what it uses in a tuple
        maker = definition(value, "sdy.all_reduce")
        maker = _maker(value) if maker is None else _maker(maker.operands[0])
        if maker is not None and self._is_product(maker):
            return True
        order = self._order(op.block)
        users = [order.get(user, len(order)) for user in _users(op.results[0])]
        products = [order[user] for user in _users(value) if self._is_product(user) and user in order]
        return bool(users and products) and min(products) < min(users)

    def _order(self, block: ir.Block) -> dict[ir.Operation, int]:
        """The order in which XLA comes to the operations of a block: each after its operands, from the results on."""
        order = self._orders.get(block)
        if order is None:
            order = self._orders[block] = {}
            last = block.operations[len(block.operations) - 1].operation
            open_, seen = [last], set[ir.Operation]()
            while open_:
                op = open_[-1]
                if op in seen:
                    open_.pop()
                    order.setdefault(op, len(order))
                    continue
                seen.add(op)
                makers = (_maker(value) for value in reversed([*op.operands]))
                open_ += [maker for maker in makers if maker is not None and maker not in seen]
        return order


def _is_remembered(op: ir.Operation) -> bool:
    """Whether a reshard is one that XLA has made already when it partitioned what computes the operand."""
    maker = definition(op.operands[0], "stablehlo.custom_call")
    if maker is None or REMEMBERED not in maker.attributes or DISTINCT not in op.attributes:
        return False
    return maker.attributes[REMEMBERED] == op.attributes[DISTINCT]


def _is_returned(value: ir.Value) -> bool:
    """Whether a value is a result of the program: XLA reshards what it gets from a tuple, of which it knows nothing."""
    users = [use.owner.operation for use in value.uses]
    return any(user.name == "func.return" and _is_main(user.parent) for user in users)


def _is_main(op: ir.Operation | None) -> bool:
    return op is not None and ir.StringAttr(op.attributes["sym_name"]).value == "main"


def _maker(value: ir.Value) -> ir.Operation | None:
    owner: Any = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


def _users(value: ir.Value) -> Iterator[ir.Operation]:
    """The operations that use a value, or a reshard of it."""
    for use in value.uses:
        user = use.owner.operation
        if user.name == "sdy.reshard":
            yield from _users(user.results[0])
        else:
            yield user


def is_of_scalar(value: ir.Value) -> bool:
    """Whether a value is a scalar, broadcast, which each device has."""
    maker = definition(value, "stablehlo.broadcast_in_dim", "stablehlo.reshape")
    return maker is not None and not maker.operands[0].type.shape


def transfers_of(tensor: Tensor, after: TensorSharding, sizes: Mapping[str, int], swaps: bool) -> tuple[Transfer, ...]:
    """What is moved to get a tensor another sharding.

    Raises:
        Unmodelled: that is not known.
    """
    if tensor.sharding.mesh.startswith("maximal_mesh"):
        raise Unmodelled  # one device has the result of a callback, and sends it if it is used
    steps = _steps(tensor.sharding, after, tensor.shape, (*sizes.items(),), swaps)
    return tuple(Transfer(step, tensor) for step in steps)


@functools.lru_cache(maxsize=4096)
def _steps(
    before: TensorSharding, after: TensorSharding, shape: tuple[int, ...], sizes: _Sizes, swaps: bool
) -> tuple[Step, ...]:
    known = dict(sizes)
    return tuple(reshard(tiles_of(before, known), tiles_of(after, known), shape, swaps=swaps))


@functools.lru_cache(maxsize=4096)
def _stops(
    before: TensorSharding, after: TensorSharding, shape: tuple[int, ...], sizes: _Sizes, swaps: bool
) -> tuple[TensorSharding, ...]:
    """The shardings on the way to another one that XLA remembers; none if that is not known."""
    known = dict(sizes)
    try:
        *found, _ = hops(tiles_of(before, known), tiles_of(after, known), shape, swaps=swaps)
    except Unmodelled:
        return ()
    stops = tuple(over_axes(hop.target, known) for hop in found)
    return tuple(stop for stop in stops if stop is not None) if None not in stops else ()


@functools.lru_cache(maxsize=4096)
def _is_swap(before: TensorSharding, after: TensorSharding, sizes: _Sizes) -> bool:
    known = dict(sizes)
    return is_swap(tiles_of(before, known), tiles_of(after, known))
