"""Calls that an executable makes as it runs: how they run, and take their place in the order of calls."""

import contextvars
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from partjit._jax.arrays import aval_of_struct, numpy_putter
from partjit._jax.threads import ThreadSettings
from partjit._jax.types import PyTree
from partjit.colocated.runtime import scheduler
from partjit.colocated.runtime.call import Call, Lane, current_calls
from partjit.colocated.runtime.emission import Execution
from partjit.colocated.runtime.failures import Failure, Site
from partjit.colocated.runtime.handed_over import HandedOver
from partjit.colocated.runtime.interrupts import is_interrupt
from partjit.colocated.runtime.observation import observe_call, profiled
from partjit.colocated.runtime.streams import Stream, current_stream, inside
from partjit.colocated.specialization import Specialization

__all__ = ["EmittedCall", "SpecializationForExecutables", "run_emitting"]


class SpecializationForExecutables(Specialization):
    """A function specialized for calls that executables make."""

    _putters: Sequence[Callable[[np.ndarray], jax.Array]] | None = None

    def lanes(self) -> list[Lane]:
        """Those that its calls are in: of their stream, and of the object whose method it is."""
        return [lane for lane in (self.own_stream(), self._lane) if lane is not None]

    def own_stream(self) -> Stream:
        """The stream that its calls are on."""
        return self._stream or current_stream()

    def in_place_of_all(self, site: Site, lanes: Sequence[Lane], body: Callable[[], Sequence[jax.Array]]) -> Call:
        """A call in the place of all that an executable makes."""
        return self._call(site, self.own_stream(), lanes, body)

    def run_emitted(self, arrays: Sequence[np.ndarray], stream: Stream, site: Site, node: str) -> None:
        """Runs the function; a failure is kept as that of an asynchronous call without results.

        Args:
            arrays: the flat arguments.
            stream: the stream of the call.
            site: where the user's code makes it.
            node: its name in the plan.
        """
        assert self.out_specs is not None
        try:
            observe = observe_call(self._name, stream, node)
            args, kwargs = self.in_specs.tree.unflatten(self._as_taken(arrays))
            with profiled(self._name):
                result = observe(self._target)(*args, **kwargs)
            self.out_specs.fit_flat(result, self._name)
        except BaseException as error:
            running = current_calls()
            Failure(error, self._name, site, stream, running[-1].parent if running else None)
            if is_interrupt(error):
                raise

    def _as_taken(self, arrays: Sequence[np.ndarray]) -> Sequence[PyTree]:
        """The arguments as the function takes them."""
        if self._options.arrays == "numpy" and self._options.layout != "per_shard":
            return arrays
        if self._putters is None:
            self._putters = [
                numpy_putter(aval_of_struct(spec), sharding, all(sharding is not other for other in self._uncommitted))
                for spec, sharding in zip(self.in_specs.leaves, self._shardings, strict=True)
            ]
        return [put(array) for put, array in zip(self._putters, arrays, strict=True)]


@dataclasses.dataclass(frozen=True, eq=False)
class EmittedCall:
    """A call that an executable makes.

    Attributes:
        specialization: what it calls.
        handed_over: which devices hand over what of its arguments.
        site: where the user's code makes it.
        node: its name in the plan.
    """

    specialization: SpecializationForExecutables
    handed_over: HandedOver
    site: Site
    node: str

    @property
    def positions(self) -> frozenset[int]:
        """The positions of the devices, in the order of the mesh, that hand something over for it."""
        return self.handed_over.positions

    def run(self, stream: Stream, handed_over: Mapping[int, Sequence[np.ndarray]]) -> None:
        """Runs the function, with what each device has handed over."""
        arrays = self.handed_over.arrays(handed_over)
        contextvars.copy_context().run(self.specialization.run_emitted, arrays, stream, self.site, self.node)


def run_emitting(
    calls: Sequence[EmittedCall], dispatch: Callable[[np.int32], Sequence[jax.Array]]
) -> Sequence[jax.Array]:
    """Dispatches an executable that makes calls; they run on a thread, in the place of one call.

    Args:
        calls: its calls, which are on one stream, and of one object at most.
        dispatch: dispatches it, given the number of the execution; the first result is the number of calls made.

    Returns:
        The other results.
    """
    for call in calls:
        call.specialization.prepare()
    stream = calls[0].specialization.own_stream()
    lanes = [*dict.fromkeys(lane for call in calls for lane in call.specialization.lanes())]
    entered = scheduler.entered_lanes()
    free = [lane for lane in lanes if lane not in entered]
    execution = Execution(calls, stream)
    is_nested = len(free) < len(lanes)  # made by a call of its own stream, they are a part of that call
    if not is_nested:
        context, settings = contextvars.copy_context(), ThreadSettings()

        def body() -> Sequence[jax.Array]:
            with settings:
                context.run(inside, stream)
                context.run(execution.run_calls)
            return ()

        first = max(calls, key=lambda call: len(call.specialization.lanes()))  # a method, if there is one
        scheduler.submit(first.specialization.in_place_of_all(first.site, free, body))
    try:
        made, *results = dispatch(np.int32(execution.number))
        execution.dispatched(made)
    except BaseException as error:
        execution.abandon()
        if execution.interrupt is not None:
            raise execution.interrupt from None
        if _quotes_ctrl_c(error):
            raise KeyboardInterrupt from error
        raise
    finally:
        if is_nested:
            execution.run_calls()
    if execution.interrupt is not None:
        raise execution.interrupt
    return results


def _quotes_ctrl_c(error: BaseException) -> bool:
    """Whether Ctrl-C came while XLA was calling Python in this thread, as XLA:CPU does."""
    is_of_xla = isinstance(error, jax.errors.JaxRuntimeError)
    return is_of_xla and str(error).rstrip().rpartition("\n")[2].startswith("KeyboardInterrupt")
