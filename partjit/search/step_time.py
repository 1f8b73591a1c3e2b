"""How long a step would take on a machine: estimated from what it computes, moves in memory and sends."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from partjit.checks import require, require_number, wrong_type, wrong_value
from partjit.inspect.collectives import Collective, UnknownMove, executions, taken
from partjit.inspect.contents import Contents
from partjit.inspect.skeleton import skeleton_of
from partjit.inspect.traffic import count_traffic
from partjit.inspect.user_lines import shown_lines
from partjit.render import html
from partjit.render.numbers import shown_bytes, shown_duration, shown_flops
from partjit.render.text import table
from partjit.search.machine import Machine
from partjit.search.work import Part, Work, seconds_of

__all__ = ["Cause", "StepTime", "estimate_time", "require_links", "seconds_of_step", "step_time"]


class Cause(NamedTuple):
    """What takes time in a step.

    Attributes:
        kind: "compute", "memory" (what exceeds the time of the operations), "launch", "collective", or "unpredicted".
        what: the equation, or the collective and the axes it goes over.
        where: the user's line, or empty.
        amount: FLOPs, bytes moved in memory, launches, or bytes sent, of a device.
        seconds: how long they take.
    """

    kind: str
    what: str
    where: str
    amount: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The estimated time of a step; its text is a table of causes.

    Attributes:
        machine: the machine.
        overlap: the assumption: the fraction of the communication, up to the time of everything else, that is hidden
            behind computation.
        causes: what takes time, the longest first.
        is_lower_bound: whether trip counts are unknown that count as one iteration.
        unpredicted_at_most: the seconds of what is not predicted, if XLA moves as much as it may; as causes it takes
            what it takes as a rule.
    """

    machine: Machine
    overlap: float
    causes: tuple[Cause, ...]
    is_lower_bound: bool = False
    unpredicted_at_most: float = 0.0

    def seconds_of(self, *kinds: str) -> float:
        """The time of the causes of these kinds, one after the other."""
        return sum(cause.seconds for cause in self.causes if cause.kind in kinds)

    @functools.cached_property
    def computing(self) -> float:
        """The seconds of operations, of the memory traffic that takes longer than they do, and of launches."""
        return self.seconds_of("compute", "memory", "launch")

    @functools.cached_property
    def communication(self) -> float:
        """The seconds of all that is sent, one collective after the other, hidden or not."""
        return self.seconds_of("collective", "unpredicted")

    @property
    def hidden(self) -> float:
        """The seconds of communication that are assumed to be hidden behind computation."""
        return min(self.overlap * self.communication, self.computing)

    @property
    def total(self) -> float:
        """The seconds of a step."""
        return self.computing + self.communication - self.hidden

    @property
    def at_most(self) -> float:
        """The seconds of a step if XLA moves as much as it may for what is not predicted."""
        communication = self.seconds_of("collective") + self.unpredicted_at_most
        return self.computing + communication - min(self.overlap * communication, self.computing)

    def to_text(self, most: int | None = 20) -> str:
        """The table, of at most `most` causes."""
        least = "at least" if self.is_lower_bound else "about"
        launching = self.seconds_of("launch")
        bound = f", or up to {shown_duration(self.at_most)}," if self.unpredicted_at_most else ""
        launches = f"launches {shown_duration(launching)}, " if launching else ""
        title = (
            f"{least} {shown_duration(self.total)} per step{bound} on {self.machine.name}: compute "
            f"{shown_duration(self.seconds_of('compute'))}, memory {shown_duration(self.seconds_of('memory'))}, "
            f"{launches}communication {shown_duration(self.communication)}, "
            f"of which {shown_duration(self.hidden)} hidden"
        )
        return f"{title}\n{table(_COLUMNS, self._rows(), most)}"

    def _rows(self) -> list[tuple[str, ...]]:
        rows = []
        for one in self.causes:
            shown = {"compute": shown_flops, "launch": lambda number: f"{number:.0f}"}.get(one.kind, shown_bytes)
            amount = shown(one.amount)
            rows.append((one.kind, one.what, one.where or "?", amount, shown_duration(one.seconds)))
        return rows

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html.fragment(html.table(self.to_text(0).partition("\n")[0], _COLUMNS, self._rows()))


_COLUMNS = ("cause", "what", "line", "amount", "time")


