"""Whether calls of a function are so cheap that its caller makes them itself.

A caller that goes on meanwhile wants the interpreter as well, and a call that is cheap takes several times as long. So
at first it waits a moment for calls on a thread, and goes on doing so as long as they turn out to be cheap.
"""

__all__ = ["INTERRUPTED_SECONDS", "TRIAL_SECONDS", "Cheapness", "CheapnessAhead", "Quickness"]

TRIAL_SECONDS = 4e-4
"""How long a caller waits for a call on trial."""

_CHEAP_SECONDS = 200e-6
"""Handing a call and its arguments to a thread takes about as long."""
_CHEAP_IN_A_ROW = 10
"""How many calls must have been cheap, one after another, before the next one runs in its caller."""
_MOST_IN_A_ROW = 4 * _CHEAP_IN_A_ROW
"""How many are remembered. Each call that is not cheap halves them: the third one is the last in its caller."""
INTERRUPTED_SECONDS = 20e-3
"""A call that takes less may have been cheap, while its thread did not run: the system ran others in between."""
_QUICK_SECONDS = 50e-6
"""To have another thread make a call, which has to get hold of the interpreter, takes about as long."""
_QUICK_IN_A_ROW = 20
"""How many calls must have been quick, one after another, before threads that are busy otherwise make the next ones.

A slow one counts against them by what it took: one that was a little late, as the system has it, changes nothing.
"""


class Quickness:
    """Whether calls of a function are so quick that no other thread is worth its while, whatever it could overlap."""

    __slots__ = ("_credit",)

    def __init__(self) -> None:
        self._credit = 0.0

    def measured(self, seconds: float) -> None:
        """Takes note of how long a call took."""
        if seconds < _QUICK_SECONDS:
            self._credit = min(self._credit + 1, 2 * _QUICK_IN_A_ROW)
        else:
            self._credit = max(self._credit - seconds / _QUICK_SECONDS, 0.0)

    @property
    def is_shown(self) -> bool:
        """Whether they were quick often enough."""
        return self._credit >= _QUICK_IN_A_ROW


class Cheapness:
    """Whether calls of a function are so cheap that handing them to a thread costs more.

    Attributes:
        trials: for how many calls on a thread the caller waits a moment, so that it is seen how long they take. There
            are more whenever there have been twice as many calls.
    """

    __slots__ = ("_alone_in_a_row", "_calls", "_in_a_row", "trials")

    def __init__(self) -> None:
        self._in_a_row = self._alone_in_a_row = self._calls = 0
        self.trials = 2 * _CHEAP_IN_A_ROW

    def measured(self, seconds: float, alone: float | None = None) -> None:
        """Takes note of how long a call took; `alone` without the wait for its arguments, if that is known."""
        self._calls += 1
        if seconds < _CHEAP_SECONDS and self._in_a_row == self._alone_in_a_row == _MOST_IN_A_ROW:  # as a rule
            return
        self._in_a_row = _in_a_row(self._in_a_row, seconds)
        self._alone_in_a_row = _in_a_row(self._alone_in_a_row, seconds if alone is None else alone)
        if self._calls & (self._calls - 1) == 0:
            self.trials = max(self.trials, _CHEAP_IN_A_ROW)

    def tried(self, has_ended: bool) -> None:
        """Takes note of a trial, and of whether the call ended while its caller waited for it."""
        self.trials -= 1 if has_ended and self._in_a_row else _CHEAP_IN_A_ROW

    @property
    def is_shown(self) -> bool:
        """Whether it was cheap often enough for its caller."""
        return self._in_a_row >= _CHEAP_IN_A_ROW

    @property
    def is_shown_alone(self) -> bool:
        """Whether it was often enough for whoever waits for it, and so for its arguments, anyway."""
        return self._alone_in_a_row >= _CHEAP_IN_A_ROW

    @property
    def may_be_cheap(self) -> bool:
        """Whether to find out how long it takes alone: now and then also if it was long, as first calls are."""
        return self._alone_in_a_row > 0 or self._calls & (self._calls - 1) == 0


class CheapnessAhead(Cheapness):
    """The same of calls that run ahead: another thread makes them beside the program unless they are quick."""

    __slots__ = ("_quickness",)

    def __init__(self) -> None:
        super().__init__()
        self._quickness = Quickness()

    def measured(self, seconds: float, alone: float | None = None) -> None:
        """See `Cheapness`."""
        super().measured(seconds, alone)
        self._quickness.measured(seconds if alone is None else alone)

    @property
    def is_shown_alone(self) -> bool:
        """See `Cheapness`."""
        return self._quickness.is_shown and super().is_shown_alone


def _in_a_row(before: int, seconds: float) -> int:
    """How many calls are counted as cheap, one after another, after one that took so long."""
    if seconds < _CHEAP_SECONDS:
        return min(before + 1, _MOST_IN_A_ROW)
    return before // 2 if seconds < INTERRUPTED_SECONDS else 0
