"""What a report on a partitioned program contains: shardings, collectives, memory, FLOPs, findings, as tables."""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jax.sharding import Mesh

from partjit.checks import require_integer
from partjit.inspect.annotated import AnnotatedEquation, AnnotatedValue
from partjit.inspect.collectives import Collective, UnknownMove, executions, repeated, taken, total_bytes
from partjit.inspect.compiled import CompiledUnit
from partjit.inspect.findings import Finding, findings_of, grouped
from partjit.inspect.flops import Flops, flops_of
from partjit.inspect.folded_findings import FoldedFinding, folded_findings
from partjit.inspect.listing import Listing, lines_of
from partjit.inspect.memory import Memory, estimate_memory
from partjit.inspect.modules import folded
from partjit.inspect.outcomes import Costs
from partjit.inspect.predicted import Prediction
from partjit.inspect.propagation import Partitioned
from partjit.inspect.suggestions import tried_out
from partjit.inspect.user_lines import shown_lines
from partjit.mesh import describe_mesh
from partjit.paths import pattern_of
from partjit.plan.plan import Plan
from partjit.render.numbers import counted, shown_bytes, shown_duration, shown_flops
from partjit.render.text import table

__all__ = ["Collectives", "Contents"]

_LISTED = 3
_LARGE = 1 << 16


class Collectives(tuple[Collective, ...]):
    """The collectives of a report, in the order of the program; its text is a table.

    Attributes:
        source: "predicted" from the shardings, or "compiled": read from the optimized program.
        unknown: the operations for which XLA may move data in a way that is not predicted; empty if compiled.
    """

    source: str
    unknown: tuple[UnknownMove, ...]

    def __new__(
        cls, collectives: Iterable[Collective], source: str, unknown: Iterable[UnknownMove] = ()
    ) -> "Collectives":
        """Those of a program or several, where they are from, and the moves that are not predicted."""
        made = super().__new__(cls, collectives)
        made.source = source
        made.unknown = tuple(unknown)
        return made

    @property
    def counts(self) -> collections.Counter[tuple[str, tuple[str, ...]]]:
        """How many arrays each kind moves over each axes; a combined collective counts for all of its arrays."""
        counts: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
        for collective in self:
            counts[collective.kind, collective.axes] += collective.combined
        return counts

    @property
    def bytes_per_step(self) -> float:
        """Bytes that a device sends in one step; a loop of unknown trip count counts as one iteration.

        A lower bound if there are `unknown` moves.
        """
        return total_bytes(self).bytes

    @property
    def bytes_per_step_at_most(self) -> float:
        """The same with the upper bounds of `unknown` moves."""
        return self.bytes_per_step + sum(executions(m) * m.bytes_at_most for m in self.unknown)

    def rows(self) -> Iterator[tuple[Collective, int]]:
        """Groups of equal collectives: the first of each and their number; the most expensive group first."""
        return ((group[0], len(group)) for group in self.groups())

    def groups(self) -> list[list[Collective]]:
        """Groups of equal collectives, those of modules whose paths differ in numbers only included.

        The most expensive group comes first.
        """
        alike: dict[tuple[object, ...], list[Collective]] = {}
        for c in self:
            key = c.kind, c.axes, c.site, c.library, c.result, c.times, c.per, c.program, pattern_of(c.module)
            alike.setdefault(key, []).append(c)

        def cost(group: list[Collective]) -> float:
            return sum(c.counted_bytes for c in group)

        return sorted(alike.values(), key=cost, reverse=True)

    def to_text(self, most: int | None = None) -> str:
        """The table, of at most so many lines. Raises TypeError or ValueError if `most` is no number of lines."""
        most = None if most is None else require_integer("Collectives.to_text", "most", most, 0)
        marks = "".join(f"\n{line}" for line in self._marks(most))
        if not self:
            known = "no collectives" if not self.unknown else "no collectives that can be predicted exactly"
            return f"{known} ({self.source}){marks}"
        total = shown_bytes(self.bytes_per_step)
        if self.unknown:
            total = f"between {total} and {shown_bytes(self.bytes_per_step_at_most)}"
        rows = [_row(group) for group in self.groups()]
        # Nothing is said by a column of module paths without any, or of programs that are all one.
        said = (any(c.module for c in self), len({c.program for c in self}) > 1)
        kept = [*range(6), *([6] if said[0] else []), 7, *([8] if said[1] else [])]
        columns, rows = [_COLUMNS[k] for k in kept], [[row[k] for k in kept] for row in rows]
        notes = ["loops of unknown length count as one iteration"] * any(c.times is None for c in self)
        notes += ["of branches the one that sends the most counts"] * any(c.branch for c in self)
        counts = f" ({', '.join(notes)})" if notes else ""
        title = f"{counted(len(self), 'collective')} ({self.source}); a device sends {total} per step{counts}"
        return f"{title}\n{table(columns, rows, most)}{marks}"

    def _marks(self, most: int | None) -> Iterator[str]:
        """The moves that are not predicted, those that may send the most first."""
        alike: dict[tuple[object, ...], list[UnknownMove]] = {}
        for move in self.unknown:
            alike.setdefault((move.operation, move.site, move.program), []).append(move)

        def cost(group: list[UnknownMove]) -> int:
            return sum(executions(move) * move.bytes_at_most for move in group)

        groups = sorted(alike.values(), key=cost, reverse=True)
        if groups:
            yield "XLA may move data here, which is predicted only within bounds:"
        for group in groups[:most]:
            one = group[0]
            where = "" if one.site is None else f", {shown_lines(one.site, one.library)}"
            several = f"{len(group)} x " if len(group) > 1 else ""
            name = one.operation.partition(".")[2]
            yield f"  {several}{name}: at most {shown_bytes(cost(group))} per step{where}"
        if most is not None and groups[most:]:
            yield f"  ... and {len(groups) - most} more"

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__


