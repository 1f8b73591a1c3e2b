"""Which operation has which model."""

from collections.abc import Callable, Mapping

from partjit.inspect.moves import indices, products, replicated, reshapes, windows
from partjit.inspect.moves.model import Model, Operation

__all__ = ["LOOKING_AROUND", "LOOKING_AT_PRIMITIVES", "LOOKING_AT_SLICES", "MODELS"]

_ELEMENTWISE = """
    abs add and atan2 cbrt ceil clamp compare complex convert cosine count_leading_zeros divide exponential
    exponential_minus_one floor imag is_finite log log_plus_one logistic maximum minimum multiply negate not or popcnt
    power real remainder round_nearest_afz round_nearest_even rsqrt select shift_left shift_right_arithmetic
    shift_right_logical sign sine sqrt subtract tan tanh xor
"""

MODELS: Mapping[str, Callable[[Operation], Model | None]] = {
    "stablehlo.cholesky": replicated.factorization,
    "stablehlo.concatenate": replicated.concatenate,
    "stablehlo.convolution": windows.convolution,
    "stablehlo.custom_call": replicated.custom_call,
    "stablehlo.dot_general": products.dot,
    "stablehlo.dynamic_slice": replicated.dynamic_slice,
    "stablehlo.dynamic_update_slice": replicated.dynamic_update_slice,
    "stablehlo.fft": replicated.fft,
    "stablehlo.gather": indices.gather,
    "stablehlo.pad": windows.pad,
    "stablehlo.reduce": replicated.reduce,
    "stablehlo.reduce_window": windows.reduce_window,
    "stablehlo.reshape": reshapes.reshape,
    "stablehlo.reverse": windows.reverse,
    "stablehlo.scatter": indices.scatter,
    "stablehlo.slice": windows.slice_,
    "stablehlo.sort": replicated.sort,
    "stablehlo.transpose": replicated.transpose,
    "stablehlo.triangular_solve": replicated.factorization,
} | {f"stablehlo.{name}": replicated.elementwise for name in _ELEMENTWISE.split()}
"""The models of the operations that XLA partitions by itself; None where the sharding of values says all."""

LOOKING_AROUND = (replicated.concatenate, replicated.dynamic_update_slice)
"""The models that look at the operations which compute the operands; others depend on attributes and tensors alone."""

LOOKING_AT_PRIMITIVES = (replicated.sort, windows.slice_)
"""The models that look at the primitive as well."""

LOOKING_AT_SLICES = (windows.pad, windows.slice_)
"""The models that look at what computes the operand and uses the result, if that is slices and the like."""
