"""Calls that take nothing into account but their lanes: how they run on threads in as few steps as possible.

Nobody observes or records them, they are not made ahead, and no other call makes them. Their caller and the thread that
runs them share one interpreter, so every step of either is time that the caller does not have. What is the same for all
calls of a specialization is found out once; a call is one object, which its caller fills and a thread runs.
"""

import contextvars
import time
import weakref
from collections.abc import Sequence
from typing import Any

import jax

from partjit._jax.threads import ThreadSettings
from partjit._jax.types import PyTree
from partjit.colocated.cheapness import TRIAL_SECONDS
from partjit.colocated.on_thread import OnThread
from partjit.colocated.runtime import scheduler
from partjit.colocated.runtime.call import Call
from partjit.colocated.runtime.failures import CodeSite, Site
from partjit.colocated.runtime.history import Made
from partjit.colocated.runtime.out_specs import OutSpecs
from partjit.colocated.runtime.pending import PendingArray
from partjit.colocated.runtime.pins import Taken
from partjit.colocated.runtime.scheduler import submit
from partjit.colocated.runtime.streams import Stream

__all__ = ["submitted", "submitted_flat"]

_reference = weakref.ref
_settings_here = ThreadSettings.here
_copy_context = contextvars.copy_context


def submitted(
    on_thread: OnThread, takes: list[Taken], stream: Stream, out_specs: OutSpecs, site: Site | CodeSite
) -> PyTree:
    """Submits a call, and returns its results; the arguments are those of `submitted_flat`."""
    call = _SimpleCall(on_thread, takes, stream, out_specs, site)
    results = _submitted(call, out_specs)
    cheapness = on_thread.cheapness
    if cheapness is not None and cheapness.trials > 0 and not scheduler.is_changing_lanes():
        cheapness.tried(scheduler.join(call, time.monotonic() + TRIAL_SECONDS))
    return results[0] if out_specs.is_leaf else out_specs.tree.unflatten(results)


def submitted_flat(
    on_thread: OnThread,
    takes: list[Taken],
    stream: Stream,
    out_specs: OutSpecs,
    site: Site | CodeSite,
    *,
    is_brief: bool = False,
) -> Sequence[jax.Array]:
    """Submits a call in the lane of its stream, and in that of its object if it has one; returns its flat results.

    Args:
        on_thread: what it calls, for a thread.
        takes: return the flat arguments there.
        stream: its stream.
        out_specs: the specs of its results.
        site: where it is made.
        is_brief: whether a thread that waits for it had better run it itself.
    """
    call = _SimpleCall(on_thread, takes, stream, out_specs, site)
    call.is_brief = is_brief
    return _submitted(call, out_specs)


def _submitted(call: "_SimpleCall", out_specs: OutSpecs) -> Sequence[jax.Array]:
    """The flat results of a call that is submitted here."""
    if not out_specs.leaves:
        submit(call)
        return ()
    results = [PendingArray(call, spec.aval, spec.sharding, spec.committed) for spec in out_specs.leaves]
    call.receivers = [*map(_reference, results)]
    submit(call)
    return results


class _SimpleCall(Call):
    """A call and what it took along from its caller.

    Attributes:
        settings, context: those of its caller.
        on_thread, takes, out_specs: what `submitted_flat` got.
        crossed: the calls of its object made ahead that it must not see.
    """

    __slots__ = ("context", "crossed", "on_thread", "out_specs", "settings", "takes")

    def __init__(
        self, on_thread: OnThread, takes: list[Taken], stream: Stream, out_specs: OutSpecs, site: Site | CodeSite
    ) -> None:
        lane = on_thread.lane
        self._begin(on_thread.name, site, stream, (stream,) if lane is None else (stream, lane))
        self.settings, self.context = _settings_here(), _copy_context()
        self.on_thread = on_thread
        self.takes = takes
        self.needed, self.uses_jax = takes, on_thread.uses_jax
        self.out_specs = out_specs
        self.crossed: Sequence[Made] = ()
        if on_thread.history is not None:
            self.entering = self._enter_history

    def _enter_history(self) -> bool:
        assert self.on_thread.history is not None
        self.crossed = self.on_thread.history.crossed()
        return True

    def _called(self) -> Sequence[Any]:
        if self.on_thread.history is not None:
            self.on_thread.history.catch_up(self.name, self.crossed)
        run: Any = self.context.run
        if self.settings.are_here():
            return run(self.on_thread.run, self.takes, self.stream, self.out_specs)
        return self.settings.run(run, self.on_thread.run, self.takes, self.stream, self.out_specs)

    def drop(self) -> None:
        self.takes.clear()
