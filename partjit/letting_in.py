"""Letting further calls in while the first one with its signature still runs.

The C++ function takes a cache miss for a compilation, which one thread does while others wait; but a plan calls Python,
which may wait for another thread's call or make this very one. So the entry of such a call is dropped, and replaced by
one whose compilation ends at once. C++ drops all entries of a function or none. Where many signatures take turns they
are not replaced for a while: then each call makes an entry, and drops it.

Where all that a plan needs of its arguments is what its first fragment takes, that entry is a short cut: C++ dispatches
the fragment, and calls what does the rest.
"""

import collections
import functools
import math
import operator
import threading
import time
from collections.abc import Collection
from typing import Any

from partjit import short_cuts
from partjit._jax.dispatch import FastPath
from partjit._jax.types import PyTree

__all__ = ["LettingIn", "this_thread"]

_MOST_REPLACED = 16
_SECONDS_APART = 0.1
"""After so long it is negligible what it costs to replace as many once more."""


class LettingIn:
    """Of the entries of one function those that let further calls in.

    Attributes:
        functions: the C++ functions.
        has_plans_only: whether plans have run all calls so far. Then it lets calls in of which nothing is known yet.
        streams, may_shorten: see `short_cuts`.
    """

    def __init__(self) -> None:
        self.functions: tuple[Any, ...] = ()
        self.streams: Collection[object] = ()
        self.may_shorten = False
        self._count = 0  # of the entries that do
        self._replaced, self._latest = 0, -math.inf  # how many there were in quick succession; when the last
        self.has_plans_only = True

    @property
    def is_new(self) -> bool:
        """Whether there is an entry that lets nobody in."""
        is_new = False
        for function in self.functions:  # not `any`, which takes several times as long
            is_new = is_new or function._cache_size() > self._count
        return is_new

    def replaces_another(self) -> bool:
        """Whether to replace the entry that lets nobody in; if there were too many lately, all are dropped."""
        is_soon = time.monotonic() - self._latest < _SECONDS_APART
        self._replaced = self._replaced + self.is_new if is_soon else 0
        if self._replaced <= _MOST_REPLACED:
            return True
        self.clear()
        return False

    def let_in(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        short_cut: FastPath | None = None,
        streams: Collection[object] = (),
    ) -> None:
        """Lets further calls with the signature of a call in.

        Args:
            args, kwargs: its arguments.
            short_cut: what C++ needs to dispatch such calls, if it may.
            streams: those that the program itself puts calls on.
        """
        self._latest = time.monotonic()
        first, *others = [functools.partial(function, *args, **kwargs) for function in self.functions]
        steps = [*(function._clear_cache for function in self.functions), first]  # users call the first one
        if others:
            steps += [functools.partial(setattr, this_thread, "short_cut", None), *others]
        this_thread.is_letting_in, this_thread.short_cut = True, short_cut
        try:
            # C calls them: another thread that came in between would make an entry, which this one would then wait for.
            collections.deque(map(operator.call, steps), maxlen=0)
        finally:
            this_thread.is_letting_in, this_thread.short_cut = False, None
        self._count = 1
        if short_cut is not None:
            self.streams = streams
            short_cuts.opened(self)

    def take_back(self) -> None:
        """Has C++ make an entry that dispatches a call itself, for no plan runs it: the next such call makes one."""
        if self.has_plans_only:
            self.has_plans_only = False
            self.clear()

    def count_one_more(self) -> None:
        """Takes note that the call which has made the only new entry has ended: nobody has to wait for it any more."""
        if max(function._cache_size() for function in self.functions) == self._count + 1:
            self._count += 1

    def clear(self) -> None:
        """Forgets all entries."""
        self._count = 0
        for function in self.functions:
            function._clear_cache()


class _OfThread(threading.local):
    is_letting_in = False
    short_cut: FastPath | None = None


this_thread = _OfThread()
"""Its `is_letting_in` says whether this call of this thread only makes an entry, and computes nothing; that entry has
`short_cut`."""
