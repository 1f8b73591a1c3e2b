"""Calls that programs make: inline in the calling thread, or on a thread whose results are waited for later."""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from partjit import events
from partjit._jax.arrays import ArrayImpl
from partjit._jax.dispatch import is_profiled
from partjit._jax.types import PyTree
from partjit.colocated.journaling import log as journal
from partjit.colocated.journaling.entries import Entry
from partjit.colocated.runtime import scheduler, soon
from partjit.colocated.runtime.call import Call, current_calls, failure_here
from partjit.colocated.runtime.failures import Site
from partjit.colocated.runtime.host_values import is_new, put_host_arguments
from partjit.colocated.runtime.interrupts import is_interrupt
from partjit.colocated.runtime.numpy_functions import WITH_NUMPY, as_numpy, explain_read_only
from partjit.colocated.runtime.observation import profiled
from partjit.colocated.runtime.out_specs import OutSpecs
from partjit.colocated.runtime.pending import PendingArray, values_of
from partjit.colocated.runtime.pins import distinct
from partjit.colocated.runtime.run_ahead import Prepared
from partjit.colocated.runtime.streams import Stream, current_stream
from partjit.colocated.simple_calls import submitted_flat
from partjit.colocated.specialization import Specialization

__all__ = ["SpecializationForPrograms"]

_perf_counter = time.perf_counter
_ARRAYS = frozenset({ArrayImpl})


