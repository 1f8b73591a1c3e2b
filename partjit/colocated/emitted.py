"""Calls that an executable makes as it runs: how they run, and take their place in the order of calls."""

import contextvars
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from partjit._jax.arrays import aval_of_struct, numpy_putter
from partjit._jax.threads import ThreadSettings
from partjit._jax.types import PyTree
from partjit.colocated.runtime import scheduler
from partjit.colocated.runtime.answering import Answering, Answers
from partjit.colocated.runtime.call import Call, Lane, current_calls, failure_here
from partjit.colocated.runtime.emission import Execution
from partjit.colocated.runtime.failures import Failure, Site
from partjit.colocated.runtime.handed_over import HandedOver, Returned
from partjit.colocated.runtime.interrupts import is_interrupt
from partjit.colocated.runtime.observation import observe_call, profiled
from partjit.colocated.runtime.streams import Stream, current_stream, inside
from partjit.colocated.specialization import Specialization

__all__ = ["EmittedCall", "SpecializationForExecutables", "run_answering", "run_emitting"]


class SpecializationForExecutables(Specialization):
    """A function specialized for calls that executables make."""

    _putters: Sequence[Callable[[np.ndarray], jax.Array]] | None = None
    _of_numpy: Callable[..., PyTree]

    def prepare(self) -> None:
        """Copies the function for its host, once."""
        if not self._is_prepared:
            super().prepare()
            self._of_numpy = inspect.unwrap(self._target)

    def lanes(self) -> list[Lane]:
        """Those that its calls are in: of their stream, and of the object whose method it is."""
        return [lane for lane in (self.own_stream(), self._lane) if lane is not None]

    def own_stream(self) -> Stream:
        """The stream that its calls are on."""
        return self._stream or current_stream()

    def run_in_place_of_all(self, site: Site, body: Callable[[], Sequence[jax.Array]]) -> Sequence[jax.Array]:
        """Runs a function in this thread, in the place of all calls that an executable makes."""
        stream = self.own_stream()
        # No other thread can submit a call to a private stream in between.
        if self._lane is None and not stream.calls and stream.is_private:
            return body()
        lanes, _ = self._lanes(stream)
        return scheduler.run_here(self._call(site, stream, lanes, body)) if lanes else body()

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

    def answer(self, arrays: Sequence[np.ndarray], stream: Stream, node: str) -> Sequence[np.ndarray]:
        """Runs the function for an executable that waits for its flat results.

        Args:
            arrays: the flat arguments.
            stream: the stream of the call.
            node: its name in the plan.

        Raises:
            Exception: what the function raised.
        """
        assert self.out_specs is not None
        observe = observe_call(self._name, stream, node)
        args, kwargs = self.in_specs.tree.unflatten(arrays)
        with profiled(self._name):
            result = observe(self._of_numpy)(*args, **kwargs)
        return self.out_specs.fit_numpy(result, self._name)

    def failure(self, error: BaseException, site: Site) -> Failure:
        """The failure of a call in this thread, made at `site`."""
        return failure_here(error, self._name, site, self.own_stream())

    def _as_taken(self, arrays: Sequence[np.ndarray]) -> Sequence[PyTree]:
        """The arguments as the function takes them."""
        if self._takes_numpy:
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
        returned: which devices get what of its results.
        site: where the user's code makes it.
        node: its name in the plan.
    """

    specialization: SpecializationForExecutables
    handed_over: HandedOver
    returned: Returned
    site: Site
    node: str

    @property
    def positions(self) -> frozenset[int]:
        """The positions of the devices, in the order of the mesh, that hand something over for it."""
        return self.handed_over.positions

    @property
    def devices(self) -> int:
        """How many devices make it."""
        return len(self.returned.parts)

    def run(self, stream: Stream, handed_over: Mapping[int, Sequence[np.ndarray]]) -> None:
        """Runs the function, with what each device has handed over."""
        arrays = self.handed_over.arrays(handed_over)
        contextvars.copy_context().run(self.specialization.run_emitted, arrays, stream, self.site, self.node)

    def answer(self, handed_over: Mapping[int, Sequence[np.ndarray]]) -> Answers:
        """Runs the function, with what each device has handed over, for what each is to get."""
        arrays = self.handed_over.copies(handed_over)  # which the function may keep
        stream = self.specialization.own_stream()
        return self.returned.answers(self.specialization.answer(arrays, stream, self.node))


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


def run_answering(
    calls: Sequence[EmittedCall], dispatch: Callable[[np.int32], Sequence[jax.Array]]
) -> Sequence[jax.Array]:
    """Dispatches an executable that waits for the calls that it makes, and waits for its end.

    Args:
        calls: its calls, which are on one stream, and of one object at most.
        dispatch: as for `run_emitting`.

    Returns:
        The other results.

    Raises:
        Exception: what a function raised, with a note that names the call.
    """
    for call in calls:
        call.specialization.prepare()

    def body() -> Sequence[jax.Array]:
        execution = Answering(calls)
        try:
            made, *results = dispatch(np.int32(execution.number))
            made.block_until_ready()
        except BaseException as error:
            if execution.failure is not None:
                call, cause = execution.failure
                if isinstance(cause, Exception):
                    call.specialization.failure(cause, call.site).raise_()
                raise cause from None
            if _quotes_ctrl_c(error):
                raise KeyboardInterrupt from error
            raise
        return results

    first = max(calls, key=lambda call: len(call.specialization.lanes()))  # a method, if there is one
    return first.specialization.run_in_place_of_all(first.site, body)
