"""Functions in which nothing of jax runs: a trace refuses every operation."""

from collections.abc import Callable
from typing import Any, NoReturn

from jax._src import core

from partjit._jax.types import PyTree

__all__ = ["refusing"]


def refusing(target: Callable[..., PyTree], message: str) -> Callable[..., PyTree]:
    """A function that calls `target` so that every operation of jax in it raises a RuntimeError.

    Functions of `jax.jit` that were called before raise it as well, because jax looks for a trace before it takes its
    path for known arguments. What is not an operation goes on: reading an array, executables compiled ahead of time.

    Args:
        target: the function.
        message: that of the exception.
    """
    trace = _Refusal(message)

    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        with core.set_current_trace(trace):
            return target(*args, **kwargs)

    return call


class _Refusal(core.Trace):  # type: ignore[misc]  # jax gives the class no types
    def __init__(self, message: str) -> None:
        super().__init__()
        self._message = message

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(self._message)

    process_primitive: Any = _refuse
    process_custom_jvp_call: Any = _refuse
    process_custom_vjp_call: Any = _refuse
    stage_value: Any = _refuse
