"""Errors in the arguments of a command, and where in their text."""

import difflib
import re
from collections.abc import Iterable

__all__ = ["CANNOT", "EXCEEDED", "USAGE", "Mistake", "did_you_mean", "iterations_of", "mesh_of", "shape_of"]

_CONTEXT = 40  # characters around the error

CANNOT = 1
"""The exit code of what cannot be done."""
USAGE = 2
"""The exit code of malformed arguments."""
EXCEEDED = 3
"""The exit code of a report that does not keep the limits of `--max-bytes` and `--fail-on`."""


class Mistake(Exception):
    """Why a command ends.

    Attributes:
        message: what is wrong, and what to do.
        argument: the argument: "--mesh".
        text: its text.
        span: the part of `text` that is wrong, as start and stop, or None for no part of it.
        code: the exit code.

    Example:
        >>> print(Mistake("a size is a number", "--mesh", "data=x", (5, 6)))
        a size is a number
          --mesh data=x
                      ^
    """

    def __init__(
        self,
        message: str,
        argument: str = "",
        text: str = "",
        span: tuple[int, int] | None = None,
        code: int = USAGE,
    ) -> None:
        super().__init__(message)
        self.message, self.argument, self.text, self.span, self.code = message, argument, text, span, code

    def __str__(self) -> str:
        if self.span is None:
            return self.message
        start, stop = self.span
        # Line breaks and other unprintable characters would move the caret.
        text = "".join(c if c.isprintable() else " " for c in self.text)
        left = 0 if start < _CONTEXT else start - _CONTEXT // 2
        right = max(stop, left + 2 * _CONTEXT)
        before = f"  {self.argument} " if self.argument else "  "
        before += "…" if left else ""
        shown = f"{before}{text[left:right]}{'…' if right < len(text) else ''}"
        return f"{self.message}\n{shown}\n{' ' * (len(before) + start - left)}{'^' * max(1, stop - start)}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name.

    Example:
        >>> did_you_mean("modle", ["data", "model"]), did_you_mean("q", ["data"])
        ("; did you mean 'model'?", '')
    """
    close = difflib.get_close_matches(name, [*names], 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def mesh_of(text: str) -> dict[str, int]:
    """Reads `--mesh`, the axes of a mesh with their sizes: `data=4,model=2`.

    Raises:
        Mistake: the text is malformed.

    Example:
        >>> mesh_of("data=4, model=2")
        {'data': 4, 'model': 2}
    """
    axes: dict[str, int] = {}
    start = 0
    for part in text.split(","):
        first = start + len(part) - len(part.lstrip())
        span = first, first + len(part.strip())
        start += len(part) + 1
        name, equals, size = (item.strip() for item in part.partition("="))
        if not (name and equals and size):
            raise Mistake("an axis of a mesh is written as its name and size: data=4,model=2", "--mesh", text, span)
        if not re.fullmatch(r"[0-9]{1,9}", size) or int(size) < 1:
            message = f"the size of the axis {name!r} should be a number of devices, but is {size!r}"
            raise Mistake(message, "--mesh", text, (span[1] - len(size), span[1]))
        if name in axes:
            raise Mistake(f"the axis {name!r} is used twice", "--mesh", text, span)
        axes[name] = int(size)
    return axes


def iterations_of(text: str) -> dict[str, int]:
    """Reads `--iterations`, lines of loops with their trip counts: `model.py:12=100`.

    Raises:
        Mistake: the text is malformed.

    Example:
        >>> iterations_of("model.py:12=100, solve.py:7=20")
        {'model.py:12': 100, 'solve.py:7': 20}
    """
    counts: dict[str, int] = {}
    for part in re.finditer(r"[^,]+", text):
        found = re.fullmatch(r"\s*(.+:[0-9]+)\s*=\s*([0-9]{1,18})\s*", part[0])
        if found is None:
            raise Mistake("the trip count of a loop is written as model.py:12=100", "--iterations", text, part.span())
        if found[1] in counts:
            raise Mistake(f"the trip count of {found[1]} is given twice", "--iterations", text, part.span())
        counts[found[1]] = int(found[2])
    return counts


def shape_of(text: str) -> tuple[int, ...]:
    """Reads `--shape`, the shape of an array: `16,32`, and nothing or `()` for a scalar.

    Raises:
        Mistake: the text is malformed.

    Example:
        >>> shape_of("16,32"), shape_of("(8,)"), shape_of("")
        ((16, 32), (8,), ())
    """
    inside = re.fullmatch(r"\s*(?:\((?P<tuple>.*)\)|\[(?P<list>.*)\]|(?P<bare>.*))\s*", text, re.S)
    assert inside  # anything matches the last form
    group = next(name for name, found in inside.groupdict().items() if found is not None)
    start, body = inside.start(group), inside[group]
    sizes = []
    for match in re.finditer(r"[^,]+", body):
        size = match[0].strip()
        if not size and match.end() == len(body):  # after the comma of a tuple of one
            continue
        if not re.fullmatch(r"[0-9]{1,18}", size):
            first = start + match.start() + len(match[0]) - len(match[0].lstrip())
            message = f"a shape is written as sizes with commas between: 16,32; {size!r} is no size"
            raise Mistake(message, "--shape", text, (first, first + len(size)))
        sizes.append(int(size))
    return tuple(sizes)
