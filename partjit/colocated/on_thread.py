"""How the calls of a specialization run on threads: what they take along from their callers, and their results."""

import contextvars
import functools
import time
import weakref
from collections.abc import Callable, Sequence

import jax

from partjit._jax.threads import ThreadSettings
from partjit._jax.types import PyTree, PyTreeDef
from partjit.colocated.journaling.entries import Ahead, Entry
from partjit.colocated.runtime.call import Call, Lane
from partjit.colocated.runtime.failures import Site
from partjit.colocated.runtime.observation import Observer, observe_call, profiled
from partjit.colocated.runtime.pending import PendingArray
from partjit.colocated.runtime.pins import Take, borrowed, given_back
from partjit.colocated.runtime.run_ahead import Prepared
from partjit.colocated.runtime.specs import OutSpecs
from partjit.colocated.runtime.streams import Stream, inside

__all__ = ["OnThread"]

_perf_counter = time.perf_counter


class OnThread:
    """The calls of a specialization that run on threads.

    Args:
        name: the name of the function.
        target: the function.
        tree: the structure of its arguments.
        measured: gets the seconds that the function took; None if nobody wants to know.
    """

    __slots__ = ("_measured", "_name", "_target", "_tree")

    def __init__(
        self, name: str, target: Callable[..., PyTree], tree: PyTreeDef, measured: Callable[[float], None] | None
    ) -> None:
        self._name = name
        self._target = target
        self._tree = tree
        self._measured = measured

    def prepared(
        self,
        takes: list[Take],
        lanes: Sequence[Lane],
        stream: Stream,
        out_specs: OutSpecs,
        site: Site,
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
        settings, context, observe = ThreadSettings(), contextvars.copy_context(), observe_call(self._name, stream)
        body = functools.partial(settings.run, context.run, self._run, takes, stream, out_specs, observe, record)
        call = Call(self._name, site, stream, lanes, body)
        results = [PendingArray(call, spec.aval, spec.sharding, spec.committed) for spec in out_specs.leaves]
        call.receivers = [*map(weakref.ref, results)]
        return Prepared(call, results, out_specs, record if isinstance(record, Ahead) else None)

    def _run(
        self,
        takes: list[Take],
        stream: Stream,
        out_specs: OutSpecs,
        observe: Observer,
        record: Entry | Ahead | None,
    ) -> Sequence[jax.Array]:
        inside(stream)
        arrays = borrowed(takes)
        try:
            if record is None:
                results = self._results(arrays, out_specs, observe)
            else:
                with record:
                    results = self._results(arrays, out_specs, observe)
                    record.done(results)
            return given_back(takes, arrays, results)
        finally:  # a traceback may keep this frame
            takes.clear()
            arrays.clear()

    def _results(self, arrays: Sequence[jax.Array], out_specs: OutSpecs, observe: Observer) -> list[jax.Array]:
        args, kwargs = self._tree.unflatten(arrays)
        started = _perf_counter()
        with profiled(self._name):
            result = observe(self._target)(*args, **kwargs)
        if self._measured is not None:
            self._measured(_perf_counter() - started)
        results = out_specs.fit_flat(result, self._name)
        for array in results:
            if array.is_deleted():
                return out_specs.fit_leaves(result, self._name)  # which names it
        return results
