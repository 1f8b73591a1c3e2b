"""Moves of arrays over several processes, which are programs of the devices of all of them.

In one process alone such a program would wait for the others for ever, or meet the collective of another one. So it is
begun by the program or call that this thread executes, which agrees on it with the others.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import jax
from jax.sharding import Sharding

from partjit._jax.arrays import device_put
from partjit._jax.shardings import device_list
from partjit.devices import ids_of

__all__ = ["Together", "is_of_several_processes", "move_together", "together"]


class Together(Protocol):
    """What several processes execute, at the same point in each of them.

    Attributes:
        group: these processes.
    """

    group: tuple[int, ...]

    def do(self, what: str, action: Callable[[], jax.Array]) -> jax.Array:
        """Does something in all of them, or in none."""
        ...


_of_thread = threading.local()


@contextlib.contextmanager
def together(execution: Together | None) -> Iterator[None]:
    """In which this thread executes something of several processes; with None, it does not."""
    outer = getattr(_of_thread, "execution", None)
    _of_thread.execution = execution
    try:
        yield
    finally:
        _of_thread.execution = outer


def is_of_several_processes(value: jax.Array, sharding: Sharding) -> bool:
    """Whether to give an array that sharding, which it does not have, is a program of several processes."""
    return not (value.is_fully_addressable or value.sharding.is_equivalent_to(sharding, value.ndim))


def move_together(value: jax.Array, sharding: Sharding, what: str) -> jax.Array:
    """An array with another sharding, moved by all of its processes or by none.

    Args:
        value: the array, of which other processes have parts.
        sharding: the sharding it is to have.
        what: what it is, in messages.

    Raises:
        ValueError: this thread executes nothing that these processes have in common.
    """
    processes = {device.process_index for s in (value.sharding, sharding) for device in device_list(s)}
    execution: Together | None = getattr(_of_thread, "execution", None)
    shown = f"{what}, {value.aval.str_short()}, from {_text(value.sharding)} to {_text(sharding)}"
    if execution is None or {*execution.group} != processes:
        raise ValueError(
            f"{what} is {value.aval.str_short()} with {_text(value.sharding)}, but is needed with {_text(sharding)}, "
            f"and to move it takes the devices of processes {sorted(processes)} together, which a call on a thread, or "
            "on other processes, cannot order among their programs: say with a sharding in out_specs or out_specs_fn "
            "how the function returns it, and let the program reshard it, or call the function with mode='inline'"
        )
    return execution.do(f"moving {shown}", lambda: device_put(value, sharding))


def _text(sharding: Sharding) -> str:
    return f"{getattr(sharding, 'spec', sharding)} on {ids_of(sharding)}".replace("PartitionSpec", "P")
