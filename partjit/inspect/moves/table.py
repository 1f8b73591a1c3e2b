"""Which operation has which model."""

from collections.abc import Callable, Mapping

from partjit.inspect.moves import replicated, windows
from partjit.inspect.moves.model import Model, Operation

__all__ = ["MODELS"]

MODELS: Mapping[str, Callable[[Operation], Model | None]] = {
    "stablehlo.cholesky": replicated.factorization,
    "stablehlo.concatenate": replicated.concatenate,
    "stablehlo.convolution": windows.convolution,
    "stablehlo.custom_call": replicated.custom_call,
    "stablehlo.dynamic_slice": replicated.dynamic_slice,
    "stablehlo.dynamic_update_slice": replicated.dynamic_update_slice,
    "stablehlo.fft": replicated.fft,
    "stablehlo.pad": windows.pad,
    "stablehlo.reduce": replicated.reduce,
    "stablehlo.reduce_window": windows.reduce_window,
    "stablehlo.reverse": windows.reverse,
    "stablehlo.slice": windows.slice_,
    "stablehlo.sort": replicated.sort,
    "stablehlo.triangular_solve": replicated.factorization,
}
"""The models of the operations that XLA partitions by itself; None where the sharding of values says all."""
