"""How often something in a program runs: a number per iteration of the loops around it whose trip count is unknown."""

import dataclasses
from collections.abc import Mapping

from jax.extend.mlir import ir

from partjit.inspect.user_lines import Site, shown_line

__all__ = ["ONCE", "Branches", "Times", "given_trip_count"]


@dataclasses.dataclass(frozen=True)
class Times:
    """How often something runs in a step.

    Attributes:
        known: the product of the known trip counts of the loops around it.
        loops: the lines of those whose trip count is unknown, outermost first.

    Example:
        >>> (Times(10) * Times(1, (("model.py", 12, "train"),))).known
        10
    """

    known: int = 1
    loops: tuple[Site | None, ...] = ()

    @property
    def exact(self) -> int | None:
        """The number, None if a trip count is unknown."""
        return None if self.loops else self.known

    def __mul__(self, other: "Times") -> "Times":
        return Times(self.known * other.known, (*self.loops, *other.loops))

    def __add__(self, other: "Times") -> "Times":
        return Times(self.known + other.known, tuple(dict.fromkeys((*self.loops, *other.loops))))

    def __str__(self) -> str:
        if not self.loops:
            return str(self.known)
        return f"{self.known} per iteration at {', '.join(map(shown_line, self.loops))}"


ONCE = Times()


def given_trip_count(site: Site | None, iterations: Mapping[str, int]) -> int | None:
    """The trip count of a loop at a line, if the caller gave one: by `model.py:12`, or with the path of the file.

    Example:
        >>> given_trip_count(("/home/me/model.py", 12, "train"), {"model.py:12": 100})
        100
    """
    if site is None:
        return None
    return iterations.get(shown_line(site), iterations.get(f"{site[0]}:{site[1]}"))


class Branches:
    """Names the conditionals of a program as they are met."""

    def __init__(self) -> None:
        self._numbers: dict[ir.Operation, int] = {}

    def around(self, op: ir.Operation) -> tuple[tuple[str, int], ...]:
        """The branches that an operation is in, outermost first: the name of the conditional, and which it is."""
        found: list[tuple[str, int]] = []
        while (outer := op.parent) is not None:
            if outer.name in ("stablehlo.case", "stablehlo.if"):
                number = self._numbers.setdefault(outer, len(self._numbers))
                of_branch = next(k for k, region in enumerate(outer.regions) if op.block in [*region.blocks])
                found.insert(0, (f"conditional.{number}", of_branch))
            op = outer
        return tuple(found)
