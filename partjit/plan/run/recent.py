"""Calls of a program that are like one of the last, recognized at a glance.

What has to be equal is compared by identity first: types and shardings of arrays, jax's context, the entered stream.
"""

import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.tree_util import tree_flatten, tree_leaves

from partjit import events
from partjit._jax.caches import CacheGroup
from partjit._jax.dispatch import FastPath, make_cpp_function, results_are_checked
from partjit._jax.tracing import is_eager, trace_context
from partjit._jax.types import PyTree, PyTreeDef
from partjit.arguments import Numbered
from partjit.colocated.journaling import log as journal
from partjit.colocated.runtime.pending import PendingArray
from partjit.colocated.runtime.streams import Stream, entered_stream
from partjit.plan.plan import Plan
from partjit.plan.run.kinds import KINDS, are_arguments, flat_arguments, numbers_of
from partjit.plan.run.placing import Placing
from partjit.plan.run.run import Run
from partjit.plan.run.separation import Separation, TypedStatics
from partjit.retiring import delete_consumed

__all__ = ["Recent", "is_watched"]

_recents = CacheGroup("partjit recent calls")

_FIRST = 4
"""The kinds of calls that are compared one by one: training, evaluation, and a smaller batch at the end of each."""
_MOST = 1024
"""Those that are known: batches of many lengths, for instance. The others are found by a hash."""


_Report: TypeAlias = Callable[[Sequence[object]], None]
"""What warns of arguments that are resharded, or refuses them, as is requested at the time; from the flat arguments."""

_Continue: TypeAlias = Callable[[Sequence[object]], PyTree]
"""What does the rest of a plan whose first fragment was dispatched, from the arguments, flat or not, to the result."""


_Front: TypeAlias = tuple[TypedStatics, Callable[..., _Continue | None], bool]
"""The static arguments of calls; a C++ function that recognizes such calls by the others, dispatches their first
fragments, and returns what does the rest; and whether one of those reads leaves that are no arguments themselves: then
all are given the flat arguments."""


class _Call(NamedTuple):
    """A kind of calls.

    Attributes:
        context: everything besides its arguments that such a call depends on.
        tree, kinds: the structure of its arguments without static ones, and what has to be equal of these.
        statics: the static arguments.
        plan, run: the plan, and the same compiled.
        placing: what is done with the arguments.
        out_tree: the structure of the result.
        report: reports the arguments that are resharded; None if there are none.
    """

    context: object
    tree: PyTreeDef
    kinds: list[object]
    statics: TypedStatics
    plan: Plan
    placing: Placing
    run: Run
    out_tree: PyTreeDef
    report: _Report | None


_LEAST, _LARGEST = np.iinfo(np.int32).min, np.iinfo(np.int32).max


