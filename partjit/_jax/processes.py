"""The group of processes that this one belongs to."""

from jax._src import distributed
from jaxlib._jax import DistributedRuntimeClient

__all__ = ["DistributedRuntimeClient", "distributed_client"]


def distributed_client() -> DistributedRuntimeClient | None:
    """The client of the service that the processes of a group share, or None for a single process."""
    return distributed.global_state.client
