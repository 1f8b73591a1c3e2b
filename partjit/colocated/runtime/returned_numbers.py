"""Numbers that functions return: they are put on devices when more than the number is used.

`if bool(stop):` after each step then neither puts a number on a device nor reads it back. Where more was used of one,
the threads that run calls put the next ones, so that whoever uses them need not.
"""

from collections.abc import Sequence

import jax
import numpy as np

from partjit._jax.arrays import shareable
from partjit._jax.types import PyTree
from partjit.colocated.runtime.out_specs import OutSpecs
from partjit.colocated.runtime.pending import OnDemand

__all__ = ["returned_number"]


def returned_number(out_specs: OutSpecs, returned: Sequence[PyTree], name: str) -> OnDemand | None:
    """The result of a function, if it is a number of the host alone.

    Args:
        out_specs: the specs of its results.
        returned: a list of what it returned.
        name: its name in messages.

    Raises:
        ValueError: the shape or dtype is not as specified.
    """
    if not out_specs.is_number or isinstance(returned[0], jax.Array):
        return None
    (number,) = out_specs.fit_numpy(returned[0], name)
    return _ReturnedNumber(np.array(number), out_specs)  # the function may change its own


class _ReturnedNumber(OnDemand):
    __slots__ = ("_out_specs", "_value")

    def __init__(self, value: np.ndarray, out_specs: OutSpecs) -> None:
        self._value = value
        self._out_specs = out_specs

    @property
    def number(self) -> bool | int | float:
        """The number."""
        return self._value.item()

    def __call__(self) -> jax.Array:
        """The array, on its devices."""
        self._out_specs.is_used = True
        return shareable(self._out_specs.leaves[0].put_numpy(self._value))
