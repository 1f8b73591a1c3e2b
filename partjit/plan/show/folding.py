"""What repeats in a plan, so that readers see it once: a hundred calls in a row fit on a screen."""

import re
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["LONG", "Repeat", "repeats", "shortened"]

LONG = 40
"""The number of lines, or of nodes, that are not shortened."""

_PERIOD = 24  # lines of what repeats, at most
_LEAST = 4  # what repeats less often is shown as it is


class Repeat(NamedTuple):
    """Items that repeat: from `start` on, `period` items, as many times."""

    start: int
    period: int
    times: int

    @property
    def stop(self) -> int:
        """Where they end."""
        return self.start + self.period * self.times


def repeats(keys: Sequence[Hashable]) -> Iterator[Repeat]:
    """What repeats among items with these keys, those of equal items being equal; the repeats do not overlap.

    Example:
        >>> [*repeats("xababababy")]
        [Repeat(start=1, period=2, times=4)]
    """
    start = 0
    while start < len(keys):
        found = [Repeat(start, period, _count(keys, start, period)) for period in range(1, _PERIOD + 1)]
        best = max(found, key=lambda one: (one.period * one.times if one.times >= _LEAST else 0, -one.period))
        if best.times >= _LEAST:
            yield best
            start = best.stop
        else:
            start += 1


def _count(keys: Sequence[Hashable], start: int, period: int) -> int:
    same = start
    while same + period < len(keys) and keys[same] == keys[same + period]:
        same += 1
    return 1 + (same - start) // period


def shortened(source: str) -> str:
    r"""The source of a plan, with lines that repeat but for numbers in names written twice, if it is long.

    Example:
        >>> lines = [f"    x{k}_result = fun_{k}(x{k})" for k in range(50)]
        >>> print(shortened("\n".join(["def step(x0):", *lines])))
        def step(x0):
            x0_result = fun_0(x0)
            # ... 48 times alike ...
            x49_result = fun_49(x49)
    """
    lines = source.split("\n")
    if len(lines) <= LONG:
        return source
    parts, start = list[str](), 0
    for repeat in repeats([*map(_without_numbers, lines)]):
        first, last = repeat.start + repeat.period, repeat.stop - repeat.period
        indent = re.match(r" *", lines[repeat.start])
        often = f"{repeat.times - 2} times alike"
        of = f", {repeat.period} lines each" if repeat.period > 1 else ""
        parts += [*lines[start:first], f"{'' if indent is None else indent[0]}# ... {often}{of} ..."]
        parts += lines[last : repeat.stop]
        start = repeat.stop
    return "\n".join([*parts, *lines[start:]])


def _without_numbers(line: str) -> str:
    """A line without the numbers in its names; those in its comment, such as numbers of equations, stay."""
    text, mark, comment = line.partition("  # ")
    return re.sub(r"_?\d+", "", text) + mark + comment
