"""The rewrites of a lowered program that XLA makes before it propagates shardings.

HLO has no broadcast that also expands dimensions of size 1 or permutes dimensions, and one that only adds dimensions of
size 1 is a reshape there. Shardy propagates through reshapes and transposes before it does through broadcasts, so a
program that is not rewritten may get other shardings than the one that is compiled.

Source: `XlaBuilder::BroadcastInDim`, `stablehlo_prepare_for_hlo_export.cpp` and `hlo_function_importer.cc` of XLA.
"""

import math
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

__all__ = ["rewrite_broadcast"]


def rewrite_broadcast(op: Any) -> None:
    """Replaces a `stablehlo.broadcast_in_dim` by the operations that it is in HLO."""
    value, result = op.operands[0], op.results[0]
    dims, out = [*ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"])], result.type.shape
    order = sorted(range(len(dims)), key=dims.__getitem__)
    kept = [k for k in order if value.type.shape[k] == out[dims[k]]]
    adds_ones = math.prod(value.type.shape) == math.prod(out) > 0
    if kept == [*range(len(dims))] and not adds_ones:
        return
    with ir.InsertionPoint(op), op.location:
        if order != sorted(order):
            value = stablehlo.TransposeOp(value, order).result
        if adds_ones:
            value = _reshaped(value, out)
        else:
            if len(kept) < len(dims):
                value = _reshaped(value, [out[dims[k]] for k in kept])
            value = stablehlo.BroadcastInDimOp(result.type, value, [dims[k] for k in kept]).result
    result.replace_all_uses_with(value)
    op.erase()


def _reshaped(value: Any, shape: list[int]) -> Any:
    if value.type.shape == shape:
        return value
    return stablehlo.ReshapeOp(ir.RankedTensorType.get(shape, value.type.element_type), value).result
