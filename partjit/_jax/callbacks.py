"""Python functions that executables call."""

from collections.abc import Callable, Sequence
from typing import NoReturn, cast

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.interpreters.mlir import LoweringRuleContext

from partjit._jax.types import PyTree

__all__ = ["lower_callback", "raise_of_xla"]


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


def raise_of_xla(error: BaseException) -> NoReturn:
    """Raises what a dispatch has raised, as jax does."""
    if _quotes_ctrl_c(error):
        raise KeyboardInterrupt from error
    if type(error) is ValueError and str(error).startswith("INTERNAL: "):  # as C++ raises what XLA says
        raise jax.errors.JaxRuntimeError(str(error)) from None
    raise error


def _quotes_ctrl_c(error: BaseException) -> bool:
    """Whether Ctrl-C came while XLA was calling Python in this thread, as XLA:CPU does."""
    is_of_xla = isinstance(error, jax.errors.JaxRuntimeError | ValueError)
    return is_of_xla and str(error).rstrip().rpartition("\n")[2].startswith("KeyboardInterrupt")
