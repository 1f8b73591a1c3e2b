"""Which devices meshes and values are on, if any: for errors about values of one program on different ones."""

from collections.abc import Iterable, Sequence

import jax
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, Sharding

from partjit._jax.compiling import equations_that_need_devices, mismatches_inside
from partjit._jax.shardings import MaybeSharding, UnspecifiedValue, device_list
from partjit._jax.types import Device
from partjit.arguments import known_paths
from partjit.errors import MissingMeshError, ShardingError
from partjit.mesh import describe_mesh, device_ids, is_abstract_mesh

__all__ = [
    "check_needs_no_devices",
    "describe_devices",
    "devices_of",
    "has_devices_of",
    "ids_of",
    "incompatible_devices",
    "is_over_processes",
    "no_devices",
    "platform_of",
]


def ids_of(sharding: Sharding) -> list[int]:
    """The ids of the devices of a sharding, in their order; none on an abstract mesh."""
    return [device.id for device in device_list(sharding) or ()]


def is_over_processes(mesh: Mesh) -> bool:
    """Whether the devices of a mesh belong to several processes; those of an abstract mesh do to none."""
    if jax.process_count() == 1 or is_abstract_mesh(mesh):
        return False
    return len({device.process_index for device in mesh.devices.flat}) > 1


def describe_devices(devices: Iterable[Device]) -> str:
    """The ids of devices, and which process has which where there are several.

    For example `[0, 1, 2, 3] of process 0 and [4, 5, 6, 7] of process 1`.
    """
    devices = [*devices]
    if jax.process_count() == 1 or not devices:
        return str([device.id for device in devices])
    by_process: dict[int, list[int]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device.id)
    parts = [f"{ids} of process {process}" for process, ids in sorted(by_process.items())]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def platform_of(mesh: Mesh) -> str | None:
    """The platform of the devices of a mesh, "cpu" for instance; None if it is empty, or abstract and does not say."""
    if mesh.empty:
        return None
    device = mesh.abstract_mesh.abstract_device
    return None if device is None else device.platform


def no_devices(problem: str, mesh: Mesh) -> MissingMeshError:
    """The error about what cannot be done on an abstract mesh, to be raised."""
    return MissingMeshError(
        f"{problem}: the abstract mesh ({describe_mesh(mesh)}) has no devices. A program can be traced, lowered and "
        "explained there; to compile or call it, enter a mesh of devices: `with partjit.Mesh(devices, axis_names):`"
    )


def check_needs_no_devices(jaxpr: ClosedJaxpr, name: str, mesh: Mesh) -> None:
    """Raises MissingMeshError for a program on an abstract mesh that cannot be lowered there."""
    if is_abstract_mesh(mesh) and (found := equations_that_need_devices(jaxpr)):
        raise MissingMeshError(
            f"{name} cannot be lowered on the abstract mesh ({describe_mesh(mesh)}): it has {', '.join(found)}, which "
            "jax lowers for devices only. Take a mesh of devices, such as virtual CPU devices, or leave it out"
        )


def devices_of(mesh: Mesh) -> str:
    """The devices of a mesh, for messages."""
    return f"the abstract mesh ({describe_mesh(mesh)})" if is_abstract_mesh(mesh) else f"the devices {device_ids(mesh)}"


def has_devices_of(mesh: Mesh, other: Mesh, *, in_order: bool = True) -> bool:
    """Whether two meshes have the same devices, in the same order or in any; abstract ones have if they are as large.

    A mesh of devices and an abstract one have not.
    """
    if is_abstract_mesh(mesh) or is_abstract_mesh(other):
        return is_abstract_mesh(mesh) and is_abstract_mesh(other) and mesh.size == other.size
    if in_order:
        return [*mesh.devices.flat] == [*other.devices.flat]
    return {*mesh.devices.flat} == {*other.devices.flat}


def incompatible_devices(
    error: Exception,
    name: str,
    jaxpr: ClosedJaxpr,
    in_shardings: Sequence[MaybeSharding],
    out_shardings: Sequence[MaybeSharding],
) -> ShardingError:
    """The error for a program whose arguments, constraints and results are not all on the same devices.

    Args:
        error: what jax raised, which names neither arguments nor results.
        name: the name of the program.
        jaxpr: the program.
        in_shardings, out_shardings: the shardings of its arguments and results, UNSPECIFIED where nothing is known.
    """
    info = jaxpr.jaxpr.debug_info
    placed = [
        *_placed("argument", info.arg_names, jaxpr.in_avals, in_shardings),
        *_placed("result", info.result_paths, jaxpr.out_avals, out_shardings),
        *mismatches_inside(error),
    ]
    first = placed[0][1] if placed else []
    others = [f"{what} on {ids}" for what, ids in placed[1:] if ids != first]
    return ShardingError(
        f"Received incompatible devices for pjitted computation {name}: {placed[0][0]} is on the devices {first}, but "
        f"{'; '.join(others)}. Put all arguments, results and constraints on the devices of one mesh, in one order: "
        "jax.device_put(value, NamedSharding(mesh, spec))"
    )


def _placed(
    kind: str, paths: object, avals: Sequence[AbstractValue], shardings: Sequence[MaybeSharding]
) -> list[tuple[str, list[int]]]:
    return [
        (f"{kind} {path} ({aval.str_short()})", ids_of(sharding))
        for path, aval, sharding in zip(known_paths(paths, len(avals), "{}"), avals, shardings, strict=True)
        if not isinstance(sharding, UnspecifiedValue)
    ]
