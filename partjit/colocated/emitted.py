"""Calls that an executable makes as it runs: what they call, with what the devices hand over."""

import contextvars
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from partjit import events
from partjit._jax.arrays import aval_of_struct
from partjit._jax.dispatch import is_profiled
from partjit._jax.types import PyTree
from partjit.colocated.cheapness import Quickness
from partjit.colocated.journaling import log as journal
from partjit.colocated.runtime.call import Call, Lane, failure_here
from partjit.colocated.runtime.failures import Failure, Site
from partjit.colocated.runtime.handed_over import HandedOver, Returned, owned
from partjit.colocated.runtime.history import History
from partjit.colocated.runtime.host_values import Destination
from partjit.colocated.runtime.interrupts import is_interrupt
from partjit.colocated.runtime.numpy_functions import explain_read_only
from partjit.colocated.runtime.observation import observe_call, profiled
from partjit.colocated.runtime.streams import Stream, current_stream
from partjit.colocated.specialization import Specialization

__all__ = ["EmittedCall", "SpecializationForExecutables"]


class SpecializationForExecutables(Specialization):
    """A function specialized for calls that executables make."""

    _destinations: Sequence[Destination] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._quickness = Quickness()

    def lanes(self) -> list[Lane]:
        """Those that its calls are in: of their stream, and of the object whose method it is."""
        return [lane for lane in (self.own_stream(), self._lane) if lane is not None]

    def own_stream(self) -> Stream:
        """The stream that its calls are on."""
        return self._stream or current_stream()

    def in_place_of_all(
        self,
        site: Site,
        lanes: Sequence[Lane],
        body: Callable[[], PyTree],
        others: Sequence["SpecializationForExecutables"] = (),
    ) -> Call:
        """A call in the place of all that an executable makes: of this function, and of others on its stream."""
        call = Call(self._name, site, self.own_stream(), lanes, body)
        methods: dict[History, list[SpecializationForExecutables]] = {}
        for each in (self, *others):
            if each._history is not None and each._lane in lanes:
                methods.setdefault(each._history, []).append(each)
        for history, own in methods.items():
            history.order(call, shows_state=all(each._shows_state for each in own))
        return call

    @property
    def is_quick(self) -> bool:
        """Whether a thread of the devices may run it, because that costs less than handing it to another."""
        return self._quickness.is_shown and self._options.uses_jax is False and self._mode == "auto"

    def run_emitted(
        self, arrays: Sequence[np.ndarray], stream: Stream, site: Site, node: str, parent: Call | None
    ) -> None:
        """Runs the function; a failure is kept as that of an asynchronous call without results.

        Args:
            arrays: the flat arguments.
            stream: the stream of the call.
            site: where the user's code makes it.
            node: its name in the plan.
            parent: the call that the program is a part of.
        """
        assert self.out_specs is not None
        started = time.perf_counter()
        try:
            entry = self._entry(journal.current, stream, node, site) if journal.current is not None else None
            if entry is None:
                self._run_observed(arrays, stream, node)
            elif not entry.is_known:
                with entry:
                    self._run_observed(arrays, stream, node)
                    entry.done(())
        except BaseException as error:
            if self._takes_numpy:
                explain_read_only(error, self._name)
            Failure(error, self._name, site, stream, parent, [stream] if self._lane is None else [stream, self._lane])
            if is_interrupt(error):
                raise
        self._quickness.measured(time.perf_counter() - started)

    def _run_observed(self, arrays: Sequence[np.ndarray], stream: Stream, node: str) -> None:
        assert self.out_specs is not None
        target, taken = (self._target, self._put(arrays)) if self._of_numpy is None else (self._of_numpy, arrays)
        if not events.listeners and not is_profiled() and self.in_specs.are_positional:
            result = target(*taken)
        else:
            observe = observe_call(self._name, stream, node)
            args, kwargs = self.in_specs.tree.unflatten(taken)
            with profiled(self._name):
                result = observe(target)(*args, **kwargs)
        if result is not None or self.out_specs.leaves:
            self.out_specs.fit_flat([result], self._name)

    def answer(self, arrays: Sequence[np.ndarray], site: Site, node: str) -> Sequence[np.ndarray]:
        """Runs the function for an executable that waits for its flat results.

        Args:
            arrays: the flat arguments.
            site: where the user's code makes the call.
            node: the name of the call in the plan.

        Raises:
            Exception: what the function raised.
        """
        if journal.current is None:
            return self._answer(arrays, node)
        entry = self._entry(journal.current, self.own_stream(), node, site)
        if entry is None:
            return self._answer(arrays, node)
        if entry.is_known:
            return entry.numpy_results()
        with entry:
            results = self._answer(arrays, node)
            entry.done(results)
        return results

    def _answer(self, arrays: Sequence[np.ndarray], node: str) -> Sequence[np.ndarray]:
        of_numpy = self._of_numpy
        assert self.out_specs is not None
        assert of_numpy is not None, "only functions of NumPy arrays are waited for"
        try:
            if events.listeners or is_profiled():
                args, kwargs = self.in_specs.tree.unflatten(arrays)
                result = contextvars.copy_context().run(self._observed, of_numpy, args, kwargs, node)
            elif self.in_specs.are_positional:
                result = of_numpy(*arrays)
            else:
                args, kwargs = self.in_specs.tree.unflatten(arrays)
                result = of_numpy(*args, **kwargs)
        except Exception as error:
            explain_read_only(error, self._name)
            raise
        return self.out_specs.fit_numpy(result, self._name)

    def _observed(
        self, function: Callable[..., PyTree], args: Sequence[PyTree], kwargs: Mapping[str, PyTree], node: str
    ) -> PyTree:
        observe = observe_call(self._name, self.own_stream(), node)
        with profiled(self._name):
            return observe(function)(*args, **kwargs)

    def failure(self, error: BaseException, site: Site) -> Failure:
        """The failure of a call in this thread, made at `site`."""
        return failure_here(error, self._name, site, self.own_stream())

    def _put(self, arrays: Sequence[np.ndarray]) -> Sequence[jax.Array]:
        """The arguments, on the devices; a number is put there when the function uses more than the number."""
        if self._destinations is None:
            self._destinations = [
                Destination(
                    aval_of_struct(spec),
                    sharding,
                    all(sharding is not other for other in self._uncommitted),
                    is_explicit=True,
                )
                for spec, sharding in zip(self.in_specs.leaves, self._shardings, strict=True)
            ]
        pairs = zip(self._destinations, arrays, strict=True)
        if self._is_of_shards:
            return [destination.put(array) for destination, array in pairs]
        return [destination.when_used(array) for destination, array in pairs]