class Recent:
    """The last calls of one function, of different kinds.

    To compare the types of a model's many arrays by identity takes far less than to hash them, so the last few kinds
    are compared first.

    Args:
        static, host: the numbers and names of its static and of its host arguments.

    Attributes:
        has_learned: whether a call has become known for which there may be a short cut.
    """

    def __init__(self, static: Numbered, host: Numbered) -> None:
        self._separated = Separation(static, host)
        self._has_statics = self._separated.is_needed
        self._last: tuple[_Call, ...] = ()
        self._known: dict[Hashable, _Call] = {}  # these, and earlier ones
        self._remembering = threading.RLock()  # a finalizer, or a hash of the user, may come in between
        self._fronts: tuple[_Front, ...] = ()
        self._waits: dict[PyTreeDef, Sequence[int]] = {}  # see `_awaited`
        self._waits_in_trees = False
        self._has_waited = False  # for an argument of the last call
        self._short_cuts: dict[int, tuple[_Call, FastPath | None]] = {}  # by the id of the call
        self.has_learned = False
        _recents.add(self)

    def outcome(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        recognized: Callable[[Plan], object] | None = None,
        retires: bool = False,
    ) -> tuple[PyTree, None, bool] | None:
        """The outcome of an eager call for the C++ function, or None if it is of another kind than the last ones.

        Args:
            args, kwargs: what the function is called with.
            recognized: is called with the plan before it runs.
            retires: whether to do for it what `retiring` does; then None as well if something is passed twice.
        """
        if not self._last:
            return None
        statics: TypedStatics = ()
        if self._has_statics:
            args, kwargs, statics = self._separated(args, kwargs)
        if self._waits and recognized is None:  # else other processes have to know of it before something fails
            args, kwargs = self._awaited(args, kwargs)
        if (
            self._fronts
            and recognized is None
            and not events.listeners
            and journal.current is None
            and entered_stream() is None
            and not results_are_checked()
        ):
            for known, front, is_flat in self._fronts:
                if known == statics:
                    outcome = self._by_front(front, is_flat, args, kwargs, retires)
                    if outcome is not None:
                        return outcome
                    break
        flat = flat_arguments(args, kwargs)
        if flat is None:
            return None
        leaves, own_tree, found = flat
        if retires and len({*map(id, leaves)}) < len(leaves):
            return None
        call = self._recognized(own_tree, found, statics)
        if call is None:
            return None
        if call.report is not None:
            call.report(leaves)
        if recognized is not None:
            recognized(call.plan)
        call.kinds[:] = found  # the next call, with results of this one, is compared with these by identity
        try:
            placed = call.placing.apply(leaves)
        except OverflowError:  # whoever does not know the call says which integer has too many bits
            return None
        try:
            return call.run(placed, call.out_tree), None, False
        finally:  # a call that fails has consumed them as well
            if retires:
                delete_consumed(leaves)

    def _awaited(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """The arguments with the values of what the first fragment of such a call waits for: C++ recognizes these.

        Raises:
            Exception: a call failed whose result is one of the arguments.
        """
        if not self._waits_in_trees and PendingArray not in map(type, args):
            self._note_wait(waits=False)
            return args, kwargs
        try:
            leaves, tree = tree_flatten((args, kwargs))
        except ValueError:  # keys that do not compare
            return args, kwargs
        pending = [i for i, leaf in enumerate(leaves) if type(leaf) is PendingArray]
        self._note_wait(waits=bool(pending))
        own = {*self._waits.get(tree, ())}.intersection(pending)
        if not own or len({id(leaves[i]) for i in pending}) < len(pending):  # it may be donated
            return args, kwargs
        for i in own:
            leaves[i] = leaves[i].value()
        return tree.unflatten(leaves)

    def _note_wait(self, *, waits: bool) -> None:
        """Takes note of whether a call waits for an argument: there may be a short cut for the first that does not."""
        self.has_learned = self.has_learned or (self._has_waited and not waits)
        self._has_waited = waits

    def _recognized(self, tree: PyTreeDef, kinds: list[object], statics: TypedStatics) -> _Call | None:
        """The last call like one with such arguments, if it is known."""
        context = _context()
        for call in self._last:
            if kinds == call.kinds and tree == call.tree and statics == call.statics and context == call.context:
                return call
        if len(self._known) <= _FIRST:
            return None
        try:
            found = self._known.get((context, tree, tuple(kinds), statics))
        except TypeError:  # whoever does not know the call says which static argument has no hash
            return None
        if found is not None:
            self._last = (found, *self._last[: _FIRST - 1])
        return found

    def knows(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> bool:
        """Whether a call with these arguments is like one of the last ones."""
        if not self._last or not is_eager():
            return False
        statics: TypedStatics = ()
        if self._has_statics:
            args, kwargs, statics = self._separated(args, kwargs)
        flat = flat_arguments(args, kwargs)
        if flat is None:
            return False
        return self._recognized(flat[1], flat[2], statics) is not None

    def remember(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        tree: PyTreeDef,
        leaves: Sequence[object],
        plan: Plan,
        placing: Placing,
        run: Run,
        out_tree: PyTreeDef,
        report: _Report | None,
    ) -> None:
        """Has calls like this one recognized from here on.

        Args:
            args, kwargs: what the function was called with.
            tree, leaves: the same without static arguments, flat.
            plan: the plan.
            placing: what is done with such arguments.
            run: the plan, compiled.
            out_tree: the structure of the result.
            report: reports the arguments that are resharded; None if there are none.
        """
        if all(type(leaf) in KINDS for leaf in leaves):
            kinds = [KINDS[type(leaf)](leaf) for leaf in leaves]
            statics = self._separated(args, kwargs)[2]
            call = _Call(_context(), tree, kinds, statics, plan, placing, run, out_tree, report)
            with self._remembering:
                self._last = (call, *self._last)[:_FIRST]
                self._known[call.context, tree, tuple(kinds), statics] = call
                if len(self._known) > _MOST:
                    del self._known[next(iter(self._known))]
            if run.rest is not None and placing.for_calls() is not None:
                is_flat = not are_arguments(tree, run.rest.inputs)
                with self._remembering:
                    is_flat = is_flat or any(was_flat for known, _, was_flat in self._fronts if known == statics)
                    self._renew_front(statics, is_flat, plan.name)

    def _renew_front(self, statics: TypedStatics, is_flat: bool, name: str) -> None:
        """Makes a new C++ function for calls: the old one does not ask again for those that it did not know."""
        learn = partial(self._learn_by_front, statics, is_flat)
        front = make_cpp_function(learn, name, learn, ((), ()), object())
        others = [other for other in self._fronts if other[0] != statics]
        self._fronts = ((statics, front, is_flat), *others[: _FIRST - 1])

    def _by_front(
        self,
        front: Callable[..., _Continue | None],
        is_flat: bool,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        retires: bool,
    ) -> tuple[PyTree, None, bool] | None:
        """The outcome of a call that C++ recognizes, and whose first fragment it dispatches, or None."""
        leaves: Sequence[Any] = args
        if retires or is_flat:
            try:
                leaves = tree_leaves((args, kwargs))
            except ValueError:  # keys that do not compare
                return None
            if retires and len({*map(id, leaves)}) < len(leaves):
                return None
        for leaf in leaves:
            if isinstance(leaf, int) and not _LEAST <= leaf <= _LARGEST:
                return None  # whoever does not know the call says which integer has too many bits
        go_on = front(*args, **kwargs)
        if go_on is None:
            return None
        if retires:  # what the first fragment has consumed, while the devices compute
            delete_consumed(leaves)
        return go_on(leaves if is_flat else args), None, False

    def _learn_by_front(
        self, statics: TypedStatics, is_flat: bool, *args: PyTree, **kwargs: PyTree
    ) -> tuple[None, FastPath | None, bool]:
        """What the C++ function needs to recognize a call like this one, None if it is unknown; runs nothing."""
        flat = flat_arguments(args, kwargs)
        if flat is None:
            return None, None, False
        leaves, own_tree, found = flat
        call = self._recognized(own_tree, found, statics)
        if call is None:
            return None, None, False
        rest, moves = call.run.rest, call.placing.for_calls()
        if rest is not None and any(type(leaves[i]) is PendingArray for i in rest.dispatched):
            with self._remembering:
                if own_tree not in self._waits:
                    known = self._waits if len(self._waits) < _MOST else {}
                    self._waits = {**known, own_tree: rest.dispatched}
                    self._waits_in_trees |= not are_arguments(own_tree, rest.dispatched)
                    self._renew_front(statics, is_flat, call.plan.name)
            return None, None, False
        if rest is None or moves is None or not rest.are_taken(leaves):
            return None, None, False
        numbers = range(own_tree.num_leaves) if is_flat else numbers_of(own_tree)
        self.has_learned = True
        return None, rest.fast_path(call.out_tree, moves, numbers), False

    def short_cut(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], is_fit: Callable[[Any], bool]
    ) -> tuple[FastPath, Collection[Stream]] | None:
        """What C++ needs to dispatch calls like one with these arguments by itself, and the streams of the program.

        Args:
            args, kwargs: the arguments.
            is_fit: whether that is possible with such an array among them.

        Returns:
            None where there is no such way.
        """
        statics: TypedStatics = ()
        count = len(args)
        if self._has_statics:
            args, kwargs, statics = self._separated(args, kwargs)
        flat = flat_arguments(args, kwargs)
        if flat is None or results_are_checked():
            return None
        leaves, own_tree, found = flat
        call = self._recognized(own_tree, found, statics)
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        if call is None or PendingArray in map(type, arrays) or not all(map(is_fit, arrays)):
            return None
        rest, moves = call.run.rest, call.placing.for_calls()
        if rest is None or moves is None or not rest.are_taken(leaves):
            return None
        known = self._short_cuts.get(id(call))
        if known is None or known[0] is not call:
            read = self._separated.reading(own_tree, rest.inputs, count)
            known = call, rest.short_cut(call.out_tree, moves, read)
            if known[1] is not None:
                self._short_cuts = {**(self._short_cuts if len(self._short_cuts) < _MOST else {}), id(call): known}
        return None if known[1] is None else (known[1], rest.streams)

    def clear(self) -> None:
        """Recognizes nothing until the next call."""
        with self._remembering:
            self._last, self._known, self._fronts, self._waits, self._short_cuts = (), {}, (), {}, {}


def is_watched(streams: Iterable[Stream]) -> bool:
    """Whether somebody observes or records calls, or has ever put calls on one of these streams of a program."""
    return bool(events.listeners) or journal.current is not None or any(stream.was_entered for stream in streams)


def _context() -> tuple[object, ...]:
    """Everything besides its arguments that a call depends on."""
    return trace_context(), entered_stream(), results_are_checked()
