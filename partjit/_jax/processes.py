"""The group of processes that this one belongs to."""

import socket

from jax._src import distributed
from jaxlib._jax import DistributedRuntimeClient

__all__ = ["DistributedRuntimeClient", "distributed_client", "own_host"]


def distributed_client() -> DistributedRuntimeClient | None:
    """The client of the service that the processes of a group share, or None for a single process."""
    return distributed.global_state.client


def own_host() -> str:
    """The address of this machine in the network in which the processes of the group reach their service."""
    address = distributed.global_state.coordinator_address
    assert address is not None  # there is a client
    host, _, port = address.rpartition(":")
    family, kind, protocol, _, target = socket.getaddrinfo(
        host.strip("[]"), int(port), socket.AF_INET, socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # nothing is sent: this asks which interface leads there
        return probe.getsockname()[0]
