"""Changes of shardings that an expert would try, each for a finding or several."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from partjit._jax.shardings import UNSPECIFIED
from partjit.inspect.annotated import AnnotatedEquation, AnnotatedValue, shown_axes
from partjit.inspect.changes import Axes, Change
from partjit.inspect.collectives import Collective
from partjit.inspect.findings import AS_STATE, Finding
from partjit.inspect.other_specs import OtherSpecs, other_specs
from partjit.inspect.predicted import Prediction
from partjit.inspect.propagation import Partitioned
from partjit.inspect.redundant import Redundancy, redundancies
from partjit.inspect.renewed import renewed_arguments
from partjit.inspect.residual_streams import ResidualStream, residual_streams
from partjit.inspect.why.dataflow import Dataflow
from partjit.inspect.why.key_paths import keys_of
from partjit.paths import pattern_of
from partjit.primitive import sharding_constraint_p
from partjit.render.numbers import counted, shown_bytes

__all__ = ["Proposal", "proposals"]


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Findings, and one change for all of them.

    Attributes:
        findings: the findings.
        change: the change.
        is_required: whether they are no findings if the change gains nothing.
        alternative: another change for the same, which is proposed instead if less is sent with it.
        per_device: the operations of a device, if the change is to spare these; the alternative is for when it does
            not.
        replaces: findings that are left out if these are reported: the change is about what they are about.
    """

    findings: tuple[Finding, ...]
    change: Change
    is_required: bool = True
    alternative: "Proposal | None" = None
    replaces: tuple[Finding, ...] = ()
    per_device: float | None = None


def proposals(
    partitioned: Partitioned, prediction: Prediction, found: Sequence[Finding], large: float
) -> Iterator[Proposal]:
    """Changes for a unit with these moves and findings, in which a value of at least `large` bytes is large."""
    if partitioned.unit.mesh.size <= 1:
        return
    collectives = prediction.collectives
    yield from _of_findings(partitioned, found)
    yield from _replicated_by_spec(partitioned, found, large)
    yield from map(_of_redundancy, redundancies(partitioned))
    yield from _unconstrained(partitioned, collectives)
    yield from _elementwise(partitioned, collectives)
    yield from _back_and_forth(partitioned, collectives)
    yield from map(_of_other_specs, other_specs(partitioned, prediction))


def _of_findings(partitioned: Partitioned, found: Sequence[Finding]) -> Iterator[Proposal]:
    """The changes that existing findings suggest, one for those of a kind."""
    tree = partitioned.tree
    values = {value.name: value for value in tree.values}
    positions = {value.name: k for k, value in enumerate(tree.inputs)}
    by_kind: dict[str, list[tuple[Finding, AnnotatedValue]]] = {}
    for finding in found:
        if finding.value in values:
            kind = f"{finding.kind} argument" if finding.value in positions else finding.kind
            kind = "moved state" if finding.suggestion == AS_STATE else kind
            by_kind.setdefault(kind, []).append((finding, values[finding.value]))
    for kind, group in by_kind.items():
        change = Change()
        if kind == "replicated argument":
            specs = {positions[v.name]: axes for _, v in group if (axes := _best(v)) is not None}
            change = Change(arguments=specs)
        elif kind == "replicated":
            change = Change(values={v.number: axes for _, v in group if (axes := _best(v)) is not None})
        elif kind.startswith("moved"):
            moved, renewed = {v.number for _, v in group}, renewed_arguments(partitioned)
            own = {
                j: value.sharding.axes
                for j, value in enumerate(tree.outputs)
                if value.number in moved and value.sharding is not None and value.sharding.is_of_whole_axes
                if (j in renewed) == (kind == "moved state")
            }
            change = Change({renewed[j]: axes for j, axes in own.items() if j in renewed}, own)
        if change != Change():
            yield Proposal(tuple(finding for finding, _ in group), change, is_required=kind == "moved state")


def _of_redundancy(found: Redundancy) -> Proposal:
    """Each remedy with the next one as its alternative; the last of all is none."""
    proposal = Proposal((found.finding,), Change(), per_device=found.per_device)
    for suggestion, change in reversed(found.remedies):
        finding = dataclasses.replace(found.finding, suggestion=suggestion)
        proposal = Proposal((finding,), change, alternative=proposal, per_device=found.per_device)
    return proposal