def estimate_time(report: object, machine: Machine, *, overlap: float = 0.0) -> StepTime:
    """The time of a step of a program on a machine, by causes.

    Each part of the program computes as long as its operations or its memory traffic take, whichever is longer;
    elementwise equations are fused and cost what they read and write together. Collectives come one after the other.
    What the program moves and is not predicted counts with what it sends as a rule; `StepTime.at_most` counts its upper
    bound. Launches take what the machine says.
    Nothing is known of how near to its peak a device computes, or of what XLA fuses and overlaps: compare estimates
    with each other.

    Args:
        report: a report of `partjit.inspect.explain`, or an answer of `partjit.inspect.what_if.WhatIf`.
        machine: the machine; see `tpu_v5p`, `tpu_v6e`, `h100` and `measure_machine`.
        overlap: which fraction of the communication is hidden behind computation, where there is as much; from 0 to 1.

    Raises:
        TypeError: `report` is neither, or `machine` none.
        ValueError: `overlap` is not between 0 and 1, or the machine has no link for an axis of the mesh.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> from partjit import Mesh, P, pjit
        >>> from partjit.inspect import explain
        >>> from partjit.search import Link, Machine
        >>> mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
        >>> fun = pjit(lambda x, y: x @ y, in_shardings=(P(None, "data"), P("data")), out_shardings=P())
        >>> report = explain(fun, np.ones((64, 1024), np.float32), np.ones((1024, 64), np.float32), mesh=mesh)
        >>> machine = Machine("toy", {"f32": 1e9}, 1 << 30, 1e9, {"data": Link(1e8)})
        >>> print(estimate_time(report, machine))
        about 1.34 ms per step on toy: compute 1.05 ms, memory 0.00 us, communication 292.72 us, of which 0.00 us hidden
        cause       what                  line...amount       time
        compute     dot_general f32       ...  1.0 Mflop    1.05 ms
        collective  all-reduce over data  ...    28.7 kB  292.72 us

    Source: the roofline of Williams, Waterman and Patterson, Roofline: an insightful visual performance model, 2009.
    """
    require("estimate_time", "machine", machine, Machine, "a Machine", "see partjit.search.h100, tpu_v5p and tpu_v6e")
    if not 0 <= require_number("estimate_time", "overlap", overlap, "a number between 0 and 1") <= 1:
        raise wrong_value("estimate_time", "overlap", overlap, "a number between 0 and 1")
    if not isinstance(report, Contents):
        raise wrong_type("estimate_time", "report", report, "a report of partjit.inspect.explain")
    parts: list[Part] = []
    for program in report.programs:
        times = program.unit.times or 1
        work = Work(program.tree, count_traffic(skeleton_of(program.inlined), program.inlined))
        for part in work.parts(program.inlined.shardings):
            launches = part.launches * times
            parts.append(part._replace(flops=part.flops * times, traffic=part.traffic * times, launches=launches))
    is_exact = all(c.is_exact or c.branch for c in report.collectives)
    return step_time(
        parts, report.collectives, report.collectives.unknown, dict(report.mesh.shape), machine, overlap, not is_exact
    )


def step_time(
    parts: Iterable[Part],
    collectives: Iterable[Collective],
    unknown: Iterable[UnknownMove],
    sizes: Mapping[str, int],
    machine: Machine,
    overlap: float = 0.0,
    is_lower_bound: bool = False,
) -> StepTime:
    """As `estimate_time`, from the parts of the programs and what they send on a mesh with axes of these sizes.

    Raises:
        ValueError: the machine has no link for an axis of the mesh.
    """
    require_links(machine, sizes)
    moves = [*unknown]
    causes = [
        *_of_parts(parts, machine),
        *_of_collectives([*collectives], sizes, machine),
        *_of_moves(moves, machine),
    ]
    most = sum(move.bytes_at_most * executions(move) for move in _moving(moves)) / _slowest(machine)
    merged: dict[tuple[str, str, str], Cause] = {}
    for cause in causes:
        before = merged.get(cause[:3])
        if before is not None:
            cause = cause._replace(amount=before.amount + cause.amount, seconds=before.seconds + cause.seconds)
        merged[cause[:3]] = cause
    ordered = sorted((one for one in merged.values() if one.seconds > 0), key=lambda one: (-one.seconds, one[:3]))
    return StepTime(machine, overlap, tuple(ordered), is_lower_bound, most)


