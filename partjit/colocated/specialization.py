"""A colocated function specialized for one kind of arguments: the ways in which its calls run.

A call runs in its caller, with as little overhead as possible; in its caller, once it is first in its lanes; or on a
thread, with pending results.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from partjit import events
from partjit._jax.arrays import ArrayImpl
from partjit._jax.types import PyTree
from partjit.colocated.agreement import refusals
from partjit.colocated.cheapness import INTERRUPTED_SECONDS
from partjit.colocated.journaling import log as journal
from partjit.colocated.journaling.entries import Entry
from partjit.colocated.prepared import PreparedFunction
from partjit.colocated.runtime import scheduler
from partjit.colocated.runtime.call import Call, Lane, current_calls, failure_here
from partjit.colocated.runtime.failures import CodeSite, Site, call_site, code_site, site_of, without_stop
from partjit.colocated.runtime.host_values import is_new, put_host_arguments
from partjit.colocated.runtime.interrupts import is_interrupt
from partjit.colocated.runtime.moves import together
from partjit.colocated.runtime.observation import observe_call
from partjit.colocated.runtime.out_spec import OutSpec
from partjit.colocated.runtime.pending import PendingArray, values_of
from partjit.colocated.runtime.pins import distinct
from partjit.colocated.runtime.streams import Stream, current_stream
from partjit.colocated.simple_calls import submitted

__all__ = ["Specialization"]

_perf_counter = time.perf_counter
_CATCH_UP_SECONDS = 2e-4
"""How long a caller waits for each of the calls before one that it would rather run itself."""
_LEFT_TO_THREADS, _MOST_SECONDS_LEFT = 100, 0.2
"""How many times as long as it waited in vain a caller then leaves its calls to threads, and for how long at most."""
_MOST_ATTEMPTS = 10
"""How often it does so where another thread was quicker each time."""


class Specialization(PreparedFunction):
    """A colocated function specialized for one kind of arguments."""

    def __call__(
        self,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        leaves: Sequence[jax.Array],
        are_plain: bool,
        is_agreed: bool = False,
    ) -> PyTree:
        """Calls the function.

        Args:
            args, kwargs, leaves: the arguments, and their arrays.
            are_plain: whether none of these is pending or an array of keys.
            is_agreed: whether other processes know of it if this one fails.
        """
        out_specs = self.out_specs
        if out_specs is not None and are_plain and (self._is_known_to_all or is_agreed) and self._runs_simply():
            stream = self._stream or current_stream()
            site = code_site(3)  # the callers of this are in the package
            return submitted(self._on_thread, self._pinned_all(leaves), stream, out_specs, site)
        if self._agreement is not None and not is_agreed and (self._mode == "inline" or not self._is_known_to_all):
            learns = self.out_specs is None and not self._options.has_out_specs
            refusals.take_back()
            try:
                result = self._agreement.run(self, (args, kwargs, leaves, are_plain, True))
            except BaseException:
                if learns:  # elsewhere the next call may be the first one to show it
                    self.out_specs = None
                raise
            self._is_known_to_all = self.out_specs is not None
            return result
        try:
            if not self._is_prepared:
                self.prepare()
            if not self._is_here:
                assert self.out_specs is not None
                return self.out_specs.tree.unflatten(self._results_elsewhere())
            stream = self._stream or current_stream()
            is_ready = self._host_shardings is None and (are_plain or PendingArray not in map(type, leaves))
            # No other thread can submit a call to a private stream in between.
            is_free = is_ready and not stream.calls and stream.is_private and not events.listeners
            if journal.current is not None:
                run = functools.partial(self._run_inline, args, kwargs) if is_free and self._is_direct else None
                return self._run_recorded(journal.current, leaves, stream, run)
            if is_free:
                if self._mode == "inline":
                    run = self._run_inline
                elif self._mode == "auto" and self._cheapness.is_shown and self._ahead is None:
                    run = self._run_cheap
                else:
                    return self._run_in_order(leaves, stream)
                if self._lane is None:
                    return run(args, kwargs, stream)
                if not self._lane.calls:
                    lanes = [stream, self._lane]
                    result = self._run_if_free(functools.partial(run, args, kwargs, stream), lanes, stream)
                    if result is not scheduler.NOT_FREE:
                        return result
            return self._run_in_order(leaves, stream)
        except StopIteration as error:
            raise without_stop(error, self._name) from error

    def call_with_host_arguments(self, leaves: Sequence[Any]) -> PyTree:
        """Calls the function with flat arguments, `HostArgument`s among them; the others are plain arrays."""
        is_cheap = self._mode == "auto" and self._stream is None and self._cheapness.is_shown
        is_ready = self._is_prepared and self._is_here and self._is_known_to_all
        if not is_ready or self._mode == "inline" or is_cheap or journal.current is not None:
            is_usual = is_ready and journal.current is None
            if not (is_usual and self._takes_numpy):  # as on a thread, numbers are put when more than these is used
                is_fitted = self.out_specs is not None  # so that no result is one of these
                when_used = is_usual and is_fitted and not self._is_of_shards
                leaves = put_host_arguments(leaves, when_used=when_used)
            args, kwargs = self.in_specs.tree.unflatten(leaves)
            return self(args, kwargs, leaves, True)
        try:
            stream = self._stream or current_stream()
            out_specs = self.out_specs
            if out_specs is not None and self._runs_simply():
                takes = self._pinned_all(leaves)
                return submitted(self._on_thread, takes, stream, out_specs, code_site(3))
            return self._run_in_order(leaves, stream)
        except StopIteration as error:
            raise without_stop(error, self._name) from error

    def _run_inline(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], stream: Stream) -> PyTree:
        try:
            returned = [self._target(*args, **kwargs)]
            if self.out_specs is not None:
                return self.out_specs.fit(returned, self._name)
            return returned[0] if type(returned[0]) is ArrayImpl else self._unspecified.as_arrays(returned[0])
        except BaseException as error:
            failure_here(error, self._name, call_site(), stream).raise_()

    def _run_cheap(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], stream: Stream, entry: Entry | None = None
    ) -> PyTree:
        """Runs a call in its caller, but with the results and errors of an asynchronous one, as only timing decides."""
        started = _perf_counter()
        assert self.out_specs is not None
        try:
            if entry is None:
                result = self._made_here(args, kwargs, stream)
            else:
                with entry:
                    result = self._made_here(args, kwargs, stream)
                    entry.done(jax.tree.leaves(result))
        except BaseException as error:
            lanes = [stream] if self._lane is None else [stream, self._lane]
            failure = failure_here(error, self._name, call_site(), stream, lanes)
            if is_interrupt(error):  # of the caller, not of the call
                failure.raise_()
            failed = [PendingArray.failed(failure, s.aval, s.sharding, s.committed) for s in self.out_specs.leaves]
            return self.out_specs.tree.unflatten(failed)
        self._cheapness.measured(_perf_counter() - started)
        return self._as_elsewhere(result)

    def _made_here(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], stream: Stream) -> PyTree:
        """The result of a call that runs in its caller, as one on a thread has it."""
        assert self.out_specs is not None
        target = observe_call(self._name, stream)(self._target) if events.listeners else self._target
        returned = [target(*args, **kwargs)]
        if self._is_only_process:
            fitted = self.out_specs.fit(returned, self._name)
        else:
            with together(None):
                fitted = self.out_specs.fit(returned, self._name)
        return self._without_arguments(fitted, returned, args, kwargs)

    def _as_elsewhere(self, result: PyTree) -> PyTree:
        """A result that is there, as it is in another process that makes the call on a thread.

        All processes agree on the arguments of a program if these are pending, so that they are so in all or in none.
        """
        return result if self._is_only_process else jax.tree.map(PendingArray.of, result)

    def _without_arguments(
        self, result: PyTree, returned: Sequence[PyTree], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> PyTree:
        """The result without arguments in it: on a thread it would be another array that shares the memory.

        Args:
            result: the arrays.
            returned: a list of what the function returned; if they are something else, some may have been moved.
            args, kwargs: the arguments.
        """
        if is_new(returned[0]):
            return result
        given = jax.tree.leaves((args, kwargs))
        leaves, tree = jax.tree.flatten(result)
        ids = [*map(id, leaves)]
        if result is returned[0] and len({*ids}) == len(ids) and {*map(id, given)}.isdisjoint(ids):
            return result
        return tree.unflatten(distinct(leaves, given))

    @property
    def _is_direct(self) -> bool:
        """Whether a call runs in its caller as soon as its stream is free."""
        return self._mode == "inline" and self._lane is None

    def _run_recorded(
        self, log: journal.Log, leaves: Sequence[jax.Array], stream: Stream, run: Callable[[Stream], PyTree] | None
    ) -> PyTree:
        """Runs a call while a journal is open, unless that knows it; with `run` if nothing comes before it."""
        entry = self._entry(log, stream)
        if entry is not None and self.out_specs is not None and not self._options.has_out_specs:
            entry.specs = self.out_specs.tree.unflatten(self.out_specs.leaves)
        if entry is None or not (entry.is_known or run is not None):
            return self._run_in_order(leaves, stream, entry)
        if run is not None and not entry.is_known:
            with entry:
                result = run(stream)
                entry.done(jax.tree.leaves(result), result if self.out_specs is None else None)
            return result
        if self.out_specs is not None:
            result = self.out_specs.tree.unflatten(entry.results(self.out_specs))
            return result if self._mode == "inline" else self._as_elsewhere(result)
        result = entry.tree()
        self._learn(result)
        return result

    def _run_in_order(self, leaves: Sequence[jax.Array], stream: Stream, entry: Entry | None = None) -> PyTree:
        """Runs a call in the order of its lanes, in its caller or on a thread."""
        lanes, is_nested = self._lanes(stream)
        out_specs = self.out_specs
        if is_nested and self._ahead is not None and out_specs is not None:
            made = self._ahead.made(out_specs, entry)
            if made is not None:
                return out_specs.tree.unflatten(made)
        if self._mode == "inline" or out_specs is None or is_nested:
            return self._run_here(put_host_arguments(leaves), lanes, stream, code_site(4), entry)
        if self._ahead is not None:
            site = code_site(4)
            results = self._ahead.take(
                out_specs, lambda: self._prepared([], lanes, stream, out_specs, site, entry), entry
            )
            return out_specs.tree.unflatten(results)
        is_cheap = self._mode == "auto" and self._stream is None and self._cheapness.is_shown
        is_ahead = self._history is not None and self._history.is_ahead
        if is_cheap and not is_ahead and all(map(_has_value, leaves)) and self._has_caught_up(lanes):
            args, kwargs = self.in_specs.tree.unflatten(self._on_host(values_of(put_host_arguments(leaves))))
            run = functools.partial(self._run_cheap, args, kwargs, stream, entry)
            for _ in range(_MOST_ATTEMPTS):
                result = self._run_if_free(run, lanes, stream)
                if result is not scheduler.NOT_FREE:
                    return result
                if not self._has_caught_up(lanes):
                    break
        takes = self._pinned_all(leaves)
        prepared = self._prepared(takes, lanes, stream, out_specs, code_site(4), entry)
        return out_specs.tree.unflatten(prepared.submit())

    def _has_caught_up(self, lanes: Sequence[Lane]) -> bool:
        """Whether nothing comes before a cheap call; waits a moment for that, as otherwise its caller never catches up.

        The thread that runs the calls before it takes as long for each as this one takes to hand over the next. Where
        other callers run them, this one waits as they wait for it: handing over its own would keep these waiting, too.
        """
        before = [call for lane in lanes for call in [*lane.calls]]
        if not before:
            return True
        now = time.monotonic()
        if now < self._catches_up_from or current_calls() or scheduler.is_changing_lanes():
            return False  # those before may wait for the call that makes this one
        are_of_callers = all(call.is_run_by_caller for call in before)
        seconds = INTERRUPTED_SECONDS if are_of_callers else _CATCH_UP_SECONDS * (1 + len(before))
        for last in [call for lane in lanes for call in [*lane.calls][-1:]]:
            if not scheduler.join(last, now + seconds):
                self._catches_up_from = now + min(_LEFT_TO_THREADS * seconds, _MOST_SECONDS_LEFT)
                return False
        return True

    def _results_elsewhere(self) -> list[jax.Array]:
        """The flat results on a host that has none of the devices: no function runs here."""
        assert self.out_specs is not None
        return [_without_shards(spec) for spec in self.out_specs.leaves]

    def _run_here(
        self,
        leaves: Sequence[jax.Array],
        lanes: Sequence[Lane],
        stream: Stream,
        site: Site | CodeSite,
        entry: Entry | None = None,
    ) -> PyTree:
        def body() -> PyTree:
            if entry is None:
                return run()
            is_specified = self.out_specs is not None
            with entry:
                result = run()
                entry.done(jax.tree.leaves(result), None if is_specified else result)
                return result

        def run() -> PyTree:
            args, kwargs = self.in_specs.tree.unflatten(self._on_host(values_of(leaves)))
            started = _perf_counter()
            try:
                returned = [observe(self._target)(*args, **kwargs)]
                if self.out_specs is not None:
                    return self.out_specs.fit(returned, self._name)
                result = self._unspecified.as_arrays(returned[0])
            except BaseException as error:
                failure_here(error, self._name, site_of(site), stream).raise_()
            self._learn(result)
            if self._mode != "inline":
                self._cheapness.measured(_perf_counter() - started)
                result = self._without_arguments(result, returned, args, kwargs)
            return result

        observe = observe_call(self._name, stream)
        if not lanes:
            return body()
        call = self._call(site, stream, lanes, body)
        call.needed, call.uses_jax = leaves, self._options.uses_jax is not False
        return scheduler.run_here(call)

    def _run_if_free(self, body: Callable[[], PyTree], lanes: Sequence[Lane], stream: Stream) -> PyTree:
        call = Call(self._name, code_site(4), stream, lanes, body)  # as in `__call__`, from one more frame
        if self._history is not None:
            call.entering = self._history.has_nothing_ahead
        return scheduler.run_if_free(call)


def _has_value(leaf: jax.Array) -> bool:
    return type(leaf) is not PendingArray or leaf.has_value


def _without_shards(spec: OutSpec) -> jax.Array:
    """A result on a host that has none of its devices."""
    return jax.make_array_from_single_device_arrays(spec.shape, spec.sharding, [], dtype=spec.dtype)
