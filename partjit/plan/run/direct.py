"""Results of calls that only executables get: these are dispatched with NumPy arrays as the functions returned them.

To put a small array on a device takes about as long as to dispatch an executable, which does it on the way in half the
time, if there is a single device.
"""

import collections
from collections.abc import Collection

import numpy as np
from jax.sharding import Sharding

from partjit._jax.arrays import is_laid_out_as_numpy
from partjit._jax.shardings import device_list
from partjit.colocated.runtime.host_values import LARGE
from partjit.plan.ir.nodes import ColocatedCall, Fragment, Value, blocks_of, walk
from partjit.plan.plan import Plan

__all__ = ["left_to_dispatch"]


def left_to_dispatch(plan: Plan, default: Sharding) -> Collection[Value]:
    """The results of calls that are left to the dispatch of what reads them.

    Args:
        plan: the plan.
        default: the sharding of values whose own it leaves open.
    """
    if len(device_list(default)) > 1 or plan.mesh.size > 1:
        return ()
    nodes = [*walk(plan.nodes)]
    others = {*plan.outputs}
    for node in nodes:
        if not isinstance(node, Fragment) or node.by_one_device:
            others.update(node.inputs)
        others.update(value for block in blocks_of(node) for value in block.outputs)
    read = collections.Counter(value for node in nodes for value in node.inputs)
    made = (v for node in nodes if isinstance(node, ColocatedCall) and node.is_inline for v in node.outputs)
    return {value for value in made if value not in others and read[value] == 1 and _is_small(value)}


def _is_small(value: Value) -> bool:
    """Whether the dispatch makes an array of this type of a NumPy array, wherever it is called, and at little cost."""
    aval = value.aval
    if not isinstance(aval.dtype, np.dtype) or not is_laid_out_as_numpy(aval.dtype):
        return False
    # Without 64 bits in effect, jax would make another type of it.
    has_64_bits = aval.dtype.itemsize == (16 if aval.dtype.kind == "c" else 8)
    return not aval.weak_type and not has_64_bits and value.nbytes < LARGE