def _of_other_specs(found: OtherSpecs) -> Proposal:
    """Each spec with the next one as its alternative."""
    proposal = None
    for suggestion, change in reversed(found.others):
        finding = dataclasses.replace(found.finding, suggestion=suggestion)
        proposal = Proposal((finding,), change, alternative=proposal)
    assert proposal is not None
    return proposal


def _best(value: AnnotatedValue, first: Sequence[str] = ()) -> Axes | None:
    """The largest axis that divides a dimension, on the largest such dimension; None if there is none."""
    sizes, shape = value.mesh.shape, value.aval.shape
    dims = sorted(range(len(shape)), key=lambda dim: -shape[dim])
    for axis in (*first, *sorted(sizes, key=lambda axis: -sizes[axis])):
        for dim in dims:
            if sizes[axis] > 1 and shape[dim] and shape[dim] % sizes[axis] == 0:
                return tuple((axis,) if k == dim else () for k in range(len(shape)))
    return None


def _replicated_by_spec(partitioned: Partitioned, found: Sequence[Finding], large: float) -> Iterator[Proposal]:
    """Arguments whose specs replicate them: optimizer state, and others. One without a spec is a finding already.

    Optimizer state has the keys and the shape of a parameter.
    """
    tree, unit = partitioned.tree, partitioned.unit
    paths = [keys_of(value.path or "") or () for value in tree.inputs]
    dims = (dim for value in tree.inputs if value.sharding for dim in value.sharding.axes)
    batch = [axis for axis, _ in collections.Counter(axis for dim in dims for axis in dim).most_common(1)]
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for k, value in enumerate(tree.inputs):
        if value.is_array and len(paths[k]) > 1:
            by_shape.setdefault(value.aval.shape, []).append(k)
    states, others, with_states = dict[int, Axes](), dict[int, Axes](), dict[int, Axes]()
    for k, value in enumerate(tree.inputs):
        if not (value.is_array and value.aval.shape and value.is_replicated):
            continue
        alike, best = by_shape.get(value.aval.shape, ()), _best(value, batch)
        twins = [p for p in alike if _is_parameter_of(paths[p], paths[k], p < k)]
        if twins and (axes := _like(tree.inputs[twins[0]]) or best) is not None:
            states[k] = axes
        elif not twins and best is not None and unit.in_shardings[k] is not UNSPECIFIED:
            own = [p for p in alike if _is_parameter_of(paths[k], paths[p], k < p)]
            others[k] = next(filter(None, (_like(tree.inputs[p]) for p in own)), best)
            with_states.update(dict.fromkeys((k, *own), best))

    def proposal(kind: str, arguments: Mapping[int, Axes], about: Mapping[int, Axes], advice: str) -> Proposal:
        findings = tuple(_of_argument(kind, tree.inputs[k], paths[k], arguments[k], advice) for k in about)
        results = {j: arguments[k] for j, k in renewed_arguments(partitioned).items() if k in arguments}
        names = {tree.outputs[j].name for j in results}
        replaced = tuple(finding for finding in found if finding.kind == "moved" and finding.value in names)
        return Proposal(findings, Change(arguments=arguments, results=results), replaces=replaced)

    if sum(tree.inputs[k].nbytes for k in states) >= large:
        yield proposal("optimizer state", states, states, _LIKE_PARAMETER)
    if sum(tree.inputs[k].nbytes for k in others) >= large:
        one = proposal("replicated", others, others, _AS_BOTH)
        other = proposal("replicated", with_states, others, _WITH_STATE) if with_states != others else None
        yield dataclasses.replace(one, alternative=other)


_LIKE_PARAMETER = "shard it like its parameter, or over an axis along which that is replicated, as argument and result"
_AS_BOTH = "shard it over an axis, as an argument and as a result: it is gathered where it is used"
_WITH_STATE = (
    "shard it and its optimizer state over an axis, as arguments and as results: it is gathered where it is used"
)


def _of_argument(kind: str, value: AnnotatedValue, keys: tuple[str, ...], axes: Axes, advice: str) -> Finding:
    size, module = shown_bytes(value.nbytes), "/".join(key for key in keys[1:] if key != "params")
    why = ": each device keeps and updates all of it" if kind == "optimizer state" else ", as its spec says"
    text = f"the argument {value.path}, {size}, is replicated{why}; try {shown_axes(axes)}"
    return Finding(kind, value.nbytes, text, advice, None, value.name, module)


