"""Python functions that executables call."""

from collections.abc import Callable, Sequence
from typing import cast

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.interpreters.mlir import LoweringRuleContext

from partjit._jax.types import PyTree

__all__ = ["lower_callback"]


def lower_callback(
    ctx: LoweringRuleContext, callback: Callable[..., Sequence[PyTree]], operands: Sequence[ir.Value]
) -> Sequence[ir.Value]:
    """The results of a call of NumPy arrays on the host of a CPU device, in a lowering rule.

    `jax.interpreters.mlir.emit_python_callback` does the same on all platforms, and checks the results in each call.

    Args:
        ctx: the context of the rule, whose `avals_out` are the results.
        callback: returns NumPy arrays of exactly their shapes and dtypes.
        operands: the arguments.
    """
    ctx.module_context.add_host_callback(callback)  # which also keeps it alive
    index = np.uint64(len(ctx.module_context.host_callbacks) - 1)
    lower = jax.ffi.ffi_lowering("xla_ffi_python_cpu_callback", has_side_effect=True)
    return cast(Sequence[ir.Value], lower(ctx, *operands, index=index))