_COLUMNS = ("kind", "axes", "result", "count", "times", "sent per step", "module", "line", "program")


def _row(group: Sequence[Collective]) -> tuple[str | int, ...]:
    c, count = group[0], len(group)
    return (
        c.kind,
        ", ".join(c.axes) or "-",
        c.result if len(c.result) <= 40 else f"{c.combined} arrays",
        count,
        c.shown_times if c.times is None else c.times,
        shown_bytes(count * c.counted_bytes),
        folded(module for c in group for module in c.modules),
        shown_lines(c.site, c.library),
        c.program,
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Contents:
    """What a report on a partitioned program contains; its text is tables.

    Attributes:
        name: the name of the function.
        whole: the function as one program, annotated.
        programs: the programs that are compiled, annotated: the function itself, or the fragments of its plan.
        plan: its plan, if it makes colocated calls.
        donated: which arguments of each program are.
        predictions: of each program, the collectives that its shardings require.
        compiled: the compiled programs; empty if nothing was compiled.
        noted: findings about calls, and about what XLA did.
        requested_large: the number of bytes from which a replicated value is a finding; None for the default.
        bandwidth: the bytes per second that a device sends, or those of each axis by name; None if that is not stated.
        donated_to_whole: which arguments of the function are donated.

    What is computed from these alone, such as memory, FLOPs and findings, is computed when it is first read.
    """

    name: str
    whole: Partitioned
    programs: tuple[Partitioned, ...]
    plan: Plan | None
    donated: tuple[tuple[bool, ...], ...]
    predictions: tuple[Prediction, ...]
    compiled: tuple[CompiledUnit, ...]
    noted: tuple[Finding, ...]
    requested_large: float | None
    bandwidth: float | Mapping[str, float] | None
    donated_to_whole: tuple[bool, ...]

    @functools.cached_property
    def predicted(self) -> Collectives:
        """The collectives that the shardings require, those of a fragment as often as it runs."""
        each = [*zip(self.programs, self.predictions, strict=True)]
        return Collectives(
            [repeated(c, program.unit.times) for program, prediction in each for c in prediction.collectives],
            "predicted",
            [repeated(move, program.unit.times) for program, prediction in each for move in prediction.unknown],
        )

    @functools.cached_property
    def flops(self) -> Flops:
        """FLOPs of one execution, counted in the equations."""
        return flops_of(self.whole.tree)

    @functools.cached_property
    def estimates(self) -> tuple[Memory, ...]:
        """The memory of each program, computed from its equations."""
        each = zip(self.programs, self.donated, self.predictions, strict=True)
        return tuple(estimate_memory(program, flags, *found) for program, flags, found in each)

    @property
    def large(self) -> float:
        """The number of bytes from which a replicated value is a finding."""
        if self.requested_large is not None:
            return self.requested_large
        return max(_LARGE, max((estimate.peak for estimate in self.estimates), default=0) // 100)

    @functools.cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What to look at, first what matters most; suggestions are tried out when this is first read."""
        large, found = self.large, list[Finding]()
        for program, prediction in zip(self.programs, self.predictions, strict=True):
            collectives = [repeated(c, program.unit.times) for c in prediction.collectives]
            found += findings_of(program, collectives, large)
        if self.plan is not None:
            return (*self.noted, *found)
        (program,), (donated,), moved = self.programs, self.donated, self.predicted
        costs = Costs(moved.bytes_per_step, moved.bytes_per_step_at_most, self.estimates[0].peak)
        return (*self.noted, *tried_out(found, program, donated, self.predictions[0], costs, large))

    @functools.cached_property
    def folded_findings(self) -> tuple[FoldedFinding, ...]:
        """The same, those that repeat from layer to layer as one."""
        return folded_findings(self.findings)

    @property
    def seconds(self) -> Mapping[tuple[str, ...], float]:
        """How long the collectives over axes take in a step at the stated bandwidth, the longest first.

        Those over several axes take as long as over the slowest of them. What counts is what `bytes_per_step` of the
        collectives counts. Empty if no bandwidth is stated.
        """
        found: dict[tuple[str, ...], float] = {}
        rates = self.bandwidth
        if rates is None:
            return found
        for c in taken(self.collectives):
            known = [rates[axis] for axis in c.axes if axis in rates] if isinstance(rates, Mapping) else [rates]
            if known:
                found[c.axes] = found.get(c.axes, 0.0) + c.counted_bytes / min(known)
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def memory(self) -> tuple[Memory, ...]:
        """The memory of each program on a device: as XLA reports it if it was compiled, estimated otherwise."""
        if not self.compiled:
            return self.estimates
        return tuple(unit.memory or estimate for unit, estimate in zip(self.compiled, self.estimates, strict=True))

    @property
    def mesh(self) -> Mesh:
        """The mesh; empty if there is none."""
        return self.whole.unit.mesh

    @functools.cached_property
    def jaxpr(self) -> Listing:
        """The jaxpr, each value with its spec and its bytes per device, each equation with its source line."""
        title = f"{self.name} on the mesh {describe_mesh(self.mesh)}" if not self.mesh.empty else self.name
        return Listing(title, tuple(lines_of(self.whole.tree)))

    @functools.cached_property
    def collectives(self) -> Collectives:
        """The collectives of the compiled programs, if they were compiled; the predicted ones otherwise."""
        if not self.compiled:
            return self.predicted
        return Collectives([c for unit in self.compiled for c in unit.collectives], "compiled")

    @property
    def values(self) -> tuple[AnnotatedValue, ...]:
        """All values of the program."""
        return tuple(self.whole.tree.values)

    @property
    def equations(self) -> tuple[AnnotatedEquation, ...]:
        """All equations of the program, nested ones included."""
        return tuple(self.whole.inlined.equations)

    def to_text(self, most: int | None = 20) -> str:
        """The tables of the report, each of at most `most` lines.

        Raises:
            TypeError, ValueError: `most` is no number of lines.
        """
        most = None if most is None else require_integer("Report.to_text", "most", most, 0)
        parts = [self._summary()]
        if self.findings:
            parts.append("\n".join(["look at", *_lines_of(self.folded_findings)]))
        parts += [self.collectives.to_text(most), self._arrays(most)]
        if self.plan is not None:
            parts.append(f"{self.plan!r}\n{self.plan}")
        return "\n\n".join(parts)

    def _summary(self) -> str:
        where = "without a mesh" if self.mesh.empty else f"on {describe_mesh(self.mesh)}"
        about = "" if self.flops.is_exact else "at least "
        return "\n".join(
            [
                f"{self.name} {where}: {counted(len(self.equations), 'equation')}",
                f"  compute: {about}{shown_flops(self.flops.total)}, {shown_flops(self.flops.per_device)} per device",
                *(f"  memory per device, {memory}" for memory in self.memory),
                *([f"  network: {_shown_seconds(self.seconds)} in a step"] if self.seconds else []),
            ]
        )

    def _arrays(self, most: int | None) -> str:
        """The arguments and results with their specs, those of equal layers as one."""
        alike: dict[object, list[AnnotatedValue]] = {}
        for is_result, values in enumerate((self.whole.tree.inputs, self.whole.results)):
            for value in values:
                if value.is_array:
                    key = is_result, pattern_of(value.path or ""), value.shown_type, value.shown_spec
                    alike.setdefault(key, []).append(value)
        rows = [
            (
                folded(value.path or "" for value in group),
                group[0].shown_type,
                group[0].shown_spec,
                len(group),
                shown_bytes(sum(value.nbytes_per_device for value in group)),
            )
            for group in alike.values()
        ]
        columns = ("array", "type", "spec", "count", "per device")
        is_folded = any(len(group) > 1 for group in alike.values())
        kept = [k for k in range(len(columns)) if is_folded or columns[k] != "count"]
        return table([columns[k] for k in kept], [[row[k] for k in kept] for row in rows], most)

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__


def _shown_seconds(seconds: Mapping[tuple[str, ...], float]) -> str:
    return ", ".join(f"{' x '.join(axes) or 'other groups'} {shown_duration(t)}" for axes, t in seconds.items())


def _lines_of(findings: Sequence[FoldedFinding]) -> Iterator[str]:
    """The first few findings of each kind and suggestion."""
    for (kind, suggestion), group in grouped(findings).items():
        yield f"  {kind}: {suggestion}" if suggestion else f"  {kind}"
        for finding in group[:_LISTED]:
            yield f"    {finding.text}{finding.where}"
        if group[_LISTED:]:
            yield f"    ... and {sum(len(one.findings) for one in group[_LISTED:])} more"
        if group[0].effect:
            yield f"    {group[0].effect}"
