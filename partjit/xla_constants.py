"""The constants that operations on constants are to XLA before it propagates shardings.

Only what decides a branch, a loop or a `select` is asked for: others have no sharding to be wrong about.

Source: StableHLO's `StablehloAggressiveFolder.cpp`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.extend.mlir import ir

__all__ = ["constant_of"]

_Array = npt.NDArray[Any]

_ELEMENTS = 1024
"""Larger constants than these decide nothing."""
_DEPTH = 24
"""Nor does what more steps compute from constants. So little is asked of what many steps compute from arguments."""


def constant_of(value: Any, is_inside: Callable[[ir.Operation], bool]) -> _Array | None:
    """The elements of a value that is computed from constants alone; None of any other.

    Args:
        value: the value.
        is_inside: whether an operation is in the function that is folded: XLA folds each by itself.
    """
    known: dict[Any, _Array | None] = {}
    found = _evaluated(value, known, 0)
    return found if found is not None and all(is_inside(op) for op in known) else None


def _evaluated(value: Any, known: dict[Any, _Array | None], depth: int) -> _Array | None:
    owner: Any = value.owner
    if isinstance(owner, ir.Block) or depth > _DEPTH:
        return None
    op = owner.operation
    if op in known:
        return known[op]
    if op.name == "stablehlo.constant":
        known[op] = _elements(op)
        return known[op]
    evaluate = _OPERATIONS.get(op.name)
    if evaluate is None or _size(value) > _ELEMENTS:
        return None
    operands = list[_Array]()
    for operand in op.operands:
        if (found := _evaluated(operand, known, depth + 1)) is None:
            return None
        operands.append(found)
    with np.errstate(all="ignore"):
        known[op] = evaluate(op, *operands)
    return known[op]


def _size(value: Any) -> int:
    return math.prod(value.type.shape)


def _dtype(value: Any) -> Any:
    return _DTYPES.get(str(value.type.element_type))


_DTYPES: Mapping[str, Any] = (
    {"i1": np.bool_, "f16": np.float16, "bf16": jax.dtypes.bfloat16, "f32": np.float32, "f64": np.float64}
    | {f"i{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)}
    | {f"ui{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)}
)


def _elements(op: Any) -> _Array | None:
    """The elements of a constant."""
    value, elements = op.results[0], op.attributes["value"]
    dtype, shape = _dtype(value), tuple(value.type.shape)
    if dtype is None or _size(value) > _ELEMENTS or not isinstance(elements, ir.DenseElementsAttr):
        return None
    if elements.is_splat:
        number: Any = elements.get_splat_value()
        return np.full(shape, number.value, dtype)
    return np.array([*elements], dtype).reshape(shape)  # type: ignore[call-overload]  # it is iterable


def _computed(compute: Callable[..., Any]) -> Callable[..., _Array | None]:
    """An operation on elements, in the dtype of the result."""
    return lambda op, *operands: np.asarray(compute(*operands)).astype(_dtype(op.results[0]))


def _quotient(compute: Callable[..., Any]) -> Callable[..., _Array | None]:
    """An operation on elements that is not folded where the last operand is zero."""
    computed = _computed(compute)
    return lambda op, left, right: computed(op, left, right) if right.all() else None


def _divided(left: _Array, right: _Array) -> _Array:
    return (left - np.fmod(left, right)) // right if left.dtype.kind in "iu" else left / right


def _compare(op: Any, left: _Array, right: _Array) -> _Array:
    direction = str(op.attributes["comparison_direction"]).rpartition(" ")[2].rstrip(">")
    return np.asarray(_COMPARISONS[direction](left, right))


_COMPARISONS: Mapping[str, Callable[..., Any]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "GE": np.greater_equal,
    "GT": np.greater,
    "LE": np.less_equal,
    "LT": np.less,
}


def _broadcast(op: Any, operand: _Array) -> _Array | None:
    same = operand.size > 0 and bool((operand == operand.flat[0]).all())
    return np.full(op.results[0].type.shape, operand.flat[0], operand.dtype) if same else None


def _slice(op: Any, operand: _Array) -> _Array:
    bounds = (op.attributes[name] for name in ("start_indices", "limit_indices", "strides"))
    return operand[tuple(slice(*each) for each in zip(*map(ir.DenseI64ArrayAttr, bounds), strict=True))]


def _reduce(op: Any, operand: _Array, initial: _Array) -> _Array | None:
    """Whether all or any elements are true, which are equal."""
    first, *_ = (one.operation.name for one in op.regions[0].blocks[0].operations)
    if first not in ("stablehlo.and", "stablehlo.or") or operand.dtype != np.bool_ or operand.min() != operand.max():
        return None
    combine = np.logical_and if first == "stablehlo.and" else np.logical_or
    return np.full(op.results[0].type.shape, combine(operand.flat[0], initial))


_OPERATIONS: Mapping[str, Callable[..., _Array | None]] = {
    "stablehlo.abs": _computed(np.abs),
    "stablehlo.add": _computed(np.add),
    "stablehlo.and": _computed(np.bitwise_and),
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.clamp": _computed(lambda low, value, high: np.minimum(np.maximum(low, value), high)),
    "stablehlo.compare": _compare,
    "stablehlo.convert": _computed(np.asarray),
    "stablehlo.divide": _quotient(_divided),
    "stablehlo.exponential": _computed(np.exp),
    "stablehlo.maximum": _computed(np.maximum),
    "stablehlo.minimum": _computed(np.minimum),
    "stablehlo.multiply": _computed(np.multiply),
    "stablehlo.negate": _computed(np.negative),
    "stablehlo.not": _computed(np.invert),
    "stablehlo.or": _computed(np.bitwise_or),
    "stablehlo.reduce": _reduce,
    "stablehlo.remainder": _quotient(np.fmod),
    "stablehlo.reshape": lambda op, operand: operand.reshape(op.results[0].type.shape),
    "stablehlo.select": _computed(np.where),
    "stablehlo.sign": _computed(np.sign),
    "stablehlo.slice": _slice,
    "stablehlo.sqrt": _computed(np.sqrt),
    "stablehlo.subtract": _computed(np.subtract),
    "stablehlo.xor": _computed(np.bitwise_xor),
}
"""What an operation computes of the elements of its operands; None where XLA does not fold it."""
