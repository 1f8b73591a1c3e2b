"""FLOPs of a program, counted in its equations."""

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Iterable, Mapping
from typing import NamedTuple

from partjit.inspect.annotated import AnnotatedEquation, AnnotatedJaxpr, AnnotatedValue
from partjit.inspect.needed import needed_equations
from partjit.shardy import TensorSharding

__all__ = ["FlopCount", "Flops", "count_flops", "flops_of", "operations_of", "shards_of"]


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


@dataclasses.dataclass(frozen=True)
class FlopCount:
    """The operations of a program, of which only the shardings are open.

    Attributes:
        own: of each equation that computes by itself, its operations and the numbers of its operands and results.
        nested: the loops, branches and `shard_map`s in it.
    """

    own: tuple[tuple[float, tuple[int, ...], tuple[int, ...]], ...]
    nested: tuple["_Bodies", ...]

    def flops(
        self, shardings: Mapping[int, TensorSharding], constrained: Mapping[int, TensorSharding] | None = None
    ) -> Flops:
        """The FLOPs with these shardings of values, by their numbers, and others in which some of them are used."""
        return self._flops(functools.cache(shards_of), shardings, {**shardings, **(constrained or {})})

    def _flops(
        self,
        shards: Callable[..., int],
        computed: Mapping[int, TensorSharding],
        used: Mapping[int, TensorSharding],
    ) -> Flops:
        total = per_device = 0.0
        for own, operands, results in self.own:
            total += own
            per_device += own / shards(*map(used.get, operands), *map(computed.get, results))
        is_exact = True
        for bodies in self.nested:
            counts = bodies.counts
            if bodies.is_branch:
                counts = [body for body in counts if body._is_known(computed)] or counts
            found = bodies.flops([body._flops(shards, computed, used) for body in counts])
            total += found.total
            per_device += found.per_device
            is_exact &= found.is_exact
        return Flops(total, per_device, is_exact)

    def _is_known(self, computed: Mapping[int, TensorSharding]) -> bool:
        """Whether the partitioner has a sharding of any result: of a branch that is never taken it has none."""
        own = any(not computed.keys().isdisjoint(results) for _, _, results in self.own)
        return own or any(body._is_known(computed) for bodies in self.nested for body in bodies.counts)


@dataclasses.dataclass(frozen=True)
class _Bodies:
    """The bodies of an equation: how often they run, None if that is unknown, and in how many instances at once."""

    counts: tuple[FlopCount, ...]
    is_branch: bool
    iterations: int | None
    instances: int

    def flops(self, of_bodies: list[Flops]) -> Flops:
        if self.is_branch:
            return max(of_bodies, key=lambda flops: flops.per_device)._replace(is_exact=False)
        iterations = 1 if self.iterations is None else self.iterations
        return Flops(
            sum(body.total for body in of_bodies) * iterations * self.instances,
            sum(body.per_device for body in of_bodies) * iterations,
            self.iterations is not None and all(body.is_exact for body in of_bodies),
        )


def flops_of(program: AnnotatedJaxpr) -> Flops:
    """FLOPs of an annotated program.

    A matrix product or a convolution takes a multiplication and an addition per term of its sums; any other computation
    takes one operation per element of its result or, for a reduction, of its operand. Of a conditional the most
    expensive branch counts, unless a constant decides on it. Replicated computations count on every device; the body of
    a `shard_map` is that of one device. What nothing uses, which XLA removes, counts for nothing.
    """
    numbered = (value for equation in program.walk() for value in (*equation.inputs, *equation.outputs))
    shardings = next((value.shardings for value in numbered), {})
    return count_flops(program).flops(shardings)


def count_flops(program: AnnotatedJaxpr) -> FlopCount:
    """The operations of an annotated program, for any shardings of its values, without what is computed for nothing."""
    return _count(program, needed_equations(program))


def _count(program: AnnotatedJaxpr, needed: Container[int]) -> FlopCount:
    own, nested = [], []
    for equation in program.equations:
        if equation.bodies:
            nested.append(
                _Bodies(
                    tuple(_count(body, needed) for body in equation.bodies.values()),
                    equation.primitive == "cond",
                    equation.trip_count,
                    _instances(equation) if equation.primitive == "shard_map" else 1,
                )
            )
        elif equation.number in needed and (operations := operations_of(equation)):
            own.append((operations, _numbers(equation.inputs), _numbers(equation.outputs)))
    return FlopCount(tuple(own), tuple(nested))


def _numbers(values: Iterable[AnnotatedValue]) -> tuple[int, ...]:
    return tuple(value.number for value in values)


def _instances(equation: AnnotatedEquation) -> int:
    """How many instances of its body a `shard_map` has: one for each position along its manual axes."""
    sizes = equation.params["mesh"].shape
    return math.prod(sizes[axis] for axis in equation.params["newly_manual_axes"])


def operations_of(equation: AnnotatedEquation) -> float:
    """The operations of an equation that computes by itself, over all devices."""
    count = _COUNTED.get(equation.primitive)
    if count is not None:
        return count(equation)
    if equation.primitive in _WITHOUT_FLOPS or not any(value.is_array for value in equation.outputs):
        return 0.0
    is_of_operand = equation.primitive.startswith(("reduce", "arg", "cum", "sort"))
    values = equation.inputs[:1] if is_of_operand else equation.outputs[:1]
    return float(sum(math.prod(value.aval.shape) for value in values if value.is_array))


def shards_of(*shardings: TensorSharding | None) -> int:
    """The number of devices that share a computation: along every axis that shards one of its values."""
    axes: dict[str, int] = {}
    for sharding in shardings:
        if sharding is not None:
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
