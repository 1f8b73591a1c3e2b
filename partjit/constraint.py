"""`with_sharding_constraint`: a spec for an intermediate value of a program, or for an array outside of programs."""

import jax
from jax.core import AbstractValue
from jax.sharding import AxisType, Mesh

from partjit._jax.tracing import abstractify, trace_state_clean
from partjit._jax.types import PyTree
from partjit.checks import flattened, wrong_type
from partjit.errors import MissingMeshError
from partjit.mesh import ambient_or_abstract_mesh
from partjit.primitive import device_witness, sharding_constraint_p
from partjit.spec import ParsedPartitionSpec, parse_spec_tree
from partjit.trees import Values, broadcast_specs
from partjit.typed import requested_type, resharded
from partjit.validate import check_specs, raise_mismatches, require_mesh

__all__ = ["with_sharding_constraint"]

_WHAT = "with_sharding_constraint arguments"


def with_sharding_constraint(x: PyTree, specs: PyTree) -> PyTree:
    """Constrains the sharding of `x`; its value does not change.

    Inside a program the partitioner keeps the constraint, and pads a dimension that is not divisible. Outside it is
    applied at once: the result is `x` resharded, and a dimension that is not divisible is an error.
    The constraint is linear: under differentiation tangent and cotangent are constrained alike.

    Args:
        x: a pytree of arrays.
        specs: a tree prefix of `x` with leaves as for `pjit`: `PartitionSpec` (whose entries may be
            `PartitionSpec.UNCONSTRAINED`: this dimension is left to the partitioner), `NamedSharding`, or None for
            replicated.

    Returns:
        A tree like `x`.

    Raises:
        ShardingError: a spec does not fit its value or the mesh, `MissingMeshError` where no mesh is set.
        TypeError: a leaf is none of these.

    Example:
        >>> import jax.numpy as jnp
        >>> from partjit import Mesh, P
        >>> with Mesh(jax.devices(), "x"):
        ...     print(with_sharding_constraint(jnp.arange(8.0), P("x")).sharding.spec)
        P('x',)

    Source: `jax.experimental.pjit.with_sharding_constraint`; None and UNCONSTRAINED as jax defined them later.
    """
    with_paths, tree = flattened(x, "with_sharding_constraint: x")
    leaves = [leaf for _, leaf in with_paths]
    paths = [f"x{jax.tree_util.keystr(path)}" for path, _ in with_paths]
    parsed = parse_spec_tree(specs, "shardings", allow_unconstrained_dims=True)
    requested = broadcast_specs(parsed, x, "shardings", lambda: Values("x", "x"), "with_sharding_constraint")
    mesh = ambient_or_abstract_mesh()
    flat_specs: list[ParsedPartitionSpec] = []
    for path, spec in zip(paths, requested, strict=True):
        if not isinstance(spec, ParsedPartitionSpec):
            raise TypeError(f"with_sharding_constraint shardings: {path} needs a spec, but got {spec!r}")
        flat_specs.append(spec)
        if mesh.empty and spec.mesh is None:
            require_mesh(mesh, [spec], "with_sharding_constraint", path)
            raise MissingMeshError(
                f"with_sharding_constraint requires a non-empty mesh to replicate {path} over, and none is set in this "
                "thread: enter one with `with partjit.Mesh(devices, axis_names):`"
            )
    avals = [*map(_type_of, leaves, paths)]
    eager = trace_state_clean() and not any(spec.reductions for spec in flat_specs)
    mismatches = check_specs(_WHAT, paths, avals, flat_specs, mesh, allow_uneven=not eager)
    raise_mismatches(mismatches, "with_sharding_constraint", mesh)
    constrain = _constrain_at_once if eager else _constrain
    return jax.tree.unflatten(tree, [constrain(x, spec, mesh) for x, spec in zip(leaves, flat_specs, strict=True)])


def _constrain_at_once(x: object, spec: ParsedPartitionSpec, mesh: Mesh) -> object:
    return sharding_constraint_p.bind(x, spec=spec, mesh=mesh, witness=device_witness(spec.mesh or mesh))


def _constrain(x: object, spec: ParsedPartitionSpec, mesh: Mesh) -> object:
    """Reshards a value over Explicit axes, which changes its type, and constrains it over the others."""
    own = spec.mesh or mesh
    x = resharded(x, requested_type(jax.typeof(x), spec, mesh), own)
    return _constrain_at_once(x, spec, mesh) if AxisType.Auto in own.axis_types else x


def _type_of(leaf: object, path: str) -> AbstractValue:
    try:
        aval = abstractify(leaf)
    except (TypeError, ValueError):
        aval = None
    if aval is None or isinstance(leaf, jax.ShapeDtypeStruct):
        raise wrong_type("with_sharding_constraint", path, leaf, "an array or a number")
    return aval
