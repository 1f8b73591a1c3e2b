"""The group of processes that this one belongs to."""

from typing import Any

from jax._src import distributed


def distributed_client() -> Any:
    """The client of the service that the processes of a group share, or None for a single process."""
    return distributed.global_state.client