@dataclasses.dataclass(frozen=True, eq=False)
class EmittedCall:
    """A call that an executable makes.

    Attributes:
        specialization: what it calls.
        handed_over: which devices hand over what of its arguments.
        returned: which devices get what of its results.
        site: where the user's code makes it.
        node: its name in the plan.
        is_answered: whether the executable waits for it.
        devices: how many devices make it.
        positions: those of the devices, in the order of the mesh, that hand something over for it.
    """

    specialization: SpecializationForExecutables
    handed_over: HandedOver
    returned: Returned
    site: Site
    node: str
    is_answered: bool = False
    devices: int = dataclasses.field(init=False)
    positions: frozenset[int] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", max(1, self.returned.mesh.size))
        object.__setattr__(self, "positions", self.handed_over.positions)

    @property
    def is_replicated(self) -> bool:
        """Whether each device has all arguments."""
        return self.handed_over.is_replicated

    def run(self, stream: Stream, parent: Call | None, handed_over: Mapping[int, Sequence[np.ndarray]]) -> None:
        """Runs the function, with what each device has handed over."""
        self.run_with(stream, parent, self.handed_over.arrays(handed_over))

    def run_with(self, stream: Stream, parent: Call | None, arrays: Sequence[np.ndarray]) -> None:
        """Runs the function, with all arguments."""
        run = self.specialization.run_emitted
        contextvars.copy_context().run(run, arrays, stream, self.site, self.node, parent)

    def run_one(self, stream: Stream, parent: Call | None, arrays: Sequence[np.ndarray]) -> None:
        """As `run`, where there is one device only, which has handed over all arguments; in this context."""
        self.specialization.run_emitted(arrays, stream, self.site, self.node, parent)

    def answer(
        self, handed_over: Mapping[int, Sequence[np.ndarray]], following: np.ndarray
    ) -> Sequence[Sequence[PyTree]]:
        """Runs the function, with what each device has handed over; gives what each gets, after what is `following`."""
        arrays = self.handed_over.owned(handed_over)  # which the function may keep
        return self.returned.answers(self.specialization.answer(arrays, self.site, self.node), following)

    def answer_one(self, arrays: Sequence[np.ndarray], following: np.ndarray) -> Sequence[PyTree]:
        """As `answer`, where there is one device only, which has handed over all arguments."""
        return following, *self.specialization.answer([*map(owned, arrays)], self.site, self.node)
