"""What a reader of a partitioned program should look at first."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from partjit._jax.shardings import UNSPECIFIED
from partjit.inspect.annotated import AnnotatedEquation, AnnotatedValue, shown_spec
from partjit.inspect.collectives import Collective
from partjit.inspect.propagation import Partitioned
from partjit.inspect.user_lines import Site, shown_site
from partjit.primitive import sharding_constraint_p
from partjit.render.numbers import shown_bytes

__all__ = ["Finding", "findings_of"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is worth a look.

    Attributes:
        kind: "replicated": a large value that every device has all of. "fight": a value constrained in two ways.
            "moved": a result that is computed in another layout than it leaves in. "not kept": a constraint the
            partitioner changed. "parts of axes": a value no spec can describe. "in loop": what a loop moves in each
            turn although it does not change. "rematerialization": an array that goes through all of it on every device.
        nbytes: how much is at stake, per device.
        text: what it is.
        suggestion: what could be done.
        site: the line of the user's code.
        value: the name of the value, if it is about one.
    """

    kind: str
    nbytes: int
    text: str
    suggestion: str
    site: Site | None = None
    value: str = ""

    def __str__(self) -> str:
        where = "" if self.site is None else f"\n  at {shown_site(self.site)}"
        return f"{self.kind}: {self.text}{where}\n  {self.suggestion}"


def findings_of(partitioned: Partitioned, collectives: Sequence[Collective], large: int) -> tuple[Finding, ...]:
    """The findings in a unit, those with most at stake first.

    Args:
        partitioned: the unit.
        collectives: what it communicates.
        large: from how many bytes on a device a replicated value counts as large.
    """
    if partitioned.unit.mesh.size <= 1:
        return ()
    constraints = {
        equation.number: equation
        for equation in partitioned.tree.walk()
        if equation.primitive in ("sharding_constraint", sharding_constraint_p.name)
    }
    found = [
        *_replicated(partitioned, large),
        *_fights(constraints),
        *_moved(partitioned),
        *_not_kept(constraints.values()),
        *_parts_of_axes(partitioned),
        *_in_loops(partitioned, collectives),
    ]
    return tuple(sorted(found, key=lambda finding: -finding.nbytes))


def _replicated(partitioned: Partitioned, large: int) -> Iterator[Finding]:
    shardings = dict(zip(partitioned.tree.inputs, partitioned.unit.in_shardings, strict=True))
    for value in partitioned.tree.inputs:
        if _is_whole(value, large) and shardings[value] is UNSPECIFIED:
            yield Finding(
                "replicated",
                value.nbytes,
                f"every device has all of the argument {value.path}, {shown_bytes(value.nbytes)}; it was given no spec "
                "and nothing it meets divides it",
                "give it a spec",
                None,
                value.name,
            )
    # What comes from a whole value that was told of already is no finding of its own.
    told = {value.number for value in partitioned.tree.inputs if _is_whole(value, large)}
    of_numbers: set[int] = set()  # these are made where they are needed
    for equation in partitioned.tree.walk():
        told.update(v.number for body in equation.bodies.values() for v in body.inputs if _is_whole(v, large))
        if equation.bodies:
            continue
        if all(value.literal or value.number in of_numbers for value in equation.inputs):
            of_numbers.update(value.number for value in equation.outputs)
            continue
        divided = next((v for v in equation.inputs if v.is_array and not v.literal and not v.is_replicated), None)
        for value in equation.outputs:
            if not _is_whole(value, large) or value.number in told:
                continue
            told.add(value.number)
            if divided is None and any(v.number in told for v in equation.inputs):
                continue
            because = "which nothing divides"
            if divided is not None:
                because = f"although {divided.name}, {_type(divided)}, is divided"
            yield Finding(
                "replicated",
                value.nbytes,
                f"every device has all of {value.name}, {_type(value)}, {shown_bytes(value.nbytes)}, {because}",
                "constrain it with with_sharding_constraint, or divide what it is computed from",
                equation.site,
                value.name,
            )


def _is_whole(value: AnnotatedValue, large: int) -> bool:
    """Whether every device has all of a large value."""
    return value.is_array and not value.literal and value.is_replicated and value.nbytes >= large


