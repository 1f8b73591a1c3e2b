"""Runs `partjit diff`: what changed between two reports in JSON."""

import argparse
import collections
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from partjit.command.mistakes import CANNOT, Mistake
from partjit.inspect.report_data import VERSION, Data
from partjit.render.numbers import shown_bytes, shown_flops
from partjit.render.text import table

__all__ = ["run", "shown_difference"]

_MOST = 20

Rows: TypeAlias = Sequence[Sequence[object]]
"""Of a table."""


def run(args: argparse.Namespace) -> int:
    """Compares two files, and prints what changed.

    Raises:
        Mistake: one of them cannot be read, or is no report.
    """
    before, after = _report(args.before, "BEFORE"), _report(args.after, "AFTER")
    print(shown_difference(before, after, None if args.all else _MOST))
    return 0


def shown_difference(before: Data, after: Data, most: int | None = None) -> str:
    """What changed between two reports, as tables of at most so many lines.

    Example:
        >>> import jax.numpy as jnp
        >>> from partjit.inspect.explain import explain
        >>> before, after = (explain(lambda x: 2 * x, jnp.ones(n)).as_data() for n in (8, 16))
        >>> print(shown_difference(before, after))
        <lambda> without a mesh, predicted
        <BLANKLINE>
        totals
                          before    after  change
        memory at most      64 B    128 B  x2.00
        FLOPs per device  8 flop  16 flop  x2.00
        ...
    """
    heads = [_head(data) for data in (before, after)]
    parts = [heads[0] if heads[0] == heads[1] else f"before: {heads[0]}\nafter:  {heads[1]}"]
    for title, columns, rows in _tables(before, after):
        if rows:
            parts.append(f"{title}\n{table(columns, rows, most)}")
    return "\n\n".join(parts if len(parts) > 1 else [*parts, "no difference"])


def _head(data: Data) -> str:
    mesh = ", ".join(f"{axis}={size}" for axis, size in data["mesh"].items())
    return f"{data['name']} {f'on {mesh}' if mesh else 'without a mesh'}, {data['collectives']['source']}"


def _tables(before: Data, after: Data) -> Iterator[tuple[str, Sequence[str], Rows]]:
    two = (before, after)
    totals = []
    for name, show, values in (
        ("sent per step", shown_bytes, [data["collectives"]["bytes_per_step"] for data in two]),
        ("memory at most", shown_bytes, [max((unit["peak"] for unit in data["memory"]), default=0) for data in two]),
        ("FLOPs per device", shown_flops, [data["flops"]["per_device"] for data in two]),
    ):
        if values[0] != values[1]:
            totals.append((name, *("unknown" if v is None else show(v) for v in values), _ratio(*values)))
    yield "totals", ("", "before", "after", "change"), totals
    of_arrays = [{value["path"]: _array(value) for part in ("arguments", "results") for value in d[part]} for d in two]
    changed = [path for path in {**of_arrays[0], **of_arrays[1]} if of_arrays[0].get(path) != of_arrays[1].get(path)]
    gone = ("-", "")
    arrays = [(path, *of_arrays[0].get(path, gone), *of_arrays[1].get(path, gone)) for path in changed]
    yield "arguments and results", ("array", "before", "per device", "after", "per device"), arrays
    tallies = [_tallies(data) for data in two]
    kinds = [key for key in sorted({*tallies[0], *tallies[1]}) if tallies[0][key] != tallies[1][key]]
    moved = [(kind, axes, *tallies[0][kind, axes].cells, *tallies[1][kind, axes].cells) for kind, axes in kinds]
    yield "collectives", ("kind", "axes", "before", "sent", "after", "sent"), moved
    findings = [collections.Counter(f"{f['kind']}: {f['text']}" for f in data["findings"]) for data in two]
    changes = [("-", text) for text in findings[0] - findings[1]] + [("+", text) for text in findings[1] - findings[0]]
    yield "findings", ("", "finding"), changes


def _ratio(before: float | None, after: float | None) -> str:
    return f"x{after / before:.2f}" if before and after is not None else ""


def _array(value: Data) -> tuple[str, str]:
    axes = value["spec"]
    spec = "unknown" if axes is None else f"P({', '.join(map(_entry, axes))})"
    return f"{value['dtype']}{value['shape']} {spec}".replace(", ", ","), shown_bytes(value["nbytes_per_device"])


def _entry(axes: Sequence[str]) -> str:
    return "None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))


class _Tally:
    """How many collectives of a kind over the same axes there are in a step, and how much a device sends for them."""

    def __init__(self) -> None:
        self.count, self.nbytes = 0, 0.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tally) and (self.count, self.nbytes) == (other.count, other.nbytes)

    @property
    def cells(self) -> tuple[int, str]:
        return self.count, shown_bytes(self.nbytes) if math.isfinite(self.nbytes) else "unknown"


def _tallies(data: Data) -> collections.defaultdict[tuple[str, str], _Tally]:
    found: collections.defaultdict[tuple[str, str], _Tally] = collections.defaultdict(_Tally)
    for collective in data["collectives"][data["collectives"]["source"]]:
        tally = found[collective["kind"], ", ".join(collective["axes"]) or "-"]
        tally.count += collective["arrays"] * (1 if collective["times"] is None else collective["times"])
        tally.nbytes += math.nan if collective["bytes_per_step"] is None else collective["bytes_per_step"]
    return found


def _report(path: str, argument: str) -> Data:
    try:
        if path == "-":
            data: Any = json.load(sys.stdin)
        else:
            with open(path, encoding="utf-8") as file:
                data = json.load(file)
    except OSError as error:
        raise Mistake(
            f"{path!r} cannot be read: {error.strerror or error}", argument, path, (0, len(path)), CANNOT
        ) from None
    except ValueError:  # no JSON, or no text
        message = f"{path!r} is no JSON: write it with partjit explain --json"
        raise Mistake(message, argument, path, (0, len(path)), CANNOT) from None
    if isinstance(data, dict) and "error" in data:
        message = f"{path!r} has an error in the place of a report: {data['error'].get('message')}"
        raise Mistake(message, argument, path, (0, len(path)), CANNOT)
    if not isinstance(data, dict) or "version" not in data or "collectives" not in data:
        message = f"{path!r} is no report: write it with partjit explain --json, or with Report.to_json"
        raise Mistake(message, argument, path, (0, len(path)), CANNOT)
    if data["version"] != VERSION:
        message = f"{path!r} has version {data['version']} of the format, and this partjit reads version {VERSION}"
        raise Mistake(message, argument, path, (0, len(path)), CANNOT)
    return data
