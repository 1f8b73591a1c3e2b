"""Other specs for the arguments whose shardings cost most: along another dimension, or over another axis.

No array is sharded into fewer parts for it: less would be gathered, and more kept. How many there are is for the user
to decide, and for `partjit.inspect.suggested` to try; so are programs that take long to propagate again.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from partjit.inspect.annotated import AnnotatedEquation, shown_axes
from partjit.inspect.changes import Axes, Change
from partjit.inspect.collectives import executions
from partjit.inspect.findings import Finding
from partjit.inspect.predicted import Prediction
from partjit.inspect.propagation import Partitioned
from partjit.inspect.spec_groups import Group, groups_of, leaf_of
from partjit.inspect.user_lines import Site
from partjit.inspect.why.dataflow import Dataflow, DataflowEdge, reachable
from partjit.render.numbers import shown_bytes

__all__ = ["OtherSpecs", "other_specs"]

_MOST_EQUATIONS = 2000
_MOST_GROUPS = 1
_MOST_SPECS = 3
_LEAST = 0.1  # of what is sent at most


@dataclasses.dataclass(frozen=True)
class OtherSpecs:
    """Specs that arguments may have instead of theirs.

    Attributes:
        finding: what their own costs.
        others: suggestions and changes.
    """

    finding: Finding
    others: tuple[tuple[str, Change], ...]


@dataclasses.dataclass
class _Sent:
    """What may be sent for the equations that use some arguments, and for which of them most."""

    nbytes: float = 0.0
    most: float = 0.0
    site: Site | None = None
    module: str = ""


def other_specs(partitioned: Partitioned, prediction: Prediction) -> Iterator[OtherSpecs]:
    """Other specs for the groups of arguments for which most may be sent, where that is a tenth of all or more."""
    if len(partitioned.inlined.equations) > _MOST_EQUATIONS:
        return
    tree, unit = partitioned.tree, partitioned.unit
    ins = [leaf_of(*of) for of in zip(unit.paths, tree.inputs, strict=True)]
    outs = [leaf_of(*of) for of in zip(unit.result_paths, tree.outputs, strict=True)]
    groups = [group for group in groups_of(ins, outs) if any(_axes(partitioned, group))]
    sent = _sent_for(partitioned, prediction, groups)
    whole = sum(nbytes for _, nbytes, _, _ in _moves(prediction))
    most = sorted(zip(groups, sent, strict=True), key=lambda one: -one[1].nbytes)[:_MOST_GROUPS]
    for group, own in most:
        others = tuple(itertools.islice(_others(partitioned, group), _MOST_SPECS))
        if others and own.nbytes >= _LEAST * whole > 0:
            yield OtherSpecs(_finding(partitioned, group, own), others)


def _moves(prediction: Prediction) -> Iterator[tuple[tuple[int, ...], float, Site | None, str]]:
    """What is moved: the equations, the bytes at most, the line and the module."""
    for c in prediction.collectives:
        yield c.tags, c.counted_bytes, c.site, c.module
    for move in prediction.unknown:
        yield move.tags, executions(move) * move.bytes_at_most, move.site, move.module


def _sent_for(partitioned: Partitioned, prediction: Prediction, groups: Sequence[Group]) -> list[_Sent]:
    """What may be sent for the equations that use the arguments of each group."""
    flow, equations = Dataflow(partitioned.tree), partitioned.inlined.equations
    of_value: dict[int, list[int]] = {}
    for k, group in enumerate(groups):
        numbers = [partitioned.tree.inputs[position].number for position in group[0]]
        for number in reachable(numbers, lambda at: (t for e in flow.used_by(at) if _is_same(e) for t in e.targets)):
            of_value.setdefault(number, []).append(k)
    found = [_Sent() for _ in groups]
    for tags, nbytes, site, module in _moves(prediction):
        values = equations[tags[-1]].inputs if tags else ()
        for k in {k for value in values for k in of_value.get(value.number, ())}:
            found[k].nbytes += nbytes
            if nbytes > found[k].most:
                found[k].most, found[k].site, found[k].module = nbytes, site, module
    return found


def _is_same(edge: DataflowEdge) -> bool:
    """Whether a value is the other one: in a nested jaxpr, or in another form."""
    return edge.crosses or (edge.equation.primitive in _VIEWS and _arrays(edge.equation) == 1)


_VIEWS = ("convert_element_type", "transpose", "reshape", "squeeze", "copy", "sharding_constraint", "dynamic_slice")


def _arrays(equation: AnnotatedEquation) -> int:
    return sum(value.is_array and bool(value.aval.shape) for value in equation.inputs)


def _axes(partitioned: Partitioned, group: Group) -> Axes:
    """The axes of the first argument of a group; none if no spec says them."""
    sharding = partitioned.tree.inputs[group[0][0]].sharding
    return () if sharding is None or not sharding.is_of_whole_axes else sharding.axes


def _others(partitioned: Partitioned, group: Group) -> Iterator[tuple[str, Change]]:
    """The same axes along other dimensions, then single axes along any."""
    shape = partitioned.tree.inputs[group[0][0]].aval.shape
    sizes = {str(axis): int(size) for axis, size in partitioned.unit.mesh.shape.items() if size > 1}
    now = tuple(tuple(dim or ()) for dim in _axes(partitioned, group))
    seen = {now}
    single = (((axis,), *[()] * (len(shape) - 1)) for axis in sizes)
    for base in (now, *single):
        for axes in itertools.permutations(base):
            if axes not in seen and _fits(axes, shape, sizes) and _parts(axes, sizes) >= _parts(now, sizes):
                seen.add(axes)
                anew = ", as argument and as result" if group[1] else ""
                change = Change(dict.fromkeys(group[0], axes), dict.fromkeys(group[1], axes))
                like = ", and what is like it," if group[0][1:] else ""
                yield f"shard it{like} as {shown_axes(axes)}{anew}", change


def _fits(axes: Sequence[tuple[str, ...]], shape: Sequence[int], sizes: Mapping[str, int]) -> bool:
    return all(size and size % _parts([own], sizes) == 0 for size, own in zip(shape, axes, strict=True))


def _parts(axes: Iterable[tuple[str, ...]], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes.get(axis, 1) for own in axes for axis in own)


def _finding(partitioned: Partitioned, group: Group, sent: _Sent) -> Finding:
    value = partitioned.tree.inputs[group[0][0]]
    more = len(group[0]) - 1
    like = f", and {more} like it" if more else ""
    return Finding(
        "other spec",
        int(sent.nbytes),
        f"{value.path}, {value.shown_type} {value.shown_spec}{like}: up to {shown_bytes(sent.nbytes)} are sent per "
        "step by what uses it",
        "shard it along another dimension, or over another axis",
        sent.site,
        value.name,
        sent.module,
    )
