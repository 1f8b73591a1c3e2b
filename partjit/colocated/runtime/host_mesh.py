"""Functions on the hosts of accelerators see the mesh of their caller as one of the hosts' devices.

Their arguments are there, and jax refuses to compute with them under a mesh of other devices.
"""

from collections.abc import Callable

from jax.sharding import Mesh

from partjit._jax.meshes import EMPTY_MESH, ambient_mesh_replaced
from partjit._jax.types import PyTree
from partjit.colocated import devices

__all__ = ["on_host_mesh"]


def on_host_mesh(target: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """A function that calls `target` under the mesh of the hosts' devices of those in the ambient mesh.

    There is none where several devices of a mesh share that of their host. It is `target` itself in a process without
    accelerators.
    """
    if not devices.has_accelerators():
        return target

    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        with ambient_mesh_replaced(_of_hosts):
            return target(*args, **kwargs)

    return call


def _of_hosts(mesh: Mesh) -> Mesh:
    hosts = devices.colocated_cpu_devices([*mesh.devices.flat])
    return devices.colocated_cpu_devices(mesh) if len({*hosts}) == len(hosts) else EMPTY_MESH