def require_links(machine: Machine, sizes: Mapping[str, int]) -> None:
    """Refuses a machine that has no link for an axis of a mesh with axes of these sizes.

    Raises:
        ValueError: it has none.
    """
    for axis, size in sizes.items():
        if size > 1 and axis not in machine.links:
            known = ", ".join(machine.links) or "nothing"
            raise ValueError(f"machine {machine.name} has no link for the axis {axis!r} of the mesh, but for {known}")


def seconds_of_step(
    parts: Iterable[Part],
    collectives: Iterable[Collective],
    unknown: Iterable[UnknownMove],
    sizes: Mapping[str, int],
    machine: Machine,
    overlap: float,
) -> tuple[float, float]:
    """The `at_most` and the `total` of `step_time`, without its causes, which take longer to make."""
    computing = seconds_of(parts, machine)
    own = [*collectives]
    if any(one.branch for one in own):
        sent = sum(cause.seconds for cause in _of_collectives(own, sizes, machine))
    else:
        known: dict[tuple[object, ...], float] = {}
        sent = 0.0
        for one in own:
            key = one.kind, one.axes, one.group_size, one.operand_bytes, one.result_bytes, one.sent
            if key not in known:
                known[key] = seconds_of_collective(one, sizes, machine)
            sent += known[key] * one.executions
    moves, slowest = [*_moving(unknown)], _slowest(machine)
    most = sent + sum(move.bytes_at_most * executions(move) for move in moves) / slowest
    sent += sum(move.bytes_likely * executions(move) for move in moves) / slowest
    return computing + most - min(overlap * most, computing), computing + sent - min(overlap * sent, computing)


def _of_parts(parts: Iterable[Part], machine: Machine) -> Iterator[Cause]:
    for part in parts:
        seconds, waiting, launching = part.seconds_on(machine)
        equation = part.equation
        name = "elementwise" if equation is None else f"{equation.primitive} {part.dtypes}"
        where = "" if equation is None else shown_lines(equation.site, equation.library) if equation.site else ""
        if seconds:
            yield Cause("compute", name, where, part.flops, seconds)
        if waiting:
            yield Cause("memory", name, where, part.traffic, waiting)
        if launching:
            yield Cause("launch", name, where, part.launches, launching)


def _of_collectives(collectives: Sequence[Collective], sizes: Mapping[str, int], machine: Machine) -> Iterator[Cause]:
    def seconds(one: Collective) -> float:
        return seconds_of_collective(one, sizes, machine) * one.executions

    for one in taken(collectives, seconds):
        what = f"{one.kind} over {' x '.join(one.axes) or 'parts of axes'}"
        where = shown_lines(one.site, one.library) if one.site else ""
        yield Cause("collective", what, where, one.counted_bytes, seconds(one))


def seconds_of_collective(one: Collective, sizes: Mapping[str, int], machine: Machine) -> float:
    """How long one execution of a collective takes."""
    axes: Mapping[str, int] = {axis: sizes[axis] for axis in one.axes}
    if one.kind != "collective-permute" and math.prod(axes.values()) != one.group_size:
        linked = axes or [axis for axis, size in sizes.items() if size > 1]
        slowest = min(linked, key=lambda axis: machine.links[axis].bandwidth, default=None)
        axes = {} if slowest is None else {slowest: one.group_size}
    return machine.seconds_to_send(one.kind, axes, one.operand_bytes * one.sent, one.result_bytes)


def _of_moves(unknown: Iterable[UnknownMove], machine: Machine) -> Iterator[Cause]:
    for move in _moving(unknown):
        nbytes = move.bytes_likely * executions(move)
        where = shown_lines(move.site, move.library) if move.site else ""
        what = f"{move.operation.partition('.')[2]}, as a rule"
        yield Cause("unpredicted", what, where, nbytes, nbytes / _slowest(machine))


def _moving(unknown: Iterable[UnknownMove]) -> Iterator[UnknownMove]:
    """Those on any device: what CPUs send besides, others do not."""
    return (move for move in unknown if not move.is_of_cpus)


def _slowest(machine: Machine) -> float:
    return min((link.bandwidth for link in machine.links.values()), default=math.inf)
