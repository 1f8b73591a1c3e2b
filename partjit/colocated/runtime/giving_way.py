"""Calls of other threads that come in between two calls that an executable waits for.

Such an executable runs its calls in the place of one call, in the lanes of their stream and of their objects. It may be
waiting for just what another thread's call of one of these objects says: a loop goes on until that ends it. The
executable has not ended, so nothing says that all of its calls come before that one. The device waits meanwhile, so the
other call must not wait for devices: its function does not use jax, its arguments are there, and it is first everywhere
else.
"""

import functools
import types
from collections.abc import Collection

from partjit._jax.arrays import ArrayImpl, is_computed
from partjit.colocated.runtime import lanes, scheduler
from partjit.colocated.runtime.call import Call
from partjit.colocated.runtime.pending import OnDemand, PendingArray

__all__ = ["give_way"]


def give_way(call: Call, among: Collection[Call] | None = None) -> None:
    """Lets those that wait right behind a call of this thread run before it goes on; those that come later wait.

    Args:
        call: the call.
        among: the only ones that may run, which may wait for devices; by default all that wait for nothing.
    """
    for lane in call.lanes:
        for other in [*lane.calls][1:]:
            may_run = _waits_for_nothing(other) if among is None else other in among
            if not (may_run and lanes.let_ahead(other, call)):
                break
            scheduler.start(other)
            scheduler.join(other)
    for lane in call.lanes:
        while (first := lane.calls[0]) is not call:  # which one that ran here has made
            scheduler.join(first)


def _waits_for_nothing(call: Call) -> bool:
    return call.needed is not None and all(map(_is_there, call.needed))


def _is_there(taken: object) -> bool:
    """Whether an argument, or what returns it in the thread of the call, waits for nothing, as far as is known."""
    source = taken
    if isinstance(taken, types.MethodType):
        source = taken.__self__
    elif isinstance(taken, functools.partial) and taken.args:  # of a number that was kept
        source = taken.args[0]
    if type(source) is PendingArray:
        return source.is_ready()
    if isinstance(source, OnDemand):
        if source.source is None:
            return True
        source = source.source
    return type(source) is ArrayImpl and not source.is_deleted() and is_computed(source)
