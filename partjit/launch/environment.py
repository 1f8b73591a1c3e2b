"""The environment variables with which `jax.distributed.initialize()` joins a group of processes of this machine.

jax reads the address of the group from a variable of its own. The number of a process and their count it asks of the
clusters that it knows, first of all of Open MPI's `mpirun`, which passes both in the environment.
"""

import re
import socket
from collections.abc import Mapping

__all__ = ["free_address", "variables"]

_DEVICE_COUNT_FLAG = re.compile(r"\s*--xla_force_host_platform_device_count=\S*")


def variables(number: int, count: int, devices: int, address: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process.

    Args:
        number: of the process, from 0.
        count: of the processes.
        devices: of each process: virtual CPU devices, or the next so many GPUs.
        address: where the processes meet, `host:port`.
        inherited: the environment of the launcher.

    Returns:
        All variables of the process.

    Example:
        >>> ours = variables(1, 2, 4, "127.0.0.1:4321", {"HOME": "/home/ada"})
        >>> ours["HOME"], ours["OMPI_COMM_WORLD_RANK"], ours["JAX_NUM_CPU_DEVICES"], ours["JAX_LOCAL_DEVICE_IDS"]
        ('/home/ada', '1', '4', '4,5,6,7')
    """
    found = {
        **inherited,
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # jax would listen on all interfaces
        "OMPI_MCA_orte_hnp_uri": "partjit.launch",  # that it is there is what jax looks for
        "OMPI_COMM_WORLD_SIZE": str(count),
        "OMPI_COMM_WORLD_RANK": str(number),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(number),
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_LOCAL_DEVICE_IDS": ",".join(str(number * devices + i) for i in range(devices)),
    }
    found.pop("OMPI_VERSION", None)  # of Open MPI 5, for which jax asks mpi4py
    if "XLA_FLAGS" in found:  # jax refuses to be told the number of devices twice
        found["XLA_FLAGS"] = _DEVICE_COUNT_FLAG.sub("", found["XLA_FLAGS"])
    # XLA sizes a thread pool by it, in which each virtual device of a collective blocks a thread.
    found.setdefault("NPROC", str(max(32, 4 * devices)))
    # The standard output is a pipe, so Python would keep lines to itself; those of a killed process would be lost.
    found.setdefault("PYTHONUNBUFFERED", "1")
    return found


def free_address() -> tuple[str, socket.socket]:
    """An address of this machine that no other process will be given, and the socket that reserves it.

    The socket is bound and does not listen. The service of `jax.distributed` shares its port (SO_REUSEPORT), others
    that ask for a port do not get it.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{reserved.getsockname()[1]}", reserved
