"""Findings: what to look at first in a partitioned program."""

import dataclasses
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from partjit._jax.shardings import UNSPECIFIED
from partjit.inspect.annotated import AnnotatedEquation, AnnotatedValue
from partjit.inspect.collectives import Collective
from partjit.inspect.propagation import Partitioned
from partjit.inspect.renewed import renewed_arguments
from partjit.inspect.user_lines import Site, shown_site
from partjit.inspect.why.dataflow import Dataflow, DataflowEdge, reachable
from partjit.inspect.why.requests import axes_in, spec_in
from partjit.primitive import sharding_constraint_p
from partjit.render.numbers import shown_bytes

__all__ = ["AS_STATE", "KINDS", "Finding", "findings_of", "grouped"]

KINDS = (
    *("replicated", "fight", "moved", "not kept", "parts of axes", "rematerialization"),
    *("reduced in loop", "optimizer state", "unconstrained", "gathered elementwise", "back and forth"),
    *("redundant", "other spec"),
    *("invariant call", "unused result", "waited for", "one by one", "taking turns"),
    "shared stream",
)
"""The kinds of findings, of partitioned values and of colocated calls; docs/inspect.md says what they mean."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is worth a look.

    Attributes:
        kind: "replicated": a large replicated value. "fight": a value constrained in two ways. "moved": a result that
            is resharded after it is computed. "not kept": a constraint that the partitioner changed. "parts of axes": a
            sharding that no spec describes.
            "reduced in loop": sums over devices in each iteration that are added up. "optimizer state": a replicated
            argument of the shape of a parameter. "unconstrained": values that layers pass on, which no constraint
            shards as the batch is. "gathered elementwise": a value gathered for an elementwise equation. "back and
            forth": a value resharded, and resharded back. "rematerialization": an array that is replicated in
            full to be resharded. "redundant": products or convolutions that the devices along an axis all compute.
            "other spec": arguments for which less is sent if they are sharded along another dimension, or over another
            axis.
            Of calls, "invariant call", "unused result", "waited for", "one by one" and "taking
            turns": see `findings_of_calls`.
        nbytes: the bytes per device that are concerned.
        text: the finding.
        suggestion: a remedy.
        site: the line of the user's code.
        value: the name of the value, if it is about one.
        module: the path of its module, "Block_3/Dense_0"; empty if there is none.
        effect: what the suggestion would change, if it was tried out on the partitioner: see `partjit.inspect.changes`.
        share: of the operations of a device, how many the suggestion may spare at most; 0 if it is not about these.
    """

    kind: str
    nbytes: int
    text: str
    suggestion: str
    site: Site | None = None
    value: str = ""
    module: str = ""
    effect: str = ""
    share: float = 0.0

    @property
    def where(self) -> str:
        """The module and the line, ", in Block_3/Dense_0, at model.py:12 in loss"; empty if both are unknown."""
        module = f", in {self.module}" if self.module else ""
        return module + ("" if self.site is None else f", at {shown_site(self.site)}")

    def __str__(self) -> str:
        where = f"\n  {self.where[2:]}" if self.where else ""
        effect = f"\n  {self.effect}" if self.effect else ""
        return f"{self.kind}: {self.text}{where}\n  {self.suggestion}{effect}"


