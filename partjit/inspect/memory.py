"""Device memory of a program: estimated from its annotated jaxpr, or as XLA reports it for the compiled program."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jax.core import ShapedArray
from jax.extend.core import Var

from partjit._jax.compiling import MeshExecutable
from partjit.devices import platform_of
from partjit.inspect.annotated import AnnotatedEquation, AnnotatedValue
from partjit.inspect.buffer_assignment import Peak, aligned, peak_of
from partjit.inspect.buffers import RANDOM, Moves, buffers_of
from partjit.inspect.collectives import Collective, UnknownMove
from partjit.inspect.propagation import Partitioned
from partjit.render.numbers import shown_bytes

__all__ = ["Buffer", "Memory", "estimate_memory", "read_memory"]


class Buffer(NamedTuple):
    """What is alive at the peak, besides arguments and results.

    Attributes:
        nbytes: its bytes on a device, of which XLA takes a multiple of 64.
        is_saved: whether the forward pass computes it for the backward pass.
        equation: the equation that computes it.
        value: the value; None for what an equation needs besides its operands and results.
    """

    nbytes: int
    is_saved: bool
    equation: AnnotatedEquation
    value: AnnotatedValue | None = None


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on the device that needs most.

    Attributes:
        program: the name of the program, or of the fragment of a plan.
        arguments, results: of its arguments and results.
        donated: of the arguments whose memory it may reuse.
        peak: the most that is live at once, arguments and results included.
        is_estimate: whether the peak was computed from the order of the equations; see `partjit.inspect.buffers`.
        saved: of what the forward pass computes for the backward pass, at the peak; None if that is not known.
        temporaries: of everything else that is neither argument nor result, at the peak.
        unknown: what the estimate leaves out, so that the peak is at least as large.
        buffers: the temporaries at the peak, the largest first; none if XLA reports the memory.
    """

    program: str
    arguments: int
    results: int
    donated: int
    peak: int
    is_estimate: bool
    saved: int | None = None
    temporaries: int = 0
    unknown: tuple[str, ...] = ()
    buffers: tuple[Buffer, ...] = dataclasses.field(default=(), repr=False)

    def __str__(self) -> str:
        about = "about " if self.is_estimate else ""
        least = f" or more, without {', '.join(self.unknown)}" if self.unknown else " at most"
        saved = f", saved for the backward pass {shown_bytes(self.saved)}" if self.saved else ""
        return (
            f"{self.program}: {about}{shown_bytes(self.peak)}{least}; arguments {shown_bytes(self.arguments)} "
            f"({shown_bytes(self.donated)} donated), results {shown_bytes(self.results)}{saved}, temporaries "
            f"{shown_bytes(self.temporaries)}"
        )


def estimate_memory(
    partitioned: Partitioned,
    donated: Sequence[bool],
    collectives: Iterable[Collective] = (),
    moves: Iterable[UnknownMove] = (),
) -> Memory:
    """The memory of a unit whose arguments are donated as these flags say, without compiling it.

    Args:
        partitioned: the unit.
        donated: for each argument whether it is donated.
        collectives: those that are predicted.
        moves: what XLA may move besides.
    """
    inlined, shardings = partitioned.inlined, partitioned.inlined.shardings

    def size(var: Var) -> int:
        sharding, aval = shardings.get(inlined.numbers.get(var, -1)), var.aval
        if sharding is None or not isinstance(aval, ShapedArray):
            return 0
        parts = (math.prod(sizes) for sizes in sharding.parts)
        return math.prod(-(-n // k) for n, k in zip(aval.shape, parts, strict=False)) * aval.dtype.itemsize

    inner, collectives = inlined.jaxpr.jaxpr, [*collectives]
    found_buffers = buffers_of(inner, size, _moves(collectives), inlined.equation_of)
    in_bytes = [*map(size, inner.invars)]
    arguments = sum(in_bytes) + sum(map(size, inner.constvars))
    results = sum(size(var) for var in inner.outvars if isinstance(var, Var))
    free = sum(nbytes for nbytes, is_donated in zip(in_bytes, donated, strict=True) if is_donated)
    found = peak_of(found_buffers, min(free, results))
    peak = arguments + results - min(free, results) + found.total
    return Memory(
        partitioned.unit.name,
        arguments,
        results,
        free,
        peak,
        True,
        found.saved,
        found.others,
        tuple(_unknown(partitioned, peak, _gathered(collectives), moves)),
        tuple(sorted(_buffers(partitioned, found), key=lambda one: -one.nbytes)),
    )


def _moves(collectives: Iterable[Collective]) -> dict[int, Moves]:
    """What the collectives of each equation need."""
    moves: dict[int, Moves] = {}
    for collective in collectives:
        for number in collective.tags[-1:]:
            before, is_sum = moves.get(number, Moves()), collective.kind in ("all-reduce", "reduce-scatter")
            gathered = before.gathered + (0 if is_sum else collective.result_bytes)
            moves[number] = Moves(gathered, before.is_summed or is_sum)
    return moves


def _gathered(collectives: Iterable[Collective]) -> int:
    return sum(one.result_bytes for one in collectives if one.kind != "all-reduce")


def _buffers(partitioned: Partitioned, found: Peak) -> Iterator[Buffer]:
    inlined = partitioned.inlined
    for one in found.alive:
        equation = None if one.eqn is None else inlined.equation_of(one.eqn)
        if equation is not None:
            number = None if one.var is None else inlined.numbers.get(one.var)
            value = next((v for v in equation.outputs if v.number == number), None)
            yield Buffer(aligned(one.nbytes), one.is_saved, equation, value)


_LARGE_PART = 0.1
_OF_RANDOM = 1 << 8
"""Bytes that XLA may need for random numbers besides, however few."""
_WITH_WORKSPACE = ("reduce_window", "select_and", "sort", "top_k", "fft", "cholesky", "lu", "qr", "eig", "svd")


def _unknown(partitioned: Partitioned, peak: int, gathered: int, moves: Iterable[UnknownMove]) -> Iterator[str]:
    """What is not in an estimate."""
    equations = partitioned.inlined.equations
    if any(not move.operation.startswith("cpu.") for move in moves):
        yield "what XLA may move besides"
    if gathered > _LARGE_PART * peak:
        yield "the lifetime of what collectives gather"
    random = sum(equation.primitive in RANDOM for equation in equations)
    if random * _OF_RANDOM > _LARGE_PART * peak:
        yield "the workspace of random numbers"
    workspace = sorted({e.primitive for e in equations if e.primitive.startswith(_WITH_WORKSPACE)})
    if workspace:
        yield f"the workspace of {', '.join(workspace)}"
    mesh = partitioned.unit.mesh
    narrow = any(
        equation.primitive == "dot_general" and equation.outputs[0].aval.dtype.itemsize < 4 for equation in equations
    )
    if narrow and (mesh.empty or platform_of(mesh) == "cpu"):
        yield "the matrix products that the CPU computes in 32 bits"


def read_memory(name: str, compiled: MeshExecutable) -> Memory | None:
    """What XLA reports for a compiled program; None on platforms where it reports nothing."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    arguments, results = int(stats.argument_size_in_bytes), int(stats.output_size_in_bytes)
    aliased, temporary = int(stats.alias_size_in_bytes), int(stats.temp_size_in_bytes)
    # The peak that XLA reports leaves out temporaries on some platforms.
    peak = max(int(getattr(stats, "peak_memory_in_bytes", 0)), arguments + results - aliased + temporary)
    return Memory(name, arguments, results, aliased, peak, False, None, temporary)
