"""The difference of two reports: under two sets of specs, on two meshes, or before and after an edit."""

import dataclasses
import difflib
import itertools
from collections.abc import Iterator, Sequence

from partjit.checks import require_integer
from partjit.inspect.annotated import AnnotatedEquation, AnnotatedValue
from partjit.inspect.contents import Contents
from partjit.inspect.user_lines import Site, shown_site
from partjit.render.html import fragment
from partjit.render.html import table as html_table
from partjit.render.numbers import shown_bytes
from partjit.render.text import table

__all__ = ["Change", "Difference", "difference"]


@dataclasses.dataclass(frozen=True)
class Change:
    """A value that is sharded differently.

    Attributes:
        value: its path or name, in the first report.
        type: its type.
        before, after: its specs.
        bytes_before, bytes_after: of it on a device.
        site: where it is computed; None for arguments and results.
    """

    value: str
    type: str
    before: str
    after: str
    bytes_before: int
    bytes_after: int
    site: Site | None


@dataclasses.dataclass(frozen=True)
class Difference:
    """What changed from one report to another.

    Attributes:
        changes: the values that are sharded differently: arguments, results, then computed values, in program order.
        collectives: kind, axes, and how many there are before and after, where that differs.
        totals: name, before and after: bytes sent per step, and memory per device.
        unmatched: the number of equations that are in one of the programs only.
    """

    changes: tuple[Change, ...]
    collectives: tuple[tuple[str, tuple[str, ...], int, int], ...]
    totals: tuple[tuple[str, float, float], ...]
    unmatched: int

    def __bool__(self) -> bool:
        return bool(self.changes or self.collectives or self.unmatched)

    def _tables(self) -> Iterator[tuple[str, tuple[str, ...], Sequence[tuple[str | int, ...]]]]:
        yield "per device", ("", "before", "after"), [(name, *map(shown_bytes, two)) for name, *two in self.totals]
        if self.changes:
            rows = []
            for c in self.changes:
                sizes, line = (c.bytes_before, c.bytes_after), shown_site(c.site) if c.site else ""
                rows.append((c.value, c.type, c.before, c.after, *map(shown_bytes, sizes), line))
            yield "values", ("value", "type", "before", "after", "bytes before", "after", "line"), rows
        if self.collectives:
            counts = [(kind, ", ".join(axes) or "-", *two) for kind, axes, *two in self.collectives]
            yield "collectives", ("kind", "axes", "before", "after"), counts

    def to_text(self, most: int | None = 20) -> str:
        """The tables, each of at most so many lines. Raises TypeError or ValueError if `most` is no number of lines."""
        most = None if most is None else require_integer("Difference.to_text", "most", most, 0)
        if not self:
            return "no difference"
        parts = [f"{title}\n{table(columns, rows, most)}" for title, columns, rows in self._tables()]
        if self.unmatched:
            parts.append(f"{self.unmatched} equations are in one of the programs only")
        return "\n\n".join(parts)

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return fragment(*(html_table(title, columns, rows) for title, columns, rows in self._tables()))


def difference(one: Contents, other: Contents) -> Difference:
    """What changed from one report to another; see `Report.diff`."""
    pairs, unmatched = _matched(one, other)
    changes = tuple(
        Change(
            before.path or before.name,
            before.shown_type,
            before.shown_spec,
            after.shown_spec,
            before.nbytes_per_device,
            after.nbytes_per_device,
            site,
        )
        for before, after, site in pairs
        if before.is_array and after.is_array and before.shown_spec != after.shown_spec
    )
    before, after = one.collectives.counts, other.collectives.counts
    counts = tuple((*key, before[key], after[key]) for key in sorted({*before, *after}) if before[key] != after[key])
    most = one.collectives.bytes_per_step_at_most, other.collectives.bytes_per_step_at_most
    totals = (
        ("sent per step", one.collectives.bytes_per_step, other.collectives.bytes_per_step),
        *([("sent at most", *most)] if (one.collectives.unknown or other.collectives.unknown) else []),
        ("memory at most", _peak(one), _peak(other)),
    )
    return Difference(changes, counts, totals, unmatched)


def _matched(one: Contents, other: Contents) -> tuple[list[tuple[AnnotatedValue, AnnotatedValue, Site | None]], int]:
    """The values of two programs that correspond, by path or by the order of equal equations; the number of others."""
    pairs: list[tuple[AnnotatedValue, AnnotatedValue, Site | None]] = []
    for these, those in ((one.whole.tree.inputs, other.whole.tree.inputs), (one.whole.results, other.whole.results)):
        by_path = {value.path: value for value in those}
        pairs += [(value, by_path[value.path], None) for value in these if value.path in by_path]
    left, right = one.equations, other.equations
    if [*map(_kind, left)] == [*map(_kind, right)]:
        matched = [(k, k) for k in range(len(left))]
    else:
        matcher = difflib.SequenceMatcher(None, [*map(_kind, left)], [*map(_kind, right)], autojunk=False)
        blocks = matcher.get_matching_blocks()
        matched = [*itertools.chain.from_iterable(((b.a + k, b.b + k) for k in range(b.size)) for b in blocks)]
    for i, j in matched:
        twins = zip(left[i].outputs, right[j].outputs, strict=True)
        pairs += [(a, b, left[i].site) for a, b in twins if a.path is None and not left[i].bodies]
    return pairs, len(left) + len(right) - 2 * len(matched)


def _kind(equation: AnnotatedEquation) -> tuple[object, ...]:
    return equation.primitive, equation.site, *(str(value.aval) for value in equation.outputs)


def _peak(report: Contents) -> int:
    return max((memory.peak for memory in report.memory), default=0)
