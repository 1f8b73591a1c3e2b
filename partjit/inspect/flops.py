"""How many floating point operations a program does, counted in its equations."""

import math
from collections.abc import Callable
from typing import NamedTuple

from partjit.inspect.annotated import AnnotatedEquation, AnnotatedJaxpr, AnnotatedValue

__all__ = ["Flops", "flops_of"]


class Flops(NamedTuple):
    """Floating point operations of one execution.

    Attributes:
        total: over all devices, each operation counted once however many of them do it.
        per_device: what the busiest device does.
        is_exact: whether the trip counts of all loops are known; an unknown one counts as one turn.
    """

    total: float
    per_device: float
    is_exact: bool


def flops_of(program: AnnotatedJaxpr, devices: int = 1) -> Flops:
    """The operations of an annotated program.

    A matrix product or a convolution does a multiplication and an addition per element of its sum; whatever else
    computes does one operation per element of what it gives or, if it reduces, of what it takes. Of a conditional the
    dearest branch counts. What several devices compute alike, because nothing divides it, each of them does.

    Args:
        program: the program.
        devices: of the mesh. The body of a `shard_map` is what one of them does.
    """
    total = per_device = 0.0
    is_exact = True
    for equation in program.equations:
        found = _of_bodies(equation, devices) if equation.bodies else _own(equation)
        total += found.total
        per_device += found.per_device
        is_exact &= found.is_exact
    return Flops(total, per_device, is_exact)


def _of_bodies(equation: AnnotatedEquation, devices: int) -> Flops:
    bodies = [flops_of(body, devices) for body in equation.bodies.values()]
    if equation.primitive == "cond":
        dearest = max(bodies, key=lambda flops: flops.per_device)
        return dearest._replace(is_exact=False)
    turns = 1 if equation.turns is None else equation.turns
    together = devices if equation.primitive == "shard_map" else 1
    return Flops(
        sum(body.total for body in bodies) * turns * together,
        sum(body.per_device for body in bodies) * turns,
        equation.turns is not None and all(body.is_exact for body in bodies),
    )


def _own(equation: AnnotatedEquation) -> Flops:
    count = _COUNTED.get(equation.primitive)
    if count is not None:
        total = count(equation)
    elif equation.primitive in _MOVES or not any(value.is_array for value in equation.outputs):
        return Flops(0.0, 0.0, True)
    else:
        takes = equation.primitive.startswith(("reduce", "arg", "cum", "sort"))
        values = equation.inputs[:1] if takes else equation.outputs[:1]
        total = float(sum(math.prod(value.aval.shape) for value in values if value.is_array))
    return Flops(total, total / _divided(equation), True)


def _divided(equation: AnnotatedEquation) -> int:
    """Into how many parts the work is divided: by each axis that divides a value it is done on."""
    axes: dict[str, int] = {}
    for value in (*equation.inputs, *equation.outputs):
        axes |= _axes(value)
    return math.prod(axes.values())


def _axes(value: AnnotatedValue) -> dict[str, int]:
    layout = value.layout
    if layout is None:
        return {}
    dims = zip(layout.axes, layout.parts, strict=True)
    return {axis: size for axes, sizes in dims for axis, size in zip(axes, sizes, strict=True)}


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
_MOVES = frozenset(
    [
        "broadcast_in_dim",
        "reshape",
        "transpose",
        "slice",
        "dynamic_slice",
        "dynamic_update_slice",
        "gather",
        "concatenate",
        "pad",
        "squeeze",
        "convert_element_type",
        "bitcast_convert_type",
        "copy",
        "copy_p",
        "rev",
        "select_n",
        "iota",
        "sharding_constraint",
        "stop_gradient",
        "expand_dims",
        "split",
        "random_wrap",
        "random_unwrap",
        "colocated_call",
        "pvary",
        "reduce_precision",
        "mesh_cast",
        "reshard",
        "optimization_barrier",
        "all_gather",
        "ppermute",
        "all_to_all",
        "axis_index",
    ]
)
