"""The CPU devices on the hosts of other devices."""

import functools
from collections.abc import Sequence
from typing import cast, overload

import jax
import numpy as np
from jax.extend.backend import backends
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from partjit._jax.shardings import device_list
from partjit._jax.types import Device
from partjit.checks import devices_in
from partjit.devices import describe_devices
from partjit.errors import ShardingError

__all__ = [
    "check_processes_of_numpy",
    "check_processes_of_results",
    "colocated_cpu_devices",
    "colocated_sharding",
    "has_accelerators",
    "platforms_of",
    "replicated_beside",
    "replicated_over",
]


@overload
def colocated_cpu_devices(devices_or_mesh: Mesh) -> Mesh: ...
@overload
def colocated_cpu_devices(devices_or_mesh: Sequence[Device]) -> list[Device]: ...


def colocated_cpu_devices(devices_or_mesh: object) -> Mesh | list[Device]:
    """The CPU device on the host of each device.

    A CPU device is its own. The i-th accelerator of a process, by id, has its i-th CPU device; with fewer CPU devices
    than accelerators, these are assigned round-robin. So the device of an accelerator does not depend on the others in
    the argument.

    Args:
        devices_or_mesh: devices, a single one, or a mesh.

    Returns:
        A list of as many devices, in the same order; for a mesh, a mesh of the same shape, names and axis types. Where
        CPU devices are shared, a device may occur twice, which jax rejects where the mesh is used.

    Raises:
        ValueError: the process of a device has no CPU devices.
        TypeError: the argument is neither devices nor a mesh.

    Example:
        >>> d = jax.devices()
        >>> colocated_cpu_devices([d[3], d[1]]) == [d[3], d[1]]
        True
    """
    if isinstance(devices_or_mesh, Mesh) and not devices_or_mesh.empty:
        mesh = devices_or_mesh
        flat = [*mesh.devices.flat]
        cpus = colocated_cpu_devices(flat)
        if cpus == flat:
            return mesh
        array = np.array(cpus).reshape(mesh.devices.shape)
        return Mesh(array, mesh.axis_names, axis_types=mesh.axis_types)
    return [_colocated(device) for device in devices_in("colocated_cpu_devices", "devices_or_mesh", devices_or_mesh)]


def has_accelerators() -> bool:
    """Whether this process has devices that are not those of its host."""
    devices = [device for client in backends().values() for device in client.local_devices()]
    return colocated_cpu_devices(devices) != devices


def check_processes_of_numpy(name: str, paths: Sequence[str], shardings: Sequence[Sharding]) -> None:
    """Checks that a process has all of each argument of a function that takes NumPy arrays.

    Raises:
        ShardingError: an argument is sharded over several processes.
    """
    for path, sharding in zip(paths, shardings, strict=True):
        devices = device_list(sharding)
        if not sharding.is_fully_replicated and len({device.process_index for device in devices}) > 1:
            raise ShardingError(
                f"{path} of {name} is sharded over the devices {describe_devices(devices)}, so that no process has all "
                "of it, and arrays='numpy' passes it as one NumPy array: replicate it, call the function per shard "
                "(layout='per_shard'), or leave arrays out and read its addressable_shards"
            )


def check_processes_of_results(name: str, devices: Sequence[Device], shardings: Sequence[Sharding]) -> None:
    """Checks that only processes that run a function have shards of its results: nobody else can make them.

    Raises:
        ShardingError: another process has a device of a result.
    """
    if jax.process_count() == 1:
        return
    processes = {device.process_index for device in devices}
    for sharding in shardings:
        others = [device for device in device_list(sharding) if device.process_index not in processes]
        if others:
            raise ShardingError(
                f"{name} runs on the hosts of the devices {describe_devices(devices)}, but its result has shards on "
                f"the devices {describe_devices(others)}, where nobody makes them: leave devices= out, so that "
                "every process makes its own shards, or return nothing"
            )


def replicated_over(devices: Sequence[Device]) -> Sharding:
    """The sharding of arrays of which every device has a full copy."""
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0])
    return NamedSharding(Mesh([*devices], ("devices",)), PartitionSpec())


@functools.lru_cache(maxsize=4096)
def replicated_beside(sharding: Sharding) -> Sharding:
    """The sharding of arrays of which every device of a sharding has a full copy; on its mesh, if it has one."""
    if isinstance(sharding, NamedSharding):
        return sharding.update(spec=PartitionSpec())
    return replicated_over(tuple(device_list(sharding)))


@functools.lru_cache(maxsize=4096)
def colocated_sharding(sharding: Sharding) -> Sharding:
    """The same sharding on the CPU devices of the hosts.

    Where the devices of a process share CPU devices, the array is unsharded on the first of them.

    Raises:
        ValueError: CPU devices are shared in an array over several processes, or the sharding is neither a
            NamedSharding nor on a single device.
    """
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return _on_abstract_hosts(sharding)
    devices = [*device_list(sharding)]
    cpus = colocated_cpu_devices(devices)
    if cpus == devices:
        return sharding
    if isinstance(sharding, SingleDeviceSharding):
        return SingleDeviceSharding(cpus[0])
    if len({*cpus}) < len(cpus):
        if not sharding.is_fully_addressable:
            raise ValueError(
                f"the processes of an array over {len(devices)} devices have fewer CPU devices than it has shards: "
                "set jax_num_cpu_devices to the number of accelerators of a process"
            )
        return SingleDeviceSharding(cpus[0])
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return NamedSharding(colocated_cpu_devices(sharding.mesh), sharding.spec)
    raise ValueError(f"a colocated function takes arrays with a NamedSharding or on a single device, not {sharding}")


def platforms_of(sharding: Sharding) -> set[str]:
    """The platforms of the devices of a sharding: of an abstract mesh that does not say it, the default one."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        device = sharding.mesh.abstract_device
        return {jax.default_backend() if device is None else device.platform}
    return {device.platform for device in sharding.device_set}


def _on_abstract_hosts(sharding: NamedSharding) -> NamedSharding:
    """The same sharding on CPU devices of hosts that are not there, one for each device."""
    mesh = cast(AbstractMesh, sharding.mesh)
    if platforms_of(sharding) == {"cpu"}:
        return sharding
    hosts = mesh.update(abstract_device=AbstractDevice("cpu", None, "cpu"))
    return NamedSharding(hosts, sharding.spec)


@functools.lru_cache(maxsize=4096)
def _colocated(device: Device) -> Device:
    if device.platform == "cpu":
        return device
    cpus = _of_process(jax.devices("cpu"), device.process_index)
    if not cpus:
        raise ValueError(
            f"process {device.process_index} of {device} has no CPU devices: let JAX start its CPU backend as well, "
            f"with JAX_PLATFORMS={device.platform},cpu"
        )
    accelerators = _of_process(jax.devices(device.platform), device.process_index)
    return cpus[accelerators.index(device) % len(cpus)]


def _of_process(devices: Sequence[Device], process_index: int) -> list[Device]:
    return sorted((d for d in devices if d.process_index == process_index), key=lambda d: d.id)