def _is_parameter_of(parameter: tuple[str, ...], state: tuple[str, ...], is_before: bool) -> bool:
    end = parameter[1:]
    if state[-len(end) :] != end or state[0] == parameter[0]:
        return False
    return len(parameter) < len(state) or (len(parameter) == len(state) and is_before)


def _like(parameter: AnnotatedValue) -> Axes | None:
    sharding = parameter.sharding
    return None if sharding is None or not any(sharding.axes) or not sharding.is_of_whole_axes else sharding.axes


def _unconstrained(partitioned: Partitioned, collectives: Sequence[Collective]) -> Iterator[Proposal]:
    """Residual streams that nobody constrains, and that are not sharded as the batch is."""
    equations = partitioned.inlined.equations
    for stream in residual_streams(partitioned.tree):
        shape = stream.first.aval.shape
        batch = _axes_of_batch(partitioned, shape[0])
        axes: Axes = (batch, *[()] * (len(shape) - 1))
        if not batch or all(value.sharding is not None and value.sharding.axes == axes for value in stream.values):
            continue
        sent = sum(
            c.counted_bytes
            for c in collectives
            if c.tags and any(v.aval.shape == shape for v in _arrays_of(equations[c.tags[-1]]))
        )
        yield dataclasses.replace(
            _constrained(stream, stream.values[:1], axes, int(sent), "it where it is first computed"),
            alternative=_constrained(stream, stream.values, axes, int(sent), "it and each of the sums"),
        )


def _constrained(
    stream: ResidualStream, values: Sequence[AnnotatedValue], axes: Axes, sent: int, which: str
) -> Proposal:
    """Constraints of these values of a stream, about which so many bytes are sent."""
    specs = [*dict.fromkeys(value.shown_spec for value in stream.values)]
    wanted = shown_axes(axes)
    finding = Finding(
        "unconstrained",
        sent,
        f"{stream.first.name}, {stream.first.shown_type}, and {counted(len(stream.sums), 'sum')} with outputs of "
        f"layers are sharded as {' and '.join(specs[:_SHOWN_SPECS])}, not as the batch is: no constraint says how",
        f"constrain {which} to {wanted} with with_sharding_constraint",
        stream.made_by.site,
        stream.first.name,
        stream.made_by.module,
    )
    return Proposal((finding,), Change(values={value.number: axes for value in values}))


_SHOWN_SPECS = 2


def _arrays_of(equation: AnnotatedEquation) -> Iterator[AnnotatedValue]:
    return (value for value in (*equation.inputs, *equation.outputs) if value.is_array)


def _axes_of_batch(partitioned: Partitioned, size: int) -> tuple[str, ...]:
    """The axes over which the smallest argument is sharded that has a sharded dimension of this size, if there is one.

    Of a step the batch is smaller than most parameters; and it is tried out.
    """
    found = (
        (k > 0, value.nbytes, axes)
        for value in partitioned.tree.inputs
        if value.is_array and value.sharding is not None and value.sharding.is_of_whole_axes
        for k, (axes, n) in enumerate(zip(value.sharding.axes, value.aval.shape, strict=False))
        if axes and n == size
    )
    return min(found, default=(False, 0, ()))[2]


_CONSTRAINTS = ("sharding_constraint", sharding_constraint_p.name)

# fmt: off
_NOT_ELEMENTWISE = frozenset((
    "dot_general", "transpose", "gather", "conv_general_dilated", "sort", "rev", "sharding_constraint", "reshard",
    "fft", "triangular_solve", "cholesky", "optimization_barrier", "dynamic_update_slice", "scatter", "scatter-add",
    "colocated_call", *_CONSTRAINTS,
))
# fmt: on


def _is_elementwise(equation: AnnotatedEquation) -> bool:
    if equation.bodies or len(equation.outputs) != 1 or not equation.outputs[0].is_array:
        return False
    shape = equation.outputs[0].aval.shape
    of_arrays = [value.aval.shape for value in equation.inputs if value.is_array]
    is_other = equation.primitive in _NOT_ELEMENTWISE or equation.primitive.startswith(("cum", "reduce"))
    return bool(shape) and not is_other and shape in of_arrays and all(own in (shape, ()) for own in of_arrays)


