"""Running executables in the thread that dispatches them.

XLA:CPU hands what takes more than a thousand operations to a thread of its own. Where the host waits for each result
before it dispatches the next executable, that thread falls asleep in between, and to wake it takes longer than a small
executable runs. Inside of a callback, which must not wait for the threads of XLA, it runs everything where it is
dispatched. So a function is called by a callback, of an executable that does nothing else.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.interpreters.mlir import LoweringRuleContext
from jax.sharding import SingleDeviceSharding

from partjit._jax.callbacks import lower_callback, raise_of_xla
from partjit._jax.compiling import lower_to_computation, without_tokens
from partjit._jax.dispatch import fast_path_data, make_cpp_function
from partjit._jax.meshes import EMPTY_MESH
from partjit._jax.types import Device

__all__ = ["NOT_ENTERED", "call_in_host_thread"]

NOT_ENTERED = object()
"""What `call_in_host_thread` returns where it did not call the function."""

_Result = TypeVar("_Result")
_enter_p = Primitive("enter_host_callback")
_NUMBER = ShapedArray((), np.dtype(np.int32))


class _Job:
    """A call that is to be made in a callback; its exception, if it raises one, goes around XLA."""

    def __init__(self, function: Callable[..., Any], args: Sequence[object]) -> None:
        self.function = function
        self.args = args
        self.result: Any = NOT_ENTERED
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.function(*self.args)
        except BaseException as error:
            self.error = error


class _Here(threading.local):
    job: _Job | None = None
    is_inside = False


_here = _Here()


def call_in_host_thread(device: Device, function: Callable[..., _Result], *args: object) -> _Result | Any:
    """Calls a function in this thread so that the executables that it dispatches run there as well.

    Args:
        device: the CPU on which they run.
        function, args: what to call. It does not return `NOT_ENTERED`.

    Returns:
        What the function returns; or `NOT_ENTERED`, where it was not called because the device has other work under
        way, so that nothing would run in this thread.

    Raises:
        BaseException: what the function raises.
        Exception: what XLA makes of the exception of a signal handler in between.
    """
    if _here.is_inside:
        return function(*args)
    job = _here.job = _Job(function, args)
    _here.is_inside = True
    try:
        _entrance(device)()
    except Exception as error:  # of a signal handler, between the function and XLA
        raise_of_xla(error)
    finally:
        _here.is_inside, _here.job = False, None
    error, job.error = job.error, None
    if error is None:
        return job.result
    try:
        raise error
    finally:
        del error  # which refers to this frame


def _enter() -> Sequence[np.ndarray]:
    job, _here.job = _here.job, None  # another thread has none
    if job is not None:
        job.run()
    return (np.zeros((), np.int32),)


@_enter_p.def_abstract_eval
def _abstract_eval() -> ShapedArray:
    return _NUMBER


def _lower(ctx: LoweringRuleContext) -> Sequence[ir.Value]:
    return lower_callback(ctx, _enter, ())


mlir.register_lowering(_enter_p, _lower, platform="cpu", cacheable=False)


@functools.cache
def _entrance(device: Device) -> Callable[[], object]:
    """What dispatches an executable that calls `_enter`."""
    jaxpr = jax.make_jaxpr(lambda: _enter_p.bind())()
    shardings = (SingleDeviceSharding(device),)
    computation = lower_to_computation(
        jaxpr, "enter_host_callback", (), shardings, (), keep_unused=False, context_mesh=EMPTY_MESH
    )
    executable = computation.compile()
    without_tokens(executable)
    tree = jax.tree.structure((0,))

    def dispatch() -> tuple[Sequence[jax.Array], object, bool]:
        outs = executable.unsafe_call()
        return tuple(outs), fast_path_data(executable, tree, (), outs, jaxpr, ()), False

    return make_cpp_function(dispatch, "enter_host_callback", dispatch, ((), ()), object())
