"""Why a value is sharded as it is, in words: the origin of each axis, the path from there, and unsharded dimensions."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from partjit.inspect.annotated import AnnotatedEquation, AnnotatedValue, shown_spec
from partjit.inspect.propagation import Partitioned
from partjit.inspect.user_lines import shown_line, shown_site
from partjit.inspect.why.lookup import look_up
from partjit.inspect.why.origins import Origin, Origins, origins
from partjit.inspect.why.requests import Request
from partjit.render.html import code, fragment

__all__ = ["Conflict", "Why", "why"]

_MOST_STEPS = 6


@dataclasses.dataclass(frozen=True, eq=False)
class Conflict:
    """A value that meets this one in an equation, but is sharded differently.

    Attributes:
        equation: where both meet.
        value: the other value.
        axes: the axes on which they differ.
        origins: the origins of these axes in the other value.
    """

    equation: AnnotatedEquation
    value: AnnotatedValue
    axes: tuple[str, ...]
    origins: Mapping[str, Origin]

    def __str__(self) -> str:
        reasons = "; ".join(f"{axis!r} from {origin}" for axis, origin in self.origins.items())
        return (
            f"{self.value} at {self.equation.primitive} ({shown_line(self.equation.site)}) is sharded differently"
            + (f": {reasons}" if reasons else "")
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Why:
    """Why a value is sharded as it is; printed as text.

    Attributes:
        value: the value.
        equation: the equation that computes it; None for an argument.
        origins: for each axis that shards it the origin of that.
        unsharded: for each unsharded dimension the reason.
        conflicts: the values that it meets in equations and that are sharded differently.
        notes: remarks.
    """

    value: AnnotatedValue
    equation: AnnotatedEquation | None
    origins: Mapping[str, Origin]
    unsharded: Mapping[int, str]
    conflicts: tuple[Conflict, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return fragment(code(str(self)))

    def reasons(self) -> Iterator[str]:
        """A line for each axis that shards the value, and one for each unsharded dimension."""
        yield from self._origins()
        yield from self._unsharded()

    def _origins(self) -> Iterator[str]:
        dimensions = dict(_dimensions(self.value))
        width = max((len(repr(axis)) for axis in self.origins), default=0)
        for axis, origin in self.origins.items():
            sure = "" if origin.is_certain else "probably "
            yield f"{axis!r:{width}} shards dimension {dimensions[axis]}: {sure}from {origin}"

    def _unsharded(self) -> Iterator[str]:
        return (f"dimension {dimension} is unsharded: {reason}" for dimension, reason in self.unsharded.items())

    def _lines(self) -> Iterator[str]:
        yield f"{self.value}   {self._where()}"
        indent = " " * (max((len(repr(axis)) for axis in self.origins), default=0) + 3)
        for line, origin in zip(self._origins(), self.origins.values(), strict=True):
            yield f"  {line}"
            if (steps := _shown_way(origin.way)) != "":
                yield f"{indent}through {steps}"
        yield from (f"  {line}" for line in self._unsharded())
        if not self.value.aval.shape:
            yield "  it has no dimensions to shard"
        for conflict in self.conflicts:
            yield f"  conflict: {conflict}"
        for note in self.notes:
            yield f"  note: {note}"

    def _where(self) -> str:
        if self.equation is not None:
            within = f", in {self.equation.module}" if self.equation.module else ""
            return f"{shown_site(self.equation.site)}{within}"
        return f"argument {self.value.path}" if self.value.path else "a constant, or an argument of a nested program"


def why(partitioned: Partitioned, value: str | AnnotatedValue) -> Why:
    """Why a value of a program, or the value that a text names, is sharded as it is.

    Raises:
        ValueNotFoundError: there is no such value, or there are several.
        ValueError: the text of the program was not kept.
        TypeError: the value is no array.
    """
    of_program = origins(partitioned)
    notes = []
    if isinstance(value, str):
        found = look_up(partitioned.tree, value, partitioned.unit.result_paths, of_program.flow)
        value, notes = found.value, [found.note] if found.note else []
    if not value.is_array:
        raise TypeError(f"{value} is of type {value.aval}, not an array, and has no sharding")
    of_value = of_program.get(value.number, {})
    if value.sharding is None:
        notes.append("nothing uses it, so that it is not computed, and is sharded in no way")
    elif of_program.problem is not None:
        notes.append(f"this is a guess from the nearest specs, because {of_program.problem}")
    elif not all(origin.is_certain for origin in of_value.values()):
        notes.append("the partitioner did not report every origin: 'probably' marks the nearest spec with that axis")
    makers = [edge.equation for edge in of_program.flow.made_by(value.number)]
    equation = next((made for made in reversed(makers) if not made.bodies), makers[-1] if makers else None)
    requests = of_program.requests.get(value.number, ())
    ordered = {axis: of_value[axis] for axis, _ in _dimensions(value) if axis in of_value}
    return Why(
        value,
        equation,
        ordered,
        dict(_unsharded(value, requests, of_program.flow.shard_maps.get(value.number, ()))),
        tuple(_conflicts(of_program, value)),
        tuple(notes),
    )


def _dimensions(value: AnnotatedValue) -> Iterator[tuple[str, int]]:
    """Each axis that shards a value, with the dimension that it shards."""
    if value.sharding is not None:
        for dimension, axes in enumerate(value.sharding.axes):
            yield from ((axis, dimension) for axis in axes)


def _unsharded(
    value: AnnotatedValue, requests: Sequence[Request], around: Sequence[AnnotatedEquation]
) -> Iterator[tuple[int, str]]:
    """Each unsharded dimension of a value in these `shard_map`s, and why."""
    sharding, sizes = value.sharding, {axis: size for axis, size in value.mesh.shape.items() if size > 1}
    if sharding is None:
        return
    used = {axis.partition(":")[0] for axis, _ in _dimensions(value)}
    manual = [axis for axis in sizes if any(axis in equation.params["newly_manual_axes"] for equation in around)]
    local = ""
    if manual:
        where = f"in the shard_map at {shown_line(around[-1].site)}"
        local = f"{_several(manual)} {'is' if len(manual) == 1 else 'are'} manual {where}"
    for dimension, size in enumerate(value.aval.shape):
        if sharding.axes[dimension]:
            continue
        request = next((r for r in requests if r.kind not in ("result", "shard_map argument")), None)
        free = [axis for axis in sizes if axis not in used and axis not in manual]
        uneven = [axis for axis in free if size % sizes[axis]]
        if not sizes:
            yield dimension, "there is no mesh" if value.mesh.empty else "the mesh has one device"
        elif request is not None and not _leaves_open(request, dimension):
            is_own = request.kind == "argument"
            yield dimension, f"its spec is {shown_spec(request.spec)}" if is_own else f"{request} requires it"
        elif size == 1:
            yield dimension, "its size is 1"
        elif not free and local:
            yield dimension, f"it is local to each device: {local}"
        elif not free:
            yield dimension, f"{_several(sorted(used))} {'shards' if len(used) == 1 else 'shard'} other dimensions"
        elif len(uneven) == len(free):
            axes = _several([f"{axis!r} ({sizes[axis]})" for axis in uneven], quoted=True, last="or")
            yield dimension, f"its size {size} is not divisible by {axes}"
        else:
            axes = _several([axis for axis in free if axis not in uneven], last="or")
            yield dimension, f"no spec propagates {axes} to it" + (f"; {local}" if local else "")


def _leaves_open(request: Request, dimension: int) -> bool:
    entry = request.spec[dimension] if dimension < len(request.spec) else None
    return entry is type(request.spec).UNCONSTRAINED


def _conflicts(of_program: Origins, value: AnnotatedValue) -> Iterator[Conflict]:
    """The values of its shape that meet it in an equation, constraints included, and are sharded differently."""
    seen = {value.number}
    for edge in (*of_program.flow.made_by(value.number), *of_program.flow.used_by(value.number)):
        if edge.crosses:
            continue
        for number in (*edge.sources, *edge.targets):
            other = of_program.flow.values[number]
            if number in seen or not other.is_array or other.aval.shape != value.aval.shape or other.sharding is None:
                continue
            seen.add(number)
            own, theirs = dict(_dimensions(value)), dict(_dimensions(other))
            differing = [axis for axis in theirs if own.get(axis) != theirs[axis]]
            if differing and edge.equation.primitive not in _REARRANGES:
                of_other = of_program.get(number, {})
                kept = {axis: of_other[axis] for axis in differing if axis in of_other}
                yield Conflict(edge.equation, other, tuple(differing), kept)


# Operands and results of these have equal shapes by chance only, and their dimensions do not correspond.
# fmt: off
_REARRANGES = frozenset((
    "dot_general", "transpose", "reshape", "gather", "scatter", "scatter-add", "conv_general_dilated",
    "broadcast_in_dim",
))
# fmt: on


def _shown_way(way: Sequence[AnnotatedEquation]) -> str:
    """The equations of a path, those of one line together."""
    steps = []
    for line, equations in itertools.groupby(way, key=lambda equation: shown_line(equation.site)):
        names = list(dict.fromkeys(equation.primitive for equation in equations))
        steps.append(f"{_several(names, quoted=True)} ({line})")
    if len(steps) > _MOST_STEPS:
        half = _MOST_STEPS // 2
        steps = [*steps[:half], f"{len(steps) - 2 * half} more lines", *steps[-half:]]
    return ", ".join(steps)


def _several(names: Sequence[str], quoted: bool = False, last: str = "and") -> str:
    shown = [*names] if quoted else [repr(name) for name in names]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} {last} {shown[-1]}"
