"""The operations that XLA folds before it propagates shardings: what they compute is another value, or a simpler one.

A value and one that is folded into it have one sharding; and what only a folded operation has used is not there.

* Sums, products and the like with a neutral element; `and` and `or` with one that decides.
* A `select` whose cases are the same, or whose predicate is a constant, or negated.
* A slice, padding, transpose or reshape that changes nothing; a reshape of a reshape; a transpose that only moves
  dimensions of size 1.
* Slices of nothing, which are constants; those with starts that are constants; those of one operand of a concatenation.
* Concatenations of nothing, of one array, and of concatenations that nothing else uses.
* Branches of which a constant takes one, and loops that a constant ends before the first iteration: see `fold_region`.
* A constant that is the first operand of a sum, a product and the like becomes the second, which counts for the order
  of the operations.

XLA folds before it inlines calls: never what one function computes and another one uses.

Source: `stablehlo_canonicalize_from_hlo_import.cpp` of XLA, and StableHLO's `StablehloAggressiveSimplification.cpp`
and `StablehloAggressiveFolder.cpp`.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from partjit.shardy import nested
from partjit.xla_constants import constant_of

__all__ = ["AS_IT_IS", "FOLDED", "FOLDED_REGIONS", "Lowered", "fold", "fold_region"]


class Lowered(NamedTuple):
    """How a module differs from the one that XLA gets.

    Attributes:
        is_ignored: whether an operation without results is not in the latter.
        function_of: the function in which an operation is there, if calls were inlined before.
        remove_unused: removes what only operations that are ignored use.
    """

    is_ignored: Callable[[ir.Operation], bool] = lambda _: False
    function_of: Callable[[ir.Operation], Hashable] = lambda _: None
    remove_unused: Callable[[ir.Module], None] = lambda _: None

    def maker(self, op: ir.Operation, value: Any, name: str) -> Any:
        """The operation that computes an operand in the same function, if it is one of that name."""
        owner = value.owner
        if isinstance(owner, ir.Block) or owner.name != name:
            return None
        return owner if self.function_of(op) == self.function_of(owner) else None

    def scalar(self, op: ir.Operation, value: Any) -> int | float | bool | None:
        """The number that an operand is in the same function, if it is computed from constants alone."""
        found = constant_of(value, lambda other: self.function_of(other) == self.function_of(op))
        return None if found is None or found.size != 1 else found.item()


AS_IT_IS = Lowered()
"""The module that XLA gets."""


def fold(op: Any, lowered: Lowered = AS_IT_IS) -> bool:
    """Replaces the result of an operation whose name is in `FOLDED`, if XLA does; returns whether it did.

    Args:
        op: the operation; those that compute its operands are folded already.
        lowered: how its module differs from the one that XLA gets.
    """
    value = FOLDED[op.name](op, lowered)
    if value is None or value.type != op.results[0].type:
        return False
    op.results[0].replace_all_uses_with(value)
    op.erase()
    return True


def fold_region(op: Any, lowered: Lowered = AS_IT_IS) -> set[int] | None:
    """Replaces the results of an operation whose name is in `FOLDED_REGIONS`, if XLA does.

    The operations of the branch that is taken are then where it was; those of others, and of a loop, are erased.

    Returns:
        Which of the operations in it, counted in the order of the program, are erased; None if it stays.
    """
    return FOLDED_REGIONS[op.name](op, lowered)


def _case(op: Any, lowered: Lowered) -> set[int] | None:
    number = lowered.scalar(op, op.operands[0])
    if number is None or not any(next(iter(result.uses), None) for result in op.results):
        return None
    last = len(op.regions) - 1
    taken = int(number) if 0 <= number <= last else last
    erased, first = set[int](), 0
    for k, region in enumerate(op.regions):
        operations = [*region.blocks[0].operations]
        inside = sum(1 + len(nested(one)) for one in operations)
        erased |= {first + inside - 1} if k == taken else {*range(first, first + inside)}
        first += inside
    *operations, returned = op.regions[taken].blocks[0].operations
    for one in operations:
        one.move_before(op)
    for result, value in zip(op.results, returned.operands, strict=True):
        result.replace_all_uses_with(value)
    op.erase()
    return erased


def _while(op: Any, lowered: Lowered) -> set[int] | None:
    cond = op.regions[0].blocks[0].operations
    if lowered.scalar(op, cond[len(cond) - 1].operands[0]) is not False:
        return None
    erased = {*range(len(nested(op)))}
    for result, value in zip(op.results, op.operands, strict=True):
        result.replace_all_uses_with(value)
    op.erase()
    return erased


FOLDED_REGIONS: Mapping[str, Callable[[Any, Lowered], set[int] | None]] = {
    "stablehlo.case": _case,
    "stablehlo.while": _while,
}
"""What folds an operation of each name, with the operations in it."""


def _neutral(neutral: int, deciding: int | None = None, *, commutes: bool = True) -> "_Fold":
    """The other operand of a neutral element, or the element that decides alone; of floats none does."""

    def of(op: Any, lowered: Lowered) -> Any:
        left, right = op.operands
        of_left, of_right = _constant(left), _constant(right)
        if of_left is None and of_right is None:
            return None  # as of most operations: what follows asks for the functions that they are in
        if commutes:
            _constant_last(op, (left, of_left), (right, of_right), lowered)
        sides = (right, of_right, left), (left, of_left, right)
        for value, constant, other in sides if commutes else sides[:1]:
            if (number := _element(constant)) is not None:
                if number == _of_type(neutral, value):
                    return other
                if deciding is not None and number == _of_type(deciding, value) and not _is_float(value):
                    return value
        return None

    return of


def _without_neutral(op: Any, lowered: Lowered) -> None:
    left, right = op.operands
    _constant_last(op, (left, _constant(left)), (right, _constant(right)), lowered)


def _constant_last(op: Any, first: tuple[Any, Any], second: tuple[Any, Any], lowered: Lowered) -> None:
    """Swaps the operands of an operation, each with the constant that it is, if only the first one is a constant."""
    if _is_constant(op, *first, lowered) and not _is_constant(op, *second, lowered):
        op.operands[0], op.operands[1] = second[0], first[0]


def _is_constant(op: Any, value: Any, constant: Any, lowered: Lowered) -> bool:
    """Whether an operand is a constant, repeated or not, in the same function."""
    if constant is None or value.owner.name == "stablehlo.reshape":
        return False
    own = lowered.function_of(op)
    return lowered.function_of(constant) == own and lowered.function_of(value.owner) == own


def _select(op: Any, lowered: Lowered) -> Any:
    predicate, chosen, other = op.operands
    while (negated := lowered.maker(op, predicate, "stablehlo.not")) is not None:
        predicate, chosen, other = negated.operands[0], other, chosen
    if chosen == other:
        return chosen
    if (which := _decided(op, predicate, lowered)) is not None:
        return chosen if which else other
    same = _splat(chosen)
    if same is not None and same == _splat(other):
        return chosen
    return None if predicate == op.operands[0] else stablehlo.SelectOp(predicate, chosen, other, **_at(op)).result


def _decided(op: Any, predicate: Any, lowered: Lowered) -> int | float | bool | None:
    """What all elements of a predicate are, if that is constant."""
    if (known := _splat(predicate)) is not None:
        return known
    found = constant_of(predicate, lambda other: lowered.function_of(other) == lowered.function_of(op))
    return None if found is None or found.size == 0 or found.min() != found.max() else found.flat[0]


def _reshape(op: Any, lowered: Lowered) -> Any:
    value = op.operands[0]
    if value.type == op.results[0].type:
        return value
    if (inner := lowered.maker(op, value, "stablehlo.reshape")) is None:
        return None
    value = inner.operands[0]
    return value if value.type == op.results[0].type else _reshaped(op, value)


def _transpose(op: Any, _: Lowered) -> Any:
    value, order = op.operands[0], [*ir.DenseI64ArrayAttr(op.attributes["permutation"])]
    if order == sorted(order):
        return value
    moved = [dim for dim in order if value.type.shape[dim] != 1]
    return _reshaped(op, value) if moved == sorted(moved) else None


def _reshaped(op: Any, value: Any) -> Any:
    return stablehlo.ReshapeOp(op.results[0].type, value, **_at(op)).result


def _slice(op: Any, lowered: Lowered) -> Any:
    value, result = op.operands[0], op.results[0]
    if 0 in result.type.shape:
        # As text: the bindings have no class for an attribute without elements of complex numbers.
        text = f'"stablehlo.constant"() {{value = dense<> : {result.type}}} : () -> {result.type} {op.location}'
        empty = ir.Operation.parse(text, context=op.context)
        ir.InsertionPoint(op).insert(empty)
        return empty.operation.results[0]
    if value.type == result.type:
        return value
    joined = lowered.maker(op, value, "stablehlo.concatenate")
    starts, limits, strides = (
        [*ir.DenseI64ArrayAttr(op.attributes[name])] for name in ("start_indices", "limit_indices", "strides")
    )
    if joined is None:
        return None
    dim, offset = ir.IntegerAttr(joined.attributes["dimension"]).value, 0
    for part in joined.operands:
        end = offset + part.type.shape[dim]
        if offset <= starts[dim] and limits[dim] <= end:
            starts[dim], limits[dim] = starts[dim] - offset, limits[dim] - offset
            if part.type == result.type:
                return part
            return stablehlo.SliceOp(part, starts, limits, strides, **_at(op)).result
        offset = end
    return None


def _dynamic_slice(op: Any, _: Lowered) -> Any:
    value, sizes = op.operands[0], op.results[0].type.shape
    starts = [_splat(start) for start in [*op.operands][1:]]
    if None in starts:
        return None
    first = [max(0, min(int(s), n - m)) for s, n, m in zip(starts, value.type.shape, sizes, strict=True)]  # pyright: ignore[reportArgumentType]
    if value.type == op.results[0].type:
        return value
    limits = [start + size for start, size in zip(first, sizes, strict=True)]
    return stablehlo.SliceOp(value, first, limits, [1] * len(sizes), **_at(op)).result


def _dynamic_update_slice(op: Any, _: Lowered) -> Any:
    value, update, *starts = op.operands
    if 0 in update.type.shape:
        return value
    return update if update.type == value.type and all(_splat(start) == 0 for start in starts) else None


def _pad(op: Any, _: Lowered) -> Any:
    amounts = (op.attributes[f"edge_padding_{side}"] for side in ("low", "high"))
    return op.operands[0] if not any(n for amount in amounts for n in ir.DenseI64ArrayAttr(amount)) else None


def _concatenate(op: Any, lowered: Lowered) -> Any:
    joined = []
    for value in op.operands:
        inner = lowered.maker(op, value, "stablehlo.concatenate")
        uses = sum(len(use.owner.results) > 0 or not lowered.is_ignored(use.owner) for use in value.uses)
        is_joined = inner is not None and inner.attributes["dimension"] == op.attributes["dimension"] and uses == 1
        joined += [one for one in (inner.operands if inner and is_joined else [value]) if 0 not in one.type.shape]
    if len(joined) == 1:
        return joined[0]
    if not joined or joined == [*op.operands]:
        return None
    return stablehlo.ConcatenateOp(joined, op.attributes["dimension"], **_at(op)).result


_Fold = Callable[[Any, Lowered], Any]

FOLDED: Mapping[str, _Fold] = {
    "stablehlo.add": _neutral(0),
    "stablehlo.subtract": _neutral(0, commutes=False),
    "stablehlo.multiply": _neutral(1, 0),
    "stablehlo.and": _neutral(-1, 0),
    "stablehlo.or": _neutral(0, -1),
    "stablehlo.xor": _neutral(0),
    "stablehlo.maximum": _without_neutral,
    "stablehlo.minimum": _without_neutral,
    "stablehlo.select": _select,
    "stablehlo.reshape": _reshape,
    "stablehlo.transpose": _transpose,
    "stablehlo.slice": _slice,
    "stablehlo.dynamic_slice": _dynamic_slice,
    "stablehlo.dynamic_update_slice": _dynamic_update_slice,
    "stablehlo.pad": _pad,
    "stablehlo.concatenate": _concatenate,
}
"""What an operation of each name is folded to: a value, new or not; None if it stays."""


def _at(op: Any) -> dict[str, Any]:
    """Where an operation is made that takes the place of another one."""
    return {"loc": op.location, "ip": ir.InsertionPoint(op)}


def _constant(value: Any) -> Any:
    """The constant that a value is, or repeats."""
    owner = value.owner
    if not isinstance(owner, ir.Block) and owner.name in ("stablehlo.broadcast_in_dim", "stablehlo.reshape"):
        owner = owner.operands[0].owner
    return None if isinstance(owner, ir.Block) or owner.name != "stablehlo.constant" else owner


def _splat(value: Any) -> int | float | bool | None:
    """The number that all elements of a value are, if it is a constant."""
    return _element(_constant(value))


def _element(owner: Any) -> int | float | bool | None:
    """The number that all elements of a constant are."""
    if owner is None:
        return None
    if not isinstance(owner.results[0].type.element_type, _READABLE):
        return None  # an attribute of complex numbers cannot be read in Python
    elements = owner.attributes["value"]
    if not isinstance(elements, ir.DenseElementsAttr) or not elements.is_splat:
        return None
    number: Any = elements.get_splat_value()
    return number.value


_READABLE = ir.IntegerType | ir.F16Type | ir.BF16Type | ir.F32Type | ir.F64Type


def _of_type(number: int, value: Any) -> int | bool:
    """A number as an element of the type; -1 has all bits."""
    if number != -1:
        return number
    element = value.type.element_type
    return element.width == 1 or (2**element.width - 1 if element.is_unsigned else number)


def _is_float(value: Any) -> bool:
    return isinstance(value.type.element_type, ir.FloatType | ir.ComplexType)
