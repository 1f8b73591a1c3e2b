"""Where the values at the cut lie: what the partitioner would choose for the program as a whole.

Deciding for one fragment after the other would miss what comes later: a value that only a later fragment constrains
would be computed on every device. So the whole program is lowered, with the calls as operations of which the
partitioner knows nothing, and only its propagation is run. The values at the cut are results of that program, so that
it says where they lie.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from partjit import shardy
from partjit._jax.compiling import DeviceAssignmentMismatchError, lower_to_computation
from partjit._jax.jaxprs import closed_jaxpr
from partjit._jax.meshes import under_mesh
from partjit._jax.shardings import UNSPECIFIED, UnspecifiedValue, default_device
from partjit.colocated.ir.primitive import opaque_calls
from partjit.devices import incompatible_devices
from partjit.plan.ir.flat import Flat

__all__ = ["home_of", "propagate"]


def home_of(in_shardings: Sequence[Any]) -> tuple[SingleDeviceSharding, bool]:
    """Where a program without a mesh runs, and whether its arguments bind it to that device."""
    known = [sharding for sharding in in_shardings if not isinstance(sharding, UnspecifiedValue)]
    if known:
        return SingleDeviceSharding(next(iter(known[0].device_set))), True
    device = default_device()
    return SingleDeviceSharding(device if isinstance(device, jax.Device) else jax.devices(device)[0]), False


def propagate(
    flat: Flat, in_shardings: Sequence[Any], out_shardings: Sequence[Any], mesh: Mesh, cut: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The shardings of arguments and of values at the cut.

    Args:
        flat: the program.
        in_shardings, out_shardings: what is known of its arguments and results, UNSPECIFIED where nothing is.
        mesh: the mesh, not empty.
        cut: the variables of the values at the cut.

    Returns:
        For each argument, and for each value at the cut, a sharding over the mesh.
    """
    if mesh.size == 1:
        everywhere = NamedSharding(mesh, P())
        return [everywhere] * len(in_shardings), [everywhere] * len(cut)
    jaxpr = closed_jaxpr(flat.invars, (*flat.outvars, *cut), flat.eqns, flat.consts)
    results = (*out_shardings, *[UNSPECIFIED] * len(cut))
    try:
        with opaque_calls(), under_mesh(mesh):
            computation = lower_to_computation(
                jaxpr,
                "whole_program",
                in_shardings,
                results,
                [False] * len(in_shardings),
                keep_unused=True,
                context_mesh=mesh,
            )
    except DeviceAssignmentMismatchError as error:
        raise incompatible_devices(error, "whole_program", jaxpr, in_shardings, results) from None
    module = computation.stablehlo()
    shardy.propagate(module)
    shardings = shardy.Shardings(module)
    arguments, results = shardings.of_arguments(), shardings.of_results()
    own = len(arguments) - len(in_shardings)  # constants come first
    return (
        [_sharding(layout, var.aval, mesh) for layout, var in zip(arguments[own:], flat.invars, strict=True)],
        [_sharding(layout, var.aval, mesh) for layout, var in zip(results[len(out_shardings) :], cut, strict=True)],
    )


def _sharding(layout: shardy.TensorSharding | None, aval: Any, mesh: Mesh) -> NamedSharding:
    if layout is None or not layout.is_of_whole_axes:
        return NamedSharding(mesh, P())
    entries: list[Any] = []
    for dim, size in zip(layout.axes, aval.shape, strict=False):  # a key has one dimension more on the device
        parts = 1
        kept = []
        for axis in dim:  # the partitioner would pad, an array cannot
            parts *= mesh.shape[axis]
            if size % parts:
                break
            kept.append(axis)
        entries.append(kept[0] if len(kept) == 1 else tuple(kept) or None)
    while entries and entries[-1] is None:
        entries.pop()
    return NamedSharding(mesh, P(*entries))
