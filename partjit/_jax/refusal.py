"""Functions in which nothing of jax runs: a trace refuses every operation."""

import contextvars
import functools
from collections.abc import Callable
from typing import Any

from jax._src import core, stages

from partjit._jax.types import PyTree

__all__ = ["leave_refusal", "refuse", "refusing"]

_trace_here, _set_trace = core.trace_state_strong_ref.get_local, core.trace_state_strong_ref.set_local
_state_here, _set_state = core.trace_state.get_local, core.trace_state.set_local

_refused: "contextvars.ContextVar[_Refusal | None]" = contextvars.ContextVar("partjit_refused", default=None)


def refusing(target: Callable[..., PyTree], message: str) -> Callable[..., PyTree]:
    """A function that calls `target` so that every operation of jax in it raises a RuntimeError.

    Functions of `jax.jit` that were called before raise it as well, because jax looks for a trace before it takes its
    path for known arguments, and so do executables compiled ahead of time. What is not an operation goes on: reading an
    array.

    Args:
        target: the function.
        message: that of the exception.
    """
    _have_executables_refused()
    trace = _Refusal(message)
    state = trace._weakref

    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        outer, outer_state = _trace_here(), _state_here()
        context = contextvars.copy_context()
        context.run(_refused.set, trace)
        try:
            try:
                _set_trace(trace)  # what `core.set_current_trace` does, in less time
                _set_state(state)
                return context.run(target, *args, **kwargs)
            finally:
                _set_trace(outer)
                _set_state(outer_state)
        finally:  # once more: a signal handler may have raised in the middle of the above
            _set_trace(outer)
            _set_state(outer_state)

    return call


def refuse() -> None:
    """Raises what an operation of jax raises here, if this is in such a function."""
    trace = core.trace_ctx.trace
    if isinstance(trace, _Refusal) and _refused.get() is trace:
        raise RuntimeError(trace.message)


def _have_executables_refused() -> None:
    """Has executables that were compiled ahead of time look whether they are called in such a function.

    They are no operations that a trace sees. C++ looks for the trace before it takes its path for known arguments, and
    calls this method of jax in one of ours, as it does when an executable is called for the first time.
    """
    of_jax = stages.Compiled.call
    if not hasattr(of_jax, "of_jax"):

        @functools.wraps(of_jax)
        def call(*args: Any, **kwargs: Any) -> Any:
            refuse()
            return of_jax(*args, **kwargs)

        vars(call)["of_jax"] = of_jax
        stages.Compiled.call = staticmethod(call)  # type: ignore[method-assign]  # jax has no hook for it


def leave_refusal() -> None:
    """Makes jax run in this thread again, where a signal handler raised while such a function was being left."""
    if isinstance(core.trace_ctx.trace, _Refusal):
        core.trace_ctx.set_trace(core.eval_trace)


def _refusing(name: str) -> Callable[..., Any]:
    def method(self: "_Refusal", *args: Any, **kwargs: Any) -> Any:
        if _refused.get() is self:
            raise RuntimeError(self.message)
        # A signal handler raised while the trace was being left. The context was left all the same, by C.
        with core.set_current_trace(core.eval_trace):
            return getattr(core.eval_trace, name)(*args, **kwargs)

    return method


class _Refusal(core.Trace):  # type: ignore[misc]  # jax gives the class no types
    def __init__(self, message: str) -> None:
        super().__init__()
        self.message = message

    process_primitive: Any = _refusing("process_primitive")
    process_custom_jvp_call: Any = _refusing("process_custom_jvp_call")
    process_custom_vjp_call: Any = _refusing("process_custom_vjp_call")
    stage_value: Any = _refusing("stage_value")
