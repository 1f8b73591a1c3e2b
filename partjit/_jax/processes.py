"""The group of processes that this one belongs to."""

import contextlib
import socket
import time

from jax._src import distributed
from jax.errors import JaxRuntimeError
from jaxlib._jax import DistributedRuntimeClient

__all__ = [
    "DistributedRuntimeClient",
    "distributed_client",
    "group_size",
    "of_the_first",
    "own_host",
    "own_process",
    "published",
]

_POLL_SECONDS = 0.01


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


def published(client: DistributedRuntimeClient, key: str, deadline: float) -> str:
    """What a process of the group says under a key; waits for it.

    Args:
        client: of the service that the processes share.
        key: the key.
        deadline: in seconds of `time.monotonic`.

    Raises:
        TimeoutError: it is not there by then.
    """
    # Polled: a thread that waits in C++ sees no interrupt, and ends the process with an error if the interpreter exits.
    while True:
        with contextlib.suppress(JaxRuntimeError):  # it is not there yet
            return client.key_value_try_get(key)
        if time.monotonic() > deadline:
            raise TimeoutError(key)
        time.sleep(_POLL_SECONDS)


def of_the_first(client: DistributedRuntimeClient, key: str, value: str) -> str:
    """What the first process of the group that asks proposes as the value of a key; nobody waits for another one."""
    with contextlib.suppress(JaxRuntimeError):  # there is one already
        client.key_value_set(key, value)
    return client.key_value_try_get(key)


def own_process() -> int:
    """The number of this process in its group; 0 for a single process. It needs no devices."""
    return distributed.global_state.process_id


def group_size() -> int:
    """How many processes the group has; 1 for a single process."""
    return distributed.global_state.num_processes or 1