class SpecializationForPrograms(Specialization):
    """A function specialized for calls that programs make."""

    def calling(self, which: Sequence[int], site: Site, node: str = "") -> Callable[..., Sequence[jax.Array]]:
        """A function that makes a call as `run_for_program`, of the flat arguments.

        Where nothing has to be taken into account, no Python of ours stands between the program and the function but
        this: each frame takes as long as what it does.
        """

        def call(*leaves: Any) -> Sequence[jax.Array]:
            stream, of_numpy, out_specs = self._stream or current_stream(), self._of_numpy, self.out_specs
            # No other thread can submit a call to a private stream in between.
            is_plain = self._is_plain and stream.is_private and not stream.calls
            if not is_plain or out_specs is None or events.listeners or journal.current is not None or is_profiled():
                return self.run_for_program(leaves, which, site, node)
            if not (_ARRAYS if of_numpy is None else WITH_NUMPY).issuperset(map(type, leaves)):
                return self.run_for_program(leaves, which, site, node)
            try:
                if self._lane is None:
                    return run(leaves, of_numpy, out_specs)
                results = self._run_if_lane_is_free(functools.partial(run, leaves, of_numpy, out_specs), site, stream)
            except BaseException as error:
                if of_numpy is not None:
                    explain_read_only(error, self._name)
                failure_here(error, self._name, site, stream).raise_()
            return self.run_for_program(leaves, which, site, node) if results is scheduler.NOT_FREE else results

        def run(
            leaves: Sequence[Any], of_numpy: Callable[..., PyTree] | None, out_specs: OutSpecs
        ) -> Sequence[jax.Array]:
            returned = [self._target(*leaves) if of_numpy is None else of_numpy(*map(as_numpy, leaves))]
            is_made_there = not which or is_new(returned[0])
            results = out_specs.fit_flat(returned, self._name)
            return results if is_made_there else distinct(results, leaves, which)

        return call

    def run_for_program(
        self, leaves: Sequence[Any], which: Sequence[int], site: Site, node: str = ""
    ) -> Sequence[jax.Array]:
        """Calls the function in this thread, for a program, and returns the flat results.

        Args:
            leaves: the flat arguments: arrays on the hosts, and `HostArgument`s.
            which: the positions of results that must be distinct from the arguments and from each other.
            site: where the user's code makes the call.
            node: its name in the plan; empty where there is none.

        Raises:
            Exception: what the function raised, with a note that names the call.
        """
        if not self._is_prepared:
            self.prepare()
        if not self._is_here:
            return self._results_elsewhere()
        stream = self._stream or current_stream()
        out_specs = self.out_specs
        assert out_specs is not None
        entry = self._entry(journal.current, stream, node, site) if journal.current is not None else None
        if entry is not None and entry.is_known:
            return entry.results(out_specs)
        return self._run_for_program(leaves, which, site, stream, out_specs, entry)

    def _run_for_program(
        self,
        leaves: Sequence[Any],
        which: Sequence[int],
        site: Site,
        stream: Stream,
        out_specs: OutSpecs,
        entry: Entry | None,
    ) -> Sequence[jax.Array]:
        if PendingArray in map(type, leaves):
            leaves = values_of(leaves)  # what failed before is not a failure of this call
        if not self._takes_numpy:
            leaves = put_host_arguments(leaves, when_used=not self._is_of_shards)
        try:
            # No other thread can submit a call to a private stream in between.
            is_free = stream.is_private and not stream.calls
            if is_free and entry is None and not events.listeners and not is_profiled():
                run = functools.partial(self._run_plainly, leaves, which, out_specs)
                found = run() if self._lane is None else self._run_if_lane_is_free(run, site, stream)
                if found is not scheduler.NOT_FREE:
                    return found
            if is_free and self._lane is None and not events.listeners:
                args, kwargs = self.in_specs.tree.unflatten(leaves)
                with entry or contextlib.nullcontext(), profiled(self._name):
                    results = out_specs.fit_flat([self._target(*args, **kwargs)], self._name)
                    if entry is not None:
                        entry.done(results)
            else:
                results = out_specs.tree.flatten_up_to(
                    self._run_here(leaves, self._lanes(stream)[0], stream, site, entry)
                )
            return distinct(results, leaves, which) if which else results
        except BaseException as error:
            failure_here(error, self._name, site, stream).raise_()

    def _run_plainly(self, leaves: Sequence[Any], which: Sequence[int], out_specs: OutSpecs) -> Sequence[jax.Array]:
        """Runs the function; nobody observes or records it."""
        if self.in_specs.are_positional:
            returned = [self._target(*leaves)]
        else:
            args, kwargs = self.in_specs.tree.unflatten(leaves)
            returned = [self._target(*args, **kwargs)]
        is_made_there = not which or is_new(returned[0])
        results = out_specs.fit_flat(returned, self._name)
        return results if is_made_there else distinct(results, leaves, which)

    def _run_if_lane_is_free(self, run: Callable[[], Sequence[jax.Array]], site: Site, stream: Stream) -> Any:
        """Runs a method in this thread; `NOT_FREE` if it would have to wait, or to undo what was made ahead."""
        lane = self._lane
        assert lane is not None
        if lane.calls:
            return scheduler.NOT_FREE
        call = Call(self._name, site, stream, [lane], run)
        if self._history is not None:
            call.entering = self._history.has_nothing_ahead
        return scheduler.run_if_free(call)

    def _run_at_once(self, leaves: Sequence[Any], site: Site, out_specs: OutSpecs) -> Sequence[jax.Array] | None:
        """Runs a brief call in this thread, with the results and failures of one on a thread, as only timing decides.

        None if it would have to wait for its turn, or for the devices where nobody waits for it, or if somebody
        observes or records it.
        """
        if out_specs.leaves and not self._cheapness.is_shown:  # with the wait for its arguments
            return None
        stream = current_stream()
        if not stream.is_private or stream.calls or current_calls():
            return None
        if events.listeners or journal.current is not None or is_profiled():
            return None
        if not out_specs.leaves and not self._readiness.of(leaves, may_wait=soon.are_one_by_one(stream)):
            return None
        if not _ARRAYS.issuperset(map(type, leaves)):
            if PendingArray in map(type, leaves):
                return None
            if not self._takes_numpy:
                leaves = put_host_arguments(leaves, when_used=not self._is_of_shards)
        run = functools.partial(self._run_plainly, leaves, range(len(out_specs.leaves)), out_specs)
        started = _perf_counter()
        try:
            results = run() if self._lane is None else self._run_if_lane_is_free(run, site, stream)
        except BaseException as error:
            failure = failure_here(error, self._name, site, stream, self._lanes(stream)[0])
            if is_interrupt(error):  # of the caller, not of the call
                failure.raise_()
            return [PendingArray.failed(failure, s.aval, s.sharding, s.committed) for s in out_specs.leaves]
        if results is scheduler.NOT_FREE:
            return None
        self._cheapness.measured(_perf_counter() - started)
        return results

    def submitting(
        self,
        pinned: Sequence[bool | None],
        site: Site,
        node: str = "",
        *,
        is_run_here: bool = False,
        is_made_if_brief: bool = False,
    ) -> Callable[..., Sequence[jax.Array]]:
        """A function that submits a call to a thread, for a program, and returns the flat results, which are pending.

        It takes the flat arguments: arrays on the hosts, and `HostArgument`s.

        Args:
            pinned: which of them may be donated while the call runs; None for one that nobody else has.
            site: where the user's code makes the call.
            node: its name in the plan.
            is_run_here: whether this thread runs it, which waits for it next; it has no results.
            is_made_if_brief: whether this thread runs it at once if it is brief, and its arguments are there.
        """

        def submit(*leaves: Any) -> Sequence[jax.Array]:
            out_specs = self.out_specs
            if out_specs is not None:
                is_brief = self._is_brief
                if is_brief and is_made_if_brief:
                    results = self._run_at_once(leaves, site, out_specs)
                    if results is not None:
                        return results
                is_brief = is_brief and bool(out_specs.leaves)  # then whoever waits for it had better run it
                if not is_run_here and self._runs_simply(is_brief=is_brief):
                    takes, stream = self._taken_all(leaves, pinned), self._stream or current_stream()
                    return submitted_flat(self._on_thread, takes, stream, out_specs, site, is_brief=is_brief)
            return self._submit_for_program(leaves, pinned, site, node, is_run_here)

        return submit

    def _submit_for_program(
        self, leaves: Sequence[Any], pinned: Sequence[bool | None], site: Site, node: str, is_run_here: bool
    ) -> Sequence[jax.Array]:
        if not self._is_prepared:
            self.prepare()
        if not self._is_here:
            return self._results_elsewhere()
        stream = self._stream or current_stream()
        out_specs = self.out_specs
        assert out_specs is not None
        if not is_run_here and self._runs_simply() and not self._is_for_waiter(out_specs):
            return submitted_flat(self._on_thread, self._taken_all(leaves, pinned), stream, out_specs, site)
        lanes, is_nested = self._lanes(stream)
        entry = self._entry(journal.current, stream, node, site) if journal.current is not None else None
        if entry is not None and entry.is_known:
            return entry.results(out_specs)
        if is_nested:  # made by a call of its own stream, it is part of that call
            made = self._ahead.made(out_specs, entry) if self._ahead is not None else None
            which = range(len(out_specs.leaves))
            return self._run_for_program(leaves, which, site, stream, out_specs, entry) if made is None else made

        def prepared() -> Prepared:
            made = self._prepared(self._taken_all(leaves, pinned), lanes, stream, out_specs, site, entry)
            made.call.is_brief = self._is_for_waiter(out_specs)
            return made

        if is_run_here:
            scheduler.run_unreceived(prepared().call)
            return ()
        if self._ahead is None:
            return prepared().submit()
        return self._ahead.take(out_specs, prepared, entry, refills=not self._is_shown_brief)

    def _is_for_waiter(self, out_specs: OutSpecs) -> bool:
        """Whether whoever waits for a call had better run it. Calls without results run beside the caller."""
        return bool(out_specs.leaves) and self._is_brief

    @property
    def _is_brief(self) -> bool:
        """Whether to have another thread run the next call takes longer than the call."""
        return self._is_shown_brief and (self._ahead is None or self._ahead.has_none)

    @property
    def _is_shown_brief(self) -> bool:
        return self._may_be_brief and self._cheapness.is_shown_alone
