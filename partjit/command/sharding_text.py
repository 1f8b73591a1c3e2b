"""Where the text of an XLA sharding is malformed, for a caret.

`partjit.opsharding` reads such texts; its errors are about all of a text.
"""

import math
import re
from typing import NoReturn

__all__ = ["place_of_mistake"]

Span = tuple[int, int]

_NUMBER = r"[0-9]{1,18}(?![0-9])"


class _Stuck(Exception):
    def __init__(self, position: int, expected: str) -> None:
        self.position, self.expected = position, expected


class _Reader:
    """Reads a text from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0
        self.tilings: list[dict[str, tuple[list[int], Span]]] = []

    def accept(self, pattern: str) -> bool:
        match = re.compile(pattern).match(self.text, self.position)
        if match:
            self.position = match.end()
        return bool(match)

    def expect(self, pattern: str, what: str) -> None:
        if not self.accept(pattern):
            self.stuck(what)

    def stuck(self, what: str) -> NoReturn:
        raise _Stuck(self.position, what)

    def expect_numbers(self, name: str, what: str) -> None:
        start = self.position
        self.expect(_NUMBER, what)
        while self.accept(r","):
            self.expect(_NUMBER, "a number")
        self.tilings[-1][name] = [*map(int, self.text[start : self.position].split(","))], (start, self.position)


def place_of_mistake(text: str, devices: int) -> tuple[Span | None, str]:
    """Finds the error in the text of a sharding.

    Args:
        text: the text.
        devices: the number of devices.

    Returns:
        Where it is, None if no part of the text alone is wrong; and what is expected there, empty if it is a sharding,
        but one for another number of devices.

    Example:
        >>> from partjit.command.sharding_text import place_of_mistake
        >>> place_of_mistake("{devices=[4,2]<=[8}", 8)
        ((18, 19), 'a closing bracket ]')
        >>> place_of_mistake("{devices=[4,2]<=[6]}", 8)
        ((17, 18), 'sizes whose product is 8, the number of tiles')
    """
    reader = _Reader(text)
    try:
        _read(reader)
        reader.expect(r"\s*$", "nothing more")
    except _Stuck as stuck:
        return (stuck.position, stuck.position + 1), stuck.expected
    for tiling in reader.tilings:
        found = _contradiction(tiling, devices)
        if found:
            return found
    return None, ""


def _contradiction(tiling: dict[str, tuple[list[int], Span]], devices: int) -> tuple[Span, str] | None:
    """The first numbers that contradict those before them."""
    grid, grid_span = tiling["grid"]
    count = math.prod(grid)
    order, order_span = tiling.get("order", ([count], grid_span))
    perm, perm_span = tiling.get("perm", ([*range(len(order))], order_span))
    listed, listed_span = tiling.get("devices", (None, grid_span))
    for is_wrong, span, expected in [
        (min(grid) < 1, grid_span, "numbers of at least 1"),
        (
            min(order) < 1 or math.prod(order) != count,
            order_span,
            f"sizes whose product is {count}, the number of tiles",
        ),
        (sorted(perm) != [*range(len(order))], perm_span, f"each of the numbers from 0 to {len(order) - 1} once"),
        (listed is not None and len(listed) != count, listed_span, f"{count} devices, one for each tile"),
        (count != devices, grid_span, ""),
    ]:
        if is_wrong:
            return span, expected
    return None


def _read(reader: _Reader) -> None:
    reader.expect(r"\s*\{", "an opening brace {")
    if reader.accept(r"\s*\}"):
        return
    if re.compile(r"\s*\{").match(reader.text, reader.position):
        _read(reader)
        while reader.accept(r"\s*,[\s,]*"):
            _read(reader)
        reader.expect(r"\s*\}", "a comma or the closing brace } of the tuple")
        return
    reader.accept(r"\s*")
    if reader.accept(r"mesh\["):
        reader.accept(r".*(?=\})")
    elif reader.accept(r"devices="):
        _read_tiling(reader)
    elif reader.accept(r"maximal"):
        reader.expect(r" device=-?[0-9]+", "the device: maximal device=0")
    else:
        reader.expect(
            r"(replicated|manual|unknown|unreduced)\b",
            "devices=[...], replicated, maximal, manual, unknown or unreduced",
        )
    reader.accept(r" shard_(as|like) [0-9]+")
    reader.accept(r" metadata=\{.*\}(?=\s*\})")
    reader.expect(r"\s*\}", "a closing brace }")


def _read_tiling(reader: _Reader) -> None:
    reader.tilings.append({})
    reader.expect(r"\[", "an opening bracket [")
    reader.expect_numbers("grid", "the number of tiles along each dimension")
    reader.expect(r"\]", "a closing bracket ]")
    if reader.accept(r"<=\["):
        reader.expect_numbers("order", "the sizes that the devices are counted by")
        reader.expect(r"\]", "a closing bracket ]")
        if reader.accept(r"T\("):
            reader.expect_numbers("perm", "the order of the sizes")
            reader.expect(r"\)", "a closing parenthesis )")
    else:
        reader.expect_numbers("devices", "the order of the devices: <=[...], or all their numbers")
    if reader.accept(r" last_tile_dims=\{"):
        while not reader.accept(r"\}"):
            reader.expect(r"(replicated|manual|unreduced|unknown|maximal)(, ?)?", "replicated, manual or unreduced")
    else:
        reader.accept(r" last_tile_dim_replicate\b")
