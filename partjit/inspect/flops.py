"""FLOPs of a program, counted in its equations."""

import math
from collections.abc import Callable
from typing import NamedTuple

from partjit.inspect.annotated import AnnotatedEquation, AnnotatedJaxpr

__all__ = ["Flops", "flops_of"]


class Flops(NamedTuple):
    """Floating point operations of one execution.

    Attributes:
        total: over all devices; an operation that several of them compute redundantly counts once.
        per_device: on the busiest device.
        is_exact: whether the trip counts of all loops are known; a loop of unknown trip count counts as one iteration.
    """

    total: float
    per_device: float
    is_exact: bool


def flops_of(program: AnnotatedJaxpr) -> Flops:
    """FLOPs of an annotated program.

    A matrix product or a convolution takes a multiplication and an addition per term of its sums; any other computation
    takes one operation per element of its result or, for a reduction, of its operand. Of a conditional the most
    expensive branch counts. Replicated computations count on every device; the body of a `shard_map` is that of one
    device.
    """
    total = per_device = 0.0
    is_exact = True
    for equation in program.equations:
        found = _of_bodies(equation) if equation.bodies else _own(equation)
        total += found.total
        per_device += found.per_device
        is_exact &= found.is_exact
    return Flops(total, per_device, is_exact)


def _of_bodies(equation: AnnotatedEquation) -> Flops:
    bodies = [flops_of(body) for body in equation.bodies.values()]
    if equation.primitive == "cond":
        return max(bodies, key=lambda flops: flops.per_device)._replace(is_exact=False)
    iterations = 1 if equation.trip_count is None else equation.trip_count
    instances = _instances(equation) if equation.primitive == "shard_map" else 1
    return Flops(
        sum(body.total for body in bodies) * iterations * instances,
        sum(body.per_device for body in bodies) * iterations,
        equation.trip_count is not None and all(body.is_exact for body in bodies),
    )


def _instances(equation: AnnotatedEquation) -> int:
    """How many instances of its body a `shard_map` has: one for each position along its manual axes."""
    sizes = equation.params["mesh"].shape
    return math.prod(sizes[axis] for axis in equation.params["newly_manual_axes"])


def _own(equation: AnnotatedEquation) -> Flops:
    count = _COUNTED.get(equation.primitive)
    if count is not None:
        total = count(equation)
    elif equation.primitive in _WITHOUT_FLOPS or not any(value.is_array for value in equation.outputs):
        return Flops(0.0, 0.0, True)
    else:
        is_of_operand = equation.primitive.startswith(("reduce", "arg", "cum", "sort"))
        values = equation.inputs[:1] if is_of_operand else equation.outputs[:1]
        total = float(sum(math.prod(value.aval.shape) for value in values if value.is_array))
    return Flops(total, total / _shards(equation), True)


def _shards(equation: AnnotatedEquation) -> int:
    """The number of devices that share a computation: along every axis that shards one of its values."""
    axes: dict[str, int] = {}
    for value in (*equation.inputs, *equation.outputs):
        if (sharding := value.sharding) is not None:
            axes.update(sharding.sizes)
    return math.prod(axes.values())


def _dot(equation: AnnotatedEquation) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.inputs[0].aval.shape
    return 2.0 * math.prod(equation.outputs[0].aval.shape) * math.prod(shape[dim] for dim in contracted)


def _convolution(equation: AnnotatedEquation) -> float:
    kernel = equation.inputs[1].aval.shape
    features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * math.prod(equation.outputs[0].aval.shape) * math.prod(kernel) / max(features, 1)


_COUNTED: dict[str, Callable[[AnnotatedEquation], float]] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
}
# fmt: off
_WITHOUT_FLOPS = frozenset((
    "broadcast_in_dim", "reshape", "transpose", "slice", "dynamic_slice", "dynamic_update_slice", "gather",
    "concatenate", "pad", "squeeze", "convert_element_type", "bitcast_convert_type", "copy", "copy_p", "rev",
    "select_n", "iota", "sharding_constraint", "stop_gradient", "expand_dims", "split", "random_wrap", "random_unwrap",
    "colocated_call", "pvary", "reduce_precision", "mesh_cast", "reshard", "optimization_barrier", "all_gather",
    "ppermute", "all_to_all", "axis_index",
))
# fmt: on
