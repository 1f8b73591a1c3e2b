"""Calls in the body of a program that is evaluated eagerly, as under `jax.disable_jit()`.

Such a call has the semantics of the compiled program: NumPy arrays and numbers are converted to arrays, arguments and
results are sharded over the program's mesh, and specs are kept. But it is made at once and in its caller, when its turn
comes in its lanes; calls made ahead are used first.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import cast

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from partjit._jax.arrays import constant_of
from partjit._jax.moves import moved
from partjit._jax.shardings import device_list
from partjit.colocated.devices import colocated_sharding
from partjit.colocated.in_programs import SpecializationForPrograms
from partjit.colocated.ir.primitive import Callee
from partjit.colocated.runtime.failures import call_site
from partjit.colocated.runtime.host_values import is_host_value, owned
from partjit.colocated.runtime.out_spec import OutSpec
from partjit.colocated.runtime.pending import values_of
from partjit.colocated.runtime.streams import Stream
from partjit.mesh import Outside

__all__ = ["DefaultSharding", "as_array", "body", "call_in_body", "evaluated_with"]


@dataclasses.dataclass(frozen=True)
class DefaultSharding:
    """The default sharding of the values of a program.

    Attributes:
        sharding: over the program's mesh, or on a device if it has none.
        committed: whether values are committed to it.
    """

    sharding: Sharding
    committed: bool


class _Body(threading.local):
    def __init__(self) -> None:
        self.default: DefaultSharding | None = None
        self.outside: Outside | None = None


body = _Body()
"""The program evaluated eagerly in this thread: `default` is its default sharding, None outside of any; `outside` is
what was ambient where it was called."""


@contextlib.contextmanager
def evaluated_with(default: DefaultSharding | None) -> Iterator[None]:
    """Makes the calls of the block those of a program with this default sharding; None makes them those of none."""
    outer = body.default, body.outside
    # What is outside of a nested program is outside of all of them.
    body.default, body.outside = default, None if default is None else outer[1] or Outside()
    try:
        yield
    finally:
        body.default, body.outside = outer


def as_array(leaf: object) -> object:
    """An argument of a call: NumPy arrays and numbers become arrays, as in a program, of their own memory."""
    if not is_host_value(leaf):
        return leaf
    # A traced program keeps its constants as they are, even those made by `jax.numpy.array`.
    return constant_of(owned(leaf) if isinstance(leaf, np.ndarray) else leaf)


def call_in_body(
    default: DefaultSharding, callee: Callee, stream: Stream | None, arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """Makes a call and returns its flat results.

    Args:
        default: the default sharding of the program.
        callee, stream: what is called, and the stream on which the program puts it.
        arrays: the flat arguments, in any sharding.

    Raises:
        Exception: what the function raised, with a note that names the call.
    """
    devices = device_list(default.sharding)

    def required(array: jax.Array, own: NamedSharding | None) -> Sharding:
        if own is not None:
            return own
        return array.sharding if device_list(array.sharding) == devices else default.sharding

    shardings = [*map(required, arrays, callee.in_shardings)]
    results = [default.sharding if own is None else own for own in callee.out_shardings]
    on_hosts = tuple(map(colocated_sharding, shardings))

    def make() -> SpecializationForPrograms:
        outputs = [
            OutSpec(aval, colocated_sharding(sharding), default.committed or own is not None)
            for aval, sharding, own in zip(callee.out_avals, results, callee.out_shardings, strict=True)
        ]
        return callee.specialized(stream, on_hosts, outputs, (*devices,), SpecializationForPrograms)

    # Cached, so that the function is copied for its host once.
    specialization = cast(
        SpecializationForPrograms, callee.cache.find_equal(("body", callee, default, stream, on_hosts), make)
    )
    ahead, out_specs = callee.definition.ahead, specialization.out_specs
    made = ahead.made(out_specs) if ahead is not None and out_specs is not None else None
    if made is None:
        values = moved(arrays, on_hosts)
        assert body.outside is not None
        with body.outside.again(), evaluated_with(None):  # the function is outside of the program
            made = specialization.run_for_program(values, range(len(results)), call_site())
    return moved(values_of(made), results)
