"""What a report may not exceed: `--max-bytes` and `--fail-on`, for continuous integration."""

import dataclasses
import math
import re

from partjit.command.mistakes import Mistake, did_you_mean
from partjit.inspect.collectives import taken
from partjit.inspect.contents import Contents
from partjit.inspect.findings import KINDS
from partjit.inspect.user_lines import shown_site
from partjit.render.numbers import shown_bytes

__all__ = ["Limits", "kinds_of", "size_of"]

ANY = "any"
_UNITS = {f"{prefix}{i}b": base**k for base, i in ((1000, ""), (1024, "i")) for k, prefix in enumerate(("", *"kmgt"))}
_MOST = 3  # collectives that a message names


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a report may not exceed.

    Attributes:
        max_bytes: those that a device sends in a step, or None for any number.
        kinds: of findings that there may not be; "any" stands for all.
    """

    max_bytes: int | None
    kinds: tuple[str, ...]

    def exceeded(self, report: Contents) -> list[str]:
        """What exceeds the limits, a text each; none if the report keeps them."""
        failures = []
        sent = report.collectives.bytes_per_step
        if self.max_bytes is not None and not sent <= self.max_bytes:
            amount = f"{shown_bytes(sent)} per step" if math.isfinite(sent) else "an unknown number of bytes per step"
            costly = sorted(taken(report.collectives), key=lambda one: one.counted_bytes, reverse=True)[:_MOST]
            lines = [
                f"\n  {shown_bytes(found.counted_bytes)}  {found.kind} over {', '.join(found.axes) or 'no axis'}"
                + (f", at {shown_site(found.site)}" if found.site else "")
                for found in costly
            ]
            limit = shown_bytes(self.max_bytes)
            failures.append(f"--max-bytes: a device sends {amount}, more than {limit}; most in{''.join(lines)}")
        failures += [
            f"--fail-on: {one}" for one in report.folded_findings if one.kind in self.kinds or ANY in self.kinds
        ]
        return failures

    def left_open(self, report: Contents) -> str | None:
        """What says that more may be sent than the limit, though not for certain; None if that is not so."""
        sent = report.collectives
        most = sent.bytes_per_step_at_most
        if self.max_bytes is None or not sent.bytes_per_step <= self.max_bytes < most:
            return None
        return (
            f"--max-bytes: a device sends {shown_bytes(sent.bytes_per_step)} per step, which is within "
            f"{shown_bytes(self.max_bytes)}, and XLA may move more, which is not predicted exactly: "
            f"{shown_bytes(most)} at most. --compiled says what it moves"
        )


def size_of(text: str, option: str = "--max-bytes") -> int:
    """Reads the value of an option, a number of bytes with a unit.

    Raises:
        Mistake: the text is malformed.

    Example:
        >>> size_of("20MB"), size_of("1.5 GiB"), size_of("4096")
        (20000000, 1610612736, 4096)
    """
    found = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-zA-Z]*)\s*", text)
    unit = "" if found is None else found[2].lower()
    unit = unit if unit.endswith("b") else f"{unit}b"
    if found is None or unit not in _UNITS:
        span = (0, len(text)) if found is None else found.span(2)
        raise Mistake("a number of bytes is written as 4096, 20MB or 1.5GiB", option, text, span)
    return int(float(found[1]) * _UNITS[unit])


def kinds_of(text: str) -> tuple[str, ...]:
    """Reads `--fail-on`, kinds of findings.

    Raises:
        Mistake: there is no such kind.

    Example:
        >>> kinds_of("replicated,reduced-in-loop")
        ('replicated', 'reduced in loop')
    """
    kinds, start = [], 0
    for part in text.split(","):
        first = start + len(part) - len(part.lstrip())
        start += len(part) + 1
        kind = " ".join(part.replace("-", " ").split())
        if kind not in (*KINDS, ANY):
            names = [name.replace(" ", "-") for name in (*KINDS, ANY)]
            hint = did_you_mean(part.strip(), names) or f"; there are {', '.join(names)}"
            message = f"{part.strip()!r} is no kind of finding{hint}"
            raise Mistake(message, "--fail-on", text, (first, first + len(part.strip())))
        kinds.append(kind)
    return tuple(kinds)
