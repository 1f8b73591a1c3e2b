"""The hypothesis strategy for meshes. It shrinks towards few devices."""

import math
import warnings
from collections.abc import Sequence

import jax
import numpy as np
from hypothesis import strategies as st
from jax.sharding import AxisType

from partjit.checks import require_flag
from partjit.mesh import Mesh
from partjit.testing.argument_checks import axis_names_of, mesh_shapes_of

__all__ = ["meshes"]

_MESH_SHAPES = [(2,), (4, 2), (2, 4), (8,), (2, 2), (2, 2, 2), (4, 1, 2), (3, 2), (2, 1, 3), (1, 8), (6,), (5,), (1,)]
_AXIS_NAMES = [("x", "y", "z"), ("z", "x", "y"), ("data", "model", "stage")]
_ONE_DEVICE = (
    "partjit.testing.meshes: there is a single device, so nothing is sharded, and a test with these meshes passes "
    "whatever it tests. Run pytest with --partjit-devices=8, or call jax.config.update('jax_num_cpu_devices', 8) "
    "before jax is used"
)


@st.composite
def meshes(
    draw: st.DrawFn,
    *,
    mesh_shapes: Sequence[tuple[int, ...]] | None = None,
    axis_names: Sequence[tuple[str, ...]] | None = None,
    permuted: bool = True,
    explicit: bool = False,
) -> Mesh:
    """Meshes over any of the available devices, in any order.

    Args:
        draw: given by hypothesis.
        mesh_shapes: the shapes to draw from; those that need too many devices are left out. By default of 1 to 3 axes,
            with sizes of 1 and sizes that are no powers of 2.
        axis_names: the tuples of names to draw from, each at least as long as the longest shape.
        permuted: whether the order of the devices may differ from `jax.devices()`.
        explicit: whether at least one axis has the type Explicit.

    Raises:
        ValueError: no shape is small enough.
        TypeError: an argument is of a wrong type.

    Warns:
        UserWarning: there is a single device, so that nothing is sharded and a test of it passes whatever it tests.

    Example:
        >>> from hypothesis import given
        >>> @given(meshes(mesh_shapes=[(4, 2)]))
        ... def test(mesh):
        ...     assert mesh.size == 8
        >>> test()
    """
    permuted, explicit = require_flag("meshes", "permuted", permuted), require_flag("meshes", "explicit", explicit)
    devices = np.array(jax.devices())
    mesh_shapes = _MESH_SHAPES if mesh_shapes is None else mesh_shapes_of(mesh_shapes)
    axis_names = _AXIS_NAMES if axis_names is None else axis_names_of(axis_names, max(map(len, mesh_shapes), default=0))
    fitting = [shape for shape in mesh_shapes if math.prod(shape) <= devices.size]
    if not fitting:
        raise ValueError(
            f"meshes: there are {devices.size} devices, and every one of mesh_shapes {mesh_shapes} needs more"
        )
    if devices.size == 1 and len(fitting) < len(mesh_shapes):
        warnings.warn(_ONE_DEVICE, stacklevel=2)
    shape = draw(st.sampled_from(fitting))
    names = draw(st.sampled_from([*axis_names]))[: len(shape)]
    order = [*range(devices.size)]
    if permuted:
        order = draw(st.one_of(st.just(order), st.permutations(order)))
    types = [AxisType.Auto] * len(shape)
    if explicit:
        others = [draw(st.sampled_from([AxisType.Explicit, AxisType.Auto])) for _ in shape[1:]]
        types = draw(st.permutations([AxisType.Explicit, *others]))
    return Mesh(devices[order[: math.prod(shape)]].reshape(shape), names, axis_types=tuple(types))