def _fights(constraints: Mapping[int, AnnotatedEquation]) -> Iterator[Finding]:
    """Constraints on one value that differ: on the same one, or on what another constraint gave."""
    of_value: dict[int, AnnotatedEquation] = {}
    for equation in constraints.values():
        (value,), (result,) = equation.inputs, equation.outputs
        other = of_value.get(value.number)
        if other is not None and _axes(other.outputs[0]) != _axes(result):
            yield Finding(
                "fight",
                max(value.nbytes_per_device, result.nbytes_per_device),
                f"{value.name} is constrained to {_spec(other.outputs[0])} at {shown_site(other.site)} and to "
                f"{_spec(result)}: it is moved from one to the other",
                "keep one of the two",
                equation.site,
                result.name,
            )
        of_value[value.number] = of_value[result.number] = equation


def _moved(partitioned: Partitioned) -> Iterator[Finding]:
    for value, leaving in zip(partitioned.tree.outputs, partitioned.results, strict=True):
        if not value.is_array or value.literal or value.layout is None or leaving.layout == value.layout:
            continue
        yield Finding(
            "moved",
            max(value.nbytes_per_device, leaving.nbytes_per_device),
            f"{leaving.path} is computed as {_spec(value)} and leaves as {_spec(leaving)}",
            "let it leave as it is computed, or divide what it is computed from so",
            None,
            value.name,
        )


def _not_kept(constraints: Iterable[AnnotatedEquation]) -> Iterator[Finding]:
    for equation in constraints:
        asked = _asked(equation)
        value = equation.outputs[0]
        if asked is None or value.layout is None:
            continue
        lost = [axis for k, dim in enumerate(asked) for axis in dim if axis not in value.layout.axes[k]]
        if lost:
            yield Finding(
                "not kept",
                value.nbytes_per_device,
                f"the constraint of {value.name} asks that {', '.join(map(repr, lost))} divide it, but it is "
                f"{_type(value)}",
                "constrain it to what can be kept: an axis divides one dimension of a value",
                equation.site,
                value.name,
            )


def _asked(equation: AnnotatedEquation) -> tuple[tuple[str, ...], ...] | None:
    """Per dimension the axes that a constraint names."""
    sharding = equation.params.get("sharding")
    spec = getattr(sharding, "spec", None) if sharding is not None else equation.params.get("spec")
    entries = getattr(spec, "partitions", spec)
    if entries is None:
        return None
    found = []
    for entry in entries:
        names = (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()
        found.append(tuple(name for name in names if isinstance(name, str)))
    mesh = equation.outputs[0].mesh
    return tuple(tuple(name for name in dim if mesh.shape.get(name, 1) > 1) for dim in found)


def _parts_of_axes(partitioned: Partitioned) -> Iterator[Finding]:
    seen = set()
    for equation in partitioned.tree.walk():
        for value in equation.outputs:
            layout = value.layout
            if layout is None or value.number in seen or not any(":" in axis for dim in layout.axes for axis in dim):
                continue
            seen.add(value.number)
            yield Finding(
                "parts of axes",
                value.nbytes_per_device,
                f"{value.name}, {_type(value)}, is divided by parts of mesh axes, which no spec can say",
                "that happens where a dimension is split or merged: make the sizes multiples of the mesh axes, or "
                "constrain the value",
                equation.site,
                value.name,
            )


def _in_loops(partitioned: Partitioned, collectives: Sequence[Collective]) -> Iterator[Finding]:
    """Collectives in a loop on what the loop only reads."""
    invariant: dict[int, AnnotatedValue] = {}
    for equation in partitioned.tree.walk():
        if equation.primitive in ("scan", "while"):
            body = equation.bodies.get("jaxpr") or equation.bodies.get("body_jaxpr")
            if body is not None:
                invariant.update((value.number, value) for value in body.inputs[: equation.constants])
    equations = partitioned.inlined.equations
    for collective in collectives:
        if not collective.tags or collective.kind != "all-gather" or (collective.times or 2) <= 1:
            continue
        equation = equations[collective.tags[-1]]
        if equation.constants:  # what is gathered on the way into the body
            read = equation.inputs[: len(equation.inputs) - equation.carried]
        else:
            read = tuple(v for v in equation.inputs if v.number in invariant)
        value = next((v for v in read if v.is_array and not v.is_replicated), None)
        if value is not None:
            yield Finding(
                "in loop",
                int(collective.bytes_moved),
                f"{value.name}, {_type(value)}, is gathered in every turn of a loop that does not change it",
                "constrain it before the loop to how it is used; or leave it, if all of it takes too much memory",
                collective.site,
                value.name,
            )


def _axes(value: AnnotatedValue) -> object:
    return None if value.layout is None else value.layout.axes


def _spec(value: AnnotatedValue) -> str:
    return "?" if value.spec is None else shown_spec(value.spec)


def _type(value: AnnotatedValue) -> str:
    return f"{value.aval.str_short(short_dtypes=True)} {_spec(value)}"
