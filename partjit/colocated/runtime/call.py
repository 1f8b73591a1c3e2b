"""A call: what is known of it, and what it does.

What comes of it is settled by its lanes, in `calls`; nothing here waits.
"""

import collections
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from partjit.colocated.runtime.failures import Failure, PoisonedError, Site
from partjit.colocated.runtime.interrupts import Flag, Presence, is_interrupt

__all__ = ["NOBODY", "Call", "Lane", "Wait", "current_calls", "descends_from", "failure_here", "roots_so_far"]

NOBODY = object()
"""Who claims a call to give it up."""


class Lane:
    """An order of calls.

    Attributes:
        calls: those that have not ended, the first of which runs or may run.
        size: how many may be in it before those who add to it have to wait.
        room: happens when there may be room again for those who wait for that.
    """

    __slots__ = ("__weakref__", "calls", "room", "size")

    def __init__(self, size: float = float("inf")) -> None:
        self.calls: collections.deque[Any] = collections.deque()
        self.size = size
        self.room = Flag()

    def fullness(self) -> Flag | None:
        """What to wait for if it is full, else None."""
        if len(self.calls) < self.size:
            return None
        if self.room.is_set:
            self.room = Flag()  # before it is looked at again: room that comes later sets this one
        return self.room if len(self.calls) >= self.size else None


class Wait(Presence):
    """That somebody waits in the middle of a call; it counts as long as that is under way.

    Attributes:
        target: the call that has to go on.
    """

    __slots__ = ("target",)

    def __init__(self, target: "Call") -> None:
        super().__init__()
        self.target = target


class Call:
    """One call of a function, from its submission to its end.

    Attributes:
        name: the function's.
        site: where the call was made.
        stream: the stream it was made on.
        lanes: the lanes it stands in: that stream, unless the call that makes it is in there, and that of its object.
        receivers: gives those who wait for the results and are still there when the function has run.
        entering: what is to be done at the moment it enters its lanes; it does not enter them if that is not true.
        turn: happens when it is the first of all its lanes, where its caller waits to run it.
        submission: its caller, while that has not let go of it.
        ended: happens when the results, or the failure, are there.
        waits: for what it waits in the middle of its body; several, where a finalizer or a handler came in between.
        root: counts the calls that no call made; calls made inside of one have its number.
    """

    def __init__(self, name: str, site: Site, stream: Any, lanes: Sequence[Lane], body: Callable[[], Any]) -> None:
        self.name = name
        self.site = site
        self.stream = stream
        self.lanes = lanes
        self.receivers: Callable[[], Sequence[Any]] = tuple
        self.entering: Callable[[], bool] | None = None
        self.turn: Flag | None = None
        self.submission = Presence()
        self.ended = Flag()
        self.waits: list[Wait] = []
        running = current_calls()
        self._parent = running[-1] if running else None
        self.root = running[-1].root if running else next(_roots)
        self.body: Callable[[], Any] | None = body

    @property
    def parent(self) -> "Call | None":
        """The innermost call that has not ended of those that made it."""
        # A function that goes on by calling itself would otherwise keep all of its calls.
        while self._parent is not None and self._parent.has_ended:
            self._parent = self._parent._parent
        return self._parent

    @property
    def has_ended(self) -> bool:
        """Whether the results, or the failure, are there."""
        return self.ended.is_set

    @property
    def is_running(self) -> bool:
        """Whether somebody is about to run it, runs it, or is not done with it."""
        return isinstance(self.claimant, Presence) and self.claimant.is_on

    @property
    def was_given_up(self) -> bool:
        """Whether it will never run."""
        return self.claimant is NOBODY

    def execute(self) -> None:
        """Runs the function and hands over what it returned or raised.

        Raises:
            BaseException: what the handler of a signal raised meanwhile.
        """
        body, self.body = self.body, None
        assert body is not None, "a call runs once"
        here = current_calls()
        here.append(self)
        try:
            values = body()
            # Looked up after the function has run: a result that nobody has any more is dropped at once.
            for receiver, value in zip(self.receivers(), values, strict=True):
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

    def claim(self, claimant: object) -> bool:
        """Whether it is the claimant who runs it, or gives it up: only one does. May be asked again."""
        return vars(self).setdefault("_claimed_by", claimant) is claimant

    @property
    def claimant(self) -> object:
        """Who runs it, or gave it up; None if nobody does."""
        return vars(self).get("_claimed_by")

    def fail(self, error: BaseException) -> None:
        """Gives those who wait for the results an exception instead."""
        self._hand_over(Failure(error, self.name, self.site, self.stream, self.parent))

    def _hand_over(self, failure: Failure) -> None:
        for receiver in self.receivers():
            if receiver is not None:
                receiver.receive_failure(failure)


def descends_from(made: Any, maker: Call) -> bool:
    """Whether a call, or the call of a failure, was made by `maker`, or by a call that was."""
    ancestor = made.parent
    while ancestor is not None and ancestor is not maker:
        ancestor = ancestor.parent
    return ancestor is not None


class _Here(threading.local):
    def __init__(self) -> None:
        self.calls: list[Call] = []


_here = _Here()
_roots = itertools.count()


def current_calls() -> list[Call]:
    """The calls in whose bodies this thread is, the innermost last."""
    running = _here.calls
    while running and not running[-1].is_running:  # an interrupt kept it from being taken out
        running.pop()
    return running


def failure_here(error: BaseException, name: str, site: Site, stream: Any) -> Failure:
    """What a function has raised that was called in this thread."""
    running = current_calls()
    return Failure(error, name, site, stream, running[-1] if running else None)


def roots_so_far() -> int:
    """A number above those of all calls so far."""
    return next(_roots)
