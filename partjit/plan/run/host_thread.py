"""Plans whose executables run in the calling thread, while nothing else is under way on their device."""

from collections.abc import Callable
from typing import Any

from partjit._jax.host_thread import NOT_ENTERED, call_in_host_thread
from partjit._jax.types import Device

__all__ = ["running_in_host_thread"]

_MOST_LEFT_OUT = 64


def running_in_host_thread(device: Device, execute: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a plan, whose executables run in the thread that calls it.

    Where the device has other work under way, which another one of this thread would have to wait for, it is called as
    it is. To find out takes a dispatch, so after several times in vain it is tried less often.

    Args:
        device: the CPU.
        execute: the function.
    """
    left_out = in_vain = 0

    def run(*args: object) -> Any:
        nonlocal left_out, in_vain
        if left_out:
            left_out -= 1
            return execute(*args)
        result = call_in_host_thread(device, execute, *args)
        if result is not NOT_ENTERED:
            in_vain = 0
            return result
        in_vain = min(2 * in_vain + 1, _MOST_LEFT_OUT)
        left_out = in_vain // 2
        return execute(*args)

    return run
