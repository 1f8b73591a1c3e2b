"""A call: its data, and how it runs and hands over its results.

When it runs is decided by its lanes, in `scheduler`; nothing here waits.
"""

import collections
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from partjit._jax.types import PyTree
from partjit.colocated.runtime.failures import CodeSite, Failure, PoisonedError, Site, site_of
from partjit.colocated.runtime.interrupts import Flag, Presence, is_interrupt

__all__ = ["NOBODY", "Call", "Lane", "Wait", "Waiter", "current_calls", "descends_from", "failure_here", "roots_so_far"]

NOBODY = object()
"""The claimant of a call that is given up."""


class Lane:
    """A queue of calls that run one at a time.

    Attributes:
        calls: those that have not ended; the first one runs or may run.
        size: how many it holds before callers that add another have to wait.
        is_of_object: whether it is that of the methods of an object.
        room: set when there may be room again for waiting callers.
        latest: when a thread last had nothing more to run in it, in seconds of `time.monotonic`; see `soon`.
        at_once_until: until when a call wakes the thread that waits for it, in the same seconds; see `soon`.
        at_once_seconds: for how long that was last so because no more calls came.
        moments: how many moments a thread waits for more calls; see `soon`.
        waiter: the thread that waits for the next call, which so needs no other one, if there is one; see `soon`.
    """

    __slots__ = (
        "__weakref__",
        "at_once_seconds",
        "at_once_until",
        "calls",
        "is_of_object",
        "latest",
        "moments",
        "room",
        "size",
        "waiter",
    )

    def __init__(self, size: float = float("inf"), *, is_of_object: bool = False) -> None:
        self.calls: collections.deque[Call] = collections.deque()
        self.size = size
        self.is_of_object = is_of_object
        self.room = Flag()
        self.latest = self.at_once_until = -math.inf
        self.at_once_seconds = 0.0
        self.moments = 1
        self.waiter: Waiter | None = None

    def fullness(self) -> Flag | None:
        """The flag to wait for if it is full, else None."""
        if len(self.calls) < self.size:
            return None
        if self.room.is_set:
            self.room = Flag()  # before the length is read again: room made later sets this one
        return self.room if len(self.calls) >= self.size else None


class Wait(Presence):
    """A wait in the body of a call; it counts while it is in progress.

    Attributes:
        target: the call that is waited for.
        is_for_turn: whether it lasts until the target has ended, or may run; others may end before.
    """

    def __init__(self, target: "Call", is_for_turn: bool) -> None:
        self.target = target
        self.is_for_turn = is_for_turn


class _Receiver(Protocol):
    """A pending result."""

    def receive(self, value: Any) -> None: ...
    def receive_failure(self, failure: Failure) -> None: ...


Receivers = Sequence[Callable[[], _Receiver | None]]
"""For each result, what returns the array that is to receive it; None if that is no longer referenced."""


