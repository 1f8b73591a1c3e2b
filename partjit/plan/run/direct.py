"""Results of calls that only executables and the host get: they stay NumPy arrays as the functions returned them.

To put a small array on a device takes about as long as to dispatch an executable, which does it on the way in half the
time, if there is a single device. The host reads the predicate of a loop from the NumPy array, on however many devices.
"""

import collections
from collections.abc import Collection, Sequence

import numpy as np
from jax.sharding import Sharding

from partjit._jax.arrays import is_laid_out_as_numpy
from partjit._jax.shardings import device_list
from partjit.colocated.runtime.host_values import LARGE
from partjit.plan.ir.nodes import Branch, ColocatedCall, Fragment, Loop, Value, blocks_of, walk
from partjit.plan.plan import Plan

__all__ = ["left_to_dispatch"]


def left_to_dispatch(plan: Plan, default: Sharding) -> Collection[Value]:
    """The results of calls that are left to the dispatch of what reads them.

    Args:
        plan: the plan.
        default: the sharding of values whose own it leaves open.
    """
    nodes = [*walk(plan.nodes)]
    same = _Classes()
    others = {*plan.outputs}
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
    made = (v for node in nodes if isinstance(node, ColocatedCall) and node.is_inline for v in node.outputs)
    return {value for value in made if same.of(value) not in excluded and _is_small(value)}


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
