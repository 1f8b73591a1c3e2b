"""What a program that failed had computed: its results, as far as its loops had carried them."""

import contextlib
from collections.abc import Mapping
from types import TracebackType

import jax

from partjit._jax.types import PyTree, PyTreeDef
from partjit.checks import require
from partjit.plan.plan import Plan
from partjit.plan.run.direct import LeftToDispatch
from partjit.plan.show.source import names_of_results

__all__ = ["keep_results", "results_so_far"]

_ATTRIBUTE = "_partjit_results_so_far"


def results_so_far(error: BaseException) -> PyTree:
    """What a program had computed of its results when a call in it failed.

    A loop with calls reuses the memory of donated arguments: when it fails, they are gone. What it carried is here: in
    the place of each result that the loop carries its last value, that of the last complete iteration as a rule. Where
    an iteration has several calls, a value may be that of the iteration that failed. A stack has the slices written so
    far.

    Args:
        error: what the program raised; also if that is Ctrl-C.

    Returns:
        A tree like the result of the program, with None for each result that is not computed by a loop, or whose memory
        the iteration that failed had reused between its calls. If an integer was too large for a call, the results that
        had been computed by then. None if no program with calls raised the error.

    Raises:
        TypeError: `error` is not an exception.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from partjit import colocated, pjit
        >>> @colocated.colocated_python(arrays="numpy", out_specs_fn=lambda x: x)
        ... def check(x):
        ...     if x > 2:
        ...         raise ValueError("too much")
        ...     return x
        >>> @pjit(donate_argnums=0)
        ... def count(x):
        ...     return jax.lax.fori_loop(0, 10, lambda _, x: check(x) + 1, x)
        >>> try:
        ...     count(jnp.float32(0))
        ... except ValueError as error:
        ...     float(results_so_far(error))
        3.0
    """
    require("results_so_far", "error", error, BaseException, "the exception that a program raised")
    return getattr(error, _ATTRIBUTE, None)


def keep_results(
    error: BaseException,
    plan: Plan,
    tree: PyTreeDef | None,
    direct: LeftToDispatch,
    values: Mapping[str, object] | None = None,
) -> None:
    """Keeps what the plan that raised an exception had computed, with the exception.

    Args:
        error: the exception, while it is handled in the caller of the plan's function.
        plan: the plan.
        tree: the structure of its results; None leaves them flat.
        direct: what of its values are NumPy arrays.
        values: those computed, by their names, where its function was not called.
    """
    if values is None:
        values = _locals(error.__traceback__, f"<plan of {plan.name}>")
    found = direct.put([values.get(name) for name in names_of_results(plan)])
    results = [array if isinstance(array, jax.Array) and not array.is_deleted() else None for array in found]
    with contextlib.suppress(AttributeError):  # an exception may be immutable
        setattr(error, _ATTRIBUTE, results if tree is None else tree.unflatten(results))


def _locals(tb: TracebackType | None, file: str) -> dict[str, object]:
    while tb is not None and tb.tb_frame.f_code.co_filename != file:
        tb = tb.tb_next
    return {} if tb is None else tb.tb_frame.f_locals
