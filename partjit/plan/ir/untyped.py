"""Programs with calls over meshes with Explicit axes: the same programs over Auto axes.

A plan is made by rearranging equations, and shardings are propagated through all of it. What types say is kept where it
can be seen: as constraints where the program requests a sharding, as specs of calls, which take and give what the types
of their arguments and results say, and as shardings of the program's results.
"""

import dataclasses
from collections.abc import Sequence
from typing import cast

from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from partjit._jax.jaxprs import new_var, type_of
from partjit._jax.shardings import UNSPECIFIED, MaybeSharding, UnspecifiedValue, in_memory_of_type
from partjit._jax.untyped import reshard_p, untyped
from partjit.colocated.ir.primitive import Callee, colocated_call_p
from partjit.mesh import auto_twin, has_explicit_axes
from partjit.plan.ir.build import constraint
from partjit.primitive import device_witness, pjit_p, sharding_constraint_p
from partjit.spec import ParsedPartitionSpec, Spec
from partjit.unconstrained import constraining_results

__all__ = ["over_auto_axes"]


def over_auto_axes(
    jaxpr: ClosedJaxpr, out_shardings: Sequence[MaybeSharding], mesh: Mesh
) -> tuple[ClosedJaxpr, tuple[MaybeSharding, ...], Mesh]:
    """A program without shardings in its types, the shardings of its results, and the Auto twin of its mesh."""
    if not has_explicit_axes(mesh):
        return jaxpr, tuple(out_shardings), mesh
    twin = auto_twin(mesh)
    partly_typed = tuple(
        (isinstance(sharding, UnspecifiedValue) and _part_in_type(aval)) or UNSPECIFIED
        for aval, sharding in zip(jaxpr.out_avals, out_shardings, strict=True)
    )
    if any(spec is not UNSPECIFIED for spec in partly_typed):
        jaxpr = constraining_results(jaxpr, partly_typed, mesh)
    shardings = [
        (_sharding_in_type(aval, twin) or sharding) if isinstance(sharding, UnspecifiedValue) else sharding
        for aval, sharding in zip(jaxpr.out_avals, out_shardings, strict=True)
    ]

    def requested(eqn: JaxprEqn, made: JaxprEqn) -> Sequence[JaxprEqn]:
        """The equation, and a constraint of its result to what the type says."""
        spec = _spec_in_type(eqn.outvars[0].aval)
        (var,) = made.outvars
        if spec is None:
            return [made]
        result = new_var(var.aval)
        return [made.replace(outvars=[result]), constraint(result, var, spec, twin, made)]

    def reshard(eqn: JaxprEqn, made: JaxprEqn) -> Sequence[JaxprEqn]:
        spec = _spec_in_type(eqn.outvars[0].aval) or ParsedPartitionSpec(None, ())
        (atom,), (var,) = made.invars, made.outvars
        return [constraint(atom, var, spec, twin, made)]

    def call(eqn: JaxprEqn, made: JaxprEqn) -> Sequence[JaxprEqn]:
        callee: Callee = eqn.params["callee"]
        given = tuple(
            own or _sharding_in_type(x.aval, twin) for x, own in zip(eqn.invars, callee.in_shardings, strict=True)
        )
        avals = tuple(map(type_of, made.outvars))
        own = callee.derived((given, avals), lambda: dataclasses.replace(callee, in_shardings=given, out_avals=avals))
        return [made.replace(params=made.params | {"callee": own})]

    def program(_: JaxprEqn, made: JaxprEqn) -> Sequence[JaxprEqn]:
        params = dict(made.params, witness=device_witness(made.params["mesh"]))
        for name in ("in_specs", "out_specs"):
            if name in params:
                params[name] = tuple(map(_over_auto_axes, params[name]))
        if "spec" in params:
            params["spec"] = _over_auto_axes(params["spec"])
        return [made.replace(params=params)]

    rewrites = {reshard_p: reshard, colocated_call_p: call, pjit_p: program, sharding_constraint_p: program}
    return untyped(jaxpr, rewrites, requested), tuple(shardings), twin


def _sharding_in_type(aval: object, mesh: Mesh) -> NamedSharding | None:
    """What a type says of all axes of a mesh; None where it says nothing of some."""
    spec = _spec_in_type(aval)
    if spec is None or spec.unconstrained_dims:
        return None
    return in_memory_of_type(NamedSharding(mesh, spec.partition_spec), cast(ShapedArray, aval))


def _part_in_type(aval: object) -> ParsedPartitionSpec | None:
    """What a type says of the Explicit axes of a mesh that has Auto ones as well; None if nothing."""
    spec = _spec_in_type(aval)
    return spec if spec is not None and spec.unconstrained_dims and spec.mesh_axes else None


def _spec_in_type(aval: object) -> ParsedPartitionSpec | None:
    """What the type of a value says; a dimension of which it names no axis may be sharded over axes that are Auto."""
    if not isinstance(aval, ShapedArray):
        return None
    types = aval.sharding.mesh.axis_types
    if AxisType.Explicit not in types or AxisType.Manual in types:
        return None
    spec = ParsedPartitionSpec.from_user_input(P(*aval.sharding.spec.partitions), "a type")
    if AxisType.Auto not in types:
        return spec
    return ParsedPartitionSpec(None, tuple(axes or P.UNCONSTRAINED for axes in spec.partitions))


def _over_auto_axes(spec: Spec) -> Spec:
    if isinstance(spec, UnspecifiedValue) or spec.mesh is None:
        return spec
    return ParsedPartitionSpec(
        spec.unsafe_user_spec, spec.partitions, spec.sync, auto_twin(spec.mesh), spec.memory_kind, spec.reductions
    )
