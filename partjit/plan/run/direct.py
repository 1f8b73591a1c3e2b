"""Results of calls that only executables and the host get: they stay NumPy arrays as the functions returned them.

To put a small array on a device takes about as long as to dispatch an executable, which does it on the way in half the
time, if there is a single device. The host reads the predicate of a loop from the NumPy array, on however many devices.
What a loop carries, and the program returns at last, is put there once.
"""

import collections
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from partjit._jax.arrays import is_laid_out_as_numpy, numpy_putter
from partjit._jax.shardings import device_list
from partjit.colocated.runtime.host_values import LARGE
from partjit.plan.ir.nodes import Branch, ColocatedCall, Fragment, Loop, Value
from partjit.plan.ir.walk import blocks_of, walk
from partjit.plan.plan import Plan

__all__ = ["LeftToDispatch", "left_to_dispatch"]


class LeftToDispatch:
    """What of a plan's values are NumPy arrays.

    Attributes:
        made: results of calls.
        returned: by their positions, results of the plan that loops have made of these, with what makes arrays of them.
    """

    def __init__(
        self,
        made: Collection[Value] = (),
        returned: Mapping[int, Callable[[np.ndarray], jax.Array]] = MappingProxyType({}),
    ) -> None:
        self.made = made
        self.returned = returned

    def put(self, results: Sequence[Any]) -> Sequence[Any]:
        """The flat results of the plan, or what there is of them, as arrays."""
        own = [*results]
        for i, put in self.returned.items():
            if type(own[i]) is np.ndarray:
                own[i] = put(own[i])
        return own

    def putting(self, execute: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        """The function of the plan, with arrays as its results."""
        if not self.returned:
            return execute
        return lambda *args: self.put(execute(*args))


def left_to_dispatch(
    plan: Plan, default: Sharding, committed: bool, sharding_of: Callable[[Value], Sharding]
) -> LeftToDispatch:
    """The results of calls that are left to the dispatch of what reads them.

    Args:
        plan: the plan.
        default, committed: the sharding of values whose own it leaves open, and whether they are committed to it.
        sharding_of: returns the sharding of a value.
    """
    nodes = [*walk(plan.nodes)]
    same = _Classes()
    at_end = {value for node in plan.nodes if isinstance(node, Loop) for value in node.outputs}
    others = {*plan.outputs} - at_end
    read: collections.Counter[Value] = collections.Counter()
    for node in nodes:
        if isinstance(node, Loop):  # which carries them on, and reads its predicate
            for group in zip(node.initial, node.outputs, node.block.outputs, strict=True):
                same.join(group)
        elif isinstance(node, Branch):  # which reads its first input
            others.update(node.outputs)
            others.update(value for block in blocks_of(node) for value in block.outputs)
        elif isinstance(node, Fragment) and not node.by_one_device:
            read.update(node.inputs)
        else:
            others.update(node.inputs)
    are_several = len(device_list(default)) > 1 or plan.mesh.size > 1
    others.update(value for value, count in read.items() if count > 1 or are_several)
    excluded = {*map(same.of, others)}
    calls = (node for node in nodes if isinstance(node, ColocatedCall) and node.is_inline)
    made = {v for call in calls for v in call.outputs if same.of(v) not in excluded and _is_small(v)}
    classes = {*map(same.of, made)}
    returned = {
        i: numpy_putter(v.aval, sharding_of(v), v.sharding is not None or committed, is_explicit=True)
        for i, v in enumerate(plan.outputs)
        if same.of(v) in classes
    }
    return LeftToDispatch(made, returned)


class _Classes:
    """Values that may be one and the same."""

    def __init__(self) -> None:
        self._parents: dict[Value, Value] = {}

    def of(self, value: Value) -> Value:
        """One of those that a value may be, the same for all of them."""
        while value in self._parents:
            value = self._parents[value]
        return value

    def join(self, values: Sequence[Value]) -> None:
        """Says that these may be one."""
        first, *rest = dict.fromkeys(map(self.of, values))
        self._parents.update((other, first) for other in rest)


def _is_small(value: Value) -> bool:
    """Whether the dispatch makes an array of this type of a NumPy array, wherever it is called, and at little cost."""
    aval = value.aval
    if not isinstance(aval.dtype, np.dtype) or not is_laid_out_as_numpy(aval.dtype):
        return False
    # Without 64 bits in effect, jax would make another type of it.
    has_64_bits = aval.dtype.itemsize == (16 if aval.dtype.kind == "c" else 8)
    return not aval.weak_type and not has_64_bits and value.nbytes < LARGE
