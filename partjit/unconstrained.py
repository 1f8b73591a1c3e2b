"""Dimensions that a spec leaves to the partitioner, in a program that is a computation of its own.

Inside of a computation such a spec is a constraint. An executable has a sharding for each argument and result instead:
an argument keeps what it has in such a dimension, and the partitioner chooses for a result.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding

from partjit._jax.caches import weakref_cache
from partjit._jax.shardings import UNSPECIFIED
from partjit._jax.tracing import retraced
from partjit.mesh import tracing_under
from partjit.primitive import device_witness, sharding_constraint_p
from partjit.spec import UNCONSTRAINED, ParsedPartitionSpec, Spec

__all__ = ["constraining_results", "with_free_dimensions_settled"]


def with_free_dimensions_settled(values: Sequence[object], params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of an equation, with specs that an executable for these arguments can have."""
    in_specs, out_specs, mesh = params["in_specs"], params["out_specs"], params["mesh"]
    specs = (*in_specs, *out_specs)
    if ParsedPartitionSpec not in map(type, specs) or not any(map(_has_free_dimensions, specs)):
        return params
    in_specs = tuple(_kept(spec, value, mesh) for spec, value in zip(in_specs, values, strict=True))
    # The partitioner replicates a result without elements, whatever a constraint says of its other dimensions.
    out_specs = tuple(
        _kept(spec, None, mesh) if isinstance(aval, ShapedArray) and not aval.size else spec
        for spec, aval in zip(out_specs, params["jaxpr"].out_avals, strict=True)
    )
    return params | {
        "jaxpr": constraining_results(params["jaxpr"], out_specs, mesh),
        "in_specs": in_specs,
        "out_specs": tuple(UNSPECIFIED if _has_free_dimensions(spec) else spec for spec in out_specs),
    }


def _has_free_dimensions(spec: Spec) -> TypeGuard[ParsedPartitionSpec]:
    return isinstance(spec, ParsedPartitionSpec) and UNCONSTRAINED in spec.partitions


def _kept(spec: Spec, value: object, mesh: Mesh) -> Spec:
    """A spec in whose free dimensions an array stays sharded as it is, as far as the others leave axes for that."""
    if not _has_free_dimensions(spec):
        return spec
    own: tuple[Any, ...] = ()
    if isinstance(value, jax.Array) and isinstance(value.sharding, NamedSharding):
        sharding = value.sharding
        if sharding.mesh.shape_tuple == (spec.mesh or mesh).shape_tuple:
            own = ParsedPartitionSpec.from_user_input(sharding, "an array").partitions
    taken = {*spec.mesh_axes}
    entries = [
        tuple(axis for kept in own[dim : dim + 1] for axis in kept if axis not in taken)
        if axes is UNCONSTRAINED
        else axes
        for dim, axes in enumerate(spec.partitions)
    ]
    return ParsedPartitionSpec(None, tuple(entries), spec.sync, spec.mesh, spec.memory_kind)


@weakref_cache
def constraining_results(jaxpr: ClosedJaxpr, out_specs: tuple[Spec, ...], mesh: Mesh) -> ClosedJaxpr:
    """A jaxpr that constrains those of its results whose specs have free dimensions."""

    def constrained(*args: object) -> list[object]:
        return [
            sharding_constraint_p.bind(result, spec=spec, mesh=mesh, witness=device_witness(spec.mesh or mesh))
            if _has_free_dimensions(spec)
            else result
            for result, spec in zip(jaxpr_as_fun(jaxpr)(*args), out_specs, strict=True)
        ]

    with tracing_under(mesh):
        return retraced(jaxpr, constrained)
