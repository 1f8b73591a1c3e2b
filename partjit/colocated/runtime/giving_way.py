"""Calls of other threads that come in between two calls that an executable waits for.

Such an executable runs its calls in the place of one call, in the lanes of their stream and of their objects. It may be
waiting for just what another thread's call of one of these objects says: a loop goes on until that ends it. The
executable has not ended, so nothing says that all of its calls come before that one. The other call must wait for
nothing: its arguments are there, and it is first everywhere else. Where several devices wait meanwhile, its function
does not use jax either: a program of theirs would wait for them. A single CPU device runs others beside this one.
"""

import functools
import types
from collections.abc import Collection

from partjit._jax.arrays import ArrayImpl, PRNGKeyArray, is_computed
from partjit.colocated.runtime import lanes, scheduler
from partjit.colocated.runtime.call import Call
from partjit.colocated.runtime.moved_by_calls import MovedByCall
from partjit.colocated.runtime.pending import OnDemand, PendingArray

__all__ = ["give_way", "is_there"]


def give_way(call: Call, *, to_users_of_jax: bool, among: Collection[Call] | None = None) -> None:
    """Lets those that wait right behind a call of this thread run before it goes on; those that come later wait.

    Args:
        call: that of this thread.
        to_users_of_jax: whether also those whose functions may use jax.
        among: the only ones that may run, also if they wait for something; by default all that wait for nothing.
    """
    for lane in call.lanes:
        for other in [*lane.calls][1:]:
            if other.uses_jax and not to_users_of_jax:
                break
            may_run = _waits_for_nothing(other) if among is None else other in among
            if not (may_run and lanes.let_ahead(other, call)):
                break
            scheduler.start(other)
            scheduler.join(other)
    for lane in call.lanes:
        while (first := lane.calls[0]) is not call:  # which one that ran here has made
            scheduler.join(first)


def _waits_for_nothing(call: Call) -> bool:
    return call.needed is not None and all(map(is_there, call.needed))


def is_there(taken: object) -> bool:
    """Whether an argument, or what returns it in the thread of the call (`Taken`), waits for nothing, as is known."""
    if isinstance(taken, types.MethodType):
        return is_there(taken.__self__)
    if isinstance(taken, functools.partial):
        return is_there(taken.args[0])
    if isinstance(taken, MovedByCall):
        return taken.moved_from is None or is_there(taken.moved_from)
    if isinstance(taken, OnDemand):
        return taken.source is None or is_there(taken.source)
    if type(taken) is PendingArray:
        return taken.is_ready()
    return isinstance(taken, ArrayImpl | PRNGKeyArray) and not taken.is_deleted() and is_computed(taken)