class Call(Flag):
    """One call of a function, from its submission to its end; it is a flag that is set at its end.

    Attributes:
        name: that of the function.
        stream: the stream on which it was made.
        lanes: its lanes: that stream, unless the call is made by one in it, and the lane of its object.
        receivers: of its results; empty if nobody receives them.
        entering: called at the moment it enters its lanes; if it returns False, the call does not enter them.
        turn: set when the call is first in all its lanes, if its caller waits to run it.
        is_brief: whether a thread that waits for it had better run it itself, and others need not hurry to.
        may_overtake: whether it goes before calls that can only run when the one has ended that makes it.
        needs_no_room: whether it enters its lanes also where they are full.
        keeps_place: whether no call may come in between it and those before and behind it.
        has_parts_ahead: whether calls that it waits for, and that are part of it, have gone before it; it has begun.
        needed: what its function waits for, the flat arguments or what returns them; None if this is not known.
        uses_jax: whether that may use jax, and so wait for devices.
        waits: the waits in its body; several, where a finalizer or a signal handler interrupted one.
        number: those made later have larger ones.
        root: that of the outermost call that it is part of.
    """

    __slots__ = (
        "__weakref__",
        "_claims",
        "_parent",
        "_site",
        "body",
        "entering",
        "has_parts_ahead",
        "is_brief",
        "keeps_place",
        "lanes",
        "may_overtake",
        "name",
        "needed",
        "needs_no_room",
        "number",
        "receivers",
        "root",
        "stream",
        "turn",
        "uses_jax",
        "waits",
    )

    def __init__(
        self, name: str, site: Site | CodeSite, stream: Any, lanes: Sequence[Lane], body: Callable[[], PyTree] | None
    ) -> None:
        self._begin(name, site, stream, lanes)
        self.body = body
        running = current_calls()
        if running:
            self._parent = running[-1]
            self.root = running[-1].root
            self.may_overtake = True

    def _begin(self, name: str, site: Site | CodeSite, stream: Any, lanes: Sequence[Lane]) -> None:
        """Initializes a call that no other makes, without its body."""
        self.name = name
        self._site = site
        self.stream = stream
        self.lanes = lanes
        self.body: Callable[[], PyTree] | None = None
        self.receivers: Receivers = ()
        self.entering: Callable[[], bool] | None = None
        self.needed: Sequence[object] | None = None
        self.uses_jax = True
        self.turn: Flag | None = None
        self.is_brief = self.may_overtake = self.needs_no_room = self.keeps_place = self.has_parts_ahead = False
        self.waits: Sequence[Wait] = ()
        self._claims: list[object] = []  # the first one counts: appending is atomic
        self.is_set, self._waiting = False, []  # of a `Flag`
        self.number = self.root = next(_numbers)
        self._parent: Call | None = None

    @property
    def site(self) -> Site:
        """Where the call was made."""
        return site_of(self._site)

    @property
    def parent(self) -> "Call | None":
        """The innermost of its ancestors that has not ended."""
        # A function that continues by calling itself would otherwise keep all of its calls alive.
        while self._parent is not None and self._parent.has_ended:
            self._parent = self._parent._parent
        return self._parent

    @property
    def has_ended(self) -> bool:
        """Whether the results, or the failure, have been handed over."""
        return self.is_set

    @property
    def is_running(self) -> bool:
        """Whether a thread is about to run it, runs it, or is still finishing it."""
        return isinstance(self.claimant, Presence) and self.claimant.is_on

    @property
    def is_run_by_caller(self) -> bool:
        """Whether the thread that makes it runs it, or waits to."""
        return self.turn is not None or type(self.claimant) is Presence

    @property
    def was_given_up(self) -> bool:
        """Whether it will never run."""
        return self.claimant is NOBODY

    def execute(self) -> None:
        """Runs the function and hands over what it returned or raised.

        Raises:
            BaseException: what a signal handler raised in between.
        """
        here = current_calls()
        here.append(self)
        try:
            values = self._called()
            if self.receivers or values:
                # Looked up after the function has run: results that are no longer referenced are dropped at once.
                for reference, value in zip(self.receivers, values, strict=True):
                    receiver = reference()
                    if receiver is not None:
                        receiver.receive(value)
        except PoisonedError as error:
            self._hand_over(error.failure)
        except BaseException as error:
            self.fail(error)
            if is_interrupt(error):
                raise
        finally:
            here.remove(self)

    def _called(self) -> Sequence[Any]:
        """Runs the function, once; returns the flat results."""
        body, self.body = self.body, None
        assert body is not None, "a call runs once"
        values: Sequence[Any] = body()
        return values

    def drop(self) -> None:
        """Forgets what it was to run."""
        self.body = self.needed = None

    def claim(self, claimant: object) -> bool:
        """Whether the claimant is the one that runs the call, or gives it up. Idempotent."""
        self._claims.append(claimant)
        return self._claims[0] is claimant

    @property
    def claimant(self) -> object:
        """What runs it or gave it up; None so far."""
        return self._claims[0] if self._claims else None

    def fail(self, error: BaseException) -> None:
        """Hands over an exception in place of the results."""
        self._hand_over(Failure(error, self.name, self.site, self.stream, self.parent, self.lanes))

    def _hand_over(self, failure: Failure) -> None:
        for reference in self.receivers:
            receiver = reference()
            if receiver is not None:
                receiver.receive_failure(failure)


class Waiter(Presence):
    """What runs calls in a thread, and waits for the next one.

    Attributes:
        calls: what it runs, and what it is to run next.
        lane: where it waits, if it does. A stream that nobody uses any more is freed all the same.
        hurry: set when it is to run what it waits for.
        is_to_begin: whether that is so as soon as there is something to run.
    """

    def __init__(self, *calls: Call) -> None:
        self.is_to_begin = False
        self.calls: tuple[Call, ...] = calls
        self.lane: weakref.ref[Lane] | None = None
        self.hurry = Flag()


def descends_from(made: Call | Failure, maker: Call) -> bool:
    """Whether a call, or that of a failure, was made by `maker`, directly or not."""
    ancestor = made.parent
    while ancestor is not None and ancestor is not maker:
        ancestor = ancestor.parent
    return ancestor is not None


class _Here(threading.local):
    def __init__(self) -> None:
        self.calls: list[Call] = []


_here = _Here()
_numbers = itertools.count()


def current_calls() -> list[Call]:
    """The calls that this thread is running, the innermost last."""
    running = _here.calls
    while running and not running[-1].is_running:  # an interrupt prevented its removal
        running.pop()
    return running


def failure_here(error: BaseException, name: str, site: Site, stream: Any, lanes: Sequence[Lane] = ()) -> Failure:
    """The failure of a function called in this thread; lanes as of `Failure`."""
    running = current_calls()
    return Failure(error, name, site, stream, running[-1] if running else None, lanes)


def roots_so_far() -> int:
    """A number above the roots of all calls so far."""
    return next(_numbers)