def findings_of(partitioned: Partitioned, collectives: Sequence[Collective], large: float) -> tuple[Finding, ...]:
    """The findings in a unit with these collectives, those of most bytes first.

    A replicated value of at least `large` bytes is a finding.
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
        *_reduced_in_loops(partitioned, collectives),
    ]
    return tuple(sorted(found, key=lambda finding: -finding.nbytes))


def _replicated(partitioned: Partitioned, large: float) -> Iterator[Finding]:
    shardings = dict(zip(partitioned.tree.inputs, partitioned.unit.in_shardings, strict=True))
    for value in partitioned.tree.inputs:
        if _is_large(value, large) and shardings[value] is UNSPECIFIED:
            yield Finding(
                "replicated",
                value.nbytes,
                f"the argument {value.path}, {shown_bytes(value.nbytes)}, is replicated: it has no spec, and "
                "no sharding propagates to it",
                "give it a spec",
                None,
                value.name,
            )
    # A value computed from a replicated one that was reported already is no finding of its own.
    reported = {value.number for value in partitioned.tree.inputs if _is_large(value, large)}
    from_literals: set[int] = set()  # XLA computes these where they are needed
    for equation in partitioned.tree.walk():
        reported.update(v.number for body in equation.bodies.values() for v in body.inputs if _is_large(v, large))
        if equation.bodies:
            from_literals.update(_passed_on(equation, from_literals))
            continue
        if all(value.number < 0 or value.number in from_literals for value in equation.inputs):
            from_literals.update(value.number for value in equation.outputs)
            continue
        known = (v for v in equation.inputs if v.is_array and not v.literal and v.sharding is not None)
        sharded = next((v for v in known if not v.is_replicated), None)
        for value in equation.outputs:
            if not _is_large(value, large) or value.number in reported:
                continue
            reported.add(value.number)
            if sharded is None and any(v.number in reported for v in equation.inputs):
                continue
            because = ": no sharding propagates to it"
            if sharded is not None:
                because = f", although {sharded.name}, {_type(sharded)}, is sharded"
            yield Finding(
                "replicated",
                value.nbytes,
                f"{value.name}, {_type(value)}, {shown_bytes(value.nbytes)}, is replicated{because}",
                "constrain it with with_sharding_constraint, or shard the values that it is computed from",
                equation.site,
                value.name,
                equation.module,
            )


def _passed_on(equation: AnnotatedEquation, numbers: Container[int]) -> Iterator[int]:
    """The arguments of a body, but for carried ones, that stand for values with these numbers, or for literals."""
    for body in equation.bodies.values():
        if len(body.inputs) == len(equation.inputs):
            for k, (value, inner) in enumerate(zip(equation.inputs, body.inputs, strict=True)):
                is_carried = equation.constants <= k < equation.constants + equation.carried
                if not is_carried and (value.number < 0 or value.number in numbers):
                    yield inner.number


def _is_large(value: AnnotatedValue, large: float) -> bool:
    """Whether it is a replicated value of so many bytes."""
    return value.is_array and not value.literal and value.is_replicated and value.nbytes >= large


def _fights(constraints: Mapping[int, AnnotatedEquation]) -> Iterator[Finding]:
    """Constraints that differ: on the same value, or on the result of another constraint."""
    of_value: dict[int, AnnotatedEquation] = {}
    for equation in constraints.values():
        (value,), (result,) = equation.inputs, equation.outputs
        other = of_value.get(value.number)
        if other is not None and other.outputs[0].spec != result.spec:
            yield Finding(
                "fight",
                max(value.nbytes_per_device, result.nbytes_per_device),
                f"{value.name} is constrained to {other.outputs[0].shown_spec} at {shown_site(other.site)} and to "
                f"{result.shown_spec}: it is resharded from one to the other",
                "keep one of the two",
                equation.site,
                result.name,
                equation.module,
            )
        of_value[value.number] = of_value[result.number] = equation


AS_STATE = (
    "shard it as it is computed, as an argument and as a result, or shard the values that it is computed from like it"
)
"""What is suggested for a moved result that is an argument of the next step."""


def _moved(partitioned: Partitioned) -> Iterator[Finding]:
    renewed = renewed_arguments(partitioned)
    for j, (value, returned) in enumerate(zip(partitioned.tree.outputs, partitioned.results, strict=True)):
        if not value.is_array or value.literal or value.sharding is None or returned.sharding == value.sharding:
            continue
        yield Finding(
            "moved",
            max(value.nbytes_per_device, returned.nbytes_per_device),
            f"{returned.path} is computed as {value.shown_spec} and returned as {returned.shown_spec}",
            AS_STATE
            if j in renewed
            else "return it as it is computed, or shard the values that it is computed from like the result",
            None,
            value.name,
        )


def _not_kept(constraints: Iterable[AnnotatedEquation]) -> Iterator[Finding]:
    for equation in constraints:
        requested = _requested(equation)
        value = equation.outputs[0]
        if requested is None or value.sharding is None:
            continue
        lost = [axis for k, dim in enumerate(requested) for axis in dim if axis not in value.sharding.axes[k]]
        if lost:
            yield Finding(
                "not kept",
                value.nbytes_per_device,
                f"the constraint of {value.name} requests {', '.join(map(repr, lost))}, but the partitioner made it "
                f"{_type(value)}",
                "constrain it to a spec that can be kept: an axis shards one dimension of a value",
                equation.site,
                value.name,
                equation.module,
            )


def _requested(equation: AnnotatedEquation) -> tuple[tuple[str, ...], ...] | None:
    """Per dimension, the axes of several devices that a constraint names."""
    spec, sizes = spec_in(equation.params.get("spec", equation.params.get("sharding"))), equation.outputs[0].mesh.shape
    if spec is None:
        return None
    return tuple(tuple(axis for axis in axes if sizes.get(axis, 1) > 1) for axes in map(axes_in, spec.partitions))


def _parts_of_axes(partitioned: Partitioned) -> Iterator[Finding]:
    seen = set()
    for equation in partitioned.tree.walk():
        for value in equation.outputs:
            sharding = value.sharding
            if (
                sharding is None
                or value.number in seen
                or not any(":" in axis for dim in sharding.axes for axis in dim)
            ):
                continue
            seen.add(value.number)
            yield Finding(
                "parts of axes",
                value.nbytes_per_device,
                f"{value.name}, {_type(value)}, is sharded over parts of mesh axes, which no spec describes",
                "this happens where a dimension is split or merged: make the sizes multiples of the mesh axes, or "
                "constrain the value",
                equation.site,
                value.name,
                equation.module,
            )


# fmt: off
_LINEAR = frozenset((
    "convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim", "mul", "div", "neg", "add",
    "add_any", "sharding_constraint", "copy",
))
# fmt: on


@dataclasses.dataclass(frozen=True)
class _Carry:
    """A value that a loop carries: the numbers of the argument of its body, of its next value, and of the result."""

    before: int
    after: int
    result: int


def _reduced_in_loops(partitioned: Partitioned, collectives: Sequence[Collective]) -> Iterator[Finding]:
    """All-reduces in loops whose results are only added to a carried value: one at the end would do."""
    carried: dict[int, _Carry] = {}  # by the number of the next value
    for equation in partitioned.tree.walk():
        body = equation.bodies.get("jaxpr") or equation.bodies.get("body_jaxpr")
        if equation.primitive in ("scan", "while") and body is not None:
            arguments = body.inputs[equation.constants : equation.constants + equation.carried]
            for before, after, result in zip(arguments, body.outputs, equation.outputs, strict=False):
                carried[after.number] = _Carry(before.number, after.number, result.number)
    sums = [c for c in collectives if c.kind == "all-reduce" and c.tags and (c.times or 2) > 1]
    flow = Dataflow(partitioned.tree) if sums and carried else None
    for c in sums:
        equation = partitioned.inlined.equations[c.tags[-1]]
        value = next((v for v in equation.outputs if v.is_array), None)
        if flow is None or value is None or not value.aval.shape or not _is_added_up(flow, value.number, carried):
            continue
        times = "" if c.times is None else f", {c.times:,} times"
        yield Finding(
            "reduced in loop",
            int(c.counted_bytes),
            f"{value.name}, {_type(value)}, is reduced over {', '.join(map(repr, c.axes))} in every iteration{times}, "
            "and the sums are added up",
            "add up what each device has, in a shard_map over these axes around the loop, and reduce once after it",
            c.site,
            value.name,
            c.module,
            f"counted: once it sends {shown_bytes(c.bytes_moved)}"
            + ("" if c.bytes_per_step is None else f" instead of {shown_bytes(c.bytes_per_step)}"),
        )


def _is_added_up(flow: Dataflow, number: int, carried: Mapping[int, _Carry]) -> bool:
    """Whether all that is computed from a value in a loop is its sum with a carried value that nothing else uses."""
    found = False
    for at in reachable([number], lambda at: _computed(flow, at) if at not in carried else ()):
        edges = [edge for edge in flow.used_by(at) if not edge.crosses]
        if (carry := carried.get(at)) is not None:
            if not _is_sum_alone(flow, carry):
                return False
            found |= any(carry.before in edge.sources for edge in flow.made_by(at))
        elif not edges or any(edge.equation.primitive not in _LINEAR for edge in edges):
            return False
    return found


def _is_sum_alone(flow: Dataflow, carry: _Carry) -> bool:
    """Whether an iteration uses a carried value for its next one alone, so that only the loop's result matters."""
    for at in reachable([carry.before], lambda at: _computed(flow, at) if at != carry.after else ()):
        for edge in flow.used_by(at):
            if at == carry.after:
                if not edge.crosses or any(_is_needed(flow, edge, target, carry) for target in edge.targets):
                    return False
            elif edge.crosses or edge.equation.primitive not in _LINEAR:
                return False
    return True


def _is_needed(flow: Dataflow, edge: DataflowEdge, target: int, carry: _Carry) -> bool:
    """Whether the next value of a carry is used as more than that: in an iteration, in the condition, or stacked."""
    is_result = any(value.number == target for value in edge.equation.outputs)
    return target not in (carry.before, carry.result) and (is_result or bool(flow.used_by(target)))


def _computed(flow: Dataflow, at: int) -> Iterator[int]:
    return (target for edge in flow.used_by(at) if not edge.crosses for target in edge.targets)


def _type(value: AnnotatedValue) -> str:
    return f"{value.shown_type} {value.shown_spec}"


class _Said(Protocol):
    @property
    def kind(self) -> str: ...

    @property
    def suggestion(self) -> str: ...


F = TypeVar("F", bound=_Said)


def grouped(findings: Iterable[F]) -> Mapping[tuple[str, str], Sequence[F]]:
    """Findings, or folded ones, by kind and suggestion."""
    groups: dict[tuple[str, str], list[F]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, finding.suggestion), []).append(finding)
    return groups
