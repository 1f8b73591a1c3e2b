"""Products and convolutions that devices compute several times over: nothing in them is sharded along a mesh axis.

The collectives of such a program are few, and its shardings may look right; the time of a step shows it.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from partjit.inspect.annotated import AnnotatedEquation, AnnotatedJaxpr, AnnotatedValue, shown_axes
from partjit.inspect.changes import Axes, Change
from partjit.inspect.findings import Finding
from partjit.inspect.flops import operations_of, shards_of
from partjit.inspect.needed import needed_equations
from partjit.inspect.propagation import Partitioned
from partjit.inspect.renewed import renewed_arguments
from partjit.inspect.user_lines import shown_site
from partjit.render.numbers import shown_flops

__all__ = ["Redundancy", "Remedy", "redundancies"]

_LEAST = 0.2  # of the operations of a device; small products are replicated for good reasons
_FEW = 1e6  # operations, which no device needs a microsecond for
_PRODUCTS = ("dot_general", "conv_general_dilated")


class Remedy(NamedTuple):
    """Other shardings with which less may be computed, and what they are in words."""

    suggestion: str
    change: Change


@dataclasses.dataclass(frozen=True)
class Redundancy:
    """Operations of a device that others along an axis repeat.

    Attributes:
        finding: what is said of them, with a suggestion for any program.
        remedies: what may help, to be tried in this order.
        per_device: all operations of a device, in a step.
    """

    finding: Finding
    remedies: tuple[Remedy, ...]
    per_device: float


@dataclasses.dataclass
class _Repeated:
    """The operations that are repeated along an axis, the first and the most expensive of these equations."""

    operations: float = 0.0
    most: float = 0.0
    first: AnnotatedEquation | None = None
    equation: AnnotatedEquation | None = None


def redundancies(partitioned: Partitioned) -> Iterator[Redundancy]:
    """What is computed several times over along each axis of the mesh, if that is a large part of the operations."""
    sizes = {str(axis): int(size) for axis, size in partitioned.unit.mesh.shape.items() if size > 1}
    along = {axis: _Repeated() for axis in sizes}
    per_device, needed = 0.0, needed_equations(partitioned.tree)
    for equation, times, manual in _computing(partitioned.tree, 1, frozenset()):
        if equation.number not in needed:
            continue
        values = (*equation.inputs, *equation.outputs)
        own = times * operations_of(equation) / shards_of(*(value.sharding for value in values))
        per_device += own
        if equation.primitive in _PRODUCTS:
            used = {axis.partition(":")[0] for v in values if v.sharding is not None for axis in v.sharding.sizes}
            for axis in sizes.keys() - used - manual:
                repeated = along[axis]
                repeated.operations += own
                repeated.first = repeated.first or equation
                if own > repeated.most:
                    repeated.most, repeated.equation = own, equation
    for axis, repeated in sorted(along.items(), key=lambda item: -item[1].operations * sizes[item[0]]):
        if repeated.equation is not None and repeated.operations >= max(_LEAST * per_device, _FEW):
            share = repeated.operations / per_device
            remedies = (*_sharded_batch(partitioned, axis, sizes), *_constrained(repeated, axis, sizes))
            yield Redundancy(_finding(axis, sizes[axis], repeated, share), remedies, per_device)


def _computing(
    tree: AnnotatedJaxpr, times: int, manual: frozenset[str]
) -> Iterator[tuple[AnnotatedEquation, int, frozenset[str]]]:
    """The equations without bodies, how often they run, and the axes along which a `shard_map` says who does what."""
    for equation in tree.equations:
        if not equation.bodies:
            yield equation, times, manual
            continue
        inner = manual
        if equation.primitive == "shard_map":
            inner |= {str(axis) for axis in equation.params["newly_manual_axes"]}
        for body in equation.bodies.values():
            yield from _computing(body, times * (equation.trip_count or 1), inner)


def _finding(axis: str, size: int, repeated: _Repeated, share: float) -> Finding:
    equation = repeated.equation
    assert equation is not None
    value = equation.outputs[0]
    return Finding(
        "redundant",
        sum(v.nbytes_per_device for v in equation.outputs if v.is_array),
        f"{share:.0%} of the operations of a device, {shown_flops(repeated.operations)}, are the same on all {size} "
        f"devices along {axis!r}: no value of {_products(equation)} is sharded over it; most are in {value.name}, "
        f"{value.shown_type} {value.shown_spec}",
        f"shard the batch over {axis!r} as well, or constrain the operands of these products to a spec with that axis",
        equation.site,
        value.name,
        equation.module,
        share=share * (1 - 1 / size),
    )


def _products(equation: AnnotatedEquation) -> str:
    return "these matrix products" if equation.primitive == "dot_general" else "these convolutions and products"


def _sharded_batch(partitioned: Partitioned, axis: str, sizes: Mapping[str, int]) -> Iterator[Remedy]:
    """Arguments that are sharded along one dimension and not renewed by the step, with one more axis along that."""
    renewed = {*renewed_arguments(partitioned).values()}
    found: dict[int, Axes] = {}
    for k, value in enumerate(partitioned.tree.inputs):
        if value.is_array and value.sharding is not None and k not in renewed:
            dims = [dim for dim, axes in enumerate(value.sharding.axes) if axes]
            if len(dims) == 1 and (axes := _with_axis(value, dims[0], axis, sizes)) is not None:
                found[k] = axes
    if found:
        first = partitioned.tree.inputs[min(found)]
        more = f" and {len(found) - 1} more" if found.keys() - {min(found)} else ""
        yield Remedy(f"shard {first.path}{more} over {axis!r} as well: {shown_axes(found[min(found)])}", Change(found))


def _constrained(repeated: _Repeated, axis: str, sizes: Mapping[str, int]) -> Iterator[Remedy]:
    """An operand of the first product that is repeated, with one more axis along its first dimension that has a place.

    Activations come first, as they do in `x @ w`.
    """
    assert repeated.first is not None
    for value in repeated.first.inputs:
        dims = range(len(value.aval.shape)) if value.is_array and value.number >= 0 and value.sharding else ()
        axes = next(filter(None, (_with_axis(value, dim, axis, sizes) for dim in dims)), None)
        if axes is not None:
            where = "" if repeated.first.site is None else f" at {shown_site(repeated.first.site)}"
            yield Remedy(
                f"constrain {value.name}, {value.shown_type}, an operand of the first of them{where}, to "
                f"{shown_axes(axes)} with with_sharding_constraint",
                Change(values={value.number: axes}),
            )


def _with_axis(value: AnnotatedValue, dim: int, axis: str, sizes: Mapping[str, int]) -> Axes | None:
    """The axes of a value with one more along a dimension; None if they do not divide it, or it has the axis."""
    sharding = value.sharding
    if sharding is None or not sharding.is_of_whole_axes or axis in sharding.sizes:
        return None
    axes = (*sharding.axes[dim], axis)
    size = value.aval.shape[dim]
    if not size or size % math.prod(sizes.get(one, 1) for one in axes):
        return None
    return tuple(axes if k == dim else own for k, own in enumerate(sharding.axes))
