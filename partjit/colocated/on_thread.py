"""How the calls of a specialization run on threads: what they take along from their callers, and their results."""

import contextvars
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from partjit._jax.dispatch import is_profiled
from partjit._jax.threads import ThreadSettings
from partjit._jax.types import PyTree, PyTreeDef
from partjit.arguments import are_positional
from partjit.colocated.journaling.entries import Ahead, Entry
from partjit.colocated.runtime import scheduler
from partjit.colocated.runtime.call import Call, Lane
from partjit.colocated.runtime.failures import CodeSite, Site
from partjit.colocated.runtime.observation import observe_call, profiled
from partjit.colocated.runtime.pending import PendingArray
from partjit.colocated.runtime.pins import Taken, borrowed, distinct, given_back
from partjit.colocated.runtime.run_ahead import Prepared
from partjit.colocated.runtime.specs import OutSpecs
from partjit.colocated.runtime.streams import Stream, inside

__all__ = ["OnThread"]

_perf_counter = time.perf_counter
_reference = weakref.ref


class OnThread:
    """The calls of a specialization that run on threads.

    What can be known of all of them is found out here, once, since every microsecond of a call is one of its caller's.

    Args:
        name: the name of the function.
        target: the function.
        tree: the structure of its arguments.
        measured: gets the seconds that the function took; None if nobody wants to know.
    """

    __slots__ = ("_is_flat", "_measured", "_name", "_target", "_tree")

    def __init__(
        self, name: str, target: Callable[..., PyTree], tree: PyTreeDef, measured: Callable[[float], None] | None
    ) -> None:
        self._name = name
        self._target = target
        self._tree = tree
        self._measured = measured
        self._is_flat = are_positional(tree)

    def submitted(self, takes: list[Taken], stream: Stream, out_specs: OutSpecs | None, site: CodeSite) -> PyTree:
        """Submits a call, and returns its results; arguments as of `submitted_flat`."""
        assert out_specs is not None
        results = self.submitted_flat(takes, stream, out_specs, site)
        return results[0] if out_specs.is_leaf else out_specs.tree.unflatten(results)

    def submitted_flat(
        self, takes: list[Taken], stream: Stream, out_specs: OutSpecs, site: Site | CodeSite
    ) -> Sequence[jax.Array]:
        """Submits a call in the lane of its stream alone that nobody observes or records; as `prepared` otherwise."""
        body = _Body(ThreadSettings.here(), contextvars.copy_context(), self, takes, stream, out_specs)
        call = Call(self._name, site, stream, (stream,), body)
        results = [PendingArray(call, spec.aval, spec.sharding, spec.committed) for spec in out_specs.leaves]
        if results:
            call.receivers = [*map(_reference, results)]
        scheduler.submit(call)
        return results

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
        target = observe_call(self._name, stream)(self._target)
        body = functools.partial(settings.run, context.run, self._run, takes, stream, out_specs, target, record)
        call = Call(self._name, site, stream, lanes, body)
        results = [PendingArray(call, spec.aval, spec.sharding, spec.committed) for spec in out_specs.leaves]
        call.receivers = [*map(weakref.ref, results)]
        return Prepared(call, results, out_specs, record if isinstance(record, Ahead) else None)

    def run_simply(self, takes: list[Taken], stream: Stream, out_specs: OutSpecs) -> Sequence[jax.Array]:
        """Runs a call that nobody observes or records, in its thread and context."""
        inside(stream)
        arrays = borrowed(takes)
        try:
            return given_back(takes, arrays, self._results(arrays, out_specs, self._target))
        finally:  # a traceback may keep this frame
            takes.clear()
            arrays.clear()

    def _run(
        self,
        takes: list[Taken],
        stream: Stream,
        out_specs: OutSpecs,
        target: Callable[..., PyTree],
        record: Entry | Ahead | None,
    ) -> Sequence[jax.Array]:
        inside(stream)
        arrays = borrowed(takes)
        try:
            if record is None:
                results = self._results(arrays, out_specs, target)
            else:
                with record:
                    results = self._results(arrays, out_specs, target)
                    record.done(results)
            return given_back(takes, arrays, results)
        finally:
            takes.clear()
            arrays.clear()

    def _results(
        self, arrays: Sequence[jax.Array], out_specs: OutSpecs, target: Callable[..., PyTree]
    ) -> list[jax.Array]:
        if is_profiled():
            target = functools.partial(_profiled, self._name, target)
        started = _perf_counter()
        if self._is_flat:
            returned = [target(*arrays)]
        else:
            args, kwargs = self._tree.unflatten(arrays)
            returned = [target(*args, **kwargs)]
        if self._measured is not None:
            self._measured(_perf_counter() - started)
        results = out_specs.fit_flat(returned, self._name)
        for array in results:
            if array.is_deleted():
                return out_specs.fit_leaves(returned[0], self._name)  # which names it
        return [*distinct(results, ())] if len(results) > 1 else results


class _Body:
    """The body of a call: what it took along from its caller, and how it runs with that."""

    __slots__ = ("_context", "_on_thread", "_out_specs", "_settings", "_stream", "_takes")

    def __init__(
        self,
        settings: ThreadSettings,
        context: contextvars.Context,
        on_thread: OnThread,
        takes: list[Taken],
        stream: Stream,
        out_specs: OutSpecs,
    ) -> None:
        self._settings = settings
        self._context = context
        self._on_thread = on_thread
        self._takes = takes
        self._stream = stream
        self._out_specs = out_specs

    def __call__(self) -> Sequence[jax.Array]:
        run: Any = self._context.run
        return self._settings.run(run, self._on_thread.run_simply, self._takes, self._stream, self._out_specs)


def _profiled(name: str, target: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree) -> PyTree:
    with profiled(name):
        return target(*args, **kwargs)
