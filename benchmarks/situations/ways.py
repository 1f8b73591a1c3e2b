"""What a situation is, the devices that it is tried on, and the ways in which it is handled today."""

import concurrent.futures
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import colocated_python as jax_colocated
from jax.experimental import io_callback

from partjit import colocated
from programs import everywhere, place

BY_HAND = "by hand"
THREAD = "by hand, a thread"
IO = "io_callback"
PURE = "pure_callback"
DEBUG = "jax.debug.callback"
JAX = "jax colocated_python"
OURS = "partjit"
"""The spelling of ours that a user of the documentation writes first; those of others begin with this name as well."""

CALLBACKS = (IO, PURE, DEBUG)
"""The ways that may hang or abort the process on several devices."""

Run = Callable[[], Any]


class Situation(NamedTuple):
    """What is compared.

    Attributes:
        iterations: how many of them a run makes.
        ways: the runs. Each waits for all that it has started, and returns what must be the same for all of them: its
            results, and what its host functions have seen.
    """

    iterations: int
    ways: Mapping[str, Run]


class Place:
    """The devices of a situation.

    Attributes:
        count: how many there are.
        rows: the sharding of arrays that are sharded over their first dimension.
        everywhere: that of replicated arrays.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.mesh, self.rows = place(count)
        self.everywhere = everywhere(count)

    def put(self, value: Any) -> jax.Array:
        return jax.device_put(value, self.rows)

    def replicate(self, tree: Any) -> Any:
        return jax.device_put(tree, self.everywhere)

    def quickest(self, put: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """How NumPy arrays are best given to a `jax.jit`: on one device as they are, since its dispatch places them."""
        return put if self.count > 1 else lambda x: x

    def spec(self, *shape: int) -> jax.ShapeDtypeStruct:
        """The spec of an array that is sharded over its first dimension."""
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=self.rows if self.count > 1 else None)


def scalar(dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), dtype)


def callback(way: str, fun: Callable[..., Any], result: Any, *args: Any) -> Any:
    """A call of a NumPy function in a `jax.jit`, by one of jax's callbacks."""

    def with_numpy(*arrays: Any) -> Any:
        return fun(*jax.tree.map(np.asarray, arrays))

    plain = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), result)
    if way == IO:
        return io_callback(with_numpy, plain, *args)
    if way == PURE:
        return jax.pure_callback(with_numpy, plain, *args)
    return jax.debug.callback(with_numpy, *args)


def made_by_jax(fun: Callable[..., Any]) -> Any:
    """What `jax.experimental.colocated_python` makes of a function of arrays. It blocks its caller."""
    number = len(_known_by_number)
    _known_by_number.append(fun)
    # It copies what a function refers to, and cannot copy shardings on a single device.
    return jax_colocated.colocated_python(lambda *args: call_numbered(number, *args))


_known_by_number: list[Callable[..., Any]] = []


def call_numbered(number: int, *args: Any) -> Any:
    return _known_by_number[number](*args)


def finished(results: Any) -> Any:
    """The results of a `jax.jit`, after all of its callbacks."""
    jax.block_until_ready(results)
    jax.effects_barrier()
    return results


def ended(results: Any) -> Any:
    """The results of ours, after all calls."""
    jax.block_until_ready(results)
    colocated.wait()
    return results


def waited_for(futures: list[concurrent.futures.Future[Any]]) -> None:
    for future in futures:
        future.result()
