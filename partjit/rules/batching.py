"""`jax.vmap`: batched arguments and results get a dimension 0 in their specs, left to the partitioner or, with
`spmd_axis_name`, sharded over mesh axes.

jax does so for constraints, and for nested programs over an `AbstractMesh`. Over a mesh of devices it keeps the batch
of a nested `jax.jit` unsharded, as pjit did in 2021: that gathers a batch that is sharded everywhere else.
"""

from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr
from jax.interpreters import batching
from jax.sharding import AxisType, Mesh

from partjit._jax.rules import AxisData, batch_jaxpr, moveaxis, with_explicit_batch
from partjit.errors import ShardingError
from partjit.mesh import describe_mesh, explicit_axes, tracing_under
from partjit.primitive import pjit_p, sharding_constraint_p
from partjit.spec import UNCONSTRAINED, ParsedPartitionSpec, Partition, Spec
from partjit.typed import resharded


def _batch(
    axis_data: AxisData,
    args: Sequence[object],
    dims: Sequence[int | None],
    *,
    jaxpr: ClosedJaxpr,
    in_specs: tuple[Spec, ...],
    out_specs: tuple[Spec, ...],
    mesh: Mesh,
    **params: object,
) -> tuple[list[object], list[int | None]]:
    batched_in = [dim is not None for dim in dims]
    args = [x if dim is None else moveaxis(x, dim, 0) for x, dim in zip(args, dims, strict=True)]

    def insert(spec: Spec, batched: bool, what: str) -> Spec:
        if not batched or not isinstance(spec, ParsedPartitionSpec):
            return spec
        return insert_batch_axis(spec, 0, axis_data, mesh, what)

    batched_in_specs = tuple(insert(s, b, "pjit arguments") for s, b in zip(in_specs, batched_in, strict=True))
    with tracing_under(mesh):  # custom rules in the jaxpr are traced now
        batched_jaxpr, batched_out = batch_jaxpr(jaxpr, with_explicit_batch(axis_data, explicit_axes(mesh)), batched_in)
    outs = pjit_p.bind(
        *(resharded(x, aval, mesh) for x, aval in zip(args, batched_jaxpr.in_avals, strict=True)),
        jaxpr=batched_jaxpr,
        in_specs=batched_in_specs,
        out_specs=tuple(insert(s, b, "pjit outputs") for s, b in zip(out_specs, batched_out, strict=True)),
        mesh=mesh,
        **params,
    )
    return outs, [0 if batched else None for batched in batched_out]


def _batch_constraint(
    axis_data: AxisData,
    args: Sequence[object],
    dims: Sequence[int | None],
    *,
    spec: ParsedPartitionSpec,
    mesh: Mesh,
    **params: object,
) -> tuple[object, int | None]:
    (x,), (dim,) = args, dims
    if dim is not None:
        spec = insert_batch_axis(spec, dim, axis_data, mesh, "with_sharding_constraint arguments")
    return sharding_constraint_p.bind(x, spec=spec, mesh=mesh, **params), dim


def insert_batch_axis(
    spec: ParsedPartitionSpec,
    dim: int,
    axis_data: AxisData,
    mesh: Mesh,
    what: str,
    otherwise: Partition = UNCONSTRAINED,
) -> ParsedPartitionSpec:
    """The spec of a batched value: the batch is sharded over the axes of `spmd_axis_name`, or as `otherwise` says.

    Raises:
        ShardingError: `spmd_axis_name` names an axis the spec already uses or the mesh does not have, or does not
            divide the batch.
    """
    mesh = spec.mesh or mesh
    if not axis_data.spmd_name:
        own = tuple(axis_data.explicit_mesh_axis or ())  # on Explicit axes the type of the batch says it
        if any(axis in spec.mesh_axes for axis in own):
            raise _clash(f"the axes {own} over which the batch is sharded in its type", own, spec, what)
        if not own and AxisType.Auto not in mesh.axis_types:
            otherwise = ()  # nothing is left to the partitioner
        return spec.insert_axis_partitions(dim, own or otherwise)
    axes = tuple(axis_data.spmd_name)
    if any(axis in spec.mesh_axes for axis in axes):
        raise _clash(f"vmap spmd_axis_name {axes}", axes, spec, what)
    unknown = [axis for axis in axes if axis not in mesh.shape]
    if unknown:
        raise ShardingError(
            f"vmap spmd_axis_name {axes} names resource axis {unknown[0]}, which is undefined: the mesh has "
            f"{describe_mesh(mesh)}"
        )
    parts = 1
    for axis in axes:
        parts *= mesh.shape[axis]
    if what != "with_sharding_constraint arguments" and axis_data.size % parts:
        raise ShardingError(
            f"vmap spmd_axis_name {axes} implies that the size of the batch should be divisible by {parts}, but it is "
            f"equal to {axis_data.size}"
        )
    return spec.insert_axis_partitions(dim, axes)


def _clash(batch: str, axes: Sequence[str], spec: ParsedPartitionSpec, what: str) -> ShardingError:
    used = ", ".join(repr(axis) for axis in axes if axis in spec.mesh_axes)
    return ShardingError(
        f"{batch} cannot appear in the specs of what is batched, but one of {what} has the spec {spec}, which already "
        f"uses {used}: a mesh axis shards at most one dimension"
    )


batching.fancy_primitive_batchers[pjit_p] = _batch
batching.fancy_primitive_batchers[sharding_constraint_p] = _batch_constraint
