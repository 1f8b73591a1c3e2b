"""Calls that the executables of other wrappers make, such as those of `jax.jit`: how they run.

Such a call belongs to no execution that anyone here has started, and runs in a context of its own. Without results it
runs on a thread, and what it raises is kept as the failure of an asynchronous call. If the executable waits for its
results, it runs in the thread that waits. The executable keeps what it calls alive.
"""

import contextvars
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from partjit._jax.threads import ThreadSettings
from partjit.colocated.emitted import SpecializationForExecutables
from partjit.colocated.runtime import scheduler
from partjit.colocated.runtime.arrivals import MOST_SECONDS, Arrival, have_entered, wait_for_room
from partjit.colocated.runtime.call import Call, Lane, current_calls
from partjit.colocated.runtime.failures import Site
from partjit.colocated.runtime.interrupts import is_interrupt
from partjit.colocated.runtime.shards import on_each
from partjit.colocated.runtime.streams import Stream, inside

__all__ = ["STREAM", "AnsweredUnderJit", "CallUnderJit", "SpecializationUnderJit"]

STREAM = Stream()
"""That of calls on no other: which thread has started the program, its executable does not know."""


class SpecializationUnderJit(SpecializationForExecutables):
    """A function specialized for calls of other wrappers' executables; what `in_specs` put nowhere is uncommitted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._uncommitted = [sharding for sharding in self._shardings if isinstance(sharding, SingleDeviceSharding)]


@dataclasses.dataclass(frozen=True, eq=False)
class CallUnderJit:
    """What an executable calls to make a call: takes the position of the shard in a `shard_map`, and the arguments.

    Attributes:
        specialization: the function.
        site: where the user's code makes the call.
        shape: the axes of the mesh in whose `shard_map` it is made and their sizes; None outside of any.
        settings: those of the thread that compiled the program.
    """

    specialization: SpecializationUnderJit
    site: Site
    shape: Mapping[str, int] | None
    settings: ThreadSettings = dataclasses.field(default_factory=ThreadSettings.here)

    def __call__(self, *values: Any) -> Sequence[np.ndarray]:
        """Hands over a call; raises nothing but what a signal handler has raised meanwhile."""
        arrival: Arrival | None = None
        interrupt: BaseException | None = None
        while True:
            try:
                if arrival is None:
                    arrays, coordinates = self._taken(values)
                    size = sum(array.nbytes for array in arrays)
                    arrival = Arrival(_Made(self, arrays, coordinates), size)
                arrival.announce()
                wait_for_room()
                break
            except BaseException as error:
                if not is_interrupt(error):
                    raise
                interrupt = error  # ends the program, not the call
        if interrupt is not None:
            raise interrupt
        return ()

    def _taken(self, values: Sequence[Any]) -> tuple[list[np.ndarray], dict[str, int] | None]:
        """The arguments, in memory of their own, and the coordinates of the shard."""
        coordinates = None
        if self.shape is not None:
            position, *values = values
            indices = np.unravel_index(int(position), tuple(self.shape.values()))
            coordinates = dict(zip(self.shape, map(int, indices), strict=True))
        # XLA has copied them already, unless it changes.
        return [value if value.flags.owndata else np.array(value) for value in values], coordinates


class AnsweredUnderJit(CallUnderJit):
    """What an executable calls for the results of a call."""

    def __call__(self, *values: Any) -> Sequence[np.ndarray]:
        """Runs the function in this thread, when its turn comes.

        Raises:
            RuntimeError: the function has, or calls before it on its stream or of its object do not end.
        """
        # Where an argument is still being computed, another thread than the caller's runs the program.
        return self.settings.run(lambda: contextvars.Context().run(self._answer, *self._taken(values)))

    def _answer(self, arrays: Sequence[np.ndarray], coordinates: dict[str, int] | None) -> Sequence[np.ndarray]:
        inside(self.specialization.own_stream())
        deadline = time.monotonic() + MOST_SECONDS
        try:
            if not have_entered(deadline):
                raise TimeoutError("calls before it have not entered their streams")
            lanes = scheduler.not_entered(self.specialization.lanes())
            call = self.specialization.in_place_of_all(self.site, lanes, lambda: self._run(arrays, coordinates))
            return scheduler.run_here(call, deadline=deadline)
        except BaseException as error:  # of which XLA quotes the text, and no notes
            if is_interrupt(error):
                raise
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            failure = self.specialization.failure(error, self.site)
            text = f"the colocated call of {failure.name!r} made at {failure.site_text} failed: {error!r}{notes}"
            failure.take()
            raise RuntimeError(text).with_traceback(error.__traceback__) from None

    def _run(self, arrays: Sequence[np.ndarray], coordinates: dict[str, int] | None) -> Sequence[np.ndarray]:
        ((*results,),) = on_each(lambda _: self.specialization.answer(arrays, self.site, ""), [coordinates])
        return results


@dataclasses.dataclass(frozen=True, eq=False)
class _Made:
    """A call that an executable has made."""

    made_by: CallUnderJit
    arrays: Sequence[np.ndarray]
    coordinates: dict[str, int] | None

    def lanes(self) -> Sequence[Lane]:
        return self.made_by.specialization.lanes()

    def in_place_of(self, lanes: Sequence[Lane], body: Callable[[], Sequence[jax.Array]]) -> Call:
        return self.made_by.specialization.in_place_of_all(self.made_by.site, lanes, body)

    def run(self) -> None:
        self.made_by.settings.run(contextvars.Context().run, self._run)

    def _run(self) -> None:
        specialization, site = self.made_by.specialization, self.made_by.site
        stream = specialization.own_stream()
        inside(stream)
        parent = current_calls()[-1].parent
        on_each(lambda _: specialization.run_emitted(self.arrays, stream, site, "", parent), [self.coordinates])
