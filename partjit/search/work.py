"""What a device computes and moves through its memory in a step, equation by equation.

XLA computes an elementwise equation where its result is used. So only what other equations (products, reductions,
gathers) make or need is in memory: it is written once, and read once by each of these and once by all elementwise ones
together. That is what a compiler does that fuses well; the real traffic is rather more.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from partjit.inspect.annotated import AnnotatedEquation, AnnotatedJaxpr, AnnotatedValue
from partjit.inspect.flops import flops_of
from partjit.inspect.fusion import FUSED
from partjit.search.machine import Machine, dtype_class
from partjit.shardy import TensorSharding

__all__ = ["Part", "Work", "seconds_of"]

# fmt: off
_VIEWS = frozenset((
    "reshape", "squeeze", "expand_dims", "copy", "copy_p", "sharding_constraint", "reshard", "optimization_barrier",
    "name", "mesh_cast", "pvary", "stop_gradient",
))
# fmt: on
_FUSED = FUSED - _VIEWS
_LOOPS = ("scan", "while", "shard_map")
# What reads and writes parts of an array only: how often, and the operand, or None for the result, of this size.
_OF_PARTS: Mapping[str, tuple[int, int | None]] = {
    "gather": (2, None),
    "dynamic_slice": (2, None),
    "dynamic_update_slice": (2, 1),
    "scatter": (2, 2),
    "scatter-add": (3, 2),
    "scatter_add": (3, 2),
}


class Part(NamedTuple):
    """What equations of one kind on one line do in a step, on the busiest device.

    Attributes:
        equation: one of them; None for the elementwise equations of a program or loop, which are fused.
        dtypes: the class of their dtypes; see `partjit.search.machine.CLASSES`.
        flops: floating point operations.
        traffic: bytes read from and written to memory.
    """

    equation: AnnotatedEquation | None
    dtypes: str
    flops: float
    traffic: float


@dataclasses.dataclass(frozen=True)
class _Item:
    """A part before it is known how its values are sharded: FLOPs on all devices, and bytes by numbers of values."""

    equation: AnnotatedEquation | None
    dtypes: str
    flops: float
    operands: tuple[int, ...]
    results: tuple[int, ...]
    traffic: tuple[tuple[int, float], ...]


class Work:
    """What a program computes and moves, for any shardings of its values.

    Args:
        program: the annotated program.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from partjit.inspect import explain
        >>> report = explain(lambda x, w: jnp.tanh(x @ w), jnp.ones((8, 16)), jnp.ones((16, 4)))
        >>> [(part.flops, part.traffic) for part in Work(report.whole.tree).parts(report.whole.inlined.shardings)]
        [(1024.0, 896.0), (0.0, 256.0)]
    """

    def __init__(self, program: AnnotatedJaxpr) -> None:
        self._items = [item for item in _items(program, 1) if item.flops or item.traffic]

    def parts(
        self, shardings: Mapping[int, TensorSharding], constrained: Mapping[int, TensorSharding] | None = None
    ) -> list[Part]:
        """The parts on a device, by the shardings of values, and those in which constrained ones are used."""
        shards: dict[int, float] = {number: math.prod(one.sizes.values()) for number, one in shardings.items()}
        read = {**shardings, **constrained} if constrained else shardings
        found = []
        for item in self._items:
            devices = 1
            if item.flops:
                axes: dict[str, int] = {}
                for number in item.operands:
                    if number in read:
                        axes |= read[number].sizes
                for number in item.results:
                    if number in shardings:
                        axes |= shardings[number].sizes
                devices = math.prod(axes.values())
            traffic = sum(nbytes / shards.get(number, 1) for number, nbytes in item.traffic)
            found.append(Part(item.equation, item.dtypes, item.flops / devices, traffic))
        return found


def seconds_of(parts: Iterable[Part], machine: Machine) -> tuple[float, float]:
    """The time that the parts compute, and the time that they wait for memory besides, one after the other.

    Each part takes as long as its operations or its traffic, whichever is longer.
    """
    compute = waiting = 0.0
    for part in parts:
        seconds = part.flops / machine.rate(part.dtypes)
        compute += seconds
        waiting += max(0.0, part.traffic / machine.memory_bandwidth - seconds)
    return compute, waiting


def _items(program: AnnotatedJaxpr, times: int) -> Iterable[_Item]:
    """The items of a program that runs so often."""
    walked = [*_inlined(program.equations)]
    roots: dict[int, int] = {}
    by_number: dict[int, AnnotatedValue] = {}
    for equation in walked:
        by_number.update((value.number, value) for value in (*equation.inputs, *equation.outputs) if value.is_array)
        is_view = equation.primitive in _VIEWS or equation.primitive == "dynamic_update_slice"
        if is_view and len(equation.inputs) >= len(equation.outputs):
            for made, of in zip(equation.outputs, equation.inputs, strict=False):
                roots[made.number] = roots.get(of.number, of.number)

    def root(value: AnnotatedValue) -> int:
        return roots.get(value.number, value.number)

    fused_makers = {value.number for eqn in walked if eqn.primitive in _FUSED for value in eqn.outputs}
    in_memory = {root(value) for value in program.outputs}
    for equation in walked:
        if equation.primitive not in _FUSED and equation.primitive not in _VIEWS:
            in_memory.update(root(value) for value in equation.inputs)
    read, written = set[int](), set[int]()
    for equation in walked:
        if equation.bodies:
            yield from _of_bodies(equation, times)
        elif equation.primitive in _FUSED:
            read.update(root(v) for v in equation.inputs if root(v) not in fused_makers or root(v) in in_memory)
            written.update(value.number for value in equation.outputs if value.number in in_memory)
        elif equation.primitive not in _VIEWS:
            yield _of_equation(equation, times)
    traffic = tuple(
        (number, float(times * by_number[number].nbytes * ((number in read) + (number in written))))
        for number in sorted(read | written)
        if number in by_number
    )
    yield _Item(None, "f32", 0.0, (), (), traffic)


def _inlined(equations: Iterable[AnnotatedEquation]) -> Iterable[AnnotatedEquation]:
    """The equations of a program and of those that it calls once."""
    for equation in equations:
        if equation.bodies and equation.primitive not in (*_LOOPS, "cond"):
            for body in equation.bodies.values():
                yield from _inlined(body.equations)
        else:
            yield equation


def _of_bodies(equation: AnnotatedEquation, times: int) -> Iterable[_Item]:
    bodies = [[*_items(body, times * (equation.trip_count or 1))] for body in equation.bodies.values()]
    if equation.primitive == "cond":
        bodies = [max(bodies, key=lambda items: sum(item.flops + sum(n for _, n in item.traffic) for item in items))]
    for items in bodies:
        yield from items


def _of_equation(equation: AnnotatedEquation, times: int) -> _Item:
    arrays = [value for value in (*equation.inputs, *equation.outputs) if value.is_array]
    flops = flops_of(AnnotatedJaxpr((), (), (), (equation,))).total
    if equation.primitive in _OF_PARTS:
        count, of = _OF_PARTS[equation.primitive]
        part = equation.outputs[0] if of is None else equation.inputs[of]
        traffic = ((part.number, float(times * count * part.nbytes)),)
    else:
        traffic = tuple((value.number, float(times * value.nbytes)) for value in arrays)
    widest = max((value.aval.dtype.name for value in arrays[:1]), default="float32")
    operands, results = (tuple(v.number for v in values) for values in (equation.inputs, equation.outputs))
    return _Item(equation, dtype_class(widest), flops * times, operands, results, traffic)
