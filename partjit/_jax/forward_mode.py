"""Forward-mode differentiation of a function that has a rule for reverse mode alone: the error that names it.

jax says "can't apply forward-mode autodiff (jvp) to a custom_vjp function" wherever the equation that stands for the
tangents is evaluated, batched or lowered, and not which function that is. Needless once jax says so.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from jax._src import linear_util as lu
from jax._src.interpreters import ad
from jax.interpreters import batching, mlir

__all__ = ["named_in_forward_mode"]


def named_in_forward_mode(bwd: Callable[..., Any], message: Callable[[], str]) -> Callable[..., Any]:
    """The backward rule of a `jax.custom_vjp`, which says what is raised where forward mode meets it.

    Args:
        bwd: the rule.
        message: returns the text of the TypeError.
    """
    _install()
    rule = functools.partial(bwd)  # takes attributes of its own, and has no frame in tracebacks
    vars(rule)[_MESSAGE] = message
    return rule


_MESSAGE = "partjit_message"


def _raise(*args: Any, **params: Any) -> Any:
    """As jax's function, which it calls for rules of others."""
    message = _message_of(params.get("bwd"))
    if message is not None:
        raise TypeError(message())
    return ad.raise_custom_vjp_error_on_jvp(*args, **params)


def _message_of(bwd: Any) -> Callable[[], str] | None:
    """What the rule says of itself, under the functions that jax puts around it where a call is batched."""
    rule = getattr(bwd, "f", None)
    found = getattr(rule, _MESSAGE, None)
    for cell in getattr(rule, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # of a cell that is empty
            inner = cell.cell_contents
            found = found or (_message_of(inner) if isinstance(inner, lu.WrappedFun) else None)
    return found


@functools.cache
def _install() -> None:
    """Replaces jax's function, once."""
    primitive: Any = ad.custom_lin_p
    primitive.def_impl(_raise)
    batching.primitive_batchers[primitive] = _raise
    mlir.register_lowering(primitive, _raise, cacheable=False)
