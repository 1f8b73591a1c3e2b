"""How the calls of a specialization run on threads: what they take along from their callers, and their results."""

import contextlib
import contextvars
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from partjit._jax.arrays import ArrayImpl, is_computed
from partjit._jax.dispatch import is_profiled
from partjit._jax.threads import ThreadSettings
from partjit._jax.types import PyTree, PyTreeDef
from partjit.arguments import are_positional
from partjit.colocated.cheapness import Cheapness
from partjit.colocated.journaling.entries import Ahead, Entry
from partjit.colocated.runtime.call import Call, Lane, current_calls
from partjit.colocated.runtime.failures import CodeSite, Site
from partjit.colocated.runtime.history import History
from partjit.colocated.runtime.host_values import is_new
from partjit.colocated.runtime.observation import observe_call, profiled
from partjit.colocated.runtime.out_specs import OutSpecs
from partjit.colocated.runtime.pending import PendingArray
from partjit.colocated.runtime.pins import Taken, borrowed, distinct, given_back
from partjit.colocated.runtime.returned_numbers import returned_number
from partjit.colocated.runtime.run_ahead import Prepared
from partjit.colocated.runtime.streams import Stream, inside

__all__ = ["OnThread"]

_perf_counter = time.perf_counter


class OnThread:
    """The calls of a specialization that run on threads.

    What can be known of all of them is found out here, once, since every microsecond of a call is one of its caller's.

    Attributes:
        name: the name of the function.
        lane, history: those of its object, if it is a method of one.
        uses_jax: whether the function may use jax.
        cheapness: hears how long calls took; None if nobody wants to know.

    Args:
        target: the function.
        tree: the structure of its arguments.
    """

    __slots__ = ("_is_flat", "_target", "_tree", "cheapness", "history", "lane", "name", "uses_jax")

    def __init__(
        self,
        name: str,
        target: Callable[..., PyTree],
        tree: PyTreeDef,
        cheapness: Cheapness | None,
        lane: Lane | None,
        history: History | None,
        *,
        uses_jax: bool,
    ) -> None:
        self.name = name
        self.lane = lane
        self.history = history
        self.uses_jax = uses_jax
        self._target = target
        self._tree = tree
        self.cheapness = cheapness
        self._is_flat = are_positional(tree)

    def prepared(
        self,
        takes: list[Taken],
        lanes: Sequence[Lane],
        stream: Stream,
        out_specs: OutSpecs,
        site: Site | CodeSite,
        record: Entry | Ahead | None,
    ) -> Prepared:
        """A call made here and now that is to run on a thread.

        Args:
            takes: return the flat arguments there.
            lanes, stream: its lanes, and its stream.
            out_specs: the specs of its results.
            site: where it is made.
            record: what gets its results for the journal, if one is open.
        """
        settings, context = ThreadSettings.here(), contextvars.copy_context()
        target = observe_call(self.name, stream)(self._target)
        body = functools.partial(
            settings.run, context.run, self._run_observed, takes, stream, out_specs, target, record
        )
        call = Call(self.name, site, stream, lanes, body)
        call.needed, call.uses_jax = takes, self.uses_jax
        results = [PendingArray(call, spec.aval, spec.sharding, spec.committed) for spec in out_specs.leaves]
        call.receivers = [*map(weakref.ref, results)]
        return Prepared(call, results, out_specs, record if isinstance(record, Ahead) else None)

    def run(self, takes: list[Taken], stream: Stream, out_specs: OutSpecs) -> Sequence[Any]:
        """Runs a call that nobody observes or records, in its thread and context; arguments as of `prepared`."""
        inside(stream)
        arrays = borrowed(takes)
        try:
            results = self._results(arrays, out_specs, self._target, is_read=not out_specs.is_used)
            return given_back(takes, arrays, results)
        finally:  # a traceback may keep this frame
            takes.clear()
            arrays.clear()

    def _run_observed(
        self,
        takes: list[Taken],
        stream: Stream,
        out_specs: OutSpecs,
        target: Callable[..., PyTree],
        record: Entry | Ahead | None,
    ) -> Sequence[Any]:
        inside(stream)
        arrays = borrowed(takes)
        try:
            if record is None:
                results = self._results(arrays, out_specs, target, is_read=current_calls()[-1].is_brief)
            else:
                with record:
                    results = self._results(arrays, out_specs, target)
                    record.done(results)
            return given_back(takes, arrays, results)
        finally:
            takes.clear()
            arrays.clear()

    def _results(
        self,
        arrays: Sequence[jax.Array],
        out_specs: OutSpecs,
        target: Callable[..., PyTree],
        *,
        is_read: bool = False,
    ) -> list[Any]:
        """The flat results; a number alone is not put on devices if it `is_read`, as far as is known."""
        if is_profiled():
            target = functools.partial(_profiled, self.name, target)
        if self.cheapness is not None:
            target = functools.partial(_measured, self.cheapness, arrays, target)
        if self._is_flat:
            returned = [target(*arrays)]
        else:
            args, kwargs = self._tree.unflatten(arrays)
            returned = [target(*args, **kwargs)]
        if returned[0] is None and out_specs.is_none:
            return []
        number = returned_number(out_specs, returned, self.name) if is_read else None
        if number is not None:
            return [number]
        is_made_here = is_new(returned[0])
        results = out_specs.fit_flat(returned, self.name)
        if is_made_here:
            return results
        for array in results:
            if array.is_deleted():
                return out_specs.fit_leaves(returned[0], self.name)  # which names it
        return [*distinct(results, ())] if len(results) > 1 else results


def _profiled(name: str, target: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree) -> PyTree:
    with profiled(name):
        return target(*args, **kwargs)


def _measured(
    cheapness: Cheapness, arrays: Sequence[jax.Array], target: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree
) -> PyTree:
    began = started = _perf_counter()
    if cheapness.may_be_cheap:
        for array in arrays:
            if type(array) is ArrayImpl and not array.is_deleted() and not is_computed(array):
                with contextlib.suppress(Exception):  # which the function sees
                    array.block_until_ready()
        started = _perf_counter()
    returned = target(*args, **kwargs)
    ended = _perf_counter()
    cheapness.measured(ended - began, ended - started)
    return returned
