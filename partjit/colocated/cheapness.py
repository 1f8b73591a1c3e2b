"""Whether calls of a function are so cheap that its caller makes them itself."""

__all__ = ["Cheapness"]

_CHEAP_SECONDS = 200e-6
"""Handing a call and its arguments to a thread takes about as long."""
_CHEAP_IN_A_ROW = 10
"""How many calls must have been cheap, one after another, before the next one runs in its caller."""


class Cheapness:
    """Whether calls of a function are so cheap that handing them to a thread costs more."""

    __slots__ = ("_in_a_row",)

    def __init__(self) -> None:
        self._in_a_row = 0

    def measured(self, seconds: float) -> None:
        """Takes note of how long the function took."""
        self._in_a_row = self._in_a_row + 1 if seconds < _CHEAP_SECONDS else 0

    @property
    def is_shown(self) -> bool:
        """Whether it was cheap often enough."""
        return self._in_a_row >= _CHEAP_IN_A_ROW
