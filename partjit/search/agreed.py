"""One result for all processes of a mesh: one of them searches, and the others take what it has found."""

import json
import time
from collections.abc import Callable

from jax.sharding import Mesh

from partjit._jax.processes import distributed_client, own_process, published
from partjit.errors import MemoryLimitError
from partjit.mesh import is_abstract_mesh

__all__ = ["agreed", "processes_of"]

_DEADLINE = 3600.0
"""The seconds that a process waits for the one that searches: a search, and what that one does before."""


def processes_of(mesh: Mesh) -> tuple[int, ...]:
    """The numbers of the processes that a mesh has devices of."""
    return () if is_abstract_mesh(mesh) else tuple(sorted({device.process_index for device in mesh.devices.flat}))


def agreed(search: Callable[[], str], key: str, mesh: Mesh, name: str) -> str:
    """What a search of the first process of a mesh returns, in each of them; another one raises what that one raises.

    Args:
        search: the search.
        key: what identifies the program; the same in each process.
        mesh: the mesh.
        name: of the program.

    Raises:
        MemoryLimitError: the search raised it.
        RuntimeError: it failed in the first process, or there is nothing for an hour.
    """
    client, processes = distributed_client(), processes_of(mesh)
    if client is None or len(processes) < 2:
        return search()
    first, place = processes[0], f"partjit/search/{key}"
    if own_process() == first:
        try:
            text = search()
        except BaseException as error:
            failure = {"failed": str(error), "memory": isinstance(error, MemoryLimitError)}
            client.key_value_set(place, json.dumps(failure), allow_overwrite=True)
            raise
        client.key_value_set(place, text, allow_overwrite=True)
        return text
    try:
        text = published(client, place, time.monotonic() + _DEADLINE)
    except TimeoutError:
        raise RuntimeError(
            f"process {own_process()} waits for the specs of {name}, which process {first} searches, and has none "
            f"after {_DEADLINE:.0f} s: call the same function with arguments of the same types in all processes"
        ) from None
    data = json.loads(text)
    if "failed" in data:
        kind = MemoryLimitError if data["memory"] else RuntimeError
        raise kind(f"process {first} found no specs for {name}: {data['failed']}")
    return text
