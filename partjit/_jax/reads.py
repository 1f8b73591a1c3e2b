"""Reads of arrays by Python: `float(x)`, `bool(x)`, `x.item()`, `print(x)`, `np.asarray(x)`."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
from jax._src.array import ArrayImpl

__all__ = ["observed_reads"]

_DEVICE_GET = cast(Any, jax.device_get).__code__


@contextlib.contextmanager
def observed_reads(on_read: Callable[[jax.Array, bool], None]) -> Iterator[None]:
    """Calls a function before an array is read in the block, by any thread.

    jax's transfer guard sees no read on the CPU, where the memory of the device is that of the host. Reads in Python
    get `ArrayImpl._value`; but `np.asarray` of an array on one CPU device gets its buffer without calling Python.

    Args:
        on_read: gets the array, and whether it is read by `jax.device_get`.
    """
    value, item = cast(Any, ArrayImpl)._value, cast(Any, ArrayImpl).item

    def is_explicit() -> bool:
        frame = sys._getframe(2)
        while frame is not None and frame.f_code is not _DEVICE_GET:
            frame = frame.f_back
        return frame is not None

    def read(array: Any) -> object:
        on_read(array, is_explicit())
        return value.fget(array)

    def read_item(array: Any, *args: int) -> object:
        on_read(array, is_explicit())
        return item(array, *args)

    cast(Any, ArrayImpl)._value, cast(Any, ArrayImpl).item = property(read), read_item
    try:
        yield
    finally:
        cast(Any, ArrayImpl)._value, cast(Any, ArrayImpl).item = value, item
