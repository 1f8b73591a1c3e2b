"""Findings about what XLA did: the arrays that it replicates in full, with the value and the line of each."""

import dataclasses
from collections.abc import Iterator, Sequence

from partjit.inspect.annotated import AnnotatedEquation, AnnotatedValue
from partjit.inspect.findings import Finding
from partjit.inspect.hlo.rematerialization import Rematerialization
from partjit.inspect.propagation import Partitioned
from partjit.inspect.why.requests import axes_in

__all__ = ["findings_of_xla"]


def findings_of_xla(partitioned: Partitioned, found: Sequence[Rematerialization]) -> Iterator[Finding]:
    """The findings about a unit in which XLA replicates these arrays in full.

    Where XLA names no line, it reshards an argument or a result: the line is then the first that reads or computes it.
    """
    for one in found:
        value, equation = (None, None) if one.site is not None else _located(partitioned, one)
        if value is not None:
            one = dataclasses.replace(one, name=value.path or value.name)
        site = one.site if equation is None else equation.site
        module = one.module if equation is None else equation.module
        name = "" if value is None else value.name
        yield Finding("rematerialization", one.total_bytes or 0, one.suggestion, "", site, name, module)


def _located(
    partitioned: Partitioned, one: Rematerialization
) -> tuple[AnnotatedValue, AnnotatedEquation] | tuple[None, None]:
    tree = partitioned.tree
    argument = next((value for value in tree.inputs if value.path == one.op_name), None)
    if argument is not None:
        reading = (e for e in tree.walk() if any(value.number == argument.number for value in e.inputs))
        equation = next(reading, None)
        return (None, None) if equation is None else (argument, equation)
    made = {value.number: (value, equation) for equation in tree.walk() for value in equation.outputs}
    moved = (
        value
        for value, returned in zip(tree.outputs, partitioned.results, strict=True)
        if value.number in made and value.sharding != returned.sharding
    )
    everything = (value for value, _ in made.values())
    for values in (moved, everything):
        for value in values:
            if _is(value, one):
                computed, equation = made[value.number]
                return dataclasses.replace(computed, path=value.path), equation
    return None, None


def _is(value: AnnotatedValue, one: Rematerialization) -> bool:
    """Whether a value has the type and the sharding of an array that XLA replicates."""
    if not value.is_array or value.sharding is None or one.source_spec is None:
        return False
    shard = f"{value.shown_type.partition('[')[0]}[{','.join(map(str, value.shard_shape))}]"
    sizes = value.mesh.shape
    requested = [tuple(axis for axis in axes_in(dim) if sizes[axis] > 1) for dim in one.source_spec.partition_spec]
    requested += [()] * (len(value.aval.shape) - len(requested))
    return shard == one.shape and requested == [*value.sharding.axes[: len(value.aval.shape)]]
