"""The law that the conversion of specs to XLA's shardings is invertible."""

from jax.sharding import AbstractMesh
from jax.sharding import Mesh as JaxMesh
from jax.sharding import PartitionSpec as P

from partjit._jax.shardings import HloSharding
from partjit.checks import require_integer, require_mesh_type
from partjit.opsharding import parse_op_sharding, to_op_sharding
from partjit.spec import MAX_RANK
from partjit.testing.argument_checks import parsed_spec

__all__ = ["assert_round_trip"]


def assert_round_trip(spec: P | None, mesh: JaxMesh | AbstractMesh, ndim: int) -> None:
    """Asserts that the conversion of a spec to an OpSharding is invertible, in every form of XLA's.

    Args:
        spec: any spec without UNCONSTRAINED dimensions.
        mesh: its mesh. Axes of size 1 are not compared: a sharding does not contain them.
        ndim: the rank of the value.

    Raises:
        AssertionError: a form is parsed as another spec.
        TypeError, ValueError: an argument is of a wrong type, or the spec does not fit.

    Example:
        >>> assert_round_trip(P(("y", "x"), None), AbstractMesh((4, 2), ("x", "y")), 3)
    """
    require_mesh_type("assert_round_trip", "mesh", mesh, or_abstract=True)
    ndim = require_integer("assert_round_trip", "ndim", ndim, 0, MAX_RANK)
    parsed = parsed_spec("assert_round_trip", spec, mesh)
    expected = [tuple(axis for axis in axes if mesh.shape[axis] > 1) for axes in parsed.partitions]
    expected += [()] * (ndim - len(expected))
    iota, listed = (to_op_sharding(spec, mesh, ndim, as_list=as_list) for as_list in (False, True))
    hlo = HloSharding.from_proto(iota)
    forms = {"iota form": iota, "list": listed, "bytes": iota.SerializeToString(), "HloSharding": hlo, "text": str(hlo)}
    for name, form in forms.items():
        found = [*parse_op_sharding(form, mesh).partitions]
        found += [()] * (ndim - len(found))
        if found != expected:
            raise AssertionError(f"{spec} on {mesh} should come back as {expected}, but its {name} {hlo} reads {found}")
