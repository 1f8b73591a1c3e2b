"""Why a value is divided as it is, in words: where each axis comes from, by which way, and why a dimension is whole."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from partjit.inspect.annotated import AnnotatedEquation, AnnotatedValue, shown_spec
from partjit.inspect.propagation import Partitioned
from partjit.inspect.user_lines import shown_line, shown_site
from partjit.inspect.why.lookup import look_up
from partjit.inspect.why.origins import Origin, Origins, origins
from partjit.inspect.why.requests import Request

__all__ = ["Conflict", "Why", "why"]

_MOST_STEPS = 6


@dataclasses.dataclass(frozen=True, eq=False)
class Conflict:
    """A value that is moved because something else wants it, or what is made of it, otherwise.

    Attributes:
        equation: where both meet.
        value: the other value.
        axes: the axes on which they differ.
        origins: of these, for the other value.
    """

    equation: AnnotatedEquation
    value: AnnotatedValue
    axes: tuple[str, ...]
    origins: Mapping[str, Origin]

    def __str__(self) -> str:
        reasons = "; ".join(f"{axis!r} from {origin}" for axis, origin in self.origins.items())
        return f"{self.value} at {self.equation.primitive} ({shown_line(self.equation.site)}) lies otherwise" + (
            f": {reasons}" if reasons else ""
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Why:
    """Why a value is divided as it is.

    At a prompt it reads as text.

    Attributes:
        value: the value.
        equation: what computes it; None for an argument.
        origins: for each axis that divides it where that comes from.
        whole: for each dimension that is not divided why.
        conflicts: the values that it meets and that lie otherwise.
        notes: what else there is to say.
    """

    value: AnnotatedValue
    equation: AnnotatedEquation | None
    origins: Mapping[str, Origin]
    whole: Mapping[int, str]
    conflicts: tuple[Conflict, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre-wrap">{escape(str(self))}</pre>'

    def _lines(self) -> Iterator[str]:
        yield f"{self.value}   {self._place()}"
        dimensions = dict(_dimensions(self.value))
        width = max((len(repr(axis)) for axis in self.origins), default=0)
        indent = " " * (width + 3)
        for axis, origin in self.origins.items():
            sure = "" if origin.is_certain else "probably "
            yield f"  {axis!r:{width}} divides dimension {dimensions[axis]}: {sure}from {origin}"
            if (steps := _shown_way(origin.way)) != "":
                yield f"{indent}through {steps}"
        for dimension, reason in self.whole.items():
            yield f"  dimension {dimension} is whole: {reason}"
        if not self.value.aval.shape:
            yield "  it has no dimensions to divide"
        for conflict in self.conflicts:
            yield f"  against it: {conflict}"
        for note in self.notes:
            yield f"  note: {note}"

    def _place(self) -> str:
        if self.equation is not None:
            return shown_site(self.equation.site)
        return f"argument {self.value.path}" if self.value.path else "a constant, or an argument of a nested program"


def why(partitioned: Partitioned, value: str | AnnotatedValue) -> Why:
    """Why a value of a program is divided as it is.

    Args:
        partitioned: the program, with its text.
        value: the value, or what `find_value` finds it by.

    Raises:
        ValueNotFoundError: there is no such value, or there are several.
        ValueError: the text of the program was not kept.
        TypeError: the value is no array.
    """
    told = origins(partitioned)
    notes = []
    if isinstance(value, str):
        found = look_up(partitioned.tree, value, partitioned.unit.result_paths, told.flow)
        value, notes = found.value, [found.note] if found.note else []
    if not value.is_array:
        raise TypeError(f"{value} is of type {value.aval}, and no array that could be divided")
    of_value = told.get(value.number, {})
    if told.problem is not None:
        notes.append(f"this is the nearest explanation, because {told.problem}")
    elif not all(origin.is_certain for origin in of_value.values()):
        notes.append("the partitioner does not tell all of it: 'probably' is the nearest spec with that axis")
    makers = [edge.equation for edge in told.flow.made_by(value.number)]
    equation = next((made for made in reversed(makers) if not made.bodies), makers[-1] if makers else None)
    requests = told.requests.get(value.number, ())
    ordered = {axis: of_value[axis] for axis, _ in _dimensions(value) if axis in of_value}
    return Why(value, equation, ordered, dict(_whole(value, requests)), tuple(_conflicts(told, value)), tuple(notes))


def _dimensions(value: AnnotatedValue) -> Iterator[tuple[str, int]]:
    """Each axis that divides a value with the dimension that it divides."""
    if value.layout is not None:
        for dimension, axes in enumerate(value.layout.axes):
            yield from ((axis, dimension) for axis in axes)


def _whole(value: AnnotatedValue, requests: Sequence[Request]) -> Iterator[tuple[int, str]]:
    """Each dimension of a value that no axis divides, and why."""
    layout, sizes = value.layout, {axis: size for axis, size in value.mesh.shape.items() if size > 1}
    if layout is None:
        return
    used = {axis.partition(":")[0] for axis, _ in _dimensions(value)}
    for dimension, size in enumerate(value.aval.shape):
        if layout.axes[dimension]:
            continue
        asked = next((r for r in requests if r.kind not in ("result", "shard_map argument")), None)
        free = [axis for axis in sizes if axis not in used]
        uneven = [axis for axis in free if size % sizes[axis]]
        if asked is not None and not _leaves_open(asked, dimension):
            said = f"it is given {shown_spec(asked.spec)}" if asked.kind == "argument" else f"{asked} says so"
            yield dimension, said
        elif size == 1:
            yield dimension, "its size is 1"
        elif not free:
            yield dimension, f"{_several(sorted(used))} {'divides' if len(used) == 1 else 'divide'} other dimensions"
        elif len(uneven) == len(free):
            axes = _several([f"{axis!r} ({sizes[axis]})" for axis in uneven], quoted=True, last="or")
            yield dimension, f"its size {size} is not divisible by {axes}"
        else:
            axes = _several([axis for axis in free if axis not in uneven], last="or")
            yield dimension, f"nothing asks for it to be divided by {axes}"


def _leaves_open(request: Request, dimension: int) -> bool:
    entry = request.spec[dimension] if dimension < len(request.spec) else None
    return entry is type(request.spec).UNCONSTRAINED


def _conflicts(told: Origins, value: AnnotatedValue) -> Iterator[Conflict]:
    """The values of its shape that meet it in an equation, or that a constraint makes of it, and lie otherwise."""
    seen = {value.number}
    for edge in (*told.flow.made_by(value.number), *told.flow.used_by(value.number)):
        if edge.crosses:
            continue
        for number in (*edge.sources, *edge.targets):
            other = told.flow.values[number]
            if number in seen or not other.is_array or other.aval.shape != value.aval.shape or other.layout is None:
                continue
            seen.add(number)
            own, theirs = dict(_dimensions(value)), dict(_dimensions(other))
            differing = [axis for axis in theirs if own.get(axis) != theirs[axis]]
            if differing and edge.equation.primitive not in _REARRANGES:
                of_other = told.get(number, {})
                kept = {axis: of_other[axis] for axis in differing if axis in of_other}
                yield Conflict(edge.equation, other, tuple(differing), kept)


# What these make has the shape of what they take only by chance, and dimensions that mean others.
_REARRANGES = frozenset(
    (
        "dot_general",
        "transpose",
        "reshape",
        "gather",
        "scatter",
        "scatter-add",
        "conv_general_dilated",
        "broadcast_in_dim",
    )
)


def _shown_way(way: Sequence[AnnotatedEquation]) -> str:
    """The equations of a way, those of one line together."""
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