def _elementwise(partitioned: Partitioned, collectives: Sequence[Collective]) -> Iterator[Proposal]:
    """Values that are gathered for an elementwise equation, which needs no other shard than its own."""
    equations, flow = partitioned.inlined.equations, Dataflow(partitioned.tree)
    groups: dict[tuple[object, ...], list[tuple[Finding, dict[int, Axes], list[int]]]] = {}
    for c in collectives:
        equation = equations[c.tags[-1]] if c.tags else None
        if equation is None or c.kind != "all-gather" or not _is_elementwise(equation):
            continue
        (result,) = equation.outputs
        alike = [value for value in equation.inputs if value.is_array and value.aval.shape == result.aval.shape]
        most = max(alike, key=lambda value: value.nbytes - value.nbytes_per_device)
        axes = _like(most)
        if axes is None or result.sharding is None or result.sharding.axes == axes:
            continue
        others = [value for value in (*alike, result) if value.number != most.number and value.number >= 0]
        finding = Finding(
            "gathered elementwise",
            int(c.counted_bytes),
            f"{most.name}, {most.shown_type} {most.shown_spec}, is gathered for {equation.primitive}, which works "
            "element by element",
            f"constrain the other operands and the result to {most.shown_spec}, and drop constraints to less",
            equation.site,
            result.name,
            equation.module,
        )
        key = equation.primitive, equation.site, pattern_of(equation.module), most.shown_spec
        # A constraint of the result or of an operand would gather it after all.
        near = (edge.equation for v in others for edge in (*flow.used_by(v.number), *flow.made_by(v.number)))
        constraints = [e.number for e in near if e.primitive in _CONSTRAINTS]
        groups.setdefault(key, []).append((finding, {value.number: axes for value in others}, constraints))
    for group in groups.values():
        values = {number: axes for _, own, _ in group for number, axes in own.items()}
        dropped = tuple(dict.fromkeys(number for _, _, constraints in group for number in constraints))
        values = {k: v for k, v in values.items() if not any(k == equations[d].outputs[0].number for d in dropped)}
        yield Proposal(tuple(finding for finding, _, _ in group), Change(values=values, dropped=dropped))


_FARTHEST = 8  # equations between resharding a value and resharding it back


def _back_and_forth(partitioned: Partitioned, collectives: Sequence[Collective]) -> Iterator[Proposal]:
    """Values that are resharded, worked on element by element, and resharded to what they were."""
    tags = {c.tags[-1]: 0.0 for c in collectives if c.tags}
    for c in collectives:
        if c.tags:
            tags[c.tags[-1]] += c.counted_bytes
    flow = Dataflow(partitioned.tree)
    for first in partitioned.tree.walk():
        if first.number not in tags or not _keeps_shape(first):
            continue
        before, after = first.inputs[0], first.outputs[0]
        axes = _like(before)
        if axes is None or after.sharding is None or after.sharding.axes == axes:
            continue
        found = _way_back(flow, after, axes)
        if found is None:
            continue
        way, last = found
        sent = tags[first.number] + tags.get(last.number, 0.0)
        finding = Finding(
            "back and forth",
            int(sent),
            f"{before.name}, {before.shown_type} {before.shown_spec}, is resharded to {after.shown_spec}, and back "
            f"{counted(len(way) + 1, 'equation')} later",
            f"leave it as {before.shown_spec} in between: drop the constraint, or constrain to that",
            first.site,
            after.name,
            first.module,
        )
        between = (first, *way, last)
        dropped = tuple(equation.number for equation in between if equation.primitive in _CONSTRAINTS)
        values = {e.outputs[0].number: axes for e in way if e.primitive not in _CONSTRAINTS}
        yield Proposal((finding,), Change(dropped=dropped, values=values))


def _keeps_shape(equation: AnnotatedEquation) -> bool:
    if equation.primitive in _CONSTRAINTS:
        return True
    return _is_elementwise(equation) and equation.inputs[0].aval.shape == equation.outputs[0].aval.shape


def _way_back(
    flow: Dataflow, start: AnnotatedValue, axes: Axes
) -> tuple[list[AnnotatedEquation], AnnotatedEquation] | None:
    """The elementwise equations after a value up to one whose result is sharded over these axes, and that one."""
    way: list[AnnotatedEquation] = []
    value = start
    for _ in range(_FARTHEST):
        following = [edge.equation for edge in flow.used_by(value.number) if _keeps_shape(edge.equation)]
        last = next((e for e in following if e.outputs[0].sharding and e.outputs[0].sharding.axes == axes), None)
        if last is not None:
            return way, last
        if not following:
            return None
        way.append(following[0])
        value = following[0].outputs[0]
    return None
