"""The shards that each device is expected to hold, from the definition of a spec alone."""

import itertools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from partjit._jax.types import Device
from partjit.checks import require, require_integer, require_mesh_type
from partjit.mesh import describe_mesh
from partjit.spec import MAX_RANK
from partjit.testing.argument_checks import parsed_spec, shape_of

__all__ = ["assert_laid_out", "axes_of", "pieces"]


def axes_of(spec: P | None, ndim: int) -> tuple[tuple[str, ...], ...]:
    """Per dimension the mesh axes that shard it, major to minor.

    Example:
        >>> axes_of(P("x", None, ("y", "z")), 4)
        (('x',), (), ('y', 'z'), ())

    Raises:
        TypeError, ValueError: `spec` is no spec, `ndim` no rank, or shorter than the spec.
    """
    ndim = require_integer("axes_of", "ndim", ndim, 0, MAX_RANK)
    parsed = parsed_spec("axes_of", spec)
    if len(parsed) > ndim:
        raise ValueError(
            f"axes_of: ndim must be at least {len(parsed)}, the length of the spec {parsed}, but is {ndim}"
        )
    # Parsed for the errors only: laws about shardings must not depend on how the package parses specs.
    entries = () if spec is None else tuple(spec)
    axes = [() if e is None else tuple(e) if isinstance(e, list | tuple) else (e,) for e in entries]
    return tuple(axes + [()] * (ndim - len(axes)))


def pieces(mesh: Mesh, spec: P | None, shape: Sequence[int]) -> dict[Device, tuple[slice, ...]]:
    """The index of the shard of an array of `shape` that each device of `mesh` holds.

    Within a dimension the first axis is major: with `P(("y", "x"))`, devices that differ in `x` only hold adjacent
    shards.

    Example:
        >>> mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
        >>> [index[0].start for index in pieces(mesh, P(("y", "x")), (4,)).values()]
        [0, 2, 1, 3]

    Raises:
        TypeError, ValueError: an argument is of a wrong type, or the spec does not fit the mesh or the shape.
    """
    require_mesh_type("pieces", "mesh", mesh)
    shape = shape_of("pieces", shape)
    parsed = parsed_spec("pieces", spec, mesh)
    if len(parsed) > len(shape):
        raise ValueError(f"pieces: the spec {parsed} is for a rank of at least {len(parsed)}, but shape is {shape}")
    by_dim = axes_of(spec, len(shape))
    found = {}
    for position in itertools.product(*map(range, mesh.devices.shape)):
        at = dict(zip(mesh.axis_names, position, strict=True))
        index = []
        for size, axes in zip(shape, by_dim, strict=True):
            number, count = 0, 1
            for axis in axes:
                number, count = number * mesh.shape[axis] + at[axis], count * mesh.shape[axis]
            length = size // count
            index.append(slice(number * length, (number + 1) * length))
        found[mesh.devices[position]] = tuple(index)
    return found


def assert_laid_out(array: jax.Array, mesh: Mesh, spec: P | None) -> None:
    """Asserts that an array is sharded on a mesh by a spec that divides its shape, and that every device holds its
    shard.

    Raises:
        AssertionError: its sharding, or the data on a device, is different.
        TypeError, ValueError: `array` is no array, `mesh` no mesh, or `spec` no spec that fits.

    Example:
        >>> mesh = Mesh(np.array(jax.devices()), ("x",))
        >>> array = jax.device_put(np.arange(8), jax.sharding.NamedSharding(mesh, P("x")))
        >>> assert_laid_out(array, mesh, P("x"))
        >>> assert_laid_out(array, mesh, None)
        Traceback (most recent call last):
            ...
        AssertionError: an array of shape (8,) should be sharded as P() on (x=8), but its sharding is ...
    """
    require("assert_laid_out", "array", array, jax.Array, "an array of jax's")
    require_mesh_type("assert_laid_out", "mesh", mesh)
    parsed = parsed_spec("assert_laid_out", spec, mesh)
    if len(parsed) > array.ndim:
        raise ValueError(
            f"assert_laid_out: the spec {parsed} is for a rank of {len(parsed)}, but array has {array.ndim}"
        )
    expected = jax.sharding.NamedSharding(mesh, P() if spec is None else spec)
    described = f"an array of shape {array.shape} should be sharded as {expected.spec} on ({describe_mesh(mesh)})"
    if not array.committed:
        raise AssertionError(f"{described}, but it is not committed to any sharding")
    if not array.sharding.is_equivalent_to(expected, array.ndim):
        raise AssertionError(f"{described}, but its sharding is {array.sharding}")
    own_mesh = getattr(array.sharding, "mesh", mesh)
    if own_mesh.axis_types != mesh.axis_types:
        raise AssertionError(f"{described} with axis types {mesh.axis_types}, but they are {own_mesh.axis_types}")
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended) or not array.size:
        return  # there are no values to compare
    whole = np.asarray(array)
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    for device, index in pieces(mesh, spec, array.shape).items():
        if device in shards and not np.array_equal(
            np.asarray(shards[device]), whole[index], equal_nan=whole.dtype.kind in "fc"
        ):
            raise AssertionError(f"{described}, but device {device.id} does not hold the shard {index}")
