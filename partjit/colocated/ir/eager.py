"""Calls in the body of a program that runs on values, as under `jax.disable_jit()`.

Such a call means what it means in the program: NumPy arrays and numbers have become arrays, its arguments lie over the
program's mesh, and so do its results; specs that say where are kept. But it is made at once and in its caller, when its
turn comes in its lanes, and calls that were made ahead are taken first.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np

from partjit._jax.arrays import device_put
from partjit._jax.shardings import device_list
from partjit.colocated.devices import colocated_sharding
from partjit.colocated.ir.primitive import Callee
from partjit.colocated.runtime.failures import call_site
from partjit.colocated.runtime.pending import PendingArray
from partjit.colocated.runtime.specs import OutSpec
from partjit.colocated.specialization import Specialization
from partjit.mesh import Outside, auto_twin

__all__ = ["Home", "as_array", "body", "call_in_body", "running_at"]


@dataclasses.dataclass(frozen=True)
class Home:
    """Where the values of a program lie of which nothing else says it.

    Attributes:
        sharding: over the program's mesh, or on a device if it has none.
        is_bound: whether they are committed to it.
    """

    sharding: Any
    is_bound: bool


class _Body(threading.local):
    def __init__(self) -> None:
        self.home: Home | None = None
        self.outside: Outside | None = None


body = _Body()
"""`body.home` is that of the program whose body runs on values in this thread, None outside of any; `body.outside` is
what was ambient where the program was called.
"""


@contextlib.contextmanager
def running_at(home: Home) -> Iterator[None]:
    """Makes the calls of the block those of a program at home there."""
    outer = body.home, body.outside
    body.home, body.outside = home, Outside()
    try:
        yield
    finally:
        body.home, body.outside = outer


@contextlib.contextmanager
def _called() -> Iterator[None]:
    """For a function that a program calls: it is outside of the program, and so is what it calls itself."""
    outer = body.home, body.outside
    body.home = body.outside = None
    try:
        with cast(Outside, outer[1]).again():
            yield
    finally:
        body.home, body.outside = outer


def as_array(leaf: Any) -> Any:
    """An argument of a call: NumPy arrays and numbers are arrays in a program."""
    return jax.numpy.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex) else leaf


def call_in_body(home: Home, callee: Callee, stream: Any, leaves: Sequence[Any]) -> list[Any]:
    """Makes a call and gives its flat results.

    Args:
        home: where the program is.
        callee, stream: what is called, and the stream that the program put it on.
        leaves: the arguments, flat, wherever they lie.

    Raises:
        Exception: what the function raised, with a note that names the call.
    """
    devices = device_list(home.sharding)
    leaves = [leaf if isinstance(leaf, jax.Array) else jax.numpy.asarray(leaf) for leaf in leaves]  # jax.vmap slices

    def wanted(leaf: Any, said: Any) -> Any:
        if said is not None:
            return _on_auto_twin(said)
        return leaf.sharding if device_list(leaf.sharding) == devices else home.sharding

    shardings = [wanted(leaf, said) for leaf, said in zip(leaves, callee.in_shardings, strict=True)]
    results = [home.sharding if said is None else _on_auto_twin(said) for said in callee.out_shardings]
    on_hosts = tuple(map(colocated_sharding, shardings))

    def make() -> Specialization:
        outputs = [
            OutSpec(aval, colocated_sharding(sharding), home.is_bound or said is not None)
            for aval, sharding, said in zip(callee.out_avals, results, callee.out_shardings, strict=True)
        ]
        return callee.specialized(stream, on_hosts, outputs, (*devices,))

    # Kept, so that the function is copied for its host once.
    specialization = callee.cache.find_equal(("body", callee, home, stream, on_hosts), make)
    made = callee.ahead.made(specialization.out_specs) if callee.ahead is not None else None
    if made is None:
        values = [
            leaf if leaf.sharding == sharding else device_put(leaf, sharding)
            for leaf, sharding in zip(leaves, on_hosts, strict=True)
        ]
        with _called():
            made = specialization.run_for_program(values, range(len(results)), call_site())
    values = [result.value() if type(result) is PendingArray else result for result in made]
    return [
        value if value.sharding == sharding else device_put(value, sharding)
        for value, sharding in zip(values, results, strict=True)
    ]


def _on_auto_twin(sharding: Any) -> Any:
    """The sharding as the values of a program have it: Explicit axes are read as Auto."""
    return sharding.update(mesh=auto_twin(sharding.mesh))
